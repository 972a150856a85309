//! Actual sequence lengths.

use super::{Facts, heads};
use crate::Refusal;
use crate::fia::{FiaCall, Route};
use crate::rule::{broken, require, rules};

rules! {
    Q_COUNT = "actual_seq_lengths.count", TILING_ERROR, V1, "check E1.1",
        "actualSeqLengths has one entry, or one for each batch entry";
    Q_RANGE = "actual_seq_lengths.range", TILING_ERROR, V1, "check E1.1",
        "each query length is from 0 to the rows of the query";
    KV_COUNT = "actual_seq_lengths_kv.count", TILING_ERROR, V1, "checks E1.2, F7",
        "actualSeqLengthsKv has one entry, or one for each batch entry";
    KV_RANGE = "actual_seq_lengths_kv.range", TILING_ERROR, V1, "checks E1.2, F7",
        "each key length is from 0 to the rows of the key";
}

pub(in crate::fia) fn query(call: &FiaCall<'_>, facts: &Facts) -> Result<(), Refusal> {
    let Some(lengths) = call
        .actual_seq_lengths
        .filter(|_| facts.route == Route::Prefill)
    else {
        return Ok(());
    };
    let batch = batch(facts);
    require!(
        counted(lengths, batch),
        Q_COUNT,
        format_args!("{} entries", lengths.len()),
        format_args!("1 or {batch}"),
        "pass one length a sequence",
    );
    for (b, &len) in lengths.iter().take(batch).enumerate() {
        if !(0..=facts.query.rows).contains(&len) {
            return Err(broken(
                &Q_RANGE,
                format_args!("entry {b} is {len}"),
                format_args!("0 to {}", facts.query.rows),
                "pass lengths of each sequence (not cumulative) within the query's rows",
            )
            .into());
        }
    }
    Ok(())
}

pub(in crate::fia) fn key(call: &FiaCall<'_>, facts: &Facts) -> Result<(), Refusal> {
    let Some(lengths) = call.actual_seq_lengths_kv else {
        return Ok(());
    };
    let batch = batch(facts);
    require!(
        counted(lengths, batch),
        KV_COUNT,
        format_args!("{} entries", lengths.len()),
        format_args!("1 or {batch}"),
        "pass one length a sequence",
    );
    for b in 0..if lengths.is_empty() { 0 } else { batch } {
        let len = match lengths {
            &[one] => one,
            several => several.get(b).copied().unwrap_or(0),
        };
        let rows = if facts.kv_list {
            let of = call.key.get(b).and_then(|key| {
                facts
                    .layout
                    .input()
                    .extents(&key.shape, heads::kv_heads(call))
            });
            of.map_or(0, |extents| extents.rows)
        } else {
            facts.key.rows
        };
        if !(0..=rows).contains(&len) {
            return Err(broken(
                &KV_RANGE,
                format_args!("entry {b} is {len}"),
                format_args!("0 to {rows}"),
                "pass lengths of each sequence (not cumulative) within the key's rows",
            )
            .into());
        }
    }
    Ok(())
}

/// Longest key length in force: what the decode path measures masks by.
pub(in crate::fia) fn longest_key(call: &FiaCall<'_>, facts: &Facts) -> i64 {
    match call.actual_seq_lengths_kv {
        None | Some([]) => facts.key_rows,
        Some(&[one]) => one,
        Some(several) => several
            .iter()
            .take(batch(facts))
            .copied()
            .max()
            .unwrap_or(0),
    }
}

fn batch(facts: &Facts) -> usize {
    usize::try_from(facts.query.batch).unwrap_or(usize::MAX)
}

/// An empty array counts as none.
fn counted(lengths: &[i64], batch: usize) -> bool {
    lengths.len() <= 1 || lengths.len() >= batch
}
