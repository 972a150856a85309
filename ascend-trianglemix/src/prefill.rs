//! TriangleMix by calls of the stock operator: no mask of the prompt's size, no kernel of its own.

use std::ops::Range;

use ascend_attention::attention::{BlockTable, CallLengths, Cumulative, Inputs, PerRequest};
use ascend_attention::blockwise::{BlockCover, BlockwiseAttention, BlockwisePlan};
use ascend_attention::merge::{MergePlan, MergeState, Part};
use ascend_attention::spec::Layout;
use ascend_attention::spec::geometry::{MaskGeometry, TriangleMix};
use ascend_attention::{CausalOrigin, Element, Error, Mask, Output, Plan, Stream, Tensor};
use ascend_serving::kv::PageTable;
use ascend_serving::{AttentionShape, Result, StepMemory};

use crate::cost::{TriangleCost, geometry};
use crate::rows::{BlockSparseUse, Piece, RowSpan, TriangleChoice, TriangleThresholds, row_spans};

/// Prefill of one prompt, or of a chunk of it, in a layer with TriangleMix.
///
/// With `S = sinks + window + 1`, `N` the length of the whole prompt and `E = N - last`, the rows are computed so:
///
/// | rows | calls |
/// |---|---|
/// | before `S`: nothing is left out | causal |
/// | `S..E` | a band over the last keys and a call over the sinks, merged by their log-sum-exps |
/// | from `E` on: dense | causal |
///
/// The two parts of the middle rows are disjoint, because row `S` is the first whose window begins after the sinks.
/// All masks are the compressed one. With [`BlockSparseUse`] the full blocks of all rows are one call instead. Keys and
/// values are dense: the packed keys and values of the prompt up to the last row.
/// [`TriangleMixBackend`](crate::TriangleMixBackend) does the same over a paged cache, and for batches of several
/// requests.
///
/// It computes dense attention while the prompt's length is not known, for single rows (decoding), and where the
/// [`TriangleThresholds`] decide so.
#[derive(Clone, Copy, Debug)]
pub struct TrianglePrefill {
    /// The heads.
    pub shape: AttentionShape,
    /// Sinks, window and last rows.
    pub sizes: TriangleMix,
    /// When to leave keys out.
    pub thresholds: TriangleThresholds,
}

/// One call over contiguous rows.
#[derive(Debug)]
struct Call {
    rows: Range<usize>,
    keys: Keys,
    plan: Plan,
}

/// The keys that a call reads.
#[derive(Debug)]
enum Keys {
    /// These rows of packed keys.
    Packed(Range<usize>),
    /// A cache, read by this table.
    Paged(Box<BlockTable>),
}

/// Rows that one call computes, or two calls that are merged.
#[derive(Debug)]
struct Segment {
    call: Call,
    /// For middle rows the call over the sinks, and its merge with the call over the window.
    sinks: Option<Box<(Call, MergePlan)>>,
    /// Bytes of the outputs of both calls and of the merged log-sum-exps, where two are merged.
    parts_bytes: usize,
}

/// The calls that compute a prefill.
#[derive(Debug)]
enum Calls {
    /// Of the stock operator with its own masks.
    Stock(Vec<Segment>),
    /// One block-sparse call, and calls for the rows of partial blocks.
    BlockSparse(Box<BlockwisePlan>),
}

/// A prepared prefill. From [`TrianglePrefill::plan`].
#[derive(Debug)]
pub struct TrianglePlan {
    calls: Calls,
    cost: TriangleCost,
    shape: [usize; 3],
    /// Shapes of query, key and value.
    planned: [Vec<usize>; 3],
    saved_pairs: u128,
}

/// Where the keys of a step's requests are.
#[derive(Clone, Copy, Debug)]
pub(crate) enum KeySource<'a> {
    /// Packed keys; the row at which the keys of each request begin.
    Packed(&'a [usize]),
    /// A cache; a table with a row for each request, and the tokens of a block.
    Paged(&'a PageTable, usize),
}

/// A request of a step: its rows, those before them, and what was chosen for it.
pub(crate) type Chosen = (Range<usize>, usize, TriangleChoice);

impl TrianglePrefill {
    /// What the ways to compute a whole prompt cost, as predicted.
    pub fn cost(&self, prompt_len: usize) -> TriangleCost {
        let prompt = Some(prompt_len);
        let choice = self.thresholds.choose(self.sizes, (0, prompt_len), prompt);
        let mask = geometry(self.sizes, (0, prompt_len), &choice);
        let spans = row_spans([(0..prompt_len, 0, choice)], self.window());
        TriangleCost::new(self.sizes, &[mask], &spans)
    }

    /// Keys before a row's own in its window.
    fn window(&self) -> usize {
        usize::try_from(self.sizes.sliding_window_size).unwrap_or(usize::MAX)
    }

    /// Bytes of the outputs that one launch over a whole prompt by stock calls merges, of windows and of sinks, and of
    /// their log-sum-exps and those over both; [`TrianglePlan::memory`] has those of the chosen calls. Elements have
    /// `element_bytes`. The memory belongs to the device until the launch is done.
    pub fn part_bytes(&self, prompt_len: usize, element_bytes: usize) -> u128 {
        let prompt = Some(prompt_len);
        let TriangleChoice::Sparse { rows, .. } = self.thresholds.choose(self.sizes, (0, prompt_len), prompt) else {
            return 0;
        };
        if self.sizes.num_sink_tokens == 0 {
            return 0;
        }
        let vectors = u128::from(rows.len() as u64).saturating_mul(self.shape.heads as u128);
        let vector = (self.shape.head_dim as u128).saturating_mul(element_bytes as u128);
        let lse = size_of::<f32>() as u128;
        let each = vector.saturating_mul(2).saturating_add(lse.saturating_mul(3));
        vectors.saturating_mul(each)
    }

    /// Prepares the prefill of the rows from `first_row` on: query `[rows, N, D]`, key and value
    /// `[first_row + rows, Nkv, D]`, within what packed calls take
    /// ([`Backend::Fused`](ascend_serving::Backend::Fused)). One plan serves all layers with TriangleMix.
    ///
    /// # Errors
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for another number of keys or values than rows
    /// up to the last; as for [`FusedInferAttention::plan`](ascend_attention::FusedInferAttention::plan) and
    /// [`MergeState::plan`].
    pub fn plan<T: Element>(
        &self,
        stream: &Stream,
        (first_row, prompt_len): (usize, Option<usize>),
        (query, key, value): (&Tensor<T>, &Tensor<T>, &Tensor<T>),
    ) -> Result<TrianglePlan> {
        let rows = query.shape().first().copied().unwrap_or(0);
        let keys = key.shape().first().copied().unwrap_or(0);
        let values = value.shape().first().copied().unwrap_or(0);
        let wanted = first_row.saturating_add(rows);
        for (name, given) in [("key", keys), ("value", values)] {
            if given != wanted {
                return Err(Error::invalid(
                    name,
                    format_args!("{given} rows"),
                    format_args!("{wanted}, the rows before the chunk and its own"),
                )
                .fix("bring the keys and values of all rows up to the end of the chunk")
                .into());
            }
        }
        let choice = self.thresholds.choose(self.sizes, (first_row, rows), prompt_len);
        let requests = vec![(0..rows, first_row, choice)];
        self.plan_rows(stream, requests, KeySource::Packed(&[0]), [query, key, value])
    }

    /// Prepares the rows of a step. Key and value are the packed ones, or the cache.
    pub(crate) fn plan_rows<T: Element>(
        &self,
        stream: &Stream,
        requests: Vec<Chosen>,
        source: KeySource<'_>,
        tensors: [&Tensor<T>; 3],
    ) -> Result<TrianglePlan> {
        let [query, ..] = tensors;
        let &[rows, heads, dim] = query.shape() else {
            return Err(Error::invalid("query", query.desc(), "[rows, N, D]")
                .fix("reshape the query to packed rows")
                .into());
        };
        let saved = |(_, _, choice): &Chosen| match choice {
            TriangleChoice::Sparse { saved_pairs, .. } => *saved_pairs,
            TriangleChoice::Dense(_) => 0,
        };
        let saved_pairs = requests.iter().map(saved).sum();
        let parts = Parts { prefill: self, stream, source, tensors };
        let mask = |(rows, first_row, choice): &Chosen| geometry(self.sizes, (*first_row, rows.len()), choice);
        let masks: Vec<_> = requests.iter().map(mask).collect();
        let spans = row_spans(requests, self.window());
        let cost = TriangleCost::new(self.sizes, &masks, &spans);
        let block_sparse = match self.thresholds.block_sparse {
            _ if saved_pairs == 0 || matches!(source, KeySource::Paged(..)) => false,
            BlockSparseUse::Never => false,
            BlockSparseUse::WhereCheaper => cost.block_sparse < cost.stock,
            BlockSparseUse::Always => true,
        };
        let blockwise = match block_sparse {
            true => parts.block_sparse(&masks)?,
            false => None,
        };
        let calls = match blockwise {
            Some(plan) => Calls::BlockSparse(Box::new(plan)),
            None => {
                let segments = spans.iter().map(|span| match span {
                    RowSpan::Causal(pieces) => parts.causal(pieces),
                    RowSpan::Middle(piece) => parts.middle(piece),
                });
                Calls::Stock(segments.collect::<Result<_>>()?)
            }
        };
        Ok(TrianglePlan {
            calls,
            cost,
            shape: [rows, heads, dim],
            planned: tensors.map(|tensor| tensor.shape().to_vec()),
            saved_pairs,
        })
    }
}

/// The inputs from which the calls of a prefill are made.
struct Parts<'a, T: Element> {
    prefill: &'a TrianglePrefill,
    stream: &'a Stream,
    source: KeySource<'a>,
    tensors: [&'a Tensor<T>; 3],
}

impl<T: Element> Parts<'_, T> {
    /// Prepares one block-sparse call for all rows, and those for partial blocks; `None` where the operators do not
    /// take them, which calls of the stock operator then have to. Operator and heads are asked for before the masks are
    /// cut into blocks.
    fn block_sparse(&self, masks: &[MaskGeometry]) -> Result<Option<BlockwisePlan>> {
        let shape = self.prefill.shape;
        shape.check()?;
        if shape.emulated_only_soft_cap.is_some() {
            // Calls of the stock operator cap scores, on the emulation.
            return Ok(None);
        }
        let attention = BlockwiseAttention::new(shape.scale);
        let [query, key, _] = self.tensors;
        let heads = [query, key].map(|tensor| tensor.shape().get(1).copied());
        // What is wrong with other heads than those of the shape, calls of the stock operator say.
        if heads != [Some(shape.heads), Some(shape.kv_heads)] || !attention.takes(self.stream, self.tensors)? {
            return Ok(None);
        }
        let plan = BlockCover::new(masks).and_then(|cover| attention.plan(self.stream, &cover, self.tensors));
        match plan {
            Ok(plan) => Ok(Some(plan)),
            Err(Error::Violation(_) | Error::MissingOperator { .. } | Error::Aclnn { .. }) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Prepares one call over contiguous pieces.
    fn call(&self, mask: Mask, pieces: &[Piece], lse: bool) -> Result<Call> {
        self.prefill.shape.check()?;
        let [query, key, value] = self.tensors;
        let start = pieces.first().map_or(0, |piece| piece.rows.start);
        let rows = start..pieces.last().map_or(start, |piece| piece.rows.end);
        let ends = pieces.iter().map(|piece| piece.rows.end.saturating_sub(start));
        let q = &Cumulative::new(ends.collect())?;
        let call = self.prefill.shape.call(Layout::Tnd).mask(mask).softmax_lse(lse);
        let query = query.narrow(0, rows.clone())?;
        let (keys, plan) = match self.source {
            KeySource::Packed(starts) => {
                let place = |piece: &Piece| {
                    let first = starts.get(piece.request).copied().unwrap_or(0);
                    let at = |key: usize| key.saturating_add(first);
                    at(piece.keys.start)..at(piece.keys.end)
                };
                // In a call of several requests, every piece but the first begins with its request's first key, and
                // every piece but the last ends with its request's last key: the keys of the pieces are contiguous,
                // too.
                let first = pieces.first().map_or(0, |piece| place(piece).start);
                let ends = pieces.iter().map(|piece| place(piece).end.saturating_sub(first));
                let kv = &Cumulative::new(ends.collect())?;
                let keys = first..pieces.last().map_or(first, |piece| place(piece).end);
                let call = CallLengths::PackedDense { q, kv }.apply(call);
                let (key, value) = (key.narrow(0, keys.clone())?, value.narrow(0, keys.clone())?);
                (Keys::Packed(keys), call.plan((&query, &key, &value))?)
            }
            KeySource::Paged(table, block_size) => {
                // A call over keys in the middle begins with a whole block; the band hides the keys before the
                // window.
                let block = |piece: &Piece| piece.keys.start.checked_div(block_size).unwrap_or(0);
                let row = |piece: &Piece| -> &[usize] {
                    let row = table.row(piece.request).unwrap_or_default();
                    let end = piece.keys.end.div_ceil(block_size.max(1));
                    row.get(block(piece)..end).unwrap_or_default()
                };
                let lengths = pieces.iter().map(|piece| {
                    let before = block(piece).saturating_mul(block_size);
                    piece.keys.end.saturating_sub(before)
                });
                let kv = &PerRequest::new(lengths.collect())?;
                let rows: Vec<&[usize]> = pieces.iter().map(row).collect();
                let table = BlockTable::from_rows(self.stream, &rows, block_size)?;
                let call = CallLengths::PackedPaged { q, kv }.apply(call);
                let plan = call.plan(Inputs::new(&query, key, value).paged(&table))?;
                (Keys::Paged(Box::new(table)), plan)
            }
        };
        Ok(Call { rows, keys, plan })
    }

    fn causal(&self, pieces: &[Piece]) -> Result<Segment> {
        let mask = self.stream.device().masks().causal(CausalOrigin::RightDown)?;
        Ok(Segment { call: self.call(mask, pieces, false)?, sinks: None, parts_bytes: 0 })
    }

    /// Prepares rows whose window begins after the sinks. The last row is at the last key, so that the band is the
    /// window.
    fn middle(&self, piece: &Piece) -> Result<Segment> {
        let sizes = self.prefill.sizes;
        let window = i64::try_from(sizes.sliding_window_size).unwrap_or(i64::MAX);
        let sinks = usize::try_from(sizes.num_sink_tokens).unwrap_or(usize::MAX);
        let band = self.stream.device().masks().band(window, 0)?;
        let merged = sinks > 0;
        let call = self.call(band, std::slice::from_ref(piece), merged)?;
        let mut parts_bytes = 0;
        let sinks = match merged {
            false => None,
            true => {
                let far = Piece { keys: 0..sinks, ..piece.clone() };
                let far = self.call(Mask::none(), &[far], true)?;
                let (near_out, far_out): (Output<T>, Output<T>) = (call.plan.output()?, far.plan.output()?);
                let parts = [Part::of(&near_out)?, Part::of(&far_out)?];
                let merge = MergeState::new(Layout::Tnd).plan(&parts)?;
                parts_bytes = merged_bytes(&near_out, &far_out);
                Some(Box::new((far, merge)))
            }
        };
        Ok(Segment { call, sinks, parts_bytes })
    }
}

/// Bytes of two outputs, and of the log-sum-exps of their merge.
fn merged_bytes<T: Element>(near: &Output<T>, far: &Output<T>) -> usize {
    let bytes = |elements: usize, each: usize| elements.saturating_mul(each);
    let lse = |output: &Output<T>| output.softmax_lse.as_ref().map_or(0, |lse| lse.len());
    let elements = near.attention.len().saturating_add(far.attention.len());
    let sums = [lse(near), lse(near), lse(far)].into_iter().fold(0, usize::saturating_add);
    bytes(elements, size_of::<T>()).saturating_add(bytes(sums, size_of::<f32>()))
}

impl Keys {
    fn table_bytes(&self) -> usize {
        match self {
            Self::Packed(_) => 0,
            Self::Paged(table) => table.sequences().saturating_mul(table.columns()).saturating_mul(size_of::<i32>()),
        }
    }
}

impl Call {
    fn launch<T: Element>(
        &self,
        stream: &Stream,
        [query, key, value]: [&Tensor<T>; 3],
        output: &mut Output<T>,
    ) -> Result<()> {
        let query = query.narrow(0, self.rows.clone())?;
        match &self.keys {
            Keys::Packed(keys) => {
                let (key, value) = (key.narrow(0, keys.clone())?, value.narrow(0, keys.clone())?);
                Ok(self.plan.launch_into(stream, (&query, &key, &value), output)?)
            }
            Keys::Paged(table) => {
                let inputs = Inputs::new(&query, key, value).paged(table);
                Ok(self.plan.launch_into(stream, inputs, output)?)
            }
        }
    }
}

impl TrianglePlan {
    /// Whether nothing is left out.
    pub fn is_dense(&self) -> bool {
        self.saved_pairs == 0
    }

    /// Pairs of row and key that are left out, for each head.
    pub fn saved_pairs(&self) -> u128 {
        self.saved_pairs
    }

    /// What the ways to compute the prefill cost, as predicted.
    pub fn cost(&self) -> TriangleCost {
        self.cost
    }

    /// Whether a launch computes full blocks, if there are any, by a block-sparse call, and partial ones row by row.
    pub fn is_block_sparse(&self) -> bool {
        matches!(self.calls, Calls::BlockSparse(_))
    }

    /// The device memory that the prefill needs besides query, keys, values and output.
    pub fn memory(&self) -> StepMemory {
        let segments = match &self.calls {
            Calls::Stock(segments) => segments,
            Calls::BlockSparse(plan) => {
                return StepMemory::of_calls([plan.workspace_bytes()])
                    .holding([plan.kept_bytes()])
                    .taking([plan.part_bytes()]);
            }
        };
        let calls = segments.iter().flat_map(|Segment { call, sinks, .. }| {
            let sinks = sinks.as_ref().map(|sinks| {
                let (far, merge) = sinks.as_ref();
                far.plan.workspace_bytes().max(merge.workspace_bytes())
            });
            [Some(call.plan.workspace_bytes()), sinks]
        });
        let tables = segments.iter().flat_map(|Segment { call, sinks, .. }| {
            let sinks = sinks.as_ref().map(|sinks| sinks.0.keys.table_bytes());
            [Some(call.keys.table_bytes()), sinks]
        });
        StepMemory::of_calls(calls.flatten())
            .holding(tables.flatten())
            .taking(segments.iter().map(|segment| segment.parts_bytes))
    }

    /// Queues the prefill of a layer: the attention `[rows, N, D]`. Returns at once.
    ///
    /// # Errors
    /// [`PLAN_TENSORS`](crate::rules::PLAN_TENSORS) for tensors of other shapes, before anything is
    /// queued; as for [`Plan::launch_into`] and [`MergePlan::launch_into`].
    pub fn launch<T: Element>(
        &self,
        stream: &Stream,
        tensors: (&Tensor<T>, &Tensor<T>, &Tensor<T>),
    ) -> Result<Tensor<T>> {
        let mut output = Tensor::<T>::empty(stream.device(), self.shape)?;
        self.launch_into(stream, tensors, &mut output)?;
        Ok(output)
    }

    /// As [`launch`](Self::launch), with an output tensor of the caller.
    ///
    /// # Errors
    /// As for [`TrianglePlan::launch`], also for an output of another shape.
    pub fn launch_into<T: Element>(
        &self,
        stream: &Stream,
        (query, key, value): (&Tensor<T>, &Tensor<T>, &Tensor<T>),
        output: &mut Tensor<T>,
    ) -> Result<()> {
        let tensors = [query, key, value];
        let named = ["query", "key", "value"].into_iter().zip(tensors);
        for ((argument, tensor), planned) in named.zip(&self.planned) {
            if tensor.shape() != planned {
                return Err(Error::not_as_planned(
                    argument,
                    format_args!("{:?}", tensor.shape()),
                    format_args!("{planned:?}"),
                )
                .into());
            }
        }
        if output.shape() != self.shape {
            return Err(Error::not_as_planned(
                "output",
                format_args!("{:?}", output.shape()),
                format_args!("{:?}", self.shape),
            )
            .into());
        }
        let segments = match &self.calls {
            Calls::Stock(segments) => segments,
            Calls::BlockSparse(plan) => return Ok(plan.launch_into(stream, tensors, output)?),
        };
        for Segment { call, sinks, .. } in segments {
            let attention = output.narrow(0, call.rows.clone())?;
            let Some(sinks) = sinks else {
                let mut output = Output { attention, softmax_lse: None };
                call.launch(stream, tensors, &mut output)?;
                continue;
            };
            let (far_call, merge) = sinks.as_ref();
            let (mut near, mut far) = (call.plan.output()?, far_call.plan.output()?);
            call.launch(stream, tensors, &mut near)?;
            far_call.launch(stream, tensors, &mut far)?;
            let lse = near.softmax_lse.as_ref().map_or(&[][..], |lse| lse.shape());
            let mut both = Output { attention, softmax_lse: Some(Tensor::empty(stream.device(), lse)?) };
            let parts = [Part::of(&near)?, Part::of(&far)?];
            merge.launch_into(stream, &parts, &mut both)?;
        }
        Ok(())
    }
}
