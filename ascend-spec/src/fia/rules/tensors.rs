//! Key and value: dtype, rank, batch, and lists of one tensor a sequence.

use super::{Facts, heads};
use crate::fia::rules::entry::Operands;
use crate::fia::{FiaCall, Route};
use crate::rule::{require, rules};
use crate::{Refusal, TensorDesc};

rules! {
    KEY_DTYPE = "key.dtype_of_query", TILING_ERROR, V1, "checks D3, F3",
        "key and value have the query's dtype unless they are quantised";
    KEY_RANK = "key.rank", TILING_ERROR, V1, "checks B13, D13",
        "key and value have as many axes as the layout";
    BATCH = "key.batch", TILING_ERROR, V1, "check D15",
        "query and key have one batch size";
    BATCH_MAX = "query.batch_max", TILING_ERROR, V1, "checks D15, F2",
        "the batch size is at least 1 and at most 65536";
    VALUE_SHAPE = "value.shape_of_key", TILING_ERROR, V1, "check F10",
        "each value of a list, and in the decode path every value, has its key's shape";
    LIST_LENGTH = "key.list_length", TILING_ERROR, V1, "checks C5, F10, J16",
        "a list of keys or values has one tensor for each batch entry";
    LIST_BATCH = "key.list_batch", TILING_ERROR, V1, "checks C5, F10",
        "each tensor of a list has batch 1 and at least one element";
    LIST_SHAPE = "key.list_shape", TILING_ERROR, V1, "checks C5, F10",
        "the tensors of a list differ in their number of rows only";
}

/// Whether every batch entry has its own key and value tensor.
pub(in crate::fia) fn is_list(
    call: &FiaCall<'_>,
    batch: i64,
    route: Route,
    key: &TensorDesc,
) -> bool {
    key.shape.first() != Some(&batch) && (route == Route::Decode || call.key.len() >= 2)
}

pub(in crate::fia) fn dtypes(
    call: &FiaCall<'_>,
    at: &Operands<'_>,
    list: bool,
) -> Result<(), Refusal> {
    let used = if list { usize::MAX } else { 1 };
    for desc in call
        .key
        .iter()
        .take(used)
        .chain(call.value.iter().take(used))
    {
        require!(
            desc.dtype == at.query.dtype,
            KEY_DTYPE,
            format_args!("{} with a {} query", desc.dtype, at.query.dtype),
            at.query.dtype,
            "convert key and value to the query's dtype",
        );
    }
    Ok(())
}

pub(in crate::fia) fn rank(facts_layout: crate::Layout, at: &Operands<'_>) -> Result<(), Refusal> {
    let rank = facts_layout.input().rank();
    for (desc, name) in [(at.key, "key"), (at.value, "value")] {
        require!(
            desc.shape.rank() == rank,
            KEY_RANK,
            format_args!("{name} {} with {facts_layout}", desc.shape),
            format_args!("{rank} axes"),
            format_args!("reshape {name} or choose the layout that it has"),
        );
    }
    Ok(())
}

pub(in crate::fia) fn batch(facts: &Facts) -> Result<(), Refusal> {
    require!(
        (1..=65_536).contains(&facts.query.batch),
        BATCH_MAX,
        facts.query.batch,
        "1 to 65536",
        "split the batch over several calls",
    );
    require!(
        facts.kv_list || facts.key.batch == facts.query.batch,
        BATCH,
        format_args!(
            "{} in the key, {} in the query",
            facts.key.batch, facts.query.batch
        ),
        facts.query.batch,
        "give query and key one batch size, or a list of one key and value for each sequence",
    );
    Ok(())
}

/// Shapes of key and value beyond their first axis; for lists, of every tensor.
pub(in crate::fia) fn shapes(
    call: &FiaCall<'_>,
    facts: &Facts,
    at: &Operands<'_>,
) -> Result<(), Refusal> {
    heads::key_value(call, facts, at.key, at.value)?;
    if !facts.kv_list {
        // The prefill path compares heads and head dimension only.
        require!(
            facts.route == Route::Prefill || at.key.shape == at.value.shape,
            VALUE_SHAPE,
            format_args!("key {}, value {}", at.key.shape, at.value.shape),
            at.key.shape,
            "give the value its key's shape",
        );
        return Ok(());
    }
    let batch = usize::try_from(facts.query.batch).unwrap_or(usize::MAX);
    for (list, name) in [(call.key, "key"), (call.value, "value")] {
        let long_enough = match facts.route {
            Route::Prefill => list.len() == batch,
            Route::Decode => list.len() >= batch,
        };
        require!(
            long_enough,
            LIST_LENGTH,
            format_args!("{} tensors in {name} for {batch} sequences", list.len()),
            batch,
            "pass one tensor a sequence, or one tensor with the query's batch size",
        );
    }
    for (index, (key, value)) in call.key.iter().zip(call.value).enumerate() {
        for (desc, name) in [(key, "key"), (value, "value")] {
            require!(
                desc.shape.first() == Some(&1) && !desc.is_empty(),
                LIST_BATCH,
                format_args!("{name} {index} is {}", desc.shape),
                "batch 1, no axis of size 0",
                "give each sequence a tensor of its own with at least one row",
            );
        }
        require!(
            key.shape == value.shape,
            VALUE_SHAPE,
            format_args!(
                "key {index} is {}, value {index} is {}",
                key.shape, value.shape
            ),
            key.shape,
            "give each value its key's shape",
        );
        require!(
            key.shape.rank() == at.key.shape.rank()
                && key.shape.with(row_axis(facts), 0) == at.key.shape.with(row_axis(facts), 0),
            LIST_SHAPE,
            format_args!("key {index} is {}, key 0 is {}", key.shape, at.key.shape),
            "shapes that differ in the number of rows only",
            "give all tensors of the list the same heads and head dimension",
        );
    }
    Ok(())
}

/// Axis of the rows in a key of this layout.
fn row_axis(facts: &Facts) -> usize {
    match facts.layout.input() {
        crate::Axes::Bnsd => 2,
        _ => 1,
    }
}

/// Rows of the longest key.
pub(in crate::fia) fn longest(call: &FiaCall<'_>, layout: crate::Layout, list: bool) -> i64 {
    let used = if list { usize::MAX } else { 1 };
    let rows = |key: &TensorDesc| {
        let extents = layout.input().extents(&key.shape, heads::kv_heads(call))?;
        Some(extents.rows)
    };
    call.key
        .iter()
        .take(used)
        .filter_map(rows)
        .max()
        .unwrap_or(0)
}
