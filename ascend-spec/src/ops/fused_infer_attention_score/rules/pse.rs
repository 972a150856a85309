//! Additive position bias.

use super::{Facts, Given, packed};
use crate::allowed::{Axis, Shapes};
use crate::ops::fused_infer_attention_score::{Checker, FiaCall, Version};
use crate::rule::{require, rules};
use crate::{DType, Target, TensorDesc, Violation};

rules! {
    in Scope::A2_A3;
    SHAPE = "pse_shift.shape", TILING_ERROR, V1, "checks E5.1, F13" in Scope::ALL,
        "pseShift is [1 or B, N, rows, keys] and covers every query row and key, a shared prefix included",
        "expand the position bias to every head, query row and key";
    DTYPE = "pse_shift.dtype", TILING_ERROR, V1, "check E5.2" in Scope::ALL,
        "pseShift has the query's dtype, FLOAT16 for an INT8 query",
        "convert the position bias";
    TYPE = "pse_type.known",
        TILING_ERROR, V5, "FusedInferAttentionScore documentation, pseType" in Scope::A2_A3.until(V8_1),
        "pseType is 0 (a bias tensor), 2 or 3 (slopes)",
        "pass 0 with a bias tensor, 2 for slopes times distance, 3 for slopes times its root";
    SLOPES = "pse_shift.slopes",
        TILING_ERROR, V5, "FusedInferAttentionScore documentation, pseType" in Scope::A2_A3.until(V8_1),
        "with pseType 2 and 3 pseShift is FLOAT [N]",
        "pass one slope for each query head";
    SQUARE = "pse_type.square",
        TILING_ERROR, V5, "FusedInferAttentionScore documentation, pseType" in Scope::A2_A3.until(V8_1),
        "with pseType 2 and 3 query and key have as many rows, each sequence with a batch axis of its own",
        "pass a bias tensor with pseType 0";
    START = "start_idx.range",
        TILING_ERROR, V5, "FusedInferAttentionScore documentation, qStartIdx and \
         kvStartIdx" in Scope::A2_A3.until(V8_1),
        "with pseType 2 and 3 qStartIdx and kvStartIdx have one 32-bit entry each and are at most 1048576 apart",
        "pass the first position of the queries and that of the keys";
}

/// Largest distance of the first positions of queries and keys.
const START_DISTANCE: i64 = 1_048_576;

/// Whether the bias is made of slopes rather than read: from 8.5 on the kind of bias is ignored or refused.
pub(crate) fn slopes(call: &FiaCall<'_>, target: Target) -> bool {
    matches!(call.pse_type, 2 | 3) && SLOPES.scope.holds(target)
}

/// The bias tensor that is read. With packed rows only the split-fuse path reads one, if it covers the rows and keys
/// of the longest sequence.
pub(crate) fn read<'f>(f: &'f Facts<'_>) -> Option<&'f TensorDesc> {
    let bias = f.call.pse_shift.as_ref().filter(|pse| !pse.is_empty())?;
    let longest = || {
        let keys = f.sequences().map(|b| f.kv_len(b)).max();
        (packed::longest_query(f), keys.unwrap_or(0))
    };
    let covers = || match bias.shape[..] {
        [b, n, i, j] => {
            let (rows, keys) = longest();
            (b == 1 || b == f.batch) && n == f.call.num_heads && i >= rows && j >= keys
        }
        _ => false,
    };
    let read = match f.packed() {
        true => f.checker == Checker::SplitFuse && covers(),
        false => true,
    };
    read.then_some(bias)
}

/// Positions of the first query and the first key, 0 where not given; `None` if they are not numbers of 32 bits.
fn starts(call: &FiaCall<'_>) -> Option<(i64, i64)> {
    let start = |array: Option<&[i64]>| match array {
        None | Some([]) => Some(0),
        Some(&[one]) => i32::try_from(one).ok().map(i64::from),
        Some(_) => None,
    };
    start(call.q_start_idx).zip(start(call.kv_start_idx))
}

/// The first key's position minus the first query's, in a call that holds the rules.
pub(crate) fn key_offset(call: &FiaCall<'_>) -> i64 {
    starts(call).map_or(0, |(query, key)| key - query)
}

/// Checks slopes as position bias.
fn sloped(f: &Facts<'_>) -> Result<(), Violation> {
    let call = f.call;
    let heads = call.num_heads;
    require!(
        call.pse_shift.is_some_and(|pse| pse.dtype == DType::Float && *pse.shape == [heads]),
        SLOPES,
        Given(call.pse_shift.as_ref(), "pseShift"),
        format_args!("FLOAT [{heads}]"),
    );
    require!(
        !f.packed() && f.q.rows == f.key_rows,
        SQUARE,
        format_args!("{} rows, {} keys in {}", f.q.rows, f.key_rows, f.layout),
        "as many rows as keys, in a layout with a batch axis",
    );
    require!(
        starts(call).is_some_and(|(query, key)| (key - query).abs() <= START_DISTANCE),
        START,
        format_args!("{:?} and {:?}", call.q_start_idx, call.kv_start_idx),
        format_args!("one entry each, at most {START_DISTANCE} apart"),
    );
    Ok(())
}

pub(crate) fn check(f: &Facts<'_>) -> Result<(), Violation> {
    require!(
        for f.target => f.call.pse_type == 0 || slopes(f.call, f.target),
        TYPE,
        f.call.pse_type,
        "0, 2, 3",
    );
    if slopes(f.call, f.target) {
        return sloped(f);
    }
    let Some(pse) = f.call.pse_shift.as_ref().filter(|pse| !(f.prefill() && pse.is_empty())) else {
        return Ok(());
    };
    let dtype = if f.query.dtype == DType::Int8 { DType::Float16 } else { f.query.dtype };
    DTYPE.takes(pse.dtype, dtype)?;
    let (rows, keys) = match (f.prefill(), f.paged()) {
        // The longest packed sequence counts.
        (true, paged) if f.packed() => (packed::longest_query(f), if paged { f.mask_width() } else { f.longest_key() }),
        (true, true) => (f.q.rows, f.mask_width()),
        // A shared prefix is not counted here, though the operator reads the bias of its keys too.
        (true, false) => (f.q.rows, f.key_rows),
        (false, true) => (1, f.key_rows),
        (false, false) => (1, f.longest_key().saturating_add(super::prefix::length(f))),
    };
    // TND takes no bias at all; NTD_TND checks the shape and ignores the values.
    let batch = if f.packed() { 1 } else { f.batch };
    let rows = match f.prefill() {
        true => Axis::From(rows),
        false => Axis::Of(1),
    };
    let heads = Axis::Of(f.call.num_heads);
    let shape = [Axis::OneOr(batch), heads, rows, Axis::From(keys)];
    SHAPE.takes(pse.shape, Shapes(&[&shape]))
}
