//! The call as the kernels see it: sequences, tensors by the row, and the numbering of queries.

use super::Buffers;
use super::dequantise::scale_grid::{ScalarTensor, ScaleGrid};
use super::dequantise::{Quantisation, ScalePosition};
use super::mask::{DropMask, MaskSummary, MaskTensor};
use super::position_bias::Bias;
use super::scratch::Scratch;
use super::sequence::Sequence;
use super::simd::{Kernel, Simd, Vector, WIDTH};
use super::tensor::input::{ElementTypes, InputTensor};
use super::tensor::output::OutputTensor;
use super::tensor::strided::{Sizes, WriteTensor};
use crate::host_memory::{HostMemoryExhausted, try_collect, try_with_capacity};
use ascend_spec::attention_problem::{
    AttentionProblem, Grid, Padding, Rows, ScaleOffset, SmallTensor, SoftCap, TensorRole, Work,
};
use ascend_spec::{DType, MaskGeometry};
use rayon::prelude::*;
use std::ops::Range;
use std::sync::Arc;

/// One call. A *query* is one row of one head. The queries that share a key head are numbered row by row, and within
/// a row head by head, so that queries with neighbouring numbers see nearly the same keys.
#[derive(Debug)]
pub(super) struct Attention {
    pub(super) sequences: Vec<Sequence>,
    /// Number of query heads. Those beyond `kv_heads` groups are not computed.
    pub(super) heads: usize,
    /// Number of key heads that queries attend to.
    pub(super) kv_heads: usize,
    /// Number of query heads that share a key head.
    pub(super) group: usize,
    /// Elements of a query and of a key, the rotary part included.
    pub(super) dim: usize,
    /// Elements of a value and of an output.
    pub(super) value_dim: usize,
    /// Factor of the queries: the scale times `log2 e`, or 1 for an INT8 query, whose products are exact. The scale
    /// alone where scores are capped.
    query_scale: f32,
    /// Factor of the products of queries and keys: what `query_scale` leaves of the scale times `log2 e`, or of the
    /// scale where scores are capped.
    scale: f32,
    /// Cap of the scaled products, which are multiplied with `log2 e` behind it.
    soft_cap: Option<SoftCap>,
    query: InputTensor,
    query_rope: Option<InputTensor>,
    query_quantisation: Option<Quantisation>,
    /// Factor of the query's rotary part, besides the scale of its row: the scale of the keys, if that applies to
    /// their rotary part.
    rope_scale: Option<f32>,
    pub(super) key_quantisation: Option<Quantisation>,
    pub(super) value_quantisation: Option<Quantisation>,
    pub(super) out: OutputTensor,
    pub(super) lse: Option<WriteTensor<f32>>,
    pub(super) mask: Option<MaskTensor>,
    pub(super) bias: Option<Bias>,
    /// The attention sink of each head: a logit without a value.
    pub(super) sink: Option<Vec<f32>>,
    /// The drop mask. `output_scale` compensates for the dropped weights.
    pub(super) dropout: Option<DropMask>,
    /// Element type that weights are rounded to.
    pub(super) weight_dtype: DType,
    /// Scale of the weights, if they are quantised to INT8.
    pub(super) weight_scale: Option<f32>,
    /// Factor of the output.
    pub(super) output_scale: f32,
    /// Summand of the log-sum-exp.
    pub(super) lse_offset: f32,
    /// Whether a row is written as zeros if the mask tensor hides all of its keys, and not as the mean of the values.
    pub(super) zeroes_masked_rows: bool,
    /// Whether the bits of a row depend on the row alone.
    pub(super) deterministic: bool,
}

/// The tensors of attention whose sequences are listed one by one.
pub(super) struct Listed {
    pub(super) query: InputTensor,
    pub(super) query_rope: Option<InputTensor>,
    pub(super) out: OutputTensor,
    /// The log-sum-exp, where it is written.
    pub(super) lse: Option<WriteTensor<f32>>,
    /// Elements of a value and of an output.
    pub(super) value_dim: usize,
    /// Query heads of each sequence, which share a key head.
    pub(super) group: usize,
    /// Factor of the scores.
    pub(super) scale: f64,
    /// Element type that weights are rounded to.
    pub(super) dtype: DType,
}

impl Attention {
    /// Prepares a problem's call for the kernels.
    ///
    /// # Errors
    /// There is no host memory for a list.
    ///
    /// # Safety
    ///
    /// As for [`super::run`], for as long as the value is used; with `single`, for tensors of the problem's element
    /// type that hold `FLOAT`.
    pub(super) unsafe fn new(
        problem: &AttentionProblem<'_>,
        buffers: &Buffers<'_>,
        single: bool,
    ) -> Result<Self, HostMemoryExhausted> {
        let attends = problem.work == Work::Attend;
        let own = problem.dtype();
        let weight_dtype = if single { DType::Float } else { own };
        let types = ElementTypes { query: own, stored: weight_dtype };
        let batch = if problem.packed { 1 } else { problem.batch };
        let sizes = |dim| Sizes { batch, heads: problem.heads, rows: problem.query_rows, dim };
        let source = |role, rows: &Rows, sizes| {
            // SAFETY: the problem touches all of the query and of its rotary part.
            unsafe { InputTensor::new(buffers.base(role), rows, sizes, types) }
        };
        let rope_sizes = Sizes { rows: if attends { problem.query_rope_rows() } else { 0 }, ..sizes(problem.rope_dim) };
        let quantisation = |tensors: &Option<ScaleOffset>, heads, dim| {
            let tensors = tensors.as_ref()?;
            // SAFETY: the problem touches the tensors of its grids.
            Some(unsafe { Quantisation::new(problem, buffers, tensors, heads, dim) })
        };
        let scales = |grid: Grid, heads| {
            // SAFETY: the problem touches the tensors of its grids.
            unsafe { ScaleGrid::new(buffers, &grid, heads, 1) }
        };
        let int8 = problem.int8_query.map(|int8| {
            [int8.score_scale, int8.weight_scale, int8.product_scale].map(|grid| scales(grid, 1).of_row((0, 0, 0)))
        });
        let first = |grid: Grid| scales(grid, 1).of_row((0, 0, 0));
        let keys_scale = problem.key_quantisation.map(|tensors| tensors.scale);
        let scale = problem.scale * int8.map_or(1.0, |[scale, ..]| f64::from(scale));
        let unit = if problem.soft_cap.is_some() { 1.0 } else { std::f64::consts::LOG2_E };
        let scale = (scale * unit) as f32;
        let (keys, values) = (problem.head_dim, problem.value_dim);
        // Without keys the number of key heads does not matter, and no rule has checked it.
        let (kv_heads, group) = match (attends, problem.group()) {
            (false, _) => (problem.heads, 1),
            // With fewer query heads than key heads, the operator's loops over key heads and groups compute none of
            // them.
            (true, 0) => (0, 1),
            (true, group) => (problem.kv_heads, group),
        };
        let padding = if attends {
            // SAFETY: the problem touches its padding tensors.
            unsafe { read_padding(problem, buffers) }
        } else {
            Padding::default()
        };
        let mut sequences = try_with_capacity(if attends { problem.batch } else { batch })?;
        if attends {
            for (b, extent) in problem.sequences(padding).enumerate() {
                // SAFETY: the problem touches the key rows of each sequence.
                sequences.push(unsafe { Sequence::new(problem, buffers, b, extent, types) }?);
            }
        } else {
            // SAFETY: the problem touches the softmax outputs of each sequence.
            let all = (0..batch).map(|b| unsafe { Sequence::without_keys(problem, buffers, b) });
            sequences.extend(all);
        }
        let sink = match problem.sink {
            Some(grid) => {
                let logits = scales(grid, problem.heads);
                let of_head = |head| logits.of_row((0, head, 0));
                Some(try_collect((0..problem.heads).map(of_head))?)
            }
            None => None,
        };
        Ok(Attention {
            sequences,
            heads: problem.heads,
            kv_heads,
            group,
            dim: match problem.rope_dim {
                0 => keys,
                rope => keys.next_multiple_of(WIDTH) + rope,
            },
            value_dim: values,
            query_scale: if int8.is_some() { 1.0 } else { scale },
            scale: if int8.is_some() { scale } else { 1.0 },
            soft_cap: problem.soft_cap,
            query: source(TensorRole::Query, &problem.query, sizes(keys)),
            query_rope: problem.query_rope.map(|rope| source(TensorRole::QueryRope, &rope, rope_sizes)),
            query_quantisation: quantisation(&problem.query_quantisation, problem.heads, keys),
            rope_scale: keys_scale.filter(|_| problem.scaled_rope).map(first),
            key_quantisation: quantisation(&problem.key_quantisation, problem.kv_heads, keys),
            value_quantisation: quantisation(&problem.value_quantisation, problem.kv_heads, values),
            // SAFETY: the problem touches all of the output, and nothing else does.
            out: unsafe {
                let quantisation = quantisation(&problem.out_quantisation, problem.heads, values);
                let base = buffers.base(TensorRole::Output);
                OutputTensor::new(base, &problem.out, sizes(values), types, quantisation)
            },
            lse: problem.lse.map(|rows| {
                // SAFETY: the problem touches all of the log-sum-exp, and nothing else does.
                unsafe { WriteTensor::new(buffers.base(TensorRole::LogSumExp), &rows, sizes(1)) }
            }),
            // SAFETY: the problem touches the mask.
            mask: (attends && problem.mask.is_tensor()).then(|| unsafe { MaskTensor::new(problem, buffers) }),
            // SAFETY: the problem touches the position bias.
            bias: unsafe { Bias::new(problem, buffers, types) }?,
            sink,
            // SAFETY: the problem touches the drop mask.
            dropout: unsafe { DropMask::new(problem, buffers) },
            weight_dtype,
            weight_scale: int8.map(|[_, weight_scale, _]| weight_scale),
            output_scale: match problem.dropout {
                Some(dropout) => (1.0 / dropout.keep_prob) as f32,
                None => int8.map_or(1.0, |[.., output_scale]| output_scale),
            },
            lse_offset: problem.probability_scale.map_or(0.0, |grid| first(grid).ln()),
            zeroes_masked_rows: problem.zeroes_masked_rows,
            deterministic: false,
        })
    }

    /// Attention without any sequence yet, each of which has one key head.
    pub(super) fn listed(call: Listed) -> Self {
        let sizes = call.query.sizes();
        Attention {
            sequences: Vec::new(),
            heads: sizes.heads,
            kv_heads: 1,
            group: call.group,
            dim: match &call.query_rope {
                None => sizes.dim,
                Some(rope) => sizes.dim.next_multiple_of(WIDTH) + rope.sizes().dim,
            },
            value_dim: call.value_dim,
            query_scale: (call.scale * std::f64::consts::LOG2_E) as f32,
            scale: 1.0,
            soft_cap: None,
            query: call.query,
            query_rope: call.query_rope,
            query_quantisation: None,
            rope_scale: None,
            key_quantisation: None,
            value_quantisation: None,
            out: call.out,
            lse: call.lse,
            mask: None,
            bias: None,
            sink: None,
            dropout: None,
            weight_dtype: call.dtype,
            weight_scale: None,
            output_scale: 1.0,
            lse_offset: 0.0,
            zeroes_masked_rows: false,
            deterministic: false,
        }
    }

    /// Replaces the geometry of each sequence with the same lengths by `geometry`.
    pub(super) fn override_geometry(&mut self, geometry: &MaskGeometry) {
        let lengths = |geometry: &MaskGeometry| (geometry.q_len(), geometry.kv_len());
        for sequence in &mut self.sequences {
            if lengths(&sequence.geometry) == lengths(geometry) {
                sequence.geometry = *geometry;
            }
        }
    }

    /// Summarises the mask tensor, once for all sequences that see the same part of it. Returns the bytes of the
    /// summaries.
    pub(super) fn summarise_mask(&mut self) -> usize {
        let Some(mask) = &self.mask else {
            return 0;
        };
        let mut bytes = 0;
        let mut made: Option<(_, Arc<MaskSummary>)> = None;
        for sequence in &mut self.sequences {
            let Some(rows) = sequence.mask else {
                continue;
            };
            let visible = (rows, sequence.geometry);
            if !MaskSummary::pays(&sequence.geometry, &rows) {
                continue;
            }
            if let Some((_, mask_summary)) = made.as_ref().filter(|(same, _)| *same == visible) {
                sequence.mask_summary = Some(Arc::clone(mask_summary));
                continue;
            }
            // Without memory for a summary, the kernels read the mask itself.
            let Ok(mut mask_summary) = MaskSummary::new(&sequence.geometry) else {
                continue;
            };
            let geometry = &sequence.geometry;
            let cells = mask_summary.rows_mut().enumerate();
            cells.with_min_len(8).for_each(|(number, row)| MaskSummary::fill(row, number, (mask, &rows), geometry));
            bytes += mask_summary.bytes();
            let mask_summary = Arc::new(mask_summary);
            sequence.mask_summary = Some(Arc::clone(&mask_summary));
            made = Some((visible, mask_summary));
        }
        bytes
    }

    /// Whether the values of a sequence are the beginning of its keys, so that a loaded tile of keys contains them.
    pub(super) fn values_are_keys(&self, sequence: &Sequence) -> bool {
        let plain = self.key_quantisation.is_none() && self.value_quantisation.is_none();
        plain && sequence.kv.values_are_keys()
    }

    /// Whether scores differ from the products of queries and keys, without bias and mask.
    pub(super) fn rescales(&self) -> bool {
        self.scale != 1.0 || self.soft_cap.is_some()
    }

    /// Makes scores of products of queries and keys, in the units of scores, without bias and mask.
    #[inline(always)]
    pub(super) fn rescale<'a>(&self, products: impl Iterator<Item = &'a mut f32>) {
        match self.soft_cap {
            None => products.for_each(|product| *product *= self.scale),
            Some(cap) => products.for_each(|product| {
                let capped = cap.of(f64::from(*product * self.scale));
                *product = (capped * std::f64::consts::LOG2_E) as f32;
            }),
        }
    }

    /// Number of vectors of a query or a key.
    pub(super) fn vectors(&self) -> usize {
        self.dim.div_ceil(WIDTH)
    }

    /// Number of vectors of a value or an output.
    pub(super) fn columns(&self) -> usize {
        self.value_dim.div_ceil(WIDTH)
    }

    /// Row and head of a query.
    #[inline(always)]
    pub(super) fn row_and_head(&self, kv_head: usize, query: usize) -> (usize, usize) {
        (query / self.group, kv_head * self.group + query % self.group)
    }

    /// The rows of a range of queries, which is not empty.
    #[inline(always)]
    pub(super) fn rows(&self, queries: &Range<usize>) -> Range<u64> {
        let end = queries.end.div_ceil(self.group);
        (queries.start / self.group) as u64..end as u64
    }

    /// Widens a query and scales it: its vector `i` goes to `out[i * step]`.
    #[inline(always)]
    pub(super) fn read_query<S: Simd>(
        &self,
        simd: S,
        sequence: &Sequence,
        (row, head): (usize, usize),
        out: &mut [Vector],
        step: usize,
    ) {
        simd.outline(ReadQuery { attention: self, place: sequence.at(head, row), out, step });
    }

    /// Reads the position bias of a row, which must exist, in the units of scores. Returns whether the call has a
    /// bias.
    #[inline(always)]
    pub(super) fn read_bias<S: Simd>(
        &self,
        simd: S,
        sequence: &Sequence,
        (row, head): (usize, usize),
        keys: &Range<usize>,
        out: &mut [Vector],
    ) -> bool {
        let Some(bias) = &self.bias else {
            return false;
        };
        let (first_row, first_key) = sequence.origin;
        let place = (sequence.kv.sequence, head, first_row + row);
        let first = first_key + keys.start;
        bias.read(simd, place, self.heads, first..first + keys.len(), out);
        true
    }

    /// Whether no two sequences write the same rows.
    pub(super) fn is_disjoint(&self) -> bool {
        let mut pairs = self.sequences.windows(2);
        pairs.all(|pair| pair[0].ends_before(&pair[1]))
    }
}

/// Reads one query.
struct ReadQuery<'a> {
    attention: &'a Attention,
    /// Batch, head and row.
    place: (usize, usize, usize),
    out: &'a mut [Vector],
    step: usize,
}

impl Kernel for ReadQuery<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let ReadQuery { attention, place, out, step } = self;
        let nonfinite = &mut simd.splat(0.0);
        let dim = attention.query.sizes().dim;
        attention.query.read(simd, place, 0..dim, out, step, nonfinite);
        let coordinates = ScalePosition { sequence: (place.0, place.2), stored: (place.0, place.2) };
        if let Some(quantisation) = &attention.query_quantisation {
            quantisation.dequantise(simd, coordinates, place.1, (&mut *out, step, dim), nonfinite);
        }
        if let Some(rope) = &attention.query_rope {
            let out = &mut out[dim.div_ceil(WIDTH) * step..];
            let dim = rope.sizes().dim;
            rope.read(simd, place, 0..dim, out, step, nonfinite);
            if let (Some(scale), Some(quantisation)) = (attention.rope_scale, &attention.query_quantisation) {
                let (of_row, _) = quantisation.of_row(coordinates, place.1);
                let scale = simd.splat(scale * of_row);
                for out in out.iter_mut().step_by(step).take(dim.div_ceil(WIDTH)) {
                    simd.store(simd.multiply(simd.load(out), scale), out);
                }
            }
        }
        let scale = simd.splat(attention.query_scale);
        for out in out.iter_mut().step_by(step).take(attention.vectors()) {
            simd.store(simd.multiply(simd.load(out), scale), out);
        }
    }
}

/// Reads the lengths of the padding from its tensors. Lengths that cannot be read are 0.
///
/// # Safety
///
/// The bytes of the padding tensors may be read.
pub(crate) unsafe fn read_padding(problem: &AttentionProblem<'_>, buffers: &Buffers<'_>) -> Padding {
    let read = |tensor: Option<SmallTensor>| {
        let tensor = tensor?;
        // SAFETY: the caller keeps this contract.
        let scalars = unsafe { ScalarTensor::new(buffers, &tensor) };
        scalars.integer(tensor.offset)
    };
    Padding { query: read(problem.query_padding).unwrap_or(0), key: read(problem.key_padding).unwrap_or(0) }
}

/// Some queries of one key head, and the keys that they attend to.
#[derive(Clone, Debug)]
pub(super) struct Task {
    pub(super) sequence: usize,
    pub(super) kv_head: usize,
    pub(super) queries: Range<usize>,
    pub(super) keys: Range<usize>,
}

impl Task {
    pub(super) fn work(&self) -> u64 {
        (self.queries.len() as u64).saturating_mul(self.keys.len() as u64)
    }
}

/// A task, and the arguments of its computation.
pub(super) struct TaskContext<'a, 's> {
    pub(super) attention: &'a Attention,
    pub(super) sequence: &'a Sequence,
    pub(super) task: &'a Task,
    pub(super) scratch: &'s mut Scratch,
}
