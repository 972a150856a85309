//! Left padding.

use super::{Report, lint};
use crate::DType;
use crate::ops::fused_infer_attention_score::{CheckedCall, Version};
use crate::rule::rules;

rules! {
    in Scope::ALL;
    IGNORED = "padding_size.ignored", Lint("the tensor is not looked at"), V1, "check J10",
        "queryPaddingSize goes with several query rows, kvPaddingSize with key lengths and one key tensor that is not paged",
        "drop the padding, or pad on the right and give the lengths";
    UNCHECKED = "padding_size.unchecked", Overrun("eight bytes are read whatever the tensor has"), V1, "checks C7, J10",
        "queryPaddingSize and kvPaddingSize are INT64 [1]",
        "pass one INT64: the padding is the same for every sequence";
}

pub(super) fn check(p: &CheckedCall<'_>, report: Report<'_>) {
    let query = p.problem.query_padding.is_some();
    let key = p.problem.key_padding.is_some();
    for (size, in_force, name) in [
        (&p.call.query_padding_size, query, "queryPaddingSize"),
        (&p.call.kv_padding_size, key, "kvPaddingSize"),
    ] {
        let Some(size) = size else { continue };
        lint!(report, in_force, IGNORED, name, "none");
        lint!(
            report,
            !in_force || (*size.shape == [1] && size.dtype == DType::Int64),
            UNCHECKED,
            format_args!("{name} {size}"),
            "INT64 [1]",
        );
    }
}
