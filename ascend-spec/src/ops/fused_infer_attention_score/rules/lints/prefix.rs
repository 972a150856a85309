//! Shared prefix.

use super::{Report, lint};
use crate::allowed::Outcome;
use crate::ops::fused_infer_attention_score::{CheckedCall, Version};
use crate::rule::rules;

rules! {
    in Scope::ALL;
    DTYPE = "shared_prefix.dtype_unchecked", Overrun("a prefix of smaller elements is read as one of the key's"), V2, "check J21",
        "in the prefill path keySharedPrefix and valueSharedPrefix have the key's dtype",
        "convert the prefixes to the key's dtype";
    LENGTH = "shared_prefix.length_ignored", Lint("only an attribute is ignored"), V2, "check J21",
        "actualSharedPrefixLen goes with keySharedPrefix and valueSharedPrefix",
        "pass the prefixes, or drop actualSharedPrefixLen";
}

pub(super) fn check(p: &CheckedCall<'_>, report: Report<'_>) {
    let call = p.call;
    let key = p.problem.first.key.dtype;
    let read = [&call.key_shared_prefix, &call.value_shared_prefix].into_iter();
    for prefix in read.flatten().filter(|_| p.problem.prefix.is_some()) {
        DTYPE.takes(prefix.dtype, key).report(report);
    }
    lint!(
        report,
        call.key_shared_prefix.is_some()
            || call.actual_shared_prefix_len.is_none_or(<[i64]>::is_empty),
        LENGTH,
        "a length without a prefix",
        "none",
    );
}
