//! What a call of BlockSparseAttention that holds every rule computes, and the bytes that it touches.

use super::{BlockSparseCall, Parameter};
use crate::operator::WalkedTensors;
use crate::{Axes, Dims, TensorDesc};

/// A call of BlockSparseAttention that holds every rule, resolved.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BlockSparseProblem {
    /// Order of the axes of queries, keys, values and outputs.
    pub axes: Axes,
    /// Number of sequences.
    pub batch: usize,
    /// Rows of the axis of query rows: those of each sequence, or of all of them in TND.
    pub query_rows: usize,
    /// Rows of the axis of keys.
    pub key_rows: usize,
    /// Number of query heads.
    pub heads: usize,
    /// Number of key heads.
    pub kv_heads: usize,
    /// Elements of a query, a key and a value.
    pub dim: usize,
    /// Rows and keys of a block.
    pub block: [usize; 2],
    /// Blocks of rows and of keys that the mask has for each head.
    pub mask_blocks: [usize; 2],
    /// Factor of the scores.
    pub scale: f32,
    /// Whether the log-sum-exp is written.
    pub lse: bool,
    /// Whether a launch may leave the call's tensors.
    pub overruns: bool,
}

/// One sequence of a call. Lengths are cut to the room that there is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockSparseSequence {
    /// Its number.
    pub index: usize,
    /// Its entry of the tensors' axis of sequences.
    pub batch: usize,
    /// Its first row on the axis of query rows.
    pub first_query: usize,
    /// Its query rows.
    pub queries: usize,
    /// Its first row on the axis of keys.
    pub first_key: usize,
    /// Its keys.
    pub keys: usize,
}

impl BlockSparseProblem {
    /// A call whose outputs are empty.
    pub(super) const IDLE: Self = BlockSparseProblem {
        axes: Axes::Tnd,
        batch: 0,
        query_rows: 0,
        key_rows: 0,
        heads: 0,
        kv_heads: 0,
        dim: 0,
        block: [1, 1],
        mask_blocks: [0, 0],
        scale: 0.0,
        lse: false,
        overruns: false,
    };

    /// Whether nothing is written.
    pub fn is_idle(&self) -> bool {
        self.batch == 0 || self.query_rows == 0
    }

    /// The key head that a query head reads. Where the query heads are no multiple of the key heads, those that no key
    /// head is left for read the last one.
    pub fn kv_head(&self, head: usize) -> usize {
        let group = self.heads.checked_div(self.kv_heads).unwrap_or(0).max(1);
        (head / group).min(self.kv_heads.saturating_sub(1))
    }

    /// All sequences of the call, whose problem this is. No row belongs to two of them.
    pub fn sequences<'c>(
        &self,
        call: &BlockSparseCall<'c>,
    ) -> impl Iterator<Item = BlockSparseSequence> + Clone + use<'c> {
        let (packed, rows) = (self.axes.is_packed(), [self.query_rows, self.key_rows]);
        let lengths = [call.actual_seq_lengths, call.actual_seq_lengths_kv];
        let mut before = [0; 2];
        (0..self.batch).map(move |index| {
            let [[first_query, queries], [first_key, keys]] = [0, 1].map(|side| {
                let room = rows[side] - before[side];
                let given = lengths[side].and_then(|lengths| lengths.get(index));
                let length = given.map_or(room, |&given| usize::try_from(given).unwrap_or(0));
                let (first, length) = (before[side], length.min(room));
                before[side] += if packed { length } else { 0 };
                [first, length]
            });
            BlockSparseSequence { index, batch: if packed { 0 } else { index }, first_query, queries, first_key, keys }
        })
    }
}

impl WalkedTensors<BlockSparseCall<'_>> for BlockSparseProblem {
    fn walked_shape(&self, call: &BlockSparseCall<'_>, parameter: Parameter, desc: &TensorDesc) -> Option<Dims> {
        match parameter {
            _ if self.is_idle() => None,
            Parameter::SoftmaxLse if !self.lse => None,
            Parameter::Value => Some(call.key?.shape),
            Parameter::BlockSparseMask => {
                let [rows, keys] = self.mask_blocks;
                Some(Dims::of([self.batch, self.heads, rows, keys].map(|size| size as i64)))
            }
            _ => Some(desc.shape),
        }
    }
}
