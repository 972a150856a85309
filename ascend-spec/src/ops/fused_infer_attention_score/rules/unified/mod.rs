//! The unified checker: one set of rules for all half-precision calls, from CANN 8.5 on for some of them, from 9.0 on
//! for nearly all; on Ascend 950 it judges every call.
//!
//! Where a condition is the same as in the older paths, their rule is applied.

pub mod features;
pub mod form;
pub(crate) mod lengths;
pub mod lists;
pub mod masks;
pub mod output;
pub mod pages;
pub mod quant;
pub mod rope;

pub(crate) use form::Form;

use super::Facts;
use crate::Cann;

impl Facts<'_> {
    /// Whether the unified checks of Ascend 950 apply.
    pub(in crate::ops::fused_infer_attention_score) fn is_950(&self) -> bool {
        self.target.is_950()
    }

    /// Whether the checks are those of release `cann` or a later one. On Ascend 950 the checks of 9.0 are those of 9.1.
    pub(in crate::ops::fused_infer_attention_score) fn since(&self, cann: Cann) -> bool {
        self.target.cann >= cann || (self.is_950() && cann <= Cann::V9_1)
    }

    /// Query rows of the longest sequence.
    pub(crate) fn most_rows(&self) -> i64 {
        if self.packed() { super::packed::longest_query(self) } else { self.q.rows }
    }
}
