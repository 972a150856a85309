//! The memory that a problem touches.

use super::{
    AttentionProblem, ByteRange, Grid, MaskUse, ScaleOffset, SmallTensor, TensorRole, Work,
};
use crate::layout::Extents;
use std::ops::Range;

impl AttentionProblem<'_> {
    /// Calls `visit` with every tensor that the problem touches and the bytes that it touches, from the tensor's base address.
    /// The range is `None` if no memory could hold it. All of a paged cache counts as touched.
    pub fn touches(&self, visit: &mut dyn FnMut(TensorRole, Option<Range<u64>>)) {
        if self.work == Work::Nothing {
            return;
        }
        let batch = if self.packed { 1 } else { self.batch };
        let extents = |heads: usize, rows: usize, dim: usize| Extents {
            batch: batch as i64,
            heads: heads as i64,
            rows: rows as i64,
            dim: dim as i64,
        };
        let out = extents(self.heads, self.query_rows, self.value_dim);
        visit(TensorRole::Output, self.out.bytes(out));
        if let Some(lse) = &self.lse {
            visit(
                TensorRole::LogSumExp,
                lse.bytes(extents(self.heads, self.query_rows, 1)),
            );
        }
        if let Some(softmax) = &self.softmax {
            for (role, offset) in [
                (TensorRole::SoftmaxMax, softmax.max_offset),
                (TensorRole::SoftmaxSum, softmax.sum_offset),
            ] {
                visit(role, softmax.bytes(offset));
            }
        }
        if self.work == Work::Fill {
            return;
        }
        let query = extents(self.heads, self.query_rows, self.head_dim);
        visit(TensorRole::Query, self.query.bytes(query));
        if let Some(rope) = &self.query_rope {
            let of = Extents {
                rows: self.query_rope_rows() as i64,
                dim: self.rope_dim as i64,
                ..query
            };
            visit(TensorRole::QueryRope, rope.bytes(of));
        }
        self.touches_keys(visit);
        if self.mask != MaskUse::None {
            visit(TensorRole::Mask, self.mask_bytes());
        }
        if let Some(dropout) = &self.dropout {
            visit(TensorRole::DropMask, Some(0..dropout.bytes));
        }
        for (role, bytes) in self.described_tensors() {
            visit(role, bytes.map(ByteRange::range));
        }
    }

    fn touches_keys(&self, visit: &mut dyn FnMut(TensorRole, Option<Range<u64>>)) {
        let tensors = if self.list.is_some() { self.batch } else { 1 };
        for b in 0..tensors {
            let at = self.key_value(b);
            let (batch, rows) = match &self.pages {
                Some(pages) => (pages.blocks, pages.block_size),
                None if self.list.is_some() || self.packed => (1, self.key_axis_of(b)),
                None => (self.batch, self.key_axis_of(b)),
            };
            let of = |dim: usize| Extents {
                batch: batch as i64,
                heads: self.kv_heads as i64,
                rows: rows as i64,
                dim: dim as i64,
            };
            visit(TensorRole::Key(b), at.key.bytes(of(self.head_dim)));
            visit(TensorRole::Value(b), at.value.bytes(of(self.value_dim)));
            // One tensor for all sequences, also where the keys are a list.
            if let Some(rope) = at.key_rope.filter(|_| b == 0) {
                let batch = if self.list.is_some() {
                    self.batch
                } else {
                    batch
                };
                let of = Extents {
                    batch: batch as i64,
                    ..of(self.rope_dim)
                };
                visit(TensorRole::KeyRope, rope.bytes(of));
            }
        }
    }

    /// The tensors that are touched as far as their descriptions reach.
    fn described_tensors(&self) -> impl Iterator<Item = (TensorRole, Option<ByteRange>)> {
        let small = |tensor: SmallTensor| (tensor.role, tensor.bytes);
        let grid = move |grid: Grid| small(grid.tensor);
        let both = move |of: Option<ScaleOffset>| {
            let offset = of.and_then(|of| of.offset);
            [of.map(|of| grid(of.scale)), offset.map(grid)]
        };
        let int8 = self
            .int8_query
            .map(|int8| [int8.score_scale, int8.weight_scale, int8.product_scale].map(grid));
        let key = both(self.key_quantisation);
        let value = both(self.value_quantisation);
        // One tensor may serve keys and values.
        let shared = key == value;
        [
            self.bias.map(|bias| (TensorRole::Bias, bias.bytes)),
            self.slopes.map(|slopes| grid(slopes.grid)),
            self.pages.map(|pages| small(pages.table)),
            self.prefix.map(|of| (TensorRole::KeyPrefix, of.key_bytes)),
            self.prefix
                .map(|of| (TensorRole::ValuePrefix, of.value_bytes)),
            self.sink.map(grid),
            self.probability_scale.map(grid),
            self.query_padding.map(small),
            self.key_padding.map(small),
        ]
        .into_iter()
        .chain(both(self.query_quantisation))
        .chain(key)
        .chain(value.into_iter().filter(move |_| !shared))
        .chain(both(self.out_quantisation))
        .flatten()
        .chain(int8.into_iter().flatten())
    }
}
