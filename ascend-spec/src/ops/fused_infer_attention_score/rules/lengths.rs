//! Actual sequence lengths of layouts with a batch axis, and fixes for length arrays of any layout.

use super::Facts;
use crate::attention_problem::SequenceLengths;
use crate::operator::{Change, Listed};
use crate::ops::fused_infer_attention_score::rules::OneOr;
use crate::ops::fused_infer_attention_score::{FiaCall, Parameter, Version};
use crate::rule::{broken, require, rules};
use crate::{Layout, Violation};

rules! {
    in Scope::ALL;
    Q_COUNT = "actual_seq_lengths.count", TILING_ERROR, V1, "check E1.1",
        "actualSeqLengths has one entry, or one for each batch entry",
        "pass one length a sequence";
    Q_RANGE = "actual_seq_lengths.range", TILING_ERROR, V1, "check E1.1",
        "each query length is from 0 to the rows of the query",
        "pass lengths of each sequence (not cumulative) within the query's rows";
    KV_COUNT = "actual_seq_lengths_kv.count", TILING_ERROR, V1, "checks E1.2, F7",
        "actualSeqLengthsKv has one entry, or one for each batch entry",
        "pass one length a sequence";
    KV_RANGE = "actual_seq_lengths_kv.range", TILING_ERROR, V1, "checks E1.2, F7, J7",
        "each key length is from 0 to the rows of the key, or to what the block table holds",
        "pass lengths of each sequence (not cumulative) within the key's rows";
}

/// A change to other lengths, and its reason; otherwise the rule's fix.
type OtherLengths = Result<(Change, &'static str), &'static str>;

/// The fix for an array that is not cumulative: the sums, if its entries look like the lengths of sequences that fill
/// `rows`.
pub(crate) fn summed(parameter: Parameter, lengths: &[i64], rows: i64, otherwise: &'static str) -> OtherLengths {
    let mut sum = 0i64;
    let ends = lengths.iter().map(|&len| {
        sum = sum.checked_add(len).filter(|_| len >= 0)?;
        Some(sum)
    });
    match ends.collect::<Option<Vec<_>>>() {
        Some(ends) if ends.last() == Some(&rows) && ends.len() > 1 => {
            Ok((Change::set(parameter, ends), "it is cumulative"))
        }
        _ => Err(otherwise),
    }
}

/// The fix for an array with an entry that is too large: the differences, if these are lengths of at most `most`. The
/// call does not show whether its entries are meant as ends.
pub(crate) fn apart(ends: &[i64], most: i64, otherwise: &str) -> String {
    let mut before = 0i64;
    let lengths = ends.iter().map(|&end| {
        let len = end.checked_sub(before)?;
        before = end;
        (0..=most).contains(&len).then_some(len)
    });
    match lengths.collect::<Option<Vec<_>>>() {
        Some(lengths) if lengths.len() > 1 => format!(
            "if the entries are ends of sequences, pass their lengths {}; otherwise {otherwise}",
            Listed(&lengths)
        ),
        _ => otherwise.to_owned(),
    }
}

/// Query length of sequence `b`, for a query with `rows` rows.
pub(crate) fn q_len(call: &FiaCall<'_>, layout: Layout, rows: i64, b: usize) -> i64 {
    SequenceLengths::new(call.actual_seq_lengths, layout.is_packed()).of(b, rows)
}

/// Key length of sequence `b`, whose tensor has `rows` rows.
pub(crate) fn kv_len(call: &FiaCall<'_>, layout: Layout, paged: bool, rows: i64, b: usize) -> i64 {
    let cumulative = layout.is_packed() && !paged;
    SequenceLengths::new(call.actual_seq_lengths_kv, cumulative).of(b, rows)
}

/// The number of first sequences that a check must examine so that none is left out: later ones, which have no entry
/// of their own in the arrays or the list of keys, are like the last of these. A batch axis may be of any size.
pub(crate) fn distinct(call: &FiaCall<'_>, batch: usize) -> usize {
    let entries = |lengths: Option<&[i64]>| lengths.map_or(0, <[i64]>::len);
    let most = entries(call.actual_seq_lengths).max(entries(call.actual_seq_lengths_kv)).max(call.key.len());
    // After the last of cumulative ends, one more sequence may differ.
    batch.min(most.saturating_add(2))
}

/// The sum of `size` over all sequences.
pub(crate) fn total(call: &FiaCall<'_>, batch: usize, size: impl Fn(usize) -> i64) -> i64 {
    let looked_at = distinct(call, batch);
    let sum = (0..looked_at).fold(0i64, |sum, b| sum.saturating_add(size(b)));
    let rest = i64::try_from(batch - looked_at).unwrap_or(i64::MAX);
    let each = looked_at.checked_sub(1).map_or(0, size);
    sum.saturating_add(rest.saturating_mul(each))
}

pub(crate) fn query(f: &Facts<'_>) -> Result<(), Violation> {
    let Some(lengths) = f.call.actual_seq_lengths.filter(|_| f.prefill()) else {
        return Ok(());
    };
    require!(counted(lengths, f.batch()), Q_COUNT, format_args!("{} entries", lengths.len()), OneOr(f.batch),);
    q_range(f, lengths)
}

/// Checks each query length against the rows of the query.
pub(super) fn q_range(f: &Facts<'_>, lengths: &[i64]) -> Result<(), Violation> {
    for (b, &len) in lengths.iter().take(f.batch()).enumerate() {
        if !(0..=f.q.rows).contains(&len) {
            return Err(broken(
                &Q_RANGE,
                format_args!("entry {b} is {len}"),
                format_args!("0 to {}", f.q.rows),
                apart(lengths, f.q.rows, Q_RANGE.fix),
            ));
        }
    }
    Ok(())
}

pub(crate) fn key(f: &Facts<'_>) -> Result<(), Violation> {
    let Some(lengths) = f.call.actual_seq_lengths_kv.filter(|lengths| !lengths.is_empty()) else {
        return Ok(());
    };
    require!(counted(lengths, f.batch()), KV_COUNT, format_args!("{} entries", lengths.len()), OneOr(f.batch),);
    kv_range(f, lengths, f.prefill())
}

/// Checks each key length against the rows of its keys. `longest` is whether a single entry for a whole list is
/// checked against the list's longest tensor.
pub(super) fn kv_range(f: &Facts<'_>, lengths: &[i64], longest: bool) -> Result<(), Violation> {
    if fit(f, lengths) {
        return Ok(());
    }
    for b in f.sequences() {
        let rows = if lengths.len() == 1 && longest { f.key_rows } else { f.rows_of(b) };
        let len = f.kv_len(b);
        if !(0..=rows).contains(&len) {
            return Err(broken(
                &KV_RANGE,
                format_args!("entry {b} is {len}"),
                format_args!("0 to {rows}"),
                apart(lengths, rows, KV_RANGE.fix),
            ));
        }
    }
    Ok(())
}

/// Whether all lengths lie within keys that are the same for every sequence. Where they do not, each sequence has to
/// be checked.
fn fit(f: &Facts<'_>, lengths: &[i64]) -> bool {
    let alike = !f.kv_list && (f.paged() || !f.packed());
    let mut used = lengths.iter().take(f.batch());
    alike && used.all(|len| (0..=f.key_rows).contains(len))
}

/// Whether the array has enough entries; an empty array counts as none.
fn counted(lengths: &[i64], batch: usize) -> bool {
    lengths.len() <= 1 || lengths.len() >= batch
}
