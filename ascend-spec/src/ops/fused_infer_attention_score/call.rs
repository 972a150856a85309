//! A call of FusedInferAttentionScore: its limits and defaults, who judges it, and what is known of it once it holds
//! every rule.

use super::{Cache, FiaCall, Version};
use crate::attention_problem::AttentionProblem;
use crate::{Cann, DType, Layout, Target, TensorDesc};

impl<'a> FiaCall<'a> {
    /// `i32::MAX`, the operator's default of both token counts: no bound.
    pub const ALL_TOKENS: i64 = 2_147_483_647;

    /// Most query rows of a sequence that the decode path takes, where it takes several.
    pub const MOST_DECODE_ROWS: i64 = 16;

    /// Most rows of a packed query, all sequences together.
    pub const MOST_PACKED_ROWS: i64 = 1_048_576;

    /// Elements of MXFP8 that share a scale.
    pub const MXFP8_GROUP: i64 = 32;

    /// Most sequences of a call.
    pub const MOST_SEQUENCES: i64 = 65_536;

    /// Most query rows of a sequence that the decode path takes on `target` under a query of `dtype`.
    pub(crate) fn most_decode_rows(target: Target, dtype: DType) -> i64 {
        if target.cann >= Cann::V9_1 && dtype == DType::Int8 { 32 } else { Self::MOST_DECODE_ROWS }
    }

    /// Whether the scales of an MXFP8 query are grouped by key heads, `[Nk, T, G, D/64, 2]`, or by rows, `[T, N,
    /// D/64, 2]`. The operator admits both; CANN's documents choose by the rows of the longest sequence and the
    /// number of query heads for each key head, and the kernel reads the form that they choose.
    pub fn mxfp8_query_by_key_heads(rows: i64, heads_of_key_head: i64) -> bool {
        rows.saturating_mul(heads_of_key_head) <= 80
    }

    /// A call without tensors whose attributes have the operator's defaults, except `inner_precise`, which is 0 (high
    /// precision) as in the frameworks rather than the operator definition's 1.
    pub fn new(input_layout: &'a str) -> Self {
        FiaCall { input_layout, inner_precise: 0, ..FiaCall::default() }
    }

    /// `sparse_mode` as the operator reads it: in 32 bits.
    pub(crate) fn mode(&self) -> i64 {
        i64::from(self.sparse_mode as i32)
    }

    /// The mask; `None` for one without elements, which counts as not given.
    pub fn mask(&self) -> Option<&TensorDesc> {
        self.atten_mask.as_ref().filter(|mask| !mask.is_empty())
    }
}

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
    /// The version that the call was checked for.
    pub version: Version,
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
    /// How many axes of a paged cache, from the first on, may have any stride without a copy: key, value and keyRope
    /// with other strides are copied whole by each call. `None` where no source says what becomes of them.
    pub(super) axes_in_place: Option<usize>,
    /// What the call computes.
    pub problem: AttentionProblem<'a>,
}

impl CheckedCall<'_> {
    /// Most query rows, and most keys, of a sequence; beyond them the operator warns and promises nothing (check D15).
    pub const MOST_ROWS: usize = 20_971_520;
}

/// The parts of the operator that check calls, each with rules of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Checker {
    /// The path of several query rows a sequence.
    Prefill,
    /// The path of one query row a sequence, and of the absorbed form.
    Decode,
    /// The path of packed rows without rotary parts, which checks little.
    SplitFuse,
    /// One checker for all calls of half precision, and for every call on Ascend 950.
    Unified,
}

impl Checker {
    /// Which calls go to which checker, for each group of releases: the release or product, then the calls of the
    /// unified checker, of the split-fuse path, and of the decode and prefill path.
    pub const CALLS: [[&'static str; 4]; 4] = [
        ["8.1", "none", "none", "every call"],
        [
            "8.5",
            "half precision with head dimensions of 64, 128 (rotary parts of 64 or none), 192 over 128, or absorbed, \
             without bias, padding, prefix or output quantisation; NZ caches and reordered layouts",
            "some packed rows without rotary parts",
            "the rest",
        ],
        [
            "9.0 on",
            "half precision",
            "most packed rows without rotary parts",
            "quantised calls; single rows of 256, or of 80 with a prefix, with as many key heads as query heads",
        ],
        ["Ascend 950", "every call", "none", "none"],
    ];
}
