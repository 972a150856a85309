//! Position bias.

use ascend_spec::ops::flash_attention_score::FlashAttentionCall;

use crate::ops::fused_infer_attention_score::Distance;
use crate::tensor::{AnyTensor, Tensor};

/// What is added to the scores for the places of query and key (`realShift`, `pseType`).
///
/// A tensor has the query's element type and is `[B, N, Sq, Skv]`, `[B, N, 1, Skv]`, or for a bias that depends on
/// the distance of row and key alone its last rows `[B, N, 1024, Skv]`; B may be 1. For packed sequences it has one
/// axis, on which the biases `[N, Sq, Skv]` or `[N, 1, Skv]` of the sequences follow one another. Its numbers are
/// finite: [`Plan::check_contents`](crate::operation::Plan::check_contents) finds others.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum PositionBias<'a> {
    /// `(q k + bias) * scale`.
    BeforeScale(&'a AnyTensor),
    /// `q k * scale + bias`. Since V2 of the operator, CANN 8.1.
    AfterScale(&'a AnyTensor),
    /// `q k * scale - slope * distance`, with a slope for each head. Since V2 of the operator, CANN 8.1.
    ///
    /// The distance of row `i` and key `j` is `|j + key_start - i - query_start|`, or its root, whatever the sparse
    /// mode: both are counted from the beginning of their sequence. With a batch axis there are as many rows as keys.
    /// For packed sequences with more keys than rows, whose last rows are meant to be the last keys', `query_start`
    /// is the difference; one start serves all sequences, but in sparse mode 8 the first alone.
    ///
    /// The emulation bounds a distance to INT32 before it takes the root or multiplies with the slope.
    Slopes {
        /// FLOAT32 `[N]` or `[B, N]`.
        slopes: &'a Tensor<f32>,
        /// What the slope is multiplied with.
        distance: Distance,
        /// Place of the first query (`qStartIdx`).
        query_start: i64,
        /// Place of the first key (`kvStartIdx`).
        key_start: i64,
    },
}

impl<'a> PositionBias<'a> {
    pub(super) fn tensor(&self) -> &'a AnyTensor {
        match self {
            Self::BeforeScale(tensor) | Self::AfterScale(tensor) => tensor,
            Self::Slopes { slopes, .. } => slopes,
        }
    }

    /// CANN's `pseType`.
    pub(super) fn acl(&self) -> i64 {
        match self {
            Self::BeforeScale(_) => FlashAttentionCall::DEFAULT_PSE_TYPE,
            Self::AfterScale(_) => 0,
            Self::Slopes { distance, .. } => *distance as i64,
        }
    }

    /// First places of query and key.
    pub(super) fn starts(&self) -> Option<[i64; 2]> {
        match *self {
            Self::BeforeScale(_) | Self::AfterScale(_) => None,
            Self::Slopes { query_start, key_start, .. } => Some([query_start, key_start]),
        }
    }
}
