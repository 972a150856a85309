//! What lengths, windows and captured graphs are refused for, by rule.

use std::fmt;

macro_rules! rules {
    ($($rule:ident = $id:literal, $holds:literal;)*) => {
        /// A condition of lengths, windows or captured graphs: what holds between calls, or before there is one. What
        /// a single call of an operator may look like is the contract's matter ([`spec`](crate::spec)).
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[non_exhaustive]
        pub enum CallRule {
            $(#[doc = concat!("`", $id, "`: ", $holds, ".")] $rule,)*
        }

        impl CallRule {
            /// Every rule.
            pub const ALL: &'static [Self] = &[$(Self::$rule,)*];

            /// Its name, stable for ever.
            pub const fn id(self) -> &'static str {
                match self {
                    $(Self::$rule => $id,)*
                }
            }

            /// The condition that must hold.
            pub const fn holds(self) -> &'static str {
                match self {
                    $(Self::$rule => $holds,)*
                }
            }
        }
    };
}

rules! {
    LengthsEnds = "lengths.ends", "cumulative ends do not decrease, and have no leading 0 entry";
    LengthsBatch = "lengths.batch", "every list of a batch has one entry for each request";
    LengthsOverflow = "lengths.overflow", "sums of lengths fit the operator's integers";
    MaskWindow = "mask.window", "a window is causal and shows at least one key";
    GraphLengths = "graph.lengths", "a replay has at most the keys and blocks that were declared at the capture";
    GraphWorkspace = "graph.workspace", "a replay needs at most the workspace that the capture took";
    GraphUpdate = "graph.update", "a replay is given lengths once for each call captured with varying ones, made for its graph";
    GraphStreams = "graph.streams", "graphs take no more streams than there are";
    GraphFailed = "graph.failed", "a graph whose replay could not be ordered is not replayed again";
}

impl fmt::Display for CallRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.id())
    }
}

/// Something that breaks a [`CallRule`]: by what value, what is allowed, and how to mend it. Nothing was changed.
///
/// `{:?}` is the text of `{}`, so that a program whose `main` returns it prints what a person can read; `{:#?}` shows
/// the fields.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[error("{rule}: {holds}; given {given}, allowed: {allowed}; fix: {fix}", holds = rule.holds())]
#[non_exhaustive]
pub struct Refused {
    /// The broken rule.
    pub rule: CallRule,
    /// The value that breaks it.
    pub given: String,
    /// The allowed values.
    pub allowed: String,
    /// What to change.
    pub fix: &'static str,
}

impl fmt::Debug for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !f.alternate() {
            return fmt::Display::fmt(self, f);
        }
        f.debug_struct("Refused")
            .field("rule", &self.rule)
            .field("given", &self.given)
            .field("allowed", &self.allowed)
            .field("fix", &self.fix)
            .finish()
    }
}

impl Refused {
    /// The refusal under a rule.
    #[cold]
    pub(crate) fn new(
        rule: CallRule,
        given: impl fmt::Display,
        allowed: impl fmt::Display,
        fix: &'static str,
    ) -> Self {
        Self {
            rule,
            given: given.to_string(),
            allowed: allowed.to_string(),
            fix,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_tell_rule_value_bounds_and_fix() {
        let told = Refused::new(
            CallRule::GraphStreams,
            9,
            "at most 7",
            "capture fewer sizes",
        );
        assert_eq!(
            told.to_string(),
            "graph.streams: graphs take no more streams than there are; given 9, allowed: at most 7; fix: capture fewer \
             sizes"
        );
    }
}
