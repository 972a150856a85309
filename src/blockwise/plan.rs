//! The calls that compute a cover, and their merge.

use std::fmt;

use ascend_spec::attention_problem::score_scale;
use ascend_spec::{DType, Layout, TensorDesc};

use super::cover::{BLOCKS, BlockCover, RowsCover, SIDE};
use crate::error::{Error, Result};
use crate::mask::{HostMask, Mask, MaskForm};
use crate::memory::Element;
use crate::merge::{MergeState, Part, RowMergePlan};
use crate::ops::block_sparse_attention::{BlockMask, BlockSparseAttention, BlockSparseOutput, BlockSparsePlan};
use crate::ops::fused_infer_attention_score::{BlockTable, FusedInferAttention, Inputs, Output, Plan};
use crate::runtime::{Device, Stream};
use crate::tensor::Tensor;

/// Attention of packed sequences under the masks of a [`BlockCover`].
#[derive(Clone, Copy, Debug)]
#[must_use = "a description does nothing until planned"]
pub struct BlockwiseAttention {
    scale: f64,
}

/// A call over rows of which each is a sequence.
#[derive(Debug)]
struct RowsCall {
    rows: RowsCover,
    plan: Plan,
    table: BlockTable,
}

/// The calls of a [`BlockCover`] that were checked and prepared. From [`BlockwiseAttention::plan`]. One plan serves all
/// layers of a step.
#[derive(Debug)]
pub struct BlockwisePlan {
    /// The call over full blocks and its mask, where there are any.
    blocks: Option<(BlockSparsePlan, BlockMask)>,
    calls: Vec<RowsCall>,
    merge: RowMergePlan,
    /// Query, key and value.
    planned: [TensorDesc; 3],
    heads: usize,
    parts: usize,
    part_bytes: usize,
}

impl BlockwiseAttention {
    /// Attention with this factor of the scores.
    pub fn new(scale: f64) -> Self {
        Self { scale }
    }

    /// Whether BlockSparseAttention is installed and takes query `[T1, N1, D]`, key and value `[T2, N2, D]` like these,
    /// as covers with full blocks need it. Asked before a cover is made: nothing is planned.
    ///
    /// # Errors
    /// [`Error::UnknownProduct`].
    pub fn takes<T: Element>(&self, stream: &Stream, [query, key, value]: [&Tensor<T>; 3]) -> Result<bool> {
        let length = |tensor: &Tensor<T>| tensor.desc().shape.first().copied().unwrap_or(0);
        let (rows, keys) = (length(query), length(key));
        let heads = query.desc().shape.get(1).copied().unwrap_or(0);
        let blocks = |length: i64| length.unsigned_abs().div_ceil(SIDE as u64).cast_signed();
        // One sequence stands for all: what the operator takes does not depend on how many there are.
        let Some(mask) = TensorDesc::contiguous(DType::Int8, &[1, heads, blocks(rows), blocks(keys)]) else {
            return Ok(false);
        };
        let context = stream.device().context();
        self.blocks(&[rows], &[keys]).takes(context, [*query.desc(), *key.desc(), *value.desc(), mask])
    }

    /// The call over the full blocks of sequences of these lengths.
    fn blocks(&self, queries: &[i64], keys: &[i64]) -> BlockSparseAttention {
        BlockSparseAttention::new(Layout::Tnd, self.scale)
            .block_shape(SIDE, SIDE)
            .actual_seq_lengths(queries, keys)
            .softmax_lse(true)
    }

    /// Checks the calls for query `[T1, N1, D]`, key and value `[T2, N2, D]` and prepares them. Nothing is launched,
    /// and the tensors are not kept. Without full blocks BlockSparseAttention is not needed.
    ///
    /// # Errors
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for a scale that is not finite, for strided tensors, and for
    /// tensors of other shapes, such as of other rows and keys than the cover has;
    /// [`ARGUMENT_DEVICE`](crate::rules::ARGUMENT_DEVICE) for tensors of another device than the stream's. As for
    /// [`BlockSparseAttention::plan`], before CANN 9.0 and for heads that the operator refuses among others;
    /// [`FusedInferAttention::plan`] and [`RowMerge::plan`](crate::merge::RowMerge::plan).
    pub fn plan<T: Element>(
        &self,
        stream: &Stream,
        cover: &BlockCover,
        tensors: [&Tensor<T>; 3],
    ) -> Result<BlockwisePlan> {
        if !score_scale(self.scale).is_finite() {
            return Err(Error::invalid("scale", self.scale, "a number that is finite in 32 bits")
                .fix("scale scores by 1 / sqrt(D)"));
        }
        let [heads, kv_heads] = heads_of(stream, cover, tensors)?;
        let [query, ..] = tensors;
        let blocks = match cover.full_blocks() {
            0 => None,
            _ => Some(self.blocks_call(stream, cover, heads, tensors)?),
        };
        let rows = cover.sequences.iter().flat_map(|sequence| &sequence.calls);
        let calls = rows.map(|rows| self.rows_call(stream, rows, [heads, kv_heads], tensors));
        let calls: Vec<RowsCall> = calls.collect::<Result<_>>()?;
        // The merge takes its shapes from a part, also where no row sees a key.
        let parts = cover.parts.max(1);
        let outputs = (0..parts).map(|_| output(stream.device(), query.shape(), heads));
        let outputs: Vec<Output<T>> = outputs.collect::<Result<_>>()?;
        let merge = MergeState::new(Layout::Tnd).rows(&cover.rows).plan(&parts_of(&outputs)?)?;
        let bytes = query.len().saturating_mul(size_of::<T>());
        let lse = outputs.iter().filter_map(|output| output.softmax_lse.as_ref());
        let lse = lse.map(|lse| lse.len().saturating_mul(size_of::<f32>())).max();
        let lse = lse.unwrap_or(0);
        let part = bytes.saturating_add(lse);
        Ok(BlockwisePlan {
            blocks,
            calls,
            merge,
            planned: tensors.map(|tensor| *tensor.desc()),
            heads,
            parts,
            part_bytes: part.saturating_mul(parts).saturating_add(lse),
        })
    }

    /// Prepares the call over the full blocks of a cover.
    fn blocks_call<T: Element>(
        &self,
        stream: &Stream,
        cover: &BlockCover,
        heads: usize,
        [query, key, value]: [&Tensor<T>; 3],
    ) -> Result<(BlockSparsePlan, BlockMask)> {
        let length = |length: usize| i64::try_from(length).unwrap_or(i64::MAX);
        let sequences = cover.sequences.iter();
        let (queries, keys): (Vec<i64>, Vec<i64>) =
            sequences.map(|sequence| (length(sequence.rows.len()), length(sequence.keys.len()))).unzip();
        let mask = cover.blocks.upload(stream, heads)?;
        let plan = self.blocks(&queries, &keys).plan((query, key, value, &mask))?;
        Ok((plan, mask))
    }

    /// Prepares the call over some rows.
    fn rows_call<T: Element>(
        &self,
        stream: &Stream,
        rows: &RowsCover,
        [heads, kv_heads]: [usize; 2],
        tensors: [&Tensor<T>; 3],
    ) -> Result<RowsCall> {
        let pages: Vec<&[usize]> = rows.pages.iter().map(|row| &row.pages[..]).collect();
        let mask = HostMask::stack(&rows.pages, 1, rows.columns() * SIDE, MaskForm::INT8)?;
        let mask = Mask::all_mask(stream.device().masks().custom_matrix(&mask)?);
        let table = BlockTable::from_rows(stream, &pages, SIDE)?;
        let lengths: Vec<usize> = pages.iter().map(|pages| pages.len() * SIDE).collect();
        let [query, key, value] = rows_of(rows, tensors)?;
        let plan = FusedInferAttention::new(Layout::Bsh)
            .heads(heads)
            .kv_heads(kv_heads)
            .scale(self.scale)
            .mask(mask)
            .softmax_lse(true)
            .actual_seq_lengths_kv(lengths)
            .plan(Inputs::new(&query, &key, &value).paged(&table))?;
        Ok(RowsCall { rows: rows.clone(), plan, table })
    }
}

/// The query's and the key's number of heads, of tensors that fit the cover whichever keys it shows.
fn heads_of<T: Element>(stream: &Stream, cover: &BlockCover, tensors: [&Tensor<T>; 3]) -> Result<[usize; 2]> {
    let [query, key, value] = tensors;
    let [rows, keys] = cover.lengths();
    let queries = format_args!("[{rows}, heads, elements], as many rows as the cover has");
    let [_, heads, dim] = shape_of(stream, ("query", query), queries, |[given, ..]| given == rows)?;
    let shared = format_args!("[{keys}, heads, {dim}], of which {heads} query heads are a multiple");
    let fits =
        |[given, kv_heads, elements]: [usize; 3]| (given, elements) == (keys, dim) && heads.is_multiple_of(kv_heads);
    let [_, kv_heads, _] = shape_of(stream, ("key", key), shared, fits)?;
    let like_key = format_args!("[{keys}, {kv_heads}, {dim}], as the key");
    shape_of(stream, ("value", value), like_key, |given| given == [keys, kv_heads, dim])?;
    Ok([heads, kv_heads])
}

/// The shape of a contiguous tensor on the stream's device, with three axes that fit.
fn shape_of<T: Element>(
    stream: &Stream,
    (argument, tensor): (&'static str, &Tensor<T>),
    allowed: fmt::Arguments<'_>,
    fits: impl FnOnce([usize; 3]) -> bool,
) -> Result<[usize; 3]> {
    tensor.packed(argument, stream)?;
    match *tensor.shape() {
        [rows, heads, dim] if fits([rows, heads, dim]) => Ok([rows, heads, dim]),
        _ => Err(Error::invalid(argument, format_args!("{:?}", tensor.shape()), allowed).fix(
            "cover the masks of the sequences that query, key and value hold, packed as [rows, heads, elements], with \
             equal heads of key and value and equal elements of all",
        )),
    }
}

/// The rows as sequences, and the pages of their keys and values.
fn rows_of<T: Element>(rows: &RowsCover, [query, key, value]: [&Tensor<T>; 3]) -> Result<[Tensor<T>; 3]> {
    let cut = |tensor: &Tensor<T>, range: &std::ops::Range<usize>, rows: usize| {
        let row: usize = tensor.shape().iter().skip(1).product();
        let shape = [range.len() / rows, rows, row];
        tensor.narrow(0, range.clone())?.reshape(shape)
    };
    Ok([cut(query, &rows.rows, 1)?, cut(key, &rows.keys, SIDE)?, cut(value, &rows.keys, SIDE)?])
}

/// New memory for a part: attention with the shape of the query, and log-sum-exps.
fn output<T: Element>(device: &Device, query: &[usize], heads: usize) -> Result<Output<T>> {
    Ok(Output { attention: Tensor::empty(device, query)?, softmax_lse: Some(softmax_lse(device, query, heads)?) })
}

/// New memory for the log-sum-exps of a query.
fn softmax_lse(device: &Device, query: &[usize], heads: usize) -> Result<Tensor<f32>> {
    let rows = query.first().copied().unwrap_or(0);
    Tensor::empty(device, [rows, heads, 1])
}

fn parts_of<T: Element>(outputs: &[Output<T>]) -> Result<Vec<Part<'_, T>>> {
    outputs.iter().map(Part::of).collect()
}

impl RowsCall {
    /// Queues the call, which writes its rows of a part.
    fn launch<T: Element>(&self, stream: &Stream, tensors: [&Tensor<T>; 3], part: &Output<T>) -> Result<()> {
        let [query, key, value] = rows_of(&self.rows, tensors)?;
        let rows = self.rows.rows.clone();
        let attention = part.attention.narrow(0, rows.clone())?;
        let lse = |lse: &Tensor<f32>| {
            let heads = lse.shape().get(1).copied().unwrap_or(0);
            let lse = lse.narrow(0, rows.clone())?;
            lse.reshape([rows.len(), heads, 1, 1])
        };
        let mut output = Output {
            attention: attention.reshape(query.shape())?,
            softmax_lse: part.softmax_lse.as_ref().map(lse).transpose()?,
        };
        let inputs = Inputs::new(&query, &key, &value).paged(&self.table);
        self.plan.launch_into(stream, inputs, &mut output)
    }
}

impl BlockwisePlan {
    /// Scratch memory that a launch needs, in bytes, besides the parts.
    pub fn workspace_bytes(&self) -> usize {
        let calls = self.calls.iter().map(|call| call.plan.workspace_bytes());
        let blocks = self.blocks.as_ref().map(|(plan, _)| plan.workspace_bytes());
        calls.chain(blocks).fold(self.merge.workspace_bytes(), usize::max)
    }

    /// Bytes of the parts that a launch merges, and of the log-sum-exps of the result. They belong to the device until
    /// the launch is done.
    pub fn part_bytes(&self) -> usize {
        self.part_bytes
    }

    /// Bytes that the plan keeps on the device: the tables and masks of its calls, and what rows without keys become.
    pub fn kept_bytes(&self) -> usize {
        let tables = self.calls.iter().map(|call| {
            let entries = call.table.sequences().saturating_mul(call.table.columns());
            entries.saturating_mul(size_of::<i32>()).saturating_add(call.plan.mask_bytes())
        });
        let mask = self.blocks.as_ref().map(|(_, mask)| mask.tensor_bytes());
        tables.chain(mask).fold(self.merge.kept_bytes(), usize::saturating_add)
    }

    /// Queues the calls and their merge: attention with the shape of the query. Rows that see no key become 0. Returns
    /// at once.
    ///
    /// # Errors
    /// As for [`BlockwisePlan::launch_into`].
    pub fn launch<T: Element>(&self, stream: &Stream, tensors: [&Tensor<T>; 3]) -> Result<Tensor<T>> {
        let mut out = Tensor::empty(stream.device(), tensors[0].shape())?;
        self.launch_into(stream, tensors, &mut out)?;
        Ok(out)
    }

    /// As [`launch`](Self::launch), with an output tensor of the caller.
    ///
    /// # Errors
    /// [`PLAN_TENSORS`](crate::rules::PLAN_TENSORS) for tensors of other shapes and for strided ones, and
    /// [`ARGUMENT_DEVICE`](crate::rules::ARGUMENT_DEVICE) for tensors of another device, before anything is
    /// queued; as for [`Plan::launch_into`](crate::operation::Plan::launch_into).
    pub fn launch_into<T: Element>(
        &self,
        stream: &Stream,
        tensors: [&Tensor<T>; 3],
        out: &mut Tensor<T>,
    ) -> Result<()> {
        let named = ["query", "key", "value"].into_iter().zip(tensors);
        let given = named.zip(&self.planned);
        let out_given = (("out", &*out), &self.planned[0]);
        for ((argument, tensor), planned) in given.chain([out_given]) {
            tensor.on(argument, stream.context())?;
            if !planned.lies_as(tensor.desc()) {
                return Err(Error::not_as_planned(argument, tensor.desc(), planned));
            }
        }
        let [query, key, value] = tensors;
        let device = stream.device();
        let parts = (0..self.parts).map(|_| output(device, query.shape(), self.heads));
        let parts: Vec<Output<T>> = parts.collect::<Result<_>>()?;
        if let (Some((plan, mask)), Some(part)) = (&self.blocks, parts.get(BLOCKS)) {
            let mut output = BlockSparseOutput { out: part.attention.clone(), softmax_lse: part.softmax_lse.clone() };
            plan.launch_into(stream, (query, key, value, mask), &mut output)?;
        }
        for call in &self.calls {
            if let Some(part) = parts.get(call.rows.part) {
                call.launch(stream, tensors, part)?;
            }
        }
        let mut merged =
            Output { attention: out.clone(), softmax_lse: Some(softmax_lse(device, query.shape(), self.heads)?) };
        self.merge.launch_into(stream, &parts_of(&parts)?, &mut merged)
    }
}
