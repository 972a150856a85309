//! Limits and defaults of a call of FusedInferAttentionScore.

use super::FiaCall;
use crate::{Cann, DType, Target, TensorDesc};

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
        if target.cann >= Cann::V9_1 && dtype == DType::Int8 {
            32
        } else {
            Self::MOST_DECODE_ROWS
        }
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
        FiaCall {
            input_layout,
            inner_precise: 0,
            ..FiaCall::default()
        }
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
