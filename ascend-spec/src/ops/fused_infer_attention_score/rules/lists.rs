//! Key and value: dtype, rank, batch, and lists of one tensor a sequence.

use super::Facts;
use super::entry::MainTensors;
use crate::allowed::{Named, Outcome, Rank, Shown};
use crate::ops::fused_infer_attention_score::{FiaCall, Route, Version};
use crate::rule::{require, rules};
use crate::{DType, Layout, TensorDesc, Violation};

rules! {
    in Scope::A2_A3;
    KEY_VALUE_DTYPE = "value.dtype_of_key", TILING_ERROR, V1, "checks A5, D3" in Scope::ALL,
        "key and value have one dtype",
        "convert every key and value to one dtype";
    KEY_DTYPE = "key.dtype_of_query", TILING_ERROR, V1, "checks A5, D3, F3",
        "key and value have the query's dtype, or are INT8 or INT4 (INT32 of eight INT4 from V2 on) with \
         antiquantisation",
        "convert key and value to the query's dtype";
    KEY_RANK = "key.rank", TILING_ERROR, V1, "checks B13, D13" in Scope::ALL,
        "key and value have as many axes as the layout",
        "reshape key and value or choose the layout that they have";
    BATCH = "key.batch", TILING_ERROR, V1, "check D15" in Scope::ALL,
        "query and key have one batch size",
        "give query and key one batch size, or a list of one key and value for each sequence";
    BATCH_MAX = "query.batch_max", TILING_ERROR, V1, "checks D15, F2" in Scope::ALL,
        "the batch size is at least 1 and at most 65536",
        "split the batch over several calls";
    VALUE_SHAPE = "value.shape_of_key", TILING_ERROR, V1, "check F10",
        "each value of a list, and in the decode path every value, has its key's shape",
        "give each value its key's shape";
    LIST_LENGTH = "key.list_length", TILING_ERROR, V1, "checks C5, F10, J16" in Scope::ALL,
        "a list of keys or values has one tensor for each batch entry",
        "pass one tensor a sequence, or one tensor with the query's batch size";
    LIST_BATCH = "key.list_batch", TILING_ERROR, V1, "checks C5, F10" in Scope::ALL,
        "each tensor of a list has batch 1 and at least one element, or in the prefill path none of them has any",
        "give each sequence a tensor of its own with at least one row";
    LIST_SHAPE = "key.list_shape", TILING_ERROR, V1, "checks C5, F10" in Scope::ALL,
        "the tensors of a list differ in their number of rows only",
        "give all tensors of the list the same heads and head dimension";
}

/// Number of key or value elements in one stored element: from V2 on eight INT4 if both tensors are INT32, otherwise
/// 1.
pub(crate) fn nibbles(version: Version, main: &MainTensors<'_>) -> i64 {
    let words = main.key.dtype == DType::Int32 && main.value.dtype == DType::Int32;
    if words && version != Version::V1 { 8 } else { 1 }
}

/// Whether every batch entry has its own key and value tensor.
pub(crate) fn is_list(call: &FiaCall<'_>, layout: Layout, batch: i64, route: Route, key: &TensorDesc) -> bool {
    !layout.is_packed()
        && call.block_table.is_none()
        && key.shape.first() != Some(&batch)
        && (route == Route::Decode || call.key.len() >= 2)
}

/// Checks the dtypes of key and value against each other and the query.
pub(crate) fn dtypes(f: &Facts<'_>) -> Result<(), Violation> {
    // The prefill path checks only the first tensors of a list.
    let used = if f.kv_list && !f.prefill() { usize::MAX } else { 1 };
    let first = f.key.dtype;
    let mut all = f.call.key.iter().take(used).chain(f.call.value.iter().take(used));
    if let Some(desc) = all.find(|desc| desc.dtype != first) {
        return Err(KEY_VALUE_DTYPE.broken(format_args!("{} beside {}", desc.dtype, f.key.dtype), f.key.dtype));
    }
    let fits = match (f.query.dtype, f.kv_dtype()) {
        (DType::Int8, key) => key == DType::Int8,
        (half, key) => key == half || matches!(key, DType::Int8 | DType::Int4),
    };
    require!(fits, KEY_DTYPE, format_args!("{} with a {} query", f.key.dtype, f.query.dtype), f.query.dtype,);
    Ok(())
}

/// Whether there are no keys or no values. Refuses a list in which only some tensors are empty.
pub(crate) fn empty(f: &Facts<'_>) -> Result<bool, Violation> {
    if !f.kv_list {
        return Ok(f.key.is_empty() || f.value.is_empty());
    }
    for (list, name) in [(f.call.key, "key"), (f.call.value, "value")] {
        let empty = list.iter().filter(|desc| desc.is_empty()).count();
        require!(
            empty == 0 || empty == list.len(),
            LIST_BATCH,
            format_args!("{empty} of {} tensors in {name} are empty", list.len()),
            "all of them, or none",
        );
    }
    Ok(f.key.is_empty() || f.value.is_empty())
}

pub(crate) fn rank(layout: Layout, key: &TensorDesc, value: &TensorDesc) -> Result<(), Violation> {
    let rank = layout.input().rank();
    for (desc, name) in [(key, "key"), (value, "value")] {
        KEY_RANK
            .takes(Shown(format_args!("{name} {} with {layout}", desc.shape), desc.shape), Rank(rank))
            .fix(|| format!("reshape {name} or choose the layout that it has"))?;
    }
    Ok(())
}

pub(crate) fn batch_max(f: &Facts<'_>) -> Result<(), Violation> {
    if f.packed() {
        super::packed::arrays(f)?;
    }
    BATCH_MAX.takes(f.batch, 1..=FiaCall::MOST_SEQUENCES)
}

pub(crate) fn batch(f: &Facts<'_>) -> Result<(), Violation> {
    batch_max(f)?;
    require!(
        f.kv_list || f.paged() || f.packed() || f.k.batch == f.batch,
        BATCH,
        format_args!("{} in the key, {} in the query", f.k.batch, f.batch),
        f.batch,
    );
    Ok(())
}

/// Checks the shapes of dense keys and values beyond heads and head dimension; for lists, of every tensor.
pub(crate) fn shapes(f: &Facts<'_>) -> Result<(), Violation> {
    if !f.kv_list {
        // The prefill path compares heads and head dimension only.
        require!(
            f.prefill() || f.paged() || f.key.shape == f.value.shape,
            VALUE_SHAPE,
            format_args!("key {}, value {}", f.key.shape, f.value.shape),
            f.key.shape,
        );
        return Ok(());
    }
    for (list, name) in [(f.call.key, "key"), (f.call.value, "value")] {
        let long_enough = match f.route {
            Route::Prefill => list.len() == f.batch(),
            Route::Decode => list.len() >= f.batch(),
        };
        require!(
            long_enough,
            LIST_LENGTH,
            format_args!("{} tensors in {name} for {} sequences", list.len(), f.batch),
            f.batch,
        );
    }
    let rows = f.layout.input().row_axis();
    for (index, (key, value)) in f.call.key.iter().zip(f.call.value).enumerate() {
        for (desc, name) in [(key, "key"), (value, "value")] {
            require!(
                desc.shape.first() == Some(&1) && !desc.is_empty(),
                LIST_BATCH,
                format_args!("{name} {index} is {}", desc.shape),
                "batch 1, no axis of size 0",
            );
        }
        VALUE_SHAPE
            .takes(Named(format_args!("key {index} is {}, value {index} is", key.shape), value.shape), key.shape)?;
        require!(
            key.shape.rank() == f.key.shape.rank() && key.shape.with(rows, 0) == f.key.shape.with(rows, 0),
            LIST_SHAPE,
            format_args!("key {index} is {}, key 0 is {}", key.shape, f.key.shape),
            "shapes that differ in the number of rows only",
        );
    }
    Ok(())
}

/// Rows of the longest dense key.
pub(crate) fn longest(call: &FiaCall<'_>, layout: Layout, list: bool) -> i64 {
    let used = if list { usize::MAX } else { 1 };
    let axes = layout.input();
    let rows = |key: &TensorDesc| {
        let fits = key.shape.rank() == axes.rank();
        key.shape.get(axes.row_axis()).copied().filter(|_| fits)
    };
    call.key.iter().take(used).filter_map(rows).max().unwrap_or(0)
}
