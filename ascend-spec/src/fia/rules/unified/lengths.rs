//! Length arrays of the unified checker.

use crate::fia::rules::{Facts, lengths, packed};
use crate::rule::{broken, require};
use crate::{Axes, Cann, Refusal};

/// Most sequences that packed layouts have.
const MOST: usize = 65_536;

pub(in crate::fia) fn check(f: &Facts<'_>) -> Result<(), Refusal> {
    if f.packed() {
        return packed_arrays(f);
    }
    if let Some(all) = f.call.actual_seq_lengths.filter(|_| !f.single) {
        require!(
            counted(f, all),
            lengths::Q_COUNT,
            format_args!("{} entries", all.len()),
            format_args!("1 or {}", f.batch),
        );
        for (b, &len) in all.iter().take(f.batch()).enumerate() {
            if !(0..=f.q.rows).contains(&len) {
                return Err(broken(
                    &lengths::Q_RANGE,
                    format_args!("entry {b} is {len}"),
                    format_args!("0 to {}", f.q.rows),
                    lengths::Q_RANGE.fix,
                )
                .into());
            }
        }
    }
    let Some(all) = f.call.actual_seq_lengths_kv else {
        return Ok(());
    };
    require!(
        counted(f, all),
        lengths::KV_COUNT,
        format_args!("{} entries", all.len()),
        format_args!("1 or {}", f.batch),
    );
    if lengths::fit(f, all) {
        return Ok(());
    }
    for b in f.sequences() {
        let rows = if all.len() == 1 {
            f.key_rows
        } else {
            f.rows_of(b)
        };
        let len = f.kv_len(b);
        if !(0..=rows).contains(&len) {
            return Err(broken(
                &lengths::KV_RANGE,
                format_args!("entry {b} is {len}"),
                format_args!("0 to {rows}"),
                lengths::KV_RANGE.fix,
            )
            .into());
        }
    }
    Ok(())
}

fn counted(f: &Facts<'_>, all: &[i64]) -> bool {
    all.len() == 1 || (!all.is_empty() && all.len() >= f.batch())
}

fn packed_arrays(f: &Facts<'_>) -> Result<(), Refusal> {
    let (q, kv) = packed::arrays(f)?;
    // Until 9.0 the numbers of entries are compared for dense TND alone.
    let few = f.paged() || f.layout.input() != Axes::Tnd;
    let alike = kv.len() == q.len() || (!kv.is_empty() && few && !f.since(Cann::V9_1));
    require!(
        (1..=MOST).contains(&q.len()) && alike,
        packed::ARRAYS,
        format_args!("{} and {} entries", q.len(), kv.len()),
        format_args!("as many of each, 1 to {MOST}"),
    );
    packed::ends(q, f.q.rows, &packed::Q_ENDS, "actualSeqLengths")?;
    let last = q.last().copied().unwrap_or(0);
    // Nor, where the heads come first, the ends with the number of rows.
    let compared = f.since(Cann::V9_1) || f.layout.input() == Axes::Tnd;
    require!(
        last == f.q.rows || !compared,
        packed::Q_TOTAL,
        last,
        f.q.rows
    );
    if f.paged() {
        let capacity = f.key_rows;
        if let Some(b) = kv.iter().position(|len| !(0..=capacity).contains(len)) {
            return Err(broken(
                &packed::KV_RANGE,
                format_args!("entry {b} is {}", kv.get(b).copied().unwrap_or(0)),
                format_args!("0 to {capacity}"),
                packed::KV_RANGE.fix,
            )
            .into());
        }
        return Ok(());
    }
    packed::ends(kv, f.k.rows, &packed::KV_ENDS, "actualSeqLengthsKv")?;
    let last = kv.last().copied().unwrap_or(0);
    require!(
        last == f.k.rows || !compared,
        packed::KV_ENDS,
        format_args!("last entry {last}"),
        f.k.rows,
    );
    Ok(())
}
