//! The split-fuse path of packed rows, which checks little of a call.

use super::{Facts, packed, paged, sink};
use crate::allowed::Named;
use crate::attention_problem::MaskUse;
use crate::ops::fused_infer_attention_score::Version;
use crate::rule::{require, rules};
use crate::{Cann, Dims, SparseMode, Violation};

rules! {
    in Scope::A2_A3.since(V8_5);
    DTYPE = "split_fuse.dtype", TILING_ERROR, V1, "split-fuse path, dtypes",
        "query, key and value have one half-precision dtype",
        "convert query, key and value to FLOAT16 or BF16";
    ALONE = "split_fuse.one_key", TILING_ERROR, V1, "split-fuse path, lists",
        "packed sequences have one key and one value tensor",
        "pack the keys into one tensor";
    MASK = "split_fuse.mask", TILING_ERROR, V1, "split-fuse path, mask",
        "sparse mode 0 comes without a mask, modes 3 and 4 with the compressed one in two to four axes",
        "use mode 3 for causal attention, mode 4 for a window, mode 0 without a mask for neither";
    Q_ROWS = "split_fuse.q_rows", TILING_ERROR, V1, "9.2, split-fuse path, lengths" in Scope::A2_A3.since(V9_2),
        "from 9.2 on the last entry of actualSeqLengths is at most the number of packed query rows: those after it are \
         padding",
        "trim actualSeqLengths to the rows of the query";
    KV_ROWS = "split_fuse.kv_rows", TILING_ERROR, V1, "9.2, split-fuse path, lengths" in Scope::A2_A3.since(V9_2),
        "from 9.2 on the last entry of actualSeqLengthsKv is at most the number of packed key rows and of packed value \
         rows",
        "trim actualSeqLengthsKv to the rows of key and value";
    SINK = "split_fuse.sink", TILING_ERROR, V4, "split-fuse path, learnableSink" in Scope::A2_A3.since(V9_0),
        "a learnable sink has the query's dtype and innerPrecise 0",
        "convert the sink, and leave innerPrecise at 0 or set it so";
}

pub(crate) fn check(f: &Facts<'_>) -> Result<(SparseMode, MaskUse), Violation> {
    let call = f.call;
    super::unified::output::shape(f)?;
    require!(
        f.query.dtype.is_half() && f.key.dtype == f.query.dtype && f.value.dtype == f.query.dtype,
        DTYPE,
        format_args!("query {}, key {}, value {}", f.query.dtype, f.key.dtype, f.value.dtype),
        "one of FLOAT16 and BF16",
    );
    require!(
        call.key.len() == 1 && call.value.len() == 1,
        ALONE,
        format_args!("{} keys, {} values", call.key.len(), call.value.len()),
        1,
    );
    lengths(f)?;
    let verdict = mask(f)?;
    super::unified::output::lse_given(f)?;
    super::unified::output::lse(f)?;
    if let Some(sink) = &call.learnable_sink {
        sink::SHAPE.takes(sink.shape, Dims::of([call.num_heads]))?;
        require!(
            sink.dtype == f.query.dtype && !matches!(call.inner_precise, 1..=3),
            SINK,
            format_args!("{} with innerPrecise {}", sink.dtype, call.inner_precise),
            format_args!("{} with 0", f.query.dtype),
        );
    }
    Ok(verdict)
}

/// Checks the lengths; only their last entries are compared.
fn lengths(f: &Facts<'_>) -> Result<(), Violation> {
    let (q, kv) = packed::arrays(f)?;
    let last = |ends: &[i64]| ends.last().copied().unwrap_or(0);
    let padded = f.since(Cann::V9_2);
    match padded {
        true => Q_ROWS.takes(Named("last entry", last(q)), ..=f.q.rows)?,
        false => packed::q_total(q, f.q.rows)?,
    }
    if kv.is_empty() {
        return Err(packed::ARRAYS.broken("an empty array", "both arrays"));
    }
    if f.paged() {
        return paged::cache_rows(f, &paged::CACHE_SHAPE);
    }
    if padded {
        return KV_ROWS.takes(Named("last entry", last(kv)), ..=f.k.rows.min(f.v.rows));
    }
    packed::ROWS.takes(Named(format_args!("key {}, value", f.k.rows), f.v.rows), f.k.rows)?;
    packed::kv_total(kv, f.k.rows)
}

fn mask(f: &Facts<'_>) -> Result<(SparseMode, MaskUse), Violation> {
    let mode = SparseMode::from_acl(f.call.mode()).unwrap_or(SparseMode::DefaultMask);
    let size = SparseMode::COMPRESSED_MASK_SIZE;
    let square = f.call.mask().is_some_and(|mask| match mask.shape[..] {
        [i, j] | [1, i, j] | [1, 1, i, j] => (i, j) == (size, size),
        _ => false,
    });
    let fits = match mode {
        SparseMode::DefaultMask => f.call.mask().is_none(),
        _ => square,
    };
    require!(
        fits,
        MASK,
        format_args!("mode {mode} {} a mask", if f.call.mask().is_some() { "with" } else { "without" }),
        "mode 0 without a mask, modes 3 and 4 with [2048, 2048]",
    );
    if mode == SparseMode::Band {
        super::mask::band(f, mode, (f.call.pre_tokens, f.call.next_tokens))?;
    }
    let usage = match mode {
        SparseMode::DefaultMask => MaskUse::None,
        _ => MaskUse::Compressed,
    };
    Ok((mode, usage))
}
