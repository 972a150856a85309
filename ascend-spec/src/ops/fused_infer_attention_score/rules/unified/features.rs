//! Position bias, left padding, shared prefix and sinks in the unified checker.

use super::masks;
use crate::allowed::{Axis, Named, Shapes};
use crate::layout::Extents;
use crate::ops::fused_infer_attention_score::rules::ascend950::QuantisationKind;
use crate::ops::fused_infer_attention_score::rules::{Facts, heads, packed, padding, prefix, pse, sink};
use crate::ops::fused_infer_attention_score::{Parameter, Version};
use crate::rule::{require, rules};
use crate::{Axes, Cann, DType, Dims, Violation};

rules! {
    in Scope::UNIFIED;
    BIAS_LAYOUT = "pse_shift.layout", TILING_ERROR, V1, "checks E2.9, I3; Ascend 950, pseShift",
        "pseShift goes with BSH, BSND, BNSD and BNSD_BSND, with one head dimension, and for several rows on Atlas A2 \
         and A3 with a head dimension that is a multiple of 16",
        "use a layout with a batch axis that keeps its order, and pad the value with zeros to the query's head \
         dimension";
    BIAS_TYPE = "pse_type.zero", TILING_ERROR, V5, "position bias; Ascend 950, pseType" in Scope::UNIFIED.since(V9_1),
        "pseType is 0",
        "pass a bias tensor: slopes are gone";
    PADDING_ALONE = "padding_size.unified_alone", TILING_ERROR, V1, "check I3; Ascend 950, left padding",
        "left padding goes with BSH, BSND, BNSD and BNSD_BSND and with no shared prefix or absorbed form, until 9.0 \
         with no tensor list and one head dimension",
        "pad on the right and give the lengths";
    PREFIX_ALONE = "shared_prefix.unified_alone", TILING_ERROR, V2, "check I13; Ascend 950, shared prefix",
        "a shared prefix goes with BSH, BSND, BNSD and BNSD_BSND, with one head dimension and no paging, and for \
         several rows with no tensor list",
        "copy the prefix into each sequence's keys";
    PREFIX_OUT = "shared_prefix.output", TILING_ERROR, V5, "Ascend 950, shared prefix" in Scope::ASCEND_950,
        "of the quantised outputs INT8 alone goes with a shared prefix",
        "make attentionOut of the query's dtype";
    SINK_DTYPE = "learnable_sink.dtype_of_target", TILING_ERROR, V4, "check I7; Ascend 950, learnableSink",
        "learnableSink is BF16 on Atlas A2 and A3, and of the query's dtype on Ascend 950",
        "convert the sink";
    SINK_950 = "learnable_sink.alone", TILING_ERROR, V4, "Ascend 950, learnableSink" in Scope::ASCEND_950,
        "a learnable sink has head dimensions of 64, 128 or 192 and values of 64 or 128, innerPrecise 0, and no left \
         padding, shared prefix, position bias, quantised output or absorbed form",
        "drop what the rule excludes, and set innerPrecise to 0";
}

/// Checks the position bias.
pub(crate) fn bias(f: &Facts<'_>) -> Result<(), Violation> {
    let Some(bias) = &f.call.pse_shift else {
        return Ok(());
    };
    let several = !f.single && !f.is_950();
    require!(
        f.classic_layout() && f.form() != super::Form::Combined && (!several || f.q.dim % 16 == 0),
        BIAS_LAYOUT,
        format_args!("{} with head dimensions {} and {}", f.layout, f.q.dim, f.v.dim),
        "BSH, BSND, BNSD, BNSD_BSND",
    );
    let dtype = match f.query.dtype {
        DType::Int8 => DType::Float16,
        dtype => dtype,
    };
    pse::DTYPE.takes(bias.dtype, dtype)?;
    let (b, n, j) = (Axis::OneOr(f.batch), Axis::Of(f.call.num_heads), Axis::From(bias_width(f)));
    let (each_row, one_row) = ([b, n, Axis::From(f.q.rows), j], [b, n, Axis::Of(1), j]);
    let allowed: &[&[Axis]] = match f.since(Cann::V9_1) {
        true => &[&each_row, &one_row],
        false => &[&each_row],
    };
    pse::SHAPE.takes(bias.shape, Shapes(allowed))
}

/// Number of keys that a position bias covers.
fn bias_width(f: &Facts<'_>) -> i64 {
    let given = f.call.actual_shared_prefix_len.and_then(<[i64]>::first);
    let rows = match f.paged() && f.since(Cann::V9_1) && f.kind() != QuantisationKind::Antiquant {
        true => f.mask_width(),
        false => f.key_rows,
    };
    // Until 9.0 a prefix length without a prefix is ignored.
    let counts = f.since(Cann::V9_1) || f.call.key_shared_prefix.is_some();
    let given = given.copied().filter(|_| counts);
    rows.saturating_add(given.unwrap_or(0).max(0))
}

/// Checks left padding.
pub(crate) fn left_padding(f: &Facts<'_>) -> Result<(), Violation> {
    let call = f.call;
    let ignored = f.single || (f.kind() == QuantisationKind::Antiquant && f.most_rows() == 1);
    let query = call.query_padding_size.as_ref().filter(|_| !ignored);
    let key = call.kv_padding_size.as_ref().filter(|_| padding::checked_by_unified(f));
    if query.is_none() && key.is_none() {
        return Ok(());
    }
    PADDING_ALONE.forbids([
        ("a layout other than BSH, BSND, BNSD and BNSD_BSND", !f.classic_layout()),
        ("a tensor list", f.kv_list && !f.since(Cann::V9_1)),
        ("the absorbed form", f.form() == super::Form::Absorbed),
        ("a value of another head dimension", f.form() == super::Form::Combined && !f.since(Cann::V9_1)),
    ])?;
    PADDING_ALONE.leaves_out(call, &Parameter::SHARED_PREFIX)?;
    let sizes =
        [(query, "queryPaddingSize", call.actual_seq_lengths), (key, "kvPaddingSize", call.actual_seq_lengths_kv)];
    for (size, name, lengths) in sizes {
        let Some(size) = size else { continue };
        let checked = (!f.single || f.since(Cann::V9_1)) && f.kind() == QuantisationKind::Half;
        if checked {
            padding::SHAPE.takes(Named(name, size.shape), Dims::of([1]))?;
        }
        require!(
            lengths.is_some(),
            padding::LENGTHS,
            format_args!("{name} without lengths"),
            "the lengths of the sequences",
        );
    }
    Ok(())
}

/// Checks the shared prefix.
pub(crate) fn shared_prefix(f: &Facts<'_>) -> Result<(), Violation> {
    let call = f.call;
    let (Some(key), Some(value)) = (&call.key_shared_prefix, &call.value_shared_prefix) else {
        return prefix::PAIR.pairs(call, Parameter::SHARED_PREFIX);
    };
    PREFIX_ALONE.forbids([
        ("a layout other than BSH, BSND, BNSD and BNSD_BSND", !f.classic_layout()),
        ("a value of another head dimension", f.form() == super::Form::Combined),
        ("blockTable", f.paged()),
        ("a tensor list", f.kv_list && (f.q.rows != 1 || f.is_950())),
    ])?;
    let fits = match (prefix::extents(f, key), prefix::extents(f, value)) {
        (Some(k), Some(v)) => {
            k.rows > 0
                && k == Extents { batch: 1, rows: k.rows, ..f.k }
                && v == Extents { batch: 1, rows: k.rows, ..f.v }
        }
        _ => false,
    };
    require!(
        fits,
        prefix::SHAPE,
        format_args!("key prefix {}, value prefix {}", key.shape, value.shape),
        format_args!("batch 1, {} heads of {}, equal rows", f.k.heads, f.k.dim),
    );
    require!(
        key.dtype == f.key.dtype && key.dtype == value.dtype,
        prefix::DTYPE,
        format_args!("{} and {}", key.dtype, value.dtype),
        f.kv_dtype(),
    );
    require!(
        for f.target => f.out.dtype.is_half() || f.out.dtype == DType::Int8,
        PREFIX_OUT,
        f.out.dtype,
        "INT8, or the query's dtype",
    );
    // On Atlas A2 and A3 an empty array counts as none.
    if let Some(lengths) = call.actual_shared_prefix_len
        && (f.is_950() || !lengths.is_empty())
    {
        require!(
            matches!(lengths, &[len] if (0..=f.prefix).contains(&len)),
            prefix::LENGTH,
            format_args!("{lengths:?}"),
            format_args!("one entry from 0 to {}", f.prefix),
        );
    }
    Ok(())
}

/// Checks the learnable sink.
pub(crate) fn learnable_sink(f: &Facts<'_>) -> Result<(), Violation> {
    let call = f.call;
    let Some(sink) = &call.learnable_sink else {
        return Ok(());
    };
    sink::SHAPE.takes(sink.shape, Dims::of([call.num_heads]))?;
    let dtype = match f.is_950() {
        true => f.query.dtype,
        false => DType::Bf16,
    };
    SINK_DTYPE.takes(sink.dtype, dtype)?;
    require!(
        for f.target => f.query.dtype.is_half()
            && f.form() != super::Form::Absorbed
            && matches!((f.q.dim, f.v.dim), (64 | 128 | 192, 64 | 128))
            && call.inner_precise == 0
            && !padding::given(f)
            && call.key_shared_prefix.is_none()
            && call.value_shared_prefix.is_none()
            && call.pse_shift.is_none()
            && f.out.dtype.is_half(),
        SINK_950,
        format_args!("head dimensions {} and {}, innerPrecise {}", f.q.dim, f.v.dim, call.inner_precise),
        "none of them",
    );
    Ok(())
}

/// Checks the kind of position bias.
pub(crate) fn bias_type(f: &Facts<'_>) -> Result<(), Violation> {
    BIAS_TYPE.takes_on(f.target, f.call.pse_type, 0)
}

/// Checks what Ascend 950 still checks where there are no keys.
pub(crate) fn filled(f: &Facts<'_>) -> Result<(), Violation> {
    let call = f.call;
    if f.packed() {
        require!(
            call.actual_seq_lengths.is_some_and(|all| !all.is_empty()),
            packed::ARRAYS,
            "no actualSeqLengths",
            "one end a sequence",
        );
    }
    if f.layout.input() == Axes::Bsh && !f.paged() {
        let hidden = f.value.shape.last().copied().unwrap_or(0);
        require!(
            hidden % f.kv_heads.max(1) == 0,
            heads::HEADS_KEY,
            f.value.shape,
            format_args!("a hidden size that divides by {}", f.kv_heads),
        );
    }
    require!(!(call.mode() == masks::TREE_MODE && call.mask().is_some()), masks::MODE, masks::TREE_MODE, "0 to 4",);
    require!(
        call.actual_shared_prefix_len.is_none_or(|all| all.len() == 1),
        prefix::LENGTH,
        format_args!("{:?}", call.actual_shared_prefix_len),
        "one entry",
    );
    Ok(())
}
