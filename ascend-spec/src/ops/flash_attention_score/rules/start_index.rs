//! First positions: `qStartIdx` and `kvStartIdx`.

use super::{Report, lint};
use crate::SparseMode;
use crate::ops::flash_attention_score::{Bias, FlashAttentionProblem, Version};
use crate::rule::rules;

rules! {
    in Scope::ALL;
    LONE = "flash.start_index_lone", Lint("the number is not looked at"), V2, "FlashAttentionScore kernel, start indices",
        "qStartIdx and kvStartIdx are both given, or neither",
        "pass both, the other one as [0]";
    UNREAD = "flash.start_index_unread", Lint("the numbers are not looked at"), V2, "FlashAttentionScoreV2 documentation, qStartIdxOptional",
        "qStartIdx and kvStartIdx go with pseType 2 and 3, and have one entry",
        "pass null, or slopes; the first entry counts for all sequences";
    FIRST = "flash.start_index_first", Lint("only numbers change"), VarLenV2, "FlashAttentionScore kernel, start indices in mode 8",
        "in mode 8 start indices other than 0 go with one sequence",
        "they count for sequence 0 alone: pass the other sequences in a call of their own";
}

pub(crate) fn lints(p: &FlashAttentionProblem<'_>, report: Report<'_>) {
    let (query, key) = (p.call.q_start_idx, p.call.kv_start_idx);
    lint!(
        report,
        query.is_some() == key.is_some(),
        LONE,
        match query {
            Some(_) => "qStartIdx alone",
            None => "kvStartIdx alone",
        },
        "both or neither",
    );
    let slopes = matches!(p.bias, Bias::Slopes { .. });
    let entries = [query, key].map(|indices| indices.map_or(0, <[i64]>::len));
    lint!(
        report,
        entries
            .iter()
            .all(|&entries| entries <= usize::from(slopes)),
        UNREAD,
        format_args!("{} and {} entries", entries[0], entries[1]),
        if slopes { "one of each" } else { "null" },
    );
    let first_alone = p.mode == SparseMode::BandLeftUpCausal && p.batch > 1;
    lint!(
        report,
        !first_alone || p.key_offset() == 0,
        FIRST,
        format_args!(
            "start indices {} apart for {} sequences",
            p.key_offset(),
            p.batch
        ),
        "one sequence",
    );
}
