//! The calls that compute a cover, and their merge.

use ascend_spec::Layout;

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
    heads: usize,
    kv_heads: usize,
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
    blocks: BlockSparsePlan,
    mask: BlockMask,
    calls: Vec<RowsCall>,
    merge: RowMergePlan,
    /// Shapes of query, key and value.
    planned: [Vec<usize>; 3],
    heads: usize,
    parts: usize,
    part_bytes: usize,
}

impl BlockwiseAttention {
    /// Attention of so many query heads over so many key heads, with this factor of the scores.
    pub fn new(heads: usize, kv_heads: usize, scale: f64) -> Self {
        Self { heads, kv_heads, scale }
    }

    /// Checks the calls for query `[T1, N1, D]`, key and value `[T2, N2, D]` and prepares them. Nothing is launched,
    /// and the tensors are not kept.
    ///
    /// # Errors
    /// As for [`BlockSparseAttention::plan`], before CANN 9.0 and for heads that the operator refuses among others;
    /// [`FusedInferAttention::plan`] and [`RowMerge::plan`](crate::merge::RowMerge::plan).
    pub fn plan<T: Element>(
        &self,
        stream: &Stream,
        cover: &BlockCover,
        tensors: [&Tensor<T>; 3],
    ) -> Result<BlockwisePlan> {
        let [query, key, value] = tensors;
        let length = |length: usize| i64::try_from(length).unwrap_or(i64::MAX);
        let sequences = cover.sequences.iter();
        let (queries, keys): (Vec<i64>, Vec<i64>) =
            sequences.map(|sequence| (length(sequence.rows.len()), length(sequence.keys.len()))).unzip();
        let mask = cover.blocks.upload(stream, self.heads)?;
        let blocks = BlockSparseAttention::new(Layout::Tnd, self.scale)
            .block_shape(SIDE, SIDE)
            .actual_seq_lengths(&queries, &keys)
            .softmax_lse(true)
            .plan((query, key, value, &mask))?;
        let rows = cover.sequences.iter().flat_map(|sequence| &sequence.calls);
        let calls = rows.map(|rows| self.rows_call(stream, rows, tensors));
        let calls: Vec<RowsCall> = calls.collect::<Result<_>>()?;
        let last = calls.iter().map(|call| call.rows.part).max();
        let parts = last.unwrap_or(BLOCKS) + 1;
        let outputs = (0..parts).map(|_| output(stream.device(), query.shape(), self.heads));
        let outputs: Vec<Output<T>> = outputs.collect::<Result<_>>()?;
        let merge = MergeState::new(Layout::Tnd).rows(&cover.rows).plan(&parts_of(&outputs)?)?;
        let bytes = query.len().saturating_mul(size_of::<T>());
        let lse = outputs.iter().filter_map(|output| output.softmax_lse.as_ref());
        let lse = lse.map(|lse| lse.len().saturating_mul(size_of::<f32>())).max();
        let lse = lse.unwrap_or(0);
        let part = bytes.saturating_add(lse);
        Ok(BlockwisePlan {
            blocks,
            mask,
            calls,
            merge,
            planned: tensors.map(|tensor| tensor.shape().to_vec()),
            heads: self.heads,
            parts,
            part_bytes: part.saturating_mul(parts).saturating_add(lse),
        })
    }

    /// Prepares the call over some rows.
    fn rows_call<T: Element>(&self, stream: &Stream, rows: &RowsCover, tensors: [&Tensor<T>; 3]) -> Result<RowsCall> {
        let pages: Vec<&[usize]> = rows.pages.iter().map(|row| &row.pages[..]).collect();
        let columns = pages.iter().map(|pages| pages.len()).max().unwrap_or(0);
        let mask = HostMask::stack(&rows.pages, 1, columns * SIDE, MaskForm::INT8)?;
        let mask = Mask::all_mask(stream.device().masks().custom_matrix(&mask)?);
        let table = BlockTable::from_rows(stream, &pages, SIDE)?;
        let lengths: Vec<usize> = pages.iter().map(|pages| pages.len() * SIDE).collect();
        let [query, key, value] = rows_of(rows, tensors)?;
        let plan = FusedInferAttention::new(Layout::Bsh)
            .heads(self.heads)
            .kv_heads(self.kv_heads)
            .scale(self.scale)
            .mask(mask)
            .softmax_lse(true)
            .actual_seq_lengths_kv(lengths)
            .plan(Inputs::new(&query, &key, &value).paged(&table))?;
        Ok(RowsCall { rows: rows.clone(), plan, table })
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
        let others = [self.blocks.workspace_bytes(), self.merge.workspace_bytes()];
        calls.chain(others).max().unwrap_or(0)
    }

    /// Bytes of the parts that a launch merges, and of the log-sum-exps of the result. They belong to the device until
    /// the launch is done.
    pub fn part_bytes(&self) -> usize {
        self.part_bytes
    }

    /// Bytes that the plan keeps on the device: the tables and masks of its calls.
    pub fn kept_bytes(&self) -> usize {
        let tables = self.calls.iter().map(|call| {
            let entries = call.table.sequences().saturating_mul(call.table.columns());
            entries.saturating_mul(size_of::<i32>()).saturating_add(call.plan.mask_bytes())
        });
        tables.fold(self.mask.tensor_bytes(), usize::saturating_add)
    }

    /// Queues the calls and their merge: attention with the shape of the query. Rows that see no key become 0. Returns
    /// at once.
    ///
    /// # Errors
    /// As for [`BlockwisePlan::launch_into`].
    pub fn launch<T: Element>(&self, stream: &Stream, tensors: [&Tensor<T>; 3]) -> Result<Tensor<T>> {
        let mut out = Tensor::empty(stream.device(), &self.planned[0])?;
        self.launch_into(stream, tensors, &mut out)?;
        Ok(out)
    }

    /// As [`launch`](Self::launch), with an output tensor of the caller.
    ///
    /// # Errors
    /// [`PLAN_TENSORS`](crate::rules::PLAN_TENSORS) for tensors of other shapes, before anything is queued; as for
    /// [`Plan::launch_into`](crate::operation::Plan::launch_into).
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
            if tensor.shape() != planned {
                return Err(Error::not_as_planned(
                    argument,
                    format_args!("{:?}", tensor.shape()),
                    format_args!("{planned:?}"),
                ));
            }
        }
        let [query, key, value] = tensors;
        let device = stream.device();
        let parts = (0..self.parts).map(|_| output(device, query.shape(), self.heads));
        let mut parts: Vec<Output<T>> = parts.collect::<Result<_>>()?;
        if let Some(part) = parts.get_mut(BLOCKS) {
            let mut output = BlockSparseOutput { out: part.attention.clone(), softmax_lse: part.softmax_lse.clone() };
            let inputs = (query, key, value, &self.mask);
            self.blocks.launch_into(stream, inputs, &mut output)?;
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
