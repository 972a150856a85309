//! The facts about a call that the rules read.

use super::{FlashAttentionCall, InputLayout, PackedLengths, Version};
use crate::{Target, TensorDesc};

/// The required arguments.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Required<'a> {
    pub(super) query: &'a TensorDesc,
    pub(super) key: &'a TensorDesc,
    pub(super) value: &'a TensorDesc,
    pub(super) layout: &'a str,
    pub(super) softmax_max: &'a TensorDesc,
    pub(super) softmax_sum: &'a TensorDesc,
    pub(super) attention_out: &'a TensorDesc,
}

/// The facts about a call that the rules read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Facts<'a> {
    /// The call as the entry point reads it.
    pub(super) call: FlashAttentionCall<'a>,
    pub(super) version: Version,
    pub(super) target: Target,
    pub(super) query: TensorDesc,
    pub(super) key: TensorDesc,
    pub(super) value: TensorDesc,
    pub(super) layout: InputLayout,
    /// Number of sequences, including those without rows; if packed sequences are run as a batch, only those with
    /// rows.
    pub(super) batch: i64,
    /// Query heads, as the host counts them.
    pub(super) heads: i64,
    /// Heads of the key.
    pub(super) kv_heads: i64,
    /// Head dimension of query and key.
    pub(super) dim: i64,
    /// Head dimension of the value.
    pub(super) value_dim: i64,
    /// Rows of the longest query.
    pub(super) q_rows: i64,
    /// Rows of the longest key.
    pub(super) kv_rows: i64,
    /// Ends of packed sequences; `None` with a batch axis.
    pub(super) packed: Option<PackedLengths<'a>>,
    /// Whether the host runs packed sequences as a batch, with the rules of a batch.
    pub(super) as_batch: bool,
}

impl<'a> Facts<'a> {
    /// The packed sequences, unless the host runs them as a batch.
    pub(super) fn unequal(&self) -> Option<PackedLengths<'a>> {
        self.packed.filter(|_| !self.as_batch)
    }

    /// Query rows and keys of all sequences together, where they are packed.
    pub(super) fn sums(&self) -> Option<(i64, i64)> {
        self.packed.map(|lengths| lengths.sums())
    }

    /// Number of scores of one head in all sequences.
    pub(super) fn scores(&self) -> i128 {
        let times = |q: i64, kv: i64| i128::from(q) * i128::from(kv);
        match self.packed {
            Some(lengths) => lengths.each().fold(0i128, |all, (q, kv)| all.saturating_add(times(q, kv))),
            None => times(self.q_rows, self.kv_rows).saturating_mul(i128::from(self.batch)),
        }
    }

    /// The first position in an array of start indices.
    pub(super) fn start(indices: Option<&[i64]>) -> i64 {
        indices.and_then(|all| all.first()).copied().unwrap_or(0)
    }
}
