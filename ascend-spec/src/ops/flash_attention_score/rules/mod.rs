//! The rules of FlashAttentionScore, grouped by argument: those that refuse a call, and the lints of what the operator
//! takes and ignores or misreads.

pub mod drop_mask;
pub mod dtypes;
pub mod entry;
pub mod heads;
pub mod layouts;
pub mod lengths;
pub mod mask;
pub mod outputs;
pub mod prefix;
pub mod pse;
pub mod rope;
pub mod sink;
pub mod start_index;
pub mod tokens;

use crate::rule::lint;
use crate::{Rule, Violation};

/// Receives the lints that are found.
type Report<'r> = &'r mut dyn FnMut(Violation);

/// Every rule and lint, in the order of the files.
pub fn all() -> impl Iterator<Item = &'static Rule> {
    [
        entry::RULES,
        layouts::RULES,
        dtypes::RULES,
        heads::RULES,
        lengths::RULES,
        mask::RULES,
        tokens::RULES,
        prefix::RULES,
        pse::RULES,
        start_index::RULES,
        drop_mask::RULES,
        sink::RULES,
        rope::RULES,
        outputs::RULES,
    ]
    .into_iter()
    .flatten()
    .copied()
}
