//! The memory that a problem touches, by the strides with which a kernel walks its tensors.

use super::{AttentionProblem, ByteRange, Grid, MaskUse, Rows, ScaleOffset, SmallTensor, TensorRole, Work, extents};
use crate::layout::Extents;
use std::ops::Range;

impl AttentionProblem<'_> {
    /// Calls `visit` with every tensor that the problem touches and the bytes that it touches, from the tensor's base
    /// address. The range is `None` if no memory could hold it. All of a paged cache counts as touched.
    pub fn touches(&self, visit: &mut dyn FnMut(TensorRole, Option<Range<u64>>)) {
        if self.work == Work::Nothing {
            return;
        }
        let batch = if self.packed { 1 } else { self.batch };
        let of_query = |rows, dim| extents([batch, self.heads, rows, dim]);
        let out = of_query(self.query_rows, self.value_dim);
        visit(TensorRole::Output, self.out.bytes(out));
        if let Some(lse) = &self.lse {
            let covered = of_query(self.query_rows, 1);
            visit(TensorRole::LogSumExp, lse.bytes(covered));
        }
        if let Some(softmax) = &self.softmax {
            for (role, offset) in
                [(TensorRole::SoftmaxMax, softmax.max_offset), (TensorRole::SoftmaxSum, softmax.sum_offset)]
            {
                let rows = |b| match self.work {
                    Work::Attend => self.q_len(b),
                    _ => self.query_rows,
                };
                let each = (0..self.batch).map(|b| self.softmax_rows(b, rows(b), offset));
                visit(role, all_of(each));
            }
        }
        if self.work == Work::Fill {
            return;
        }
        let query = of_query(self.query_rows, self.head_dim);
        visit(TensorRole::Query, self.query.bytes(query));
        if let Some(rope) = &self.query_rope {
            let covered = of_query(self.query_rope_rows(), self.rope_dim);
            visit(TensorRole::QueryRope, rope.bytes(covered));
        }
        self.touches_keys(visit);
        if let Some(prefix) = &self.prefix {
            let covered = |dim| extents([1, self.kv_heads, prefix.len, dim]);
            let (key, value) = (covered(self.head_dim), covered(self.value_dim));
            visit(TensorRole::KeyPrefix, prefix.key.bytes(key));
            visit(TensorRole::ValuePrefix, prefix.value.bytes(value));
        }
        if let Some(bias) = &self.bias {
            let touched = match self.terms.is_empty() {
                true => bias.rows.bytes(extents(bias.sizes)),
                false => all_of((0..self.batch).map(|b| self.bias_rows(b))),
            };
            visit(TensorRole::Bias, touched);
        }
        if self.mask != MaskUse::None {
            visit(TensorRole::Mask, self.mask_bytes());
        }
        if let Some(dropout) = &self.dropout {
            visit(TensorRole::DropMask, Some(dropout.bytes.range()));
        }
        for (role, bytes) in self.described_tensors() {
            visit(role, bytes.map(ByteRange::range));
        }
    }

    fn touches_keys(&self, visit: &mut dyn FnMut(TensorRole, Option<Range<u64>>)) {
        let tensors = if self.list.is_some() { self.batch } else { 1 };
        for b in 0..tensors {
            let key_value = self.key_value(b);
            let (batch, rows) = match &self.pages {
                Some(pages) => (pages.blocks, pages.block_size),
                None if self.list.is_some() || self.packed => (1, self.key_axis_of(b)),
                None => (self.batch, self.key_axis_of(b)),
            };
            let covered = |dim| extents([batch, self.kv_heads, rows, dim]);
            visit(TensorRole::Key(b), key_value.key.bytes(covered(self.head_dim)));
            visit(TensorRole::Value(b), key_value.value.bytes(covered(self.value_dim)));
            // One tensor for all sequences, also where the keys are a list: then it has the rows of the longest of
            // them.
            if let Some(rope) = key_value.key_rope.filter(|_| b == 0) {
                let (batch, rows) = match self.list {
                    Some(_) => {
                        let longest = (0..self.batch).map(|b| self.key_axis_of(b)).max();
                        (self.batch, longest.unwrap_or(0))
                    }
                    None => (batch, rows),
                };
                let covered = extents([batch, self.kv_heads, rows, self.rope_dim]);
                visit(TensorRole::KeyRope, rope.bytes(covered));
            }
        }
    }

    /// The small tensors. Kernels read nothing outside of their descriptions.
    fn described_tensors(&self) -> impl Iterator<Item = (TensorRole, Option<ByteRange>)> {
        let small = |tensor: SmallTensor| (tensor.role, tensor.bytes);
        let grid = move |grid: Grid| small(grid.tensor);
        let both = move |scales: Option<ScaleOffset>| {
            let offset = scales.and_then(|scales| scales.offset);
            [scales.map(|scales| grid(scales.scale)), offset.map(grid)]
        };
        let int8 = self.int8_query.map(|int8| [int8.score_scale, int8.weight_scale, int8.product_scale].map(grid));
        let key = both(self.key_quantisation);
        let value = both(self.value_quantisation);
        // One tensor may serve keys and values.
        let shared = key == value;
        [
            self.slopes.map(|slopes| grid(slopes.grid)),
            self.pages.map(|pages| small(pages.table)),
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

/// The bytes that rows of one tensor touch together; `None` if no memory could hold them.
fn all_of(rows: impl Iterator<Item = Option<(Rows, Extents)>>) -> Option<Range<u64>> {
    let mut touched = 0..0;
    for (rows, covered) in rows.flatten() {
        let bytes = rows.bytes(covered)?;
        touched = match (touched.is_empty(), bytes.is_empty()) {
            (true, _) => bytes,
            (_, true) => touched,
            _ => touched.start.min(bytes.start)..touched.end.max(bytes.end),
        };
    }
    Some(touched)
}
