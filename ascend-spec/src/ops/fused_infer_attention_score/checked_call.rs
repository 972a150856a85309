//! A call that holds every rule.

use super::{Cache, Checker, FiaCall};
use crate::attention_problem::AttentionProblem;
use crate::{Layout, Target};

/// Which of the operator's two paths takes a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Route {
    /// Several query rows a sequence (CANN's prompt path).
    Prefill,
    /// One query row a sequence, or the absorbed form of multi-head latent attention (CANN's incremental path).
    Decode,
}

/// A call that holds every rule, and the computation that it describes. Made by [`FiaCall::check`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct CheckedCall<'a> {
    /// The call.
    pub call: &'a FiaCall<'a>,
    /// The release and product that the call was checked for.
    pub target: Target,
    /// Which of the operator's checkers judged the call.
    pub checker: Checker,
    /// Path.
    pub route: Route,
    /// Axis orders.
    pub layout: Layout,
    /// Axis order of the paged cache, if there is one.
    pub cache: Option<Cache>,
    /// What the call computes.
    pub problem: AttentionProblem<'a>,
}

impl CheckedCall<'_> {
    /// Most query rows, and most keys, of a sequence; beyond them the operator warns and promises nothing (check D15).
    pub const MOST_ROWS: usize = 20_971_520;
}
