//! Length arrays of the unified checker.

use crate::ops::fused_infer_attention_score::rules::{Facts, OneOr, lengths, packed};
use crate::ops::fused_infer_attention_score::{FiaCall, Parameter};
use crate::rule::require;
use crate::{Axes, Cann, Violation};

pub(crate) fn check(f: &Facts<'_>) -> Result<(), Violation> {
    if f.packed() {
        return packed_arrays(f);
    }
    if let Some(all) = f.call.actual_seq_lengths.filter(|_| !f.single) {
        require!(counted(f, all), lengths::Q_COUNT, format_args!("{} entries", all.len()), OneOr(f.batch),);
        lengths::q_range(f, all)?;
    }
    let Some(all) = f.call.actual_seq_lengths_kv else {
        return Ok(());
    };
    require!(counted(f, all), lengths::KV_COUNT, format_args!("{} entries", all.len()), OneOr(f.batch),);
    lengths::kv_range(f, all, true)
}

fn counted(f: &Facts<'_>, all: &[i64]) -> bool {
    all.len() == 1 || (!all.is_empty() && all.len() >= f.batch())
}

fn packed_arrays(f: &Facts<'_>) -> Result<(), Violation> {
    let (q, kv) = packed::arrays(f)?;
    let most = FiaCall::MOST_SEQUENCES;
    // Until 9.0 the numbers of entries are compared for dense TND alone.
    let few = f.paged() || f.layout.input() != Axes::Tnd;
    let alike = kv.len() == q.len() || (!kv.is_empty() && few && !f.since(Cann::V9_1));
    require!(
        (1..=most).contains(&packed::entries(q)) && alike,
        packed::ARRAYS,
        format_args!("{} and {} entries", q.len(), kv.len()),
        format_args!("as many of each, 1 to {most}"),
        packed::counted(q, kv),
    );
    packed::ends(q, f.q.rows, &packed::Q_ENDS, Parameter::ActualSeqLengths)?;
    // Until 9.0 the ends are not compared with the number of rows where the heads come first.
    let compared = f.since(Cann::V9_1) || f.layout.input() == Axes::Tnd;
    if compared {
        packed::q_total(q, f.q.rows)?;
    }
    if f.paged() {
        return packed::kv_range(f, kv);
    }
    packed::ends(kv, f.k.rows, &packed::KV_ENDS, Parameter::ActualSeqLengthsKv)?;
    if compared {
        packed::kv_total(kv, f.k.rows)?;
    }
    Ok(())
}
