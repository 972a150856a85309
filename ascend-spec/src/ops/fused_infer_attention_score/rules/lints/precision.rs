//! `innerPrecise`.

use super::{Report, lint};
use crate::DType;
use crate::allowed::Outcome;
use crate::ops::fused_infer_attention_score::rules::paged;
use crate::ops::fused_infer_attention_score::{CheckedCall, Route, Version};
use crate::rule::rules;

rules! {
    in Scope::ALL;
    UNCHECKED = "inner_precise.unchecked", Overrun("nothing is checked, and everything is read as the attributes say"), V1, "checks J1, J2",
        "innerPrecise is 0 or 1 over an INT8 cache in the decode path",
        "use innerPrecise 0 or 1: with 2 and query lengths the operator leaves the call unchecked";
    MEANING = "inner_precise.meaning", Lint("only numbers change"), V1, "check J20",
        "innerPrecise is from 0 to 3",
        "0 is high precision, 1 high performance; 2 and 3 also correct rows without visible keys";
}

/// Whether the operator leaves the call unchecked.
pub(super) fn bypass(p: &CheckedCall<'_>, report: Report<'_>) -> bool {
    // The absorbed form with an INT8 query has checks of its own.
    let unchecked = p.route == Route::Decode
        && (p.call.query_rope.is_none() || p.problem.query.dtype != DType::Int8)
        && p.call
            .key
            .first()
            .is_some_and(|key| paged::unchecked(p.call, key));
    lint!(
        report,
        !unchecked,
        UNCHECKED,
        "2 with query lengths",
        "0 or 1"
    );
    unchecked
}

pub(super) fn check(p: &CheckedCall<'_>, report: Report<'_>) {
    MEANING.takes(p.call.inner_precise, 0..=3).report(report);
}
