//! Resolution of a call that holds every rule into the problem that a kernel solves.

use super::rules::ascend950::QuantisationKind;
use super::rules::unified::lists;
use super::rules::{Facts, output, padding, prefix, pse};
use super::{Cache, CheckedCall, Checker, FiaCall, Route, mxfp8, quantisation};
use crate::attention_problem::{
    AttentionProblem, BiasTensor, ByteRange, Int8Query, KeyValue, KeyValueList, MaskUse, Pages, Prefix, Rows,
    ScaleOffset, SequenceLengths, Slopes, SmallTensor, TensorRole, Work,
};
use crate::{Cann, DType, SparseMode, TensorDesc, View, Violation};

/// The work to do, the mode in force and the use of the mask.
pub(crate) type Verdict = (Work, SparseMode, MaskUse);

/// Resolves a call whose verdict is known.
///
/// # Errors
/// [`UNSUPPORTED`](crate::UNSUPPORTED) for calls that the operator leaves unchecked and that are too inconsistent to
/// compute: a scale that is smaller than its mode's grid, a position bias of another shape, caches of key and value
/// with different axes. Also for scales of single tokens with a shared prefix, and for prefixes of INT32.
pub(super) fn resolve<'a>(f: &Facts<'a>, verdict: Verdict) -> Result<CheckedCall<'a>, Violation> {
    Ok(CheckedCall {
        call: f.call,
        version: f.version,
        target: f.target,
        checker: f.checker,
        route: f.route,
        layout: f.layout,
        cache: f.cache,
        axes_in_place: lists::axes_in_place(f),
        problem: problem(f, verdict)?,
    })
}

fn problem<'a>(f: &Facts<'a>, (work, mode, mask): Verdict) -> Result<AttentionProblem<'a>, Violation> {
    let call = f.call;
    uncomputed(f, work)?;
    let size = |value: i64| usize::try_from(value).unwrap_or(0);
    let value_dim = output::value_dim(f);
    let attend = work == Work::Attend;
    let shape = f.layout.out_shape(output::expected(f.q, value_dim));
    let out = match f.out.shape == shape {
        true => *f.out,
        false => TensorDesc::packed(f.out.dtype, shape),
    };
    let out = match f.checker {
        // This path has not checked the output's dtype, and writes the query's.
        Checker::SplitFuse => TensorDesc { dtype: f.query.dtype, ..out },
        _ => out,
    };
    let lse = output::written_lse(call).map(|lse| {
        let packed = TensorDesc::packed(DType::Float, f.layout.lse_shape(f.q));
        let usable = lse.shape == packed.shape && lse.dtype == DType::Float;
        Rows::new(f.layout.lse_axes(), if usable { lse } else { &packed }, 1)
    });
    let query_lengths = match (f.route, f.packed()) {
        (Route::Decode, false) => SequenceLengths::All,
        (_, packed) => SequenceLengths::new(call.actual_seq_lengths, packed),
    };
    let axis = f.layout.input().row_axis();
    let mut problem = AttentionProblem {
        work,
        batch: size(f.batch),
        heads: size(call.num_heads),
        kv_heads: size(f.kv_heads),
        query_rows: size(f.q.rows),
        key_rows: if f.packed() && !f.paged() {
            // From 9.2 on the split-fuse path takes keys and values with different numbers of padding rows.
            size(f.k.rows.min(f.v.rows))
        } else {
            size(f.key_rows)
        },
        head_dim: size(f.q.dim),
        value_dim: size(value_dim),
        packed: f.packed(),
        scale: call.scale,
        query_lengths,
        key_lengths: SequenceLengths::new(call.actual_seq_lengths_kv, f.packed() && !f.paged()),
        keys_beyond_table: f.paged() && f.checker == Checker::SplitFuse,
        mode,
        tokens: (call.pre_tokens, call.next_tokens),
        mask,
        mask_described: call.mask().filter(|_| mask != MaskUse::None).and_then(ByteRange::described),
        query: Rows::new(f.layout.input(), f.query, f.q.dim),
        out: Rows::new(f.layout.output(), &out, value_dim),
        lse,
        first: keys(f, value_dim),
        list: f.kv_list.then(|| KeyValueList {
            keys: call.key.into(),
            values: call.value.into(),
            axes: f.layout.input(),
        }),
        first_key_rows: f.key.shape.get(axis).copied().map_or(0, size),
        ..AttentionProblem::blank(f.query.dtype)
    };
    if !attend {
        return Ok(problem);
    }
    fitting(f)?;
    problem.pages = pages(f);
    problem.prefix = shared_prefix(f);
    let prefixes = [&call.key_shared_prefix, &call.value_shared_prefix];
    let packed = |prefix: &TensorDesc| prefix.dtype == DType::Int32;
    let packed = prefixes.into_iter().flatten().any(packed);
    // Of other keys the prefill path takes it, and no source says how it reads it.
    if problem.prefix.is_some() && packed && f.nibbles == 1 {
        return Err(Violation::unsupported("a shared prefix (keySharedPrefix) of INT32 for keys of another type"));
    }
    // A single row over quantised keys sees them all, wherever the query's padding puts it.
    let sees_all = f.target.is_950() && f.kind() == QuantisationKind::Antiquant && f.most_rows() == 1;
    let pads_query = f.prefill() && call.query_padding_size.is_some() && !f.packed() && !sees_all;
    let small = |role, desc: &TensorDesc| SmallTensor::new(role, desc, DType::Int64);
    let query_padding = call.query_padding_size.as_ref().filter(|_| pads_query);
    let pads_keys = padding::in_force(f);
    let key_padding = call.kv_padding_size.as_ref().filter(|_| pads_keys);
    problem.query_padding = query_padding.map(|desc| small(TensorRole::QueryPadding, desc));
    problem.key_padding = key_padding.map(|desc| small(TensorRole::KeyPadding, desc));
    if sees_all || (problem.is_padded() && mode == SparseMode::DefaultMask) {
        problem.tokens = (FiaCall::ALL_TOKENS, FiaCall::ALL_TOKENS);
    }
    problem.sink = quantisation::sink(f);
    if let (Some(rope), true) = (&call.query_rope, f.rope()) {
        let dim = 64;
        problem.rope_dim = dim as usize;
        problem.query_rope = Some(Rows { dtype: rope.dtype, ..Rows::new(f.layout.input(), rope, dim) });
    }
    if pse::slopes(call, f.target) {
        if problem.prefix.is_some() {
            // Which positions the prefix's keys have is not documented.
            return Err(Violation::unsupported(
                "slopes as position bias (pseType 2 and 3) with a shared prefix (keySharedPrefix)",
            ));
        }
        problem.slopes = quantisation::slopes(f).map(|grid| Slopes {
            grid,
            root: call.pse_type == 3,
            key_offset: pse::key_offset(call),
        });
    } else if let Some(pse) = pse::read(f) {
        if f.packed() && pse.dtype != f.query.dtype {
            // No check has looked at the dtype of the bias.
            return Err(Violation::unsupported(
                "a position bias (pseShift) of packed rows in another dtype than the query's",
            ));
        }
        let view = match pse.strides[..] {
            [batch, head, row, dim] => {
                let batch = if pse.shape.first() == Some(&1) { 0 } else { batch };
                View { offset: pse.offset, batch, head, row, dim }
            }
            _ => {
                return Err(Violation::unsupported("a position bias without four axes"));
            }
        };
        let axis = |axis: usize| size(pse.shape.get(axis).copied().unwrap_or(0));
        problem.bias = Some(BiasTensor {
            rows: Rows { view, lanes: 0, dtype: pse.dtype },
            sizes: [0, 1, 2, 3].map(axis),
            before_scale: false,
            up_to_row: false,
        });
    }
    quantised(f, &mut problem)?;
    let by_token = |scales: &Option<ScaleOffset>| scales.is_some_and(|scales| scales.scale.view.row != 0);
    if problem.prefix.is_some() && (by_token(&problem.key_quantisation) || by_token(&problem.value_quantisation)) {
        // Which of the scales belong to the prefix is not documented.
        return Err(Violation::unsupported("scales of single tokens with a shared prefix (keySharedPrefix)"));
    }
    problem.zeroes_masked_rows = zeroes_masked_rows(f, &problem);
    Ok(problem)
}

/// Whether a row is written as 0 if the mask tensor hides all its keys: with `inner_precise` 2 and 3, and on Ascend
/// 950 also in latent attention, and in mode 0 with padding or where tokens leave a row without keys. Elsewhere the
/// operator's additive masking makes such a row the mean of the values.
fn zeroes_masked_rows(f: &Facts<'_>, problem: &AttentionProblem<'_>) -> bool {
    if f.call.inner_precise & 2 != 0 {
        return true;
    }
    if !f.target.is_950() {
        return false;
    }
    let latent = problem.rope_dim > 0 || (problem.head_dim, problem.value_dim) == (192, 128);
    let masked = problem.mode == SparseMode::DefaultMask && problem.mask != MaskUse::None;
    let leaves_rows = |b| {
        let geometry = problem.geometry(b);
        let last = geometry.q_len().saturating_sub(1);
        let empty = |row: u64| geometry.span(row..row + 1).is_empty();
        geometry.q_len() > 0 && geometry.kv_len() > 0 && (empty(0) || empty(last))
    };
    let mut sequences = problem.distinct_sequences();
    latent || masked && (problem.is_padded() || sequences.any(leaves_rows))
}

/// What the contract of newer releases and products takes and no kernel computes yet.
fn uncomputed(f: &Facts<'_>, work: Work) -> Result<(), Violation> {
    let int8 = work == Work::Attend && f.out.dtype == DType::Int8;
    if int8 && f.checker == Checker::SplitFuse {
        return Err(Violation::unsupported("an INT8 output of the split-fuse path, whose numbers mean nothing"));
    }
    if int8 && f.call.quant_scale2.is_none() {
        return Err(Violation::unsupported("an INT8 output without quantScale2, whose numbers mean nothing"));
    }
    Ok(())
}

fn quantised(f: &Facts<'_>, problem: &mut AttentionProblem<'_>) -> Result<(), Violation> {
    let small = || Violation::unsupported("a scale or offset smaller than its mode's grid");
    match f.kind() {
        QuantisationKind::Half => {}
        QuantisationKind::Antiquant => {
            problem.key_quantisation = Some(quantisation::antiquant(f, 0).ok_or_else(small)?);
            problem.value_quantisation = Some(quantisation::antiquant(f, 1).ok_or_else(small)?);
        }
        QuantisationKind::Absorbed => {
            let whole = |role| quantisation::whole(f, role).ok_or_else(small);
            problem.query_quantisation = Some(quantisation::query(f).ok_or_else(small)?);
            problem.key_quantisation = Some(whole(TensorRole::KeyScale)?);
            problem.value_quantisation = Some(whole(TensorRole::ValueScale)?);
            problem.scaled_rope = true;
        }
        QuantisationKind::MxFp8 => {
            problem.query_quantisation = Some(mxfp8::query(f).ok_or_else(small)?);
            problem.key_quantisation = Some(mxfp8::key(f).ok_or_else(small)?);
            problem.value_quantisation = Some(mxfp8::value(f).ok_or_else(small)?);
            problem.probability_scale = quantisation::whole(f, TensorRole::WeightScale).map(|grid| grid.scale);
        }
        QuantisationKind::Fp8 => {
            if f.call.quant_scale1.is_some() {
                return Err(Violation::unsupported(
                    "quantScale1 with the modes 3, 3 and 2, whose use no document describes",
                ));
            }
            problem.query_quantisation = Some(quantisation::query(f).ok_or_else(small)?);
            problem.key_quantisation = Some(quantisation::rows_of_blocks(f).ok_or_else(small)?);
            problem.value_quantisation = Some(quantisation::value_heads(f).ok_or_else(small)?);
        }
        QuantisationKind::Tensor => {
            let scale = |role| Some(quantisation::whole(f, role)?.scale);
            problem.int8_query = Some(Int8Query {
                score_scale: scale(TensorRole::ScoreScale).ok_or_else(small)?,
                weight_scale: scale(TensorRole::WeightScale).ok_or_else(small)?,
                product_scale: scale(TensorRole::ProductScale).ok_or_else(small)?,
            });
        }
    }
    if !problem.out.dtype.is_half() {
        problem.out_quantisation = Some(quantisation::output(f).ok_or_else(small)?);
    }
    Ok(())
}

/// Refuses paged caches that the operator does not check and whose elements cannot be located.
fn fitting(f: &Facts<'_>) -> Result<(), Violation> {
    if !f.paged() {
        return Ok(());
    }
    if f.key.shape.rank() != f.value.shape.rank() {
        return Err(Violation::unsupported("caches of key and value with different numbers of axes"));
    }
    if f.key.dtype != f.value.dtype {
        return Err(Violation::unsupported("caches of key and value with different types"));
    }
    let caches = [Some(f.key), Some(f.value), f.call.key_rope.as_ref()];
    let strided = |desc: &&TensorDesc| !desc.is_contiguous() && desc.strides.last() != Some(&1);
    // Releases before 9.2 make strided caches contiguous first, or refuse them.
    let kept = f.cache == Some(Cache::Nz) && f.since(Cann::V9_2);
    if kept && caches.into_iter().flatten().any(|desc| strided(&desc)) {
        return Err(Violation::unsupported("an NZ cache whose runs of 32 bytes are strided"));
    }
    let hidden = f.value.shape.last().copied().unwrap_or(0);
    let whole = hidden.saturating_mul(f.nibbles);
    if output::own_value_dim(f) && whole % f.kv_heads.max(1) != 0 {
        return Err(Violation::unsupported("a value cache whose last axis does not divide by numKeyValueHeads"));
    }
    Ok(())
}

/// Key, value and rotary part of the first tensor.
fn keys(f: &Facts<'_>, value_dim: i64) -> KeyValue {
    let one = |desc: &TensorDesc, dim: i64| match f.cache {
        Some(cache) => cached(f, cache, desc, dim),
        None => Rows::new(f.layout.input(), desc, dim),
    };
    KeyValue {
        list_index: 0,
        batch: 0,
        key: one(f.key, f.q.dim),
        value: one(f.value, value_dim),
        key_rope: f.call.key_rope.as_ref().filter(|_| f.rope()).map(|rope| Rows {
            // INT32 does not stand for packed INT4 here.
            dtype: rope.dtype,
            ..one(rope, 64)
        }),
    }
}

/// Rows of a paged cache. A cache of another shape than its arguments imply is read as if it had the implied shape.
fn cached(f: &Facts<'_>, cache: Cache, desc: &TensorDesc, dim: i64) -> Rows {
    let (n, bs) = (f.kv_heads, f.call.block_size);
    let dtype = super::rules::unpacked(desc.dtype);
    // Ascend 950 groups the elements of quantised keys as if they had the half-precision type of their query.
    let halves = f.target.is_950() && f.kind() == QuantisationKind::Antiquant;
    let lanes = match cache {
        Cache::Nz if halves => 16,
        Cache::Nz => 256 / i64::from(dtype.bits().max(1)),
        _ => 0,
    };
    let (row, head, step) = match cache {
        Cache::BnBsH => (n.saturating_mul(dim), dim, 1),
        Cache::BnNBsD => (dim, bs.saturating_mul(dim), 1),
        Cache::Nz => (lanes, bs.saturating_mul(dim), bs.saturating_mul(lanes)),
    };
    let batch = bs.saturating_mul(n).saturating_mul(dim);
    let packed = View { offset: scaled(desc, desc.offset), batch, head, row, dim: step };
    let strides = match (cache, &desc.strides[..]) {
        (Cache::BnBsH, &[batch, row, dim_step]) if !desc.is_contiguous() => {
            View { batch, row, dim: dim_step, head: dim.saturating_mul(dim_step), ..packed }
        }
        (Cache::BnNBsD, &[batch, head, row, dim]) if !desc.is_contiguous() => View { batch, head, row, dim, ..packed },
        (Cache::Nz, &[batch, head, dim, row, 1]) if !desc.is_contiguous() => View { batch, head, row, dim, ..packed },
        _ => packed,
    };
    Rows { view: strides, lanes: usize::try_from(lanes).unwrap_or(0), dtype }
}

fn pages(f: &Facts<'_>) -> Option<Pages> {
    let table = f.call.block_table.as_ref()?;
    let size = |value: i64| usize::try_from(value).unwrap_or(0);
    let stride = |axis: usize| table.strides.get(axis).copied().unwrap_or(0);
    f.cache?;
    Some(Pages {
        block_size: size(f.call.block_size),
        blocks: size(f.key.shape.first().copied().unwrap_or(0)),
        table: SmallTensor::new(TensorRole::BlockTable, table, DType::Int32),
        row: stride(0),
        column: stride(1),
        columns: size(table.shape.get(1).copied().unwrap_or(0)),
    })
}

/// The shared prefix, which the split-fuse path ignores.
fn shared_prefix(f: &Facts<'_>) -> Option<Prefix> {
    if f.checker == Checker::SplitFuse {
        return None;
    }
    let (key, value) = (f.call.key_shared_prefix.as_ref()?, f.call.value_shared_prefix.as_ref()?);
    Some(Prefix {
        len: usize::try_from(prefix::length(f)).unwrap_or(0),
        key: Rows::new(f.layout.input(), key, f.k.dim),
        value: Rows::new(f.layout.input(), value, f.v.dim),
    })
}

/// A stride or offset of packed nibbles, counted in nibbles.
fn scaled(desc: &TensorDesc, value: i64) -> i64 {
    if desc.dtype == DType::Int32 { value.saturating_mul(8) } else { value }
}
