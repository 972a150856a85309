//! Length arrays.

use super::{Report, lint};
use crate::ops::fused_infer_attention_score::{CheckedCall, Route, Version};
use crate::rule::rules;

rules! {
    in Scope::ALL;
    SURPLUS = "actual_seq_lengths.surplus", Lint("the entries are not looked at"), V1, "checks E1, F7",
        "the length arrays have no entries beyond the batch",
        "drop the entries beyond the batch: the operator uses the first ones";
    IGNORED = "actual_seq_lengths.ignored", Lint("every row of the tensors is computed"), V1, "check E1.1; FusedInferAttentionScore documentation, actualSeqLengths",
        "in the decode path actualSeqLengths is the number of query rows, once or for each sequence",
        "drop actualSeqLengths: every sequence has all its query rows in the decode path";
    EMPTY = "actual_seq_lengths_kv.empty", Lint("the whole block table is read, whose blocks are checked"), V1, "check J7",
        "a paged call has a key length for each sequence",
        "pass the number of cached tokens of each sequence: otherwise all that the block table could hold counts";
}

pub(super) fn check(p: &CheckedCall<'_>, report: Report<'_>) {
    let call = p.call;
    lint!(
        report,
        p.problem.pages.is_none() || call.actual_seq_lengths_kv != Some(&[]),
        EMPTY,
        "an empty array",
        p.problem.batch,
    );
    if p.problem.packed {
        return;
    }
    for (lengths, name) in [
        (call.actual_seq_lengths, "actualSeqLengths"),
        (call.actual_seq_lengths_kv, "actualSeqLengthsKv"),
    ] {
        let count = lengths.map_or(0, <[i64]>::len);
        lint!(
            report,
            count <= p.problem.batch.max(1),
            SURPLUS,
            format_args!("{count} entries in {name}"),
            p.problem.batch,
        );
    }
    if p.route != Route::Decode {
        return;
    }
    let rows = i64::try_from(p.problem.query_rows).unwrap_or(i64::MAX);
    let lengths = call.actual_seq_lengths.unwrap_or(&[]);
    lint!(
        report,
        lengths.iter().take(p.problem.batch).all(|&len| len == rows)
            && (lengths.len() <= 1 || lengths.len() >= p.problem.batch),
        IGNORED,
        format_args!("{lengths:?}"),
        format_args!("{rows} for each of {} sequences", p.problem.batch),
    );
}
