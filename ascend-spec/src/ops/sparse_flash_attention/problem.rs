//! What a call of latent attention to chosen keys that holds every rule computes, and the bytes that
//! SparseFlashAttention touches.

use super::{Parameter, SparseFlashCall, softmax_shape};
use crate::operator::WalkedTensors;
use crate::ops::sparse_sequences::{SparseSequences, TokenLayout};
use crate::{Dims, TensorDesc};

/// Elements of queries and keys without their rotary part.
pub(super) const DIM: i64 = 512;
/// Elements of a rotary part.
pub(super) const ROPE_DIM: i64 = 64;

/// A call of SparseFlashAttention or KvQuantSparseFlashAttention that holds every rule, resolved.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SparseFlashProblem {
    /// The sequences.
    pub sequences: SparseSequences,
    /// Number of query heads.
    pub heads: usize,
    /// Number of entries in the list of each row.
    pub entries: usize,
    /// Keys of a block.
    pub block: usize,
    /// Factor of the scores.
    pub scale: f64,
    /// Whether maximum and sum of each row are written.
    pub softmax: bool,
    /// Whether a launch may leave the call's tensors.
    pub overruns: bool,
}

impl SparseFlashProblem {
    /// Elements of a query, a key and a value without rotary part.
    pub const DIM: usize = DIM as usize;
    /// Elements of a rotary part.
    pub const ROPE_DIM: usize = ROPE_DIM as usize;

    /// Whether nothing is written.
    pub fn is_idle(&self) -> bool {
        self.sequences.query.total() == 0
    }
}

impl WalkedTensors<SparseFlashCall<'_>> for SparseFlashProblem {
    fn walked_shape(&self, call: &SparseFlashCall<'_>, parameter: Parameter, desc: &TensorDesc) -> Option<Dims> {
        match parameter {
            _ if self.is_idle() => None,
            Parameter::SoftmaxMax | Parameter::SoftmaxSum if !self.softmax => None,
            Parameter::SoftmaxMax | Parameter::SoftmaxSum => softmax_shape(call.query.as_ref()?),
            Parameter::Key if self.sequences.key.layout == TokenLayout::PaBsnd => Some(desc.shape.with(3, DIM)),
            _ => Some(desc.shape),
        }
    }
}

/// The problem of queries and lists, which has no softmax outputs and stays within its tensors.
pub(crate) fn resolved_problem(
    sequences: SparseSequences,
    [query, indices]: [&TensorDesc; 2],
    sparse_block_size: i64,
    scale: f64,
) -> SparseFlashProblem {
    let last = |desc: &TensorDesc, from_end: usize| {
        let axis = desc.shape.len().checked_sub(from_end);
        axis.map_or(0, |axis| usize::try_from(desc.shape[axis]).unwrap_or(0))
    };
    SparseFlashProblem {
        sequences,
        heads: last(query, 2),
        entries: last(indices, 1),
        block: usize::try_from(sparse_block_size).unwrap_or(0).max(1),
        scale,
        softmax: false,
        overruns: false,
    }
}
