//! Lints of calls that are to run on other releases as well, for callers who want portable calls.

use crate::ops::fused_infer_attention_score::Version;
use crate::rule::rules;

rules! {
    in Scope::ALL;
    REFUSED = "portable.refused", Lint("the release that the call runs on takes it"), V1, "differences between releases",
        "a call that is to be portable is one that every release that it is meant for takes",
        "change what the rule of that release names";
    MEANING = "portable.meaning", Lint("the release that the call runs on reads it as it is checked"), V1, "differences between releases",
        "a call that is to be portable means the same on every release that it is meant for",
        "drop what releases read differently: masks and modes of single rows, arguments that one of them ignores";
}
