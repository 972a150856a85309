//! Packed sequences (TND, NTD_TND) in the prefill path.

use super::{Facts, lengths};
use crate::allowed::{Named, Outcome};
use crate::attention_problem::SequenceLengths;
use crate::ops::fused_infer_attention_score::{FiaCall, Parameter, Version};
use crate::rule::{broken, require, rules};
use crate::{Change, DType, Layout, NewArgument, SparseMode, Violation};

rules! {
    in Scope::A2_A3;
    ARRAYS = "packed.lengths_required", TILING_ERROR, V1, "check E2.1" in Scope::ALL,
        "packed layouts have both length arrays, with the same number of entries, from 1 to 4096 before 8.5 and to \
         65536 since",
        "pass cumulative query ends, and key ends (key lengths with paging), one for each sequence";
    DATA = "packed.lengths_data", TILING_ERROR, V2, "check E2.1" in Scope::A2_A3.until(V8_1),
        "packed sequences of the prefill path are not asked for by GetMaxWorkspaceSize, which keeps back what the \
         length arrays hold",
        "ask GetWorkspaceSize with the longest sequences there will be";
    Q_ENDS = "packed.q_ends", TILING_ERROR, V1, "check E2.2" in Scope::ALL,
        "actualSeqLengths of a packed layout is cumulative: not negative, not decreasing",
        "pass cumulative sums, without a leading 0";
    Q_TOTAL = "packed.q_total", TILING_ERROR, V1, "check E2.2" in Scope::ALL,
        "the last entry of actualSeqLengths is the number of packed query rows, before 8.5 at most 1048576",
        "trim the query to the rows in use, or add a sequence for the padding rows; where the last entry is larger, \
         correct the lengths";
    KV_ENDS = "packed.kv_ends", TILING_ERROR, V1, "check E2.3" in Scope::ALL,
        "actualSeqLengthsKv of a packed layout without paging is cumulative and ends at the number of packed key rows",
        "trim key and value to the rows in use; where the last entry is larger, correct the lengths";
    KV_RANGE = "packed.kv_range", TILING_ERROR, V1, "check E2.4" in Scope::ALL,
        "actualSeqLengthsKv of a packed layout with paging has each sequence's own length, within its block table row",
        "pass each sequence's own length (not cumulative), and a block table wide enough for it";
    DTYPE = "packed.dtype", TILING_ERROR, V1, "check E2.6",
        "packed sequences are BF16 in the prefill path",
        "convert to BF16, or use a layout with a batch axis";
    DIMS = "packed.head_dim", TILING_ERROR, V1, "check E2.8",
        "the head dimensions of query, key and value are 64, 128, or 192, 192 and 128; 192 three times with TND and as \
         many key heads as query heads",
        "pad shorter heads with zeros to 64, 128 or 192; longer ones go with BSH, BSND and BNSD";
    ROWS = "packed.value_rows", TILING_ERROR, V1, "check E2.3" in Scope::ALL,
        "packed key and value have the same number of rows",
        "pack key and value alike";
    MODE = "packed.sparse_mode", TILING_ERROR, V1, "checks E2.10, J27",
        "packed sequences take sparse modes 0 (without a mask), 3 and 4",
        "use mode 3 for causal attention, mode 4 for a window, mode 0 without a mask for neither";
    BAND_DIM = "packed.band_head_dim", TILING_ERROR, V1, "check J28",
        "sparse mode 4 over packed sequences has a value head dimension of 64 or 128",
        "use mode 3, or a layout with a batch axis";
    BAND = "packed.band", TILING_ERROR, V1, "check E2.11",
        "the band reaches into every packed sequence",
        "widen the band";
    CAUSAL = "packed.causal_rows", TILING_ERROR, V1, "check J28",
        "sparse mode 3 over packed sequences has no more query rows than keys in any of them",
        "count the new tokens as keys too";
    KV_HEADS = "packed.cache_heads", TILING_ERROR, V1, "check J28",
        "a BnBsH cache with packed queries needs numKeyValueHeads to be given",
        "set numKeyValueHeads: 0 is not expanded here";
    ALONE = "packed.alone", TILING_ERROR, V1, "checks C6, E2.9",
        "packed sequences go with no position bias, prefix, padding, tensor list or quantisation in the prefill path",
        "drop the argument, or use a layout with a batch axis";
}

/// Both length arrays, whose number of entries is the number of sequences.
pub(crate) fn arrays<'a>(f: &Facts<'a>) -> Result<(&'a [i64], &'a [i64]), Violation> {
    let (q, kv) = (f.call.actual_seq_lengths, f.call.actual_seq_lengths_kv);
    match (q, kv) {
        (Some(q), Some(kv)) if !q.is_empty() => Ok((q, kv)),
        _ => Err(ARRAYS.broken("a null or empty array", "both arrays")),
    }
}

/// The number of entries of a length array.
pub(crate) fn entries(lengths: &[i64]) -> i64 {
    i64::try_from(lengths.len()).unwrap_or(i64::MAX)
}

/// Checks the length arrays of packed sequences, whatever the path: at most `most` sequences of at most `rows` query
/// rows together.
pub(crate) fn lengths(f: &Facts<'_>, most: i64, rows: i64) -> Result<(), Violation> {
    let (q, kv) = arrays(f)?;
    require!(
        (1..=most).contains(&entries(q)) && (kv.len() == q.len() || (f.paged() && !f.prefill() && kv.is_empty())),
        ARRAYS,
        format_args!("{} and {} entries", q.len(), kv.len()),
        format_args!("as many of each, 1 to {most}"),
        counted(q, kv),
    );
    ends(q, f.q.rows, &Q_ENDS, Parameter::ActualSeqLengths)?;
    q_total(q, f.q.rows)?;
    Q_TOTAL.takes(f.q.rows, ..=rows)?;
    if f.paged() {
        return kv_range(f, kv);
    }
    ends(kv, f.k.rows, &KV_ENDS, Parameter::ActualSeqLengthsKv)?;
    kv_total(kv, f.k.rows)?;
    ROWS.takes(Named(format_args!("key {}, value", f.k.rows), f.v.rows), f.k.rows)
}

/// The fix for arrays of different length.
pub(crate) fn counted(q: &[i64], kv: &[i64]) -> &'static str {
    match q {
        [0, ..] if q.len() == kv.len().saturating_add(1) => {
            "drop the leading 0 of actualSeqLengths: its entries are ends of sequences"
        }
        _ => ARRAYS.fix,
    }
}

/// Checks that the last query ends at `rows`.
pub(super) fn q_total(q: &[i64], rows: i64) -> Result<(), Violation> {
    let last = q.last().copied().unwrap_or(0);
    Q_TOTAL
        .takes(Named("last entry", last), rows)
        .fix(|| lengths::summed(Parameter::ActualSeqLengths, q, rows, Q_TOTAL.fix))
}

/// Checks that the last key ends at `rows`.
pub(super) fn kv_total(kv: &[i64], rows: i64) -> Result<(), Violation> {
    let last = kv.last().copied().unwrap_or(0);
    KV_ENDS
        .takes(Named("last entry", last), rows)
        .fix(|| lengths::summed(Parameter::ActualSeqLengthsKv, kv, rows, KV_ENDS.fix))
}

/// Checks the key length of each sequence against the capacity of the block table.
pub(super) fn kv_range(f: &Facts<'_>, kv: &[i64]) -> Result<(), Violation> {
    let capacity = f.key_rows;
    let Some(b) = kv.iter().position(|len| !(0..=capacity).contains(len)) else {
        return Ok(());
    };
    Err(broken(
        &KV_RANGE,
        format_args!("entry {b} is {}", kv.get(b).copied().unwrap_or(0)),
        format_args!("0 to {capacity}"),
        lengths::apart(kv, capacity, KV_RANGE.fix),
    ))
}

/// Checks the ends of sequences: none may be below the one before it.
pub(super) fn ends(ends: &[i64], rows: i64, rule: &'static crate::Rule, parameter: Parameter) -> Result<(), Violation> {
    let mut before = 0;
    for (b, &end) in ends.iter().enumerate() {
        if end < before {
            return Err(broken(
                rule,
                format_args!("{} {b} is {end} after {before}", parameter.acl_name()),
                "ends of sequences, each at least the one before",
                lengths::summed(parameter, ends, rows, "pass cumulative sums, without a leading 0"),
            ));
        }
        before = end;
    }
    Ok(())
}

/// Refuses a position bias in TND, whatever the work.
pub(crate) fn no_bias(f: &Facts<'_>) -> Result<(), Violation> {
    match f.layout {
        Layout::Tnd => ALONE.leaves_out(f.call, &[Parameter::PseShift]),
        _ => Ok(()),
    }
}

/// Checks the rules of the prefill path.
pub(crate) fn prefill(f: &Facts<'_>) -> Result<(), Violation> {
    let call = f.call;
    ALONE.leaves_out(call, &Parameter::SHARED_PREFIX)?;
    let reordered = f.layout == Layout::NtdTnd;
    ALONE.forbids([
        ("queryPaddingSize", call.query_padding_size.is_some() && !reordered),
        ("kvPaddingSize", call.kv_padding_size.is_some()),
        ("an INT8 query", f.query.dtype == DType::Int8),
        ("an INT8 output", f.out.dtype == DType::Int8 && !reordered),
        ("quantised keys", f.antiquant()),
        ("a tensor list", !f.paged() && call.key.len() > 1 && f.query.shape.first() != f.key.shape.first()),
    ])?;
    require!(
        f.query.dtype == DType::Bf16 && f.key.dtype == DType::Bf16 && f.value.dtype == DType::Bf16,
        DTYPE,
        format_args!("{} query, {} key", f.query.dtype, f.key.dtype),
        "BF16",
        match f.query.dtype.is_half() && f.key.dtype.is_half() && f.out.dtype.is_half() {
            true => {
                use Parameter::{AttentionOut, Key, KeyRope, Query, QueryRope, Value};
                let all = [Query, Key, Value, QueryRope, KeyRope, AttentionOut].into_iter();
                let given = all.filter(|parameter| !call.tensors(*parameter).is_empty());
                Ok(given.map(|parameter| Change::to(parameter, NewArgument::DType(DType::Bf16))).collect::<Vec<_>>())
            }
            false => Err(DTYPE.fix),
        },
    );
    require!(
        f.cache != Some(crate::ops::fused_infer_attention_score::Cache::BnBsH) || call.num_key_value_heads != 0,
        KV_HEADS,
        0,
        "the number of key heads",
        Change::set(Parameter::NumKeyValueHeads, f.kv_heads),
    );
    lengths(f, 4096, FiaCall::MOST_PACKED_ROWS)?;
    if !f.rope() {
        let dims = (f.q.dim, f.k.dim, f.v.dim);
        let alike = f.layout == Layout::Tnd && f.kv_heads == call.num_heads;
        require!(
            matches!(dims, (64, 64, 64) | (128, 128, 128) | (192, 192, 128)) || (dims == (192, 192, 192) && alike),
            DIMS,
            format_args!("{}, {}, {}", dims.0, dims.1, dims.2),
            "64 or 128 three times; 192, 192, 128; 192 three times with TND and numHeads key heads",
            longer_heads(dims.0.max(dims.1).max(dims.2).max(match alike {
                true => 0,
                // 192 is refused here, so shorter heads must not be padded to it.
                false if dims.0 > 128 => 193,
                false => 0,
            })),
        );
    }
    Ok(())
}

/// The fix for packed heads of a dimension that no packed path takes.
pub(crate) fn longer_heads(dim: i64) -> String {
    match [64, 128, 192].into_iter().find(|longer| *longer >= dim) {
        Some(longer) => {
            format!("pad the heads of query, key and value with zeros to {longer}; the scale stays")
        }
        None => "use BSH, BSND or BNSD, one sequence a batch entry: they take heads of up to 512".into(),
    }
}

/// Query and key length of each sequence, in one walk over both arrays.
fn sequences(f: &Facts<'_>) -> impl Iterator<Item = (i64, i64)> {
    let cumulative = !f.paged();
    let ends = f.call.actual_seq_lengths.unwrap_or(&[]);
    let keys = f.call.actual_seq_lengths_kv.unwrap_or(&[]);
    let (mut q_before, mut kv_before) = (0, 0);
    ends.iter().zip(keys).map(move |(&q_end, &kv_end)| {
        let q = q_end.saturating_sub(q_before);
        let kv = kv_end.saturating_sub(kv_before);
        q_before = q_end;
        // Over a paged cache the entries are lengths already.
        kv_before = if cumulative { kv_end } else { 0 };
        (q, kv)
    })
}

/// Checks sparse mode, tokens and lengths together.
pub(crate) fn masked(f: &Facts<'_>, mode: SparseMode) -> Result<(), Violation> {
    let unmasked = f.call.atten_mask.is_none();
    require!(
        matches!(
            (mode, unmasked),
            (SparseMode::DefaultMask, true) | (SparseMode::RightDownCausal | SparseMode::Band, false)
        ),
        MODE,
        format_args!("mode {mode} {} a mask", if unmasked { "without" } else { "with" }),
        "mode 0 without a mask, modes 3 and 4 with the compressed one",
    );
    let (pre, next) = (f.call.pre_tokens, f.call.next_tokens);
    for (b, (q, kv)) in sequences(f).enumerate() {
        match mode {
            SparseMode::RightDownCausal => require!(
                q <= kv,
                CAUSAL,
                format_args!("sequence {b} has {q} query rows and {kv} keys"),
                "at least as many keys as query rows",
            ),
            SparseMode::Band if q > 0 && kv > 0 => require!(
                pre.saturating_add(next) >= 0 && pre >= -q && next >= -kv,
                BAND,
                format_args!("preTokens {pre}, nextTokens {next}, sequence {b} of {q} rows and {kv} keys"),
                "preTokens from minus the rows, nextTokens from minus the keys",
            ),
            _ => {}
        }
    }
    require!(mode != SparseMode::Band || matches!(f.v.dim, 64 | 128), BAND_DIM, f.v.dim, "64 or 128",);
    Ok(())
}

/// Number of sequences, which only the length array has.
pub(crate) fn batch(call: &crate::ops::fused_infer_attention_score::FiaCall<'_>) -> i64 {
    i64::try_from(call.actual_seq_lengths.map_or(0, <[i64]>::len)).unwrap_or(i64::MAX)
}

/// Longest query of a batch.
pub(crate) fn longest_query(f: &Facts<'_>) -> i64 {
    let ends = SequenceLengths::new(f.call.actual_seq_lengths, true);
    let len = |b| ends.of(b, f.q.rows);
    f.sequences().map(len).max().unwrap_or(0)
}
