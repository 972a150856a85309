//! Position bias.

use crate::tensor::{AnyTensor, Tensor};

/// What is added to the scores for the places of query and key (`pseShift`, `pseType`).
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum PseShift<'a> {
    /// A number for each score, added after the scale: `[B, N, Sq, Skv]`, where B may be 1 and Sq and Skv may be
    /// larger; of the query's element type (FLOAT16 with an INT8 query). Not with packed sequences.
    ///
    /// Its numbers are finite: keys are hidden by a mask, since hardware was seen to make NaN of a bias of `-inf`.
    /// Plans see no elements; [`Plan::check_contents`](crate::operation::Plan::check_contents) finds such a number, and
    /// so does the emulation in each launch.
    ///
    /// Since CANN 8.1.
    Added(&'a AnyTensor),
    /// `-slope * distance` of the places, with a slope for each head.
    ///
    /// No known release computes it, so that a plan with it is refused everywhere: V5 of the operator was described
    /// with slopes before its release, and on Ascend 950, which it is for, CANN 9.0 and 9.1 refuse them
    /// (`pse_type.zero`). It is kept for calls of releases to come. A bias made on the host and given as
    /// [`Added`](Self::Added) does the same.
    Slopes {
        /// FLOAT32 `[N]`.
        slopes: &'a Tensor<f32>,
        /// What the slope is multiplied with.
        distance: Distance,
        /// Place of the first query (`qStartIdx`).
        query_start: i64,
        /// Place of the first key (`kvStartIdx`).
        key_start: i64,
    },
}

/// What a slope is multiplied with, for query `i` and key `j`. The discriminant is CANN's `pseType`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Distance {
    /// `|i - j|`.
    Linear = 2,
    /// `sqrt(|i - j|)`.
    SquareRoot = 3,
}

impl<'a> PseShift<'a> {
    pub(super) fn tensor(&self) -> &'a AnyTensor {
        match self {
            Self::Added(tensor) => tensor,
            Self::Slopes { slopes, .. } => slopes,
        }
    }

    /// CANN's `pseType`.
    pub(super) fn acl(&self) -> i64 {
        match self {
            Self::Added(_) => 0,
            Self::Slopes { distance, .. } => *distance as i64,
        }
    }

    /// First places of query and key.
    pub(super) fn starts(&self) -> Option<[i64; 2]> {
        match *self {
            Self::Added(_) => None,
            Self::Slopes { query_start, key_start, .. } => Some([query_start, key_start]),
        }
    }
}
