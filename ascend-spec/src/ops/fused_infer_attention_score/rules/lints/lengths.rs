//! Length arrays, left padding and shared prefix.

use super::{Report, lint};
use crate::DType;
use crate::allowed::Outcome;
use crate::ops::fused_infer_attention_score::{CheckedCall, Route, Version};
use crate::rule::rules;

rules! {
    in Scope::ALL;
    SURPLUS = "actual_seq_lengths.surplus", Lint("the entries are not looked at"), V1, "checks E1, F7",
        "the length arrays have no entries beyond the batch",
        "drop the entries beyond the batch: the operator uses the first ones";
    IGNORED = "actual_seq_lengths.ignored",
        Lint("every row of the tensors is computed"),
        V1, "check E1.1; FusedInferAttentionScore documentation, actualSeqLengths",
        "in the decode path actualSeqLengths is the number of query rows, once or for each sequence",
        "drop actualSeqLengths: every sequence has all its query rows in the decode path";
    EMPTY = "actual_seq_lengths_kv.empty",
        Lint("the whole block table is read, whose blocks are checked"), V1, "check J7",
        "a paged call has a key length for each sequence",
        "pass the number of cached tokens of each sequence: otherwise all that the block table could hold counts";
    PADDING_IGNORED = "padding_size.ignored", Lint("the tensor is not looked at"), V1, "check J10",
        "queryPaddingSize goes with several query rows, kvPaddingSize with key lengths and one key tensor that is not \
         paged",
        "drop the padding, or pad on the right and give the lengths";
    PADDING_UNCHECKED = "padding_size.unchecked",
        Overrun("eight bytes are read whatever the tensor has"), V1, "checks C7, J10",
        "queryPaddingSize and kvPaddingSize are INT64 [1]",
        "pass one INT64: the padding is the same for every sequence";
    PREFIX_DTYPE = "shared_prefix.dtype_unchecked",
        Overrun("a prefix of smaller elements is read as one of the key's"), V2, "check J21",
        "in the prefill path keySharedPrefix and valueSharedPrefix have the key's dtype",
        "convert the prefixes to the key's dtype";
    PREFIX_LENGTH = "shared_prefix.length_ignored", Lint("only an attribute is ignored"), V2, "check J21",
        "actualSharedPrefixLen goes with keySharedPrefix and valueSharedPrefix",
        "pass the prefixes, or drop actualSharedPrefixLen";
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
    for (lengths, name) in
        [(call.actual_seq_lengths, "actualSeqLengths"), (call.actual_seq_lengths_kv, "actualSeqLengthsKv")]
    {
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

pub(super) fn padding(p: &CheckedCall<'_>, report: Report<'_>) {
    let query = p.problem.query_padding.is_some();
    let key = p.problem.key_padding.is_some();
    for (size, in_force, name) in
        [(&p.call.query_padding_size, query, "queryPaddingSize"), (&p.call.kv_padding_size, key, "kvPaddingSize")]
    {
        let Some(size) = size else { continue };
        lint!(report, in_force, PADDING_IGNORED, name, "none");
        lint!(
            report,
            !in_force || (*size.shape == [1] && size.dtype == DType::Int64),
            PADDING_UNCHECKED,
            format_args!("{name} {size}"),
            "INT64 [1]",
        );
    }
}

pub(super) fn prefix(p: &CheckedCall<'_>, report: Report<'_>) {
    let call = p.call;
    let key = p.problem.first.key.dtype;
    let read = [&call.key_shared_prefix, &call.value_shared_prefix].into_iter();
    for prefix in read.flatten().filter(|_| p.problem.prefix.is_some()) {
        PREFIX_DTYPE.takes(prefix.dtype, key).report(report);
    }
    lint!(
        report,
        call.key_shared_prefix.is_some() || call.actual_shared_prefix_len.is_none_or(<[i64]>::is_empty),
        PREFIX_LENGTH,
        "a length without a prefix",
        "none",
    );
}
