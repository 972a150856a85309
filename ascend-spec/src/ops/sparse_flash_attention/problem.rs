//! What a call of SparseFlashAttention that holds every rule computes, and the bytes that it touches.

use super::{Parameter, SparseFlashCall, softmax_shape};
use crate::ops::sparse_sequences::{SparseSequences, TokenLayout};
use crate::{Dims, TensorDesc};
use std::ops::Range;

/// Elements of queries and keys without their rotary part.
pub(super) const DIM: i64 = 512;
/// Elements of a rotary part.
pub(super) const ROPE_DIM: i64 = 64;

/// A call of SparseFlashAttention that holds every rule, resolved.
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
    /// The tensors whose numbers lead to rows of others: lengths of queries and keys, and the block table.
    pub const CONTENTS: [Parameter; 3] = [
        Parameter::ActualSeqLengthsQuery,
        Parameter::ActualSeqLengthsKv,
        Parameter::BlockTable,
    ];
    /// Elements of a query, a key and a value without rotary part.
    pub const DIM: usize = DIM as usize;
    /// Elements of a rotary part.
    pub const ROPE_DIM: usize = ROPE_DIM as usize;

    /// Whether nothing is written.
    pub fn is_idle(&self) -> bool {
        self.sequences.query.total() == 0
    }

    /// A tensor of the call as a launch walks it, which may be more than is described; `None` where it walks none of
    /// it.
    pub fn walked(
        &self,
        call: &SparseFlashCall<'_>,
        parameter: Parameter,
        desc: &TensorDesc,
    ) -> Option<TensorDesc> {
        let shape = match parameter {
            _ if self.is_idle() => return None,
            Parameter::SoftmaxMax | Parameter::SoftmaxSum if !self.softmax => return None,
            Parameter::SoftmaxMax | Parameter::SoftmaxSum => {
                Dims::new(&softmax_shape(call.query.as_ref()?)?)?
            }
            Parameter::Key if self.sequences.key.layout == TokenLayout::PaBsnd => {
                desc.shape.with(3, DIM)
            }
            _ => desc.shape,
        };
        Some(desc.read_as(shape))
    }

    /// Calls `visit` with every tensor that the call touches and the bytes it touches, from the tensor's base address.
    /// Visits nothing where nothing is written.
    pub fn touches(
        &self,
        call: &SparseFlashCall<'_>,
        visit: &mut dyn FnMut(Parameter, Range<u64>),
    ) {
        for (argument, desc) in call.each_tensor() {
            if let Some(walked) = self.walked(call, argument.parameter, desc) {
                visit(
                    argument.parameter,
                    walked.byte_range().unwrap_or(0..u64::MAX),
                );
            }
        }
    }
}
