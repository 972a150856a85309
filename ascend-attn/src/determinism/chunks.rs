//! The queries of one sequence in several calls, as chunked prefill makes them.

use std::ops::Range;

use ascend_attention::case::{AttentionCase, CaseTensor, MaskSource, Parameter};
use ascend_attention::spec::{SparseMode, Target};

use super::axis::take;
use super::sequences::{Sequences, ends};

/// The call on some query rows of sequence `b` alone.
///
/// # Errors
/// Why the sequence cannot be cut: what its rows see is not defined row by row.
pub(super) fn chunk(
    sequences: &Sequences,
    b: usize,
    rows: Range<usize>,
    target: Target,
) -> Result<AttentionCase, String> {
    let alone = Sequences::of(sequences.select(&[b])?, target)?;
    let case = chunk_of(&alone, rows.clone())?;
    let cut = Sequences::of(case.clone(), target)?;
    sees_the_same(&alone, &cut, rows)?;
    Ok(case)
}

/// Refuses a chunk whose rows see other keys than in the whole call.
fn sees_the_same(whole: &Sequences, cut: &Sequences, chunk: Range<usize>) -> Result<(), String> {
    let (before, after) = (whole.problem.geometry(0), cut.problem.geometry(0));
    let other = (chunk.start as u64..).zip(0..after.q_len()).find(|&(i, row)| before.runs(i) != after.runs(row));
    if let Some((i, _)) = other {
        return Err(format!("row {i} of a sequence sees other keys in a chunk"));
    }
    // With single rows some masks are read in another way.
    match (whole.problem.mask.is_tensor(), cut.problem.mask.is_tensor()) {
        (false, true) => Err("a chunk reads the mask element by element".to_owned()),
        (true, false) => Err("a chunk ignores the mask".to_owned()),
        _ => Ok(()),
    }
}

/// The call on some query rows of the only sequence of `sequences`.
fn chunk_of(sequences: &Sequences, chunk: Range<usize>) -> Result<AttentionCase, String> {
    let (problem, at) = (&sequences.problem, sequences.rows(0));
    if problem.query_padding.is_some() || problem.key_padding.is_some() {
        return Err("the sequences are left padded".to_owned());
    }
    if problem.slopes.is_some() {
        return Err("the position bias follows from distances, which a chunk changes".to_owned());
    }
    let behind = at.q_len - chunk.end;
    let mut case = sequences.case().clone();
    let cut = |parameter, tensor: &CaseTensor| cut(sequences, parameter, tensor, &chunk);
    case.arguments = (case.arguments).try_map(|argument, tensor| cut(argument.parameter, tensor))?;
    let rows = chunk.len() as i64;
    let lengths = &mut case.arguments.actual_seq_lengths;
    if sequences.problem.packed || lengths.is_some() {
        *lengths = Some(vec![rows]);
    }
    match problem.mode {
        SparseMode::DefaultMask | SparseMode::AllMask => {
            shift(&mut case, chunk.start as i64);
        }
        SparseMode::LeftUpCausal => {
            causal(sequences, &mut case, &chunk, chunk.end.min(at.kv_len))?;
            let beyond = chunk.end.saturating_sub(at.kv_len);
            if beyond > 0 && chunk.len() > 1 {
                // Rows after the last key see all keys: the last row's position is beyond the keys.
                case.arguments.sparse_mode = SparseMode::Band.acl();
                case.arguments.pre_tokens = i64::from(i32::MAX);
                case.arguments.next_tokens = beyond as i64;
            }
        }
        SparseMode::RightDownCausal => {
            causal(sequences, &mut case, &chunk, at.kv_len.saturating_sub(behind))?;
        }
        SparseMode::Band => shift(&mut case, -(behind as i64)),
        other => {
            return Err(format!("{other}: what its rows see is not stated row by row"));
        }
    }
    Ok(case)
}

/// The part of a tensor that belongs to these query rows.
fn cut(
    sequences: &Sequences,
    parameter: Parameter,
    tensor: &CaseTensor,
    chunk: &Range<usize>,
) -> Result<CaseTensor, String> {
    let at = sequences.rows(0).q_first;
    let rows = at + chunk.start..at + chunk.end;
    match parameter {
        Parameter::Query | Parameter::QueryRope | Parameter::DequantScaleQuery => {
            take(tensor, sequences.layout.input().row_axis(), &[rows])
        }
        Parameter::AttenMask | Parameter::PseShift
            if tensor.shape().len() >= 2
                && (parameter == Parameter::PseShift || sequences.case().mask == MaskSource::Tensor)
                && !compressed(sequences, parameter) =>
        {
            let axis = tensor.shape().len() - 2;
            if tensor.shape()[axis] == 1 && sequences.problem.query_rows > 1 {
                return Ok(tensor.clone());
            }
            take(tensor, axis, std::slice::from_ref(chunk))
        }
        _ => Ok(tensor.clone()),
    }
}

/// Whether the parameter is a compressed mask, which all rows share.
fn compressed(sequences: &Sequences, parameter: Parameter) -> bool {
    parameter == Parameter::AttenMask && sequences.problem.mode.takes_compressed_mask()
}

/// Moves the diagonal by `rows` rows in the counts of visible keys before and after it. Counts that mean no bound
/// stay.
fn shift(case: &mut AttentionCase, rows: i64) {
    const NO_BOUND: i64 = i32::MAX as i64;
    let arguments = &mut case.arguments;
    if arguments.pre_tokens.abs() < NO_BOUND {
        arguments.pre_tokens -= rows;
    }
    if arguments.next_tokens.abs() < NO_BOUND {
        arguments.next_tokens += rows;
    }
}

/// Keeps the first `keys` keys, the last of which is the last that the chunk's last row sees.
fn causal(sequences: &Sequences, case: &mut AttentionCase, chunk: &Range<usize>, keys: usize) -> Result<(), String> {
    case.arguments.sparse_mode = SparseMode::RightDownCausal.acl();
    if chunk.len() == 1 {
        // A single row sees all keys that are left, and the operator takes no compressed mask for it.
        case.arguments.sparse_mode = SparseMode::DefaultMask.acl();
        case.arguments.atten_mask = None;
        case.mask = MaskSource::None;
    }
    keep_keys(sequences, case, keys)
}

/// Keeps the first `count` keys of the only sequence, after a shared prefix.
fn keep_keys(sequences: &Sequences, case: &mut AttentionCase, count: usize) -> Result<(), String> {
    if count == 0 {
        return Err("its first rows see no keys of their own".to_owned());
    }
    if sequences.packs_keys() {
        let axis = sequences.layout.input().row_axis();
        let keys = 0..count.min(sequences.rows(0).kv_len);
        case.arguments = (case.arguments).try_map(|argument, tensor| match argument.parameter {
            Parameter::Key | Parameter::Value | Parameter::KeyRope => take(tensor, axis, std::slice::from_ref(&keys)),
            _ => Ok(tensor.clone()),
        })?;
        case.arguments.actual_seq_lengths_kv = Some(ends([keys.len()].into_iter()));
        return Ok(());
    }
    case.arguments.actual_seq_lengths_kv = Some(vec![count as i64]);
    Ok(())
}
