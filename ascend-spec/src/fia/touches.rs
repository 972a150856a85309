//! The memory that a call touches.

use super::{Affine, MaskUse, Operand, Problem, Rows, Work};
use crate::layout::Extents;
use std::ops::Range;

impl Problem<'_> {
    /// Calls `visit` with every tensor that the call touches and the bytes it touches, from the tensor's base address.
    /// `None` for a range means that no memory could hold it. Of a paged cache that is all of it.
    pub fn touches(&self, visit: &mut dyn FnMut(Operand, Option<Range<u64>>)) {
        if self.work == Work::Nothing {
            return;
        }
        let batch = if self.is_packed() { 1 } else { self.batch };
        let extents = |heads: usize, rows: usize, dim: usize| Extents {
            batch: batch as i64,
            heads: heads as i64,
            rows: rows as i64,
            dim: dim as i64,
        };
        let out = extents(self.heads, self.query_rows, self.value_dim);
        visit(Operand::AttentionOut, self.out.bytes(out));
        if let Some(lse) = &self.lse {
            visit(
                Operand::SoftmaxLse,
                lse.bytes(extents(self.heads, self.query_rows, 1)),
            );
        }
        if self.work == Work::Fill {
            return;
        }
        let query = extents(self.heads, self.query_rows, self.head_dim);
        visit(Operand::Query, self.query.bytes(query));
        if let Some(rope) = &self.query_rope {
            let of = Extents {
                dim: self.rope_dim as i64,
                ..query
            };
            visit(Operand::QueryRope, rope.bytes(of));
        }
        self.touches_keys(visit);
        if self.mask != MaskUse::None {
            visit(Operand::AttenMask, self.mask_bytes());
        }
        for operand in self.small_operands() {
            if let Some(desc) = operand.of(self.call) {
                visit(operand, desc.byte_range());
            }
        }
    }

    fn touches_keys(&self, visit: &mut dyn FnMut(Operand, Option<Range<u64>>)) {
        let tensors = if self.kv_list { self.batch } else { 1 };
        for b in 0..tensors {
            let at = self.key_value(b);
            let (batch, rows) = match &self.pages {
                Some(pages) => (pages.blocks, pages.block_size),
                None if self.kv_list || self.is_packed() => (1, self.kv_axis(b)),
                None => (self.batch, self.kv_axis(b)),
            };
            let of = |dim: usize| Extents {
                batch: batch as i64,
                heads: self.kv_heads as i64,
                rows: rows as i64,
                dim: dim as i64,
            };
            visit(Operand::Key(b), at.key.bytes(of(self.head_dim)));
            visit(Operand::Value(b), at.value.bytes(of(self.value_dim)));
            // One tensor for all sequences, also where the keys are a list.
            if let Some(rope) = at.key_rope.filter(|_| b == 0) {
                let batch = if self.kv_list { self.batch } else { batch };
                let of = Extents {
                    batch: batch as i64,
                    ..of(self.rope_dim)
                };
                visit(Operand::KeyRope, rope.bytes(of));
            }
        }
    }

    /// Tensors that are touched as far as their description reaches.
    fn small_operands(&self) -> impl Iterator<Item = Operand> {
        let affine = |affine: Option<Affine>| {
            let scale = affine.map(|affine| affine.scale.operand);
            let offset = affine
                .and_then(|affine| affine.offset)
                .map(|grid| grid.operand);
            [scale, offset]
        };
        let int8 = self.int8_query.map(|int8| {
            [
                int8.deq_scale1.operand,
                int8.quant_scale1.operand,
                int8.deq_scale2.operand,
            ]
        });
        let (query, key) = self.padding_operands();
        let key_scales = affine(self.key_affine);
        let value_scales = affine(self.value_affine);
        // The merged tensors serve key and value.
        let merged = key_scales == value_scales;
        [
            self.pse.map(|_| Operand::PseShift),
            self.slopes.map(|slopes| slopes.grid.operand),
            self.pages.map(|_| Operand::BlockTable),
            self.prefix.map(|_| Operand::KeySharedPrefix),
            self.prefix.map(|_| Operand::ValueSharedPrefix),
            self.sink.map(|grid| grid.operand),
            self.probability_scale.map(|grid| grid.operand),
            query,
            key,
        ]
        .into_iter()
        .chain(affine(self.query_affine))
        .chain(key_scales)
        .chain(value_scales.into_iter().filter(move |_| !merged))
        .chain(affine(self.out_affine))
        .flatten()
        .chain(int8.into_iter().flatten())
    }
}

impl Rows {
    /// The bytes that a tensor of these extents touches.
    fn bytes(&self, of: Extents) -> Option<Range<u64>> {
        let elements = match self.lanes as i64 {
            0 => self.view.elements(of)?,
            lanes => {
                let runs = Extents {
                    dim: of.dim / lanes,
                    ..of
                };
                let range = self.view.elements(runs)?;
                range.start..range.end.checked_add(lanes as u64 - 1)?
            }
        };
        let bits = u64::from(self.dtype.bits());
        let (start, end) = (
            elements.start.checked_mul(bits)?,
            elements.end.checked_mul(bits)?,
        );
        (bits > 0).then(|| start / 8..end.div_ceil(8))
    }
}
