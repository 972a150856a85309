//! `inputLayout` and the axes of query, key and value.

use super::entry::Required;
use crate::allowed::{Noted, Rank, Shown};
use crate::ops::flash_attention_score::{FlashAttentionProblem, InputLayout, Parameter, Version};
use crate::rule::{require, rules};
use crate::{TensorDesc, Violation};

rules! {
    in Scope::ALL;
    LAYOUT = "flash.input_layout", PARAM_INVALID, V1, "FlashAttentionScore documentation, inputLayout",
        "inputLayout is BSH, SBH, BSND or BNSD in any case with a batch axis, TND for packed sequences",
        "spell the layout as CANN does, and pass packed sequences to FlashAttentionVarLenScore";
    QUERY_RANK = "flash.query_rank", PARAM_INVALID, V1, "FlashAttentionScore documentation, inputLayout",
        "query has an axis for each letter of inputLayout",
        "give the query the axes that inputLayout names";
    KEY_RANK = "flash.key_rank", PARAM_INVALID, V1, "FlashAttentionScore documentation, inputLayout",
        "key has the axis of the head dimension, and for V2 no axis that inputLayout does not name",
        "give the key the axes that inputLayout names";
    KV_RANK = "flash.kv_rank", PARAM_NULLPTR, V1, "FlashAttentionScore tiling, shapes",
        "key and value have as many axes as query",
        "give key and value the axes that inputLayout names";
    NO_LENGTHS = "flash.packed_without_lengths", PARAM_NULLPTR, V1, "FlashAttentionScore tiling, inputLayout",
        "a layout with a batch axis goes to FlashAttentionScore",
        "call FlashAttentionVarLenScore with the ends of the sequences";
    BATCH = "flash.key_batch", PARAM_NULLPTR, V1, "FlashAttentionScore shape inference, key",
        "query and key have the same batch",
        "repeat keys and values for each entry of the query's batch";
}

/// The layout of a call, if the query has its number of axes.
pub(crate) fn layout(version: Version, required: &Required<'_>) -> Result<InputLayout, Violation> {
    let (known, allowed) = match version {
        Version::V4 => (InputLayout::parse(required.layout), "BSH, SBH, BSND, BNSD, TND"),
        // FlashAttentionScore passes TND on to the tiling, which lacks the lengths.
        _ if !version.is_var_len() => (InputLayout::parse(required.layout), "BSH, SBH, BSND, BNSD"),
        _ => (InputLayout::parse(required.layout).filter(|_| required.layout == InputLayout::Tnd.as_str()), "TND"),
    };
    let Some(layout) = known else {
        let given = format_args!("{:?} for {version}", required.layout);
        return Err(LAYOUT.broken(given, allowed));
    };
    QUERY_RANK.takes(Noted(required.query.shape, format_args!("in {layout}")), Rank(layout.rank()))?;
    Ok(layout)
}

/// Checks that the key has an axis of the head dimension, which the operator compares with the query's. In layouts
/// with one axis for heads and head dimension, the operator divides before it compares.
pub(crate) fn key_axes(layout: InputLayout, required: &Required<'_>) -> Result<(), Violation> {
    match layout.is_hidden() || required.key.shape.rank() >= layout.rank() {
        true => Ok(()),
        false => key_rank(layout, required),
    }
}

fn key_rank(layout: InputLayout, required: &Required<'_>) -> Result<(), Violation> {
    let rank = layout.rank();
    KEY_RANK.takes(Shown(format_args!("key {} in {layout}", required.key.shape), required.key.shape), Rank(rank))
}

/// Checks the ranks of key and value, and that packed sequences come with their ends.
pub(crate) fn ranks(version: Version, layout: InputLayout, required: &Required<'_>) -> Result<(), Violation> {
    let rank = layout.rank();
    if version == Version::V2 {
        key_rank(layout, required)?;
    }
    require!(
        !layout.is_packed() || version.has(Parameter::ActualSeqLengths),
        NO_LENGTHS,
        format_args!("{layout} for {version}"),
        "BSH, SBH, BSND, BNSD",
    );
    require!(
        required.key.shape.rank() == rank && required.value.shape.rank() == rank,
        KV_RANK,
        format_args!("key {}, value {} in {layout}", required.key.shape, required.value.shape),
        format_args!("{rank} axes"),
    );
    Ok(())
}

pub(crate) fn batch(layout: InputLayout, required: &Required<'_>) -> Result<(), Violation> {
    if let Some(axis) = layout.batch_axis() {
        let (of_query, of_key) = (required.query.shape.get(axis), required.key.shape.get(axis));
        require!(
            of_query == of_key,
            BATCH,
            format_args!("query {}, key {} in {layout}", required.query.shape, required.key.shape),
            "the same batch",
        );
    }
    Ok(())
}

/// Refuses a value with another layout than the key: the operator compares only their head dimensions, and reads the
/// value as if it had the key's layout. Packed rows after the last sequence are not read.
pub(crate) fn computed(p: &FlashAttentionProblem<'_>, required: &Required<'_>) -> Result<(), Violation> {
    let keys = p.sums().map(|(_, keys)| keys);
    match lies_like(p.layout, required.value, required.key, keys) {
        true => Ok(()),
        false => Err(Violation::unsupported(
            "a value with another batch, other rows or other heads than the key, which the operator reads as if it \
                      had the key's",
        )),
    }
}

/// Whether two tensors have the same axes except the last; of packed rows, `desc` must have at least those of the
/// sequences.
pub(super) fn lies_like(layout: InputLayout, desc: &TensorDesc, other: &TensorDesc, packed_rows: Option<i64>) -> bool {
    let last = layout.last_axis();
    match (packed_rows, &desc.shape[..], &other.shape[..]) {
        (Some(rows), &[tokens, heads, _], &[_, heads_of, _]) => tokens >= rows && heads == heads_of,
        (_, shape, other) => shape.len() == other.len() && shape.get(..last) == other.get(..last),
    }
}
