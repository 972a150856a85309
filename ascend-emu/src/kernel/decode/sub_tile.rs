//! A sub-tile of the decode kernel: its keys and values, in place or loaded, and the rows that are prefetched
//! meanwhile.

use super::products::{Outputs, Scores};
use super::softmax::{CorrectScores, UpdateSoftmax};
use super::{DecodeBuffers, QUERIES, SubTile};
use crate::kernel::SUB_TILE_KEYS;
use crate::kernel::dequantise::Quantisation;
use crate::kernel::dequantise::in_registers::HeadDequantise;
use crate::kernel::kv::PrefetchedRows;
use crate::kernel::kv::tile_rows::{DequantisedRows, LoadedRows, StridedRows, TileRows};
use crate::kernel::prefetch::{PrefetchPlan, PrefetchRows};
use crate::kernel::simd::{Simd, Vector};
use crate::kernel::tensor::input::InPlaceElement;
use crate::kernel::tile_load::{Destination, TileLoad, stride};
use ascend_spec::DType;
use half::{bf16, f16};
use std::iter;
use std::ops::Range;

/// Largest number of segments of the keys of a sub-tile: pages of 16 keys, the first of them cut anywhere.
const SEGMENTS: usize = SUB_TILE_KEYS / 16 + 1;

/// Prefetch distance of the L2 cache, in keys.
const L2_DISTANCE: usize = SUB_TILE_KEYS;

/// Keys of a sub-tile that are a constant distance apart, and whose values are, too.
#[derive(Clone, Copy)]
struct Segment<R> {
    /// Index of the segment's first key in the sub-tile.
    first: usize,
    count: usize,
    keys: R,
    values: R,
}

/// The segments of a sub-tile, in order; unused entries at the end are `None`.
type Segments<R> = [Option<Segment<R>>; SEGMENTS];

impl SubTile<'_> {
    /// The sub-tile of the keys `keys`, numbered from this sub-tile's first key.
    pub(super) fn part(&self, keys: Range<usize>) -> Self {
        let first = self.rows.start;
        SubTile {
            rows: first + keys.start..first + keys.end,
            hidden: self.hidden.map(|hidden| &hidden[keys]),
            ..self.clone()
        }
    }

    /// Number of queries.
    pub(super) fn count(&self) -> usize {
        self.task.queries.len().min(QUERIES)
    }

    /// Attends to keys and values in place. Returns `None`, and does nothing, unless they are whole vectors of
    /// FLOAT16, BFLOAT16 or INT8.
    #[inline(always)]
    pub(super) fn attend_in_place<S: Simd>(
        &self,
        simd: S,
        buffers: &mut DecodeBuffers<'_>,
        prefetched: &mut [PrefetchedRows; 3],
    ) -> Option<()> {
        let attention = self.attention;
        match (&attention.key_quantisation, &attention.value_quantisation) {
            (None, None) if attention.weight_dtype == DType::Bf16 => {
                self.attend_as::<bf16, S>(simd, buffers, prefetched)
            }
            (None, None) => self.attend_as::<f16, S>(simd, buffers, prefetched),
            (Some(key), Some(value)) => self.attend_int8(simd, buffers, [key, value], prefetched),
            _ => None,
        }
    }

    /// Attends to keys and values in place, if they are whole vectors of `T`.
    #[inline(always)]
    fn attend_as<T: InPlaceElement, S: Simd>(
        &self,
        simd: S,
        buffers: &mut DecodeBuffers<'_>,
        prefetched: &mut [PrefetchedRows; 3],
    ) -> Option<()> {
        let mut segments = [None; SEGMENTS];
        self.find_segments::<T>(&mut segments)?;
        let plans = self.plan_prefetch(&segments, prefetched);
        self.attend(simd, buffers, || segments.iter().flatten().copied(), &plans);
        Some(())
    }

    /// Attends to INT8 keys and values in place, dequantised in registers, unless their scales are per group.
    #[inline(always)]
    fn attend_int8<S: Simd>(
        &self,
        simd: S,
        buffers: &mut DecodeBuffers<'_>,
        [of_key, of_value]: [&Quantisation; 2],
        prefetched: &mut [PrefetchedRows; 3],
    ) -> Option<()> {
        if of_key.is_per_group() || of_value.is_per_group() {
            return None;
        }
        let mut segments = [None; SEGMENTS];
        self.find_segments::<i8>(&mut segments)?;
        let (kv, head) = (&self.sequence.kv, self.task.kv_head);
        let plans = self.plan_prefetch(&segments, prefetched);
        let (key, value) = (of_key.of_head(head), of_value.of_head(head));
        // The common forms have kernels of their own, which avoid a branch for each vector.
        if let (Some(key), Some(value)) = (key.per_channel(), value.per_channel()) {
            let none = [(0.0, 0.0); SUB_TILE_KEYS];
            let (keys, values) = ((key, &none[..]), (value, &none[..]));
            self.attend_dequantised(simd, buffers, &segments, keys, values, &plans);
            return Some(());
        }
        let of_keys = kv.of_rows(of_key, head, self.rows.clone());
        let of_values = kv.of_rows(of_value, head, self.rows.clone());
        if let (Some(key), Some(value)) = (key.per_token(), value.per_token()) {
            let (keys, values) = ((key, &of_keys[..]), (value, &of_values[..]));
            self.attend_dequantised(simd, buffers, &segments, keys, values, &plans);
        } else {
            let (keys, values) = ((key, &of_keys[..]), (value, &of_values[..]));
            self.attend_dequantised(simd, buffers, &segments, keys, values, &plans);
        }
        Some(())
    }

    /// Attends to INT8 keys and values in place, with a dequantiser for the keys' rows and one for the values' rows,
    /// and scale and offset of each row.
    #[inline(always)]
    fn attend_dequantised<S: Simd, H: HeadDequantise>(
        &self,
        simd: S,
        buffers: &mut DecodeBuffers<'_>,
        segments: &Segments<StridedRows<i8>>,
        keys: (H, &[(f32, f32)]),
        values: (H, &[(f32, f32)]),
        plans: &[PrefetchPlan; 2],
    ) {
        let dequantised = |segment: &Segment<StridedRows<i8>>| Segment {
            first: segment.first,
            count: segment.count,
            keys: DequantisedRows { rows: segment.keys, of_head: keys.0, of_rows: &keys.1[segment.first..] },
            values: DequantisedRows { rows: segment.values, of_head: values.0, of_rows: &values.1[segment.first..] },
        };
        let segments = || segments.iter().flatten().map(dequantised);
        self.attend(simd, buffers, segments, plans);
    }

    /// Fills `segments` with the addresses of keys and values. Returns `None` unless they are whole vectors of `T`,
    /// in at most [`SEGMENTS`] segments, and keys without a rotary part.
    #[inline(always)]
    fn find_segments<T: InPlaceElement>(&self, segments: &mut Segments<StridedRows<T>>) -> Option<()> {
        let (kv, head) = (&self.sequence.kv, self.task.kv_head);
        if kv.key.rope.is_some() {
            return None;
        }
        let Range { mut start, end } = self.rows;
        for segment in segments {
            if start == end {
                break;
            }
            let keys = kv.rows_in_place::<T>(&kv.key, head, start..end)?.rows;
            let values = kv.rows_in_place::<T>(&kv.value, head, start..start + keys.count())?.rows;
            let count = values.count();
            *segment = Some(Segment { first: start - self.rows.start, count, keys, values });
            start += count;
        }
        (start == end).then_some(())
    }

    /// The rows to prefetch while scores are computed, and while outputs are computed.
    #[inline(always)]
    fn plan_prefetch<T: InPlaceElement>(
        &self,
        segments: &Segments<StridedRows<T>>,
        prefetched: &mut [PrefetchedRows; 3],
    ) -> [PrefetchPlan; 2] {
        let (kv, head) = (&self.sequence.kv, self.task.kv_head);
        let mut values = [PrefetchRows::NONE; 2];
        for (values, segment) in values.iter_mut().zip(segments.iter().flatten()) {
            *values = segment.values.to_prefetch();
        }
        let end = self.task.keys.end;
        let at_distance = |keys| end.min(self.rows.start + keys)..end.min(self.rows.end + keys);
        let [l2_values, next_keys, l2_keys] = prefetched;
        // The TLB entries of a new block, those of its keys and of its values, are loaded together, which overlaps
        // the page walks.
        let farthest = at_distance(SUB_TILE_KEYS + L2_DISTANCE).start;
        if !l2_keys.contains(farthest) {
            for tensor in [&kv.key, &kv.value] {
                if let Some(found) = kv.rows_in_place::<T>(tensor, head, farthest..end) {
                    found.rows.to_prefetch().prefetch_pages();
                }
            }
        }
        let at_hand = (&raw const self.rows).cast();
        let (far, next) = (at_distance(L2_DISTANCE), at_distance(SUB_TILE_KEYS));
        let distant = kv.rows_to_prefetch::<T>(&kv.value, head, far, (l2_values, end));
        let of_scores = PrefetchPlan::new(values, distant, at_hand);
        let next = kv.rows_to_prefetch::<T>(&kv.key, head, next, (next_keys, end));
        let far = at_distance(SUB_TILE_KEYS + L2_DISTANCE);
        let distant = kv.rows_to_prefetch::<T>(&kv.key, head, far, (l2_keys, end));
        let of_outputs = PrefetchPlan::new(next, distant, at_hand);
        [of_scores, of_outputs]
    }

    /// Attends to the keys and values of `segments`, and prefetches other rows meanwhile.
    #[inline(always)]
    fn attend<S: Simd, R: TileRows, I: Iterator<Item = Segment<R>>>(
        &self,
        simd: S,
        buffers: &mut DecodeBuffers<'_>,
        segments: impl Fn() -> I,
        [of_scores, of_outputs]: &[PrefetchPlan; 2],
    ) {
        self.compute_weights(simd, buffers, segments(), of_scores);
        self.add_outputs(simd, buffers, segments(), of_outputs);
    }

    /// Computes the scores and turns them into weights. The softmax is updated once for the whole sub-tile, so that the
    /// result does not depend on where segments end.
    #[inline(always)]
    fn compute_weights<S: Simd, R: TileRows>(
        &self,
        simd: S,
        buffers: &mut DecodeBuffers<'_>,
        segments: impl Iterator<Item = Segment<R>>,
        plan: &PrefetchPlan,
    ) {
        let sub_tile = self;
        for segment in segments {
            for (range, cursor) in plan.cursors(segment.first..segment.first + segment.count) {
                simd.outline(Scores {
                    sub_tile,
                    buffers,
                    keys: segment.keys.after(range.start - segment.first),
                    range,
                    cursor,
                });
            }
        }
        if sub_tile.needs_correction() {
            simd.outline(CorrectScores { sub_tile, buffers });
        }
        simd.outline(UpdateSoftmax { sub_tile, buffers });
        if let Some(dropout) = &sub_tile.attention.dropout {
            sub_tile.drop_weights(dropout, buffers);
        }
    }

    /// Rescales the output and adds the weighted values.
    #[inline(always)]
    fn add_outputs<S: Simd, R: TileRows>(
        &self,
        simd: S,
        buffers: &mut DecodeBuffers<'_>,
        segments: impl Iterator<Item = Segment<R>>,
        plan: &PrefetchPlan,
    ) {
        for segment in segments {
            for (range, cursor) in plan.cursors(segment.first..segment.first + segment.count) {
                simd.outline(Outputs {
                    sub_tile: self,
                    buffers,
                    values: segment.values.after(range.start - segment.first),
                    range,
                    cursor,
                });
            }
        }
    }

    /// Loads keys and values into `keys` and `values`, then attends to them.
    #[inline(always)]
    pub(super) fn attend_loaded<S: Simd>(
        &self,
        simd: S,
        buffers: &mut DecodeBuffers<'_>,
        keys: &mut [Vector],
        values: &mut [Vector],
    ) {
        let attention = self.attention;
        let load = TileLoad {
            attention,
            sequence: self.sequence,
            kv_head: self.task.kv_head,
            rows: self.rows.clone(),
            check_finite: true,
        };
        load.keys(simd, Destination::Rows(&mut *keys));
        let finite = load.values(simd, Destination::Rows(&mut *values));
        let loaded = |vectors, row| LoadedRows { vectors, row: stride(row), first: 0 };
        let all = Segment {
            first: 0,
            count: self.rows.len(),
            keys: loaded(keys, attention.vectors()),
            values: loaded(values, attention.columns()),
        };
        let plan = PrefetchPlan::none(keys.as_ptr().cast());
        self.compute_weights(simd, buffers, iter::once(all), &plan);
        if finite {
            self.add_outputs(simd, buffers, iter::once(all), &plan);
        } else {
            self.add_outputs_skipping_zero_weights(buffers, values);
        }
    }
}
