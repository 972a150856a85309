//! BlockSparseAttention: attention in which a mask names the blocks of keys that each block of query rows sees.
//!
//! [`BlockSparseAttention`] describes a call, which is planned once and launched per layer as a [`BlockSparsePlan`]. A
//! [`BlockMask`] is its mask.

use std::num::NonZeroU64;
use std::sync::Arc;

use ascend_spec::geometry::BlockMap;
use ascend_spec::ops::block_sparse_attention::rules::ROWS_WITHOUT_KEYS;
use ascend_spec::ops::block_sparse_attention::{BlockSparseCall, BlockSparseProblem, Parameter, Version};
use ascend_spec::{Layout, Soc, TensorDesc, Tile, Visibility, block_sparse_attention_arguments};

use crate::error::{Error, Result};
use crate::mask;
use crate::memory::Element;
use crate::operator::{AllowedLints, EntryPoints, NamedTensors, entry_points, lints_of, phase_one};
use crate::ops::operation::{self, PlainCall, PlainOperation, Sealed, outputs};
use crate::runtime::{Context, Stream};
use crate::tensor::{AnyTensor, Tensor};

entry_points! {
    block_sparse_attention_arguments, BlockSparseCall<'_>, AnyArguments::BlockSparseAttention;
    Version::V1 => 1: aclnnBlockSparseAttentionGetWorkspaceSize, aclnnBlockSparseAttention;
}

/// What to do where the installed CANN has no such operator.
const INSTEAD: &str = "attend with a full mask, by FusedInferAttentionScore";

/// A call of BlockSparseAttention: attention in which each block of query rows of a head sees the blocks of keys that a
/// mask names.
///
/// Describe it, plan it for tensors of certain shapes, and launch the [`BlockSparsePlan`] once a layer.
///
/// Source: aclnnBlockSparseAttention, since CANN 9.0, on Ascend 950 since 9.1; before, planning is an
/// [`Error::MissingOperator`](crate::Error::MissingOperator) or an [`Error::Violation`](crate::Error::Violation).
///
/// ```
/// use ascend_attention::block_sparse::{BlockMask, BlockSparseAttention};
/// use ascend_attention::{Layout, Runtime, f16};
///
/// # fn main() -> ascend_attention::Result<()> {
/// # #[cfg(feature = "emulation")] {
/// let stream = Runtime::emulated()?.device(0)?.stream()?;
/// // One head with two blocks of 64 rows, and three of 128 keys, the last of which has 44.
/// let query = stream.upload(&[f16::ONE; 100 * 64], [1, 1, 100, 64])?;
/// let key = stream.upload(&[f16::ONE; 300 * 64], [1, 1, 300, 64])?;
/// let values: Vec<f16> = (0..300).flat_map(|key| [f16::from_f32((key / 128) as f32); 64]).collect();
/// let value = stream.upload(&values, [1, 1, 300, 64])?;
/// let mask = BlockMask::upload(&stream, &[1, 0, 0, 0, 0, 1], [1, 1, 2, 3])?;
/// let inputs = (&query, &key, &value, &mask);
/// let plan = BlockSparseAttention::new(Layout::Bnsd, 0.125).block_shape(64, 128).plan(inputs)?;
/// let rows = plan.launch(&stream, inputs)?.out.download(&stream)?;
/// assert_eq!([rows[0], rows[99 * 64]], [f16::ZERO, f16::from_f32(2.0)]);
/// # }
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
#[must_use = "a description does nothing until planned"]
pub struct BlockSparseAttention {
    layout: Layout,
    scale: f64,
    block_shape: [i64; 2],
    lengths: Option<[Vec<i64>; 2]>,
    softmax_lse: bool,
    inner_precise: Option<i64>,
    allowed: AllowedLints,
}

impl BlockSparseAttention {
    /// A call with queries, keys and values in this layout and this factor of the scores, with blocks of 128 rows and
    /// 128 keys. All sequences of BNSD and BSND have all rows.
    pub fn new(layout: Layout, scale: f64) -> Self {
        Self {
            layout,
            scale,
            block_shape: [128, 128],
            lengths: None,
            softmax_lse: false,
            inner_precise: None,
            allowed: AllowedLints::default(),
        }
    }

    /// Sets the query rows and the keys of a block (`blockShape`).
    pub fn block_shape(mut self, rows: usize, keys: usize) -> Self {
        self.block_shape = [rows, keys].map(|size| i64::try_from(size).unwrap_or(i64::MAX));
        self
    }

    /// Sets the query rows and the keys of each sequence (`actualSeqLengths`, `actualSeqLengthsKv`), which are lengths
    /// and no running sums in TND too.
    pub fn actual_seq_lengths(mut self, queries: &[i64], keys: &[i64]) -> Self {
        self.lengths = Some([queries.to_vec(), keys.to_vec()]);
        self
    }

    /// Sets whether the log-sum-exp of each row is returned as well.
    pub fn softmax_lse(mut self, softmax_lse: bool) -> Self {
        self.softmax_lse = softmax_lse;
        self
    }

    /// Sets `innerPrecise`. Unless set it is 0, the softmax in FLOAT, on Atlas A2 and A3, and 4, the only one there is,
    /// on Ascend 950.
    pub fn inner_precise(mut self, inner_precise: i64) -> Self {
        self.inner_precise = Some(inner_precise);
        self
    }

    /// Lets a call through that breaks this lint, which stays within the call's tensors, such as
    /// `block_sparse.rows_without_keys`.
    pub fn allow_lint(mut self, id: &str) -> Self {
        self.allowed.lint(id);
        self
    }

    /// Checks a call with queries, keys, values and a mask, and prepares it for tensors of these shapes and strides.
    /// Nothing is launched, and the tensors are not kept.
    ///
    /// # Errors
    /// Before any function of the operator is called: [`Error::Violation`](crate::Error::Violation), by
    /// `block_sparse.contents` for a mask that names blocks behind the keys of a sequence, whose rows the device would
    /// read, or that is made on the device and could, since some sequence has fewer blocks of keys than the mask;
    /// by `block_sparse.rows_without_keys` for a mask that the host knows and that names no keys for some rows;
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for a mask of maps whose blocks are not those of
    /// [`block_shape`](Self::block_shape);
    /// [`Error::UnknownProduct`](crate::Error::UnknownProduct),
    /// [`Error::MissingOperator`](crate::Error::MissingOperator),
    /// [`ARGUMENT_DEVICE`](crate::rules::ARGUMENT_DEVICE) for tensors of different devices. After that
    /// [`Error::Aclnn`](crate::Error::Aclnn), should the operator refuse the call nevertheless.
    #[doc(alias = "aclnnBlockSparseAttentionGetWorkspaceSize")]
    pub fn plan<'a, T: Element>(&self, inputs: impl Into<BlockSparseInputs<'a, T>>) -> Result<BlockSparsePlan> {
        let inputs = inputs.into();
        let context = inputs.query.memory().context();
        BlockSparseCall::check_device(Version::V1, context, INSTEAD, inputs.each())?;
        let given = self.call(context, inputs.each().map(|(_, input)| *input.desc()))?;
        let (out, lse) = given.outputs().unzip();
        let call = BlockSparseCall { attention_out: out, softmax_lse: lse.flatten(), ..given };
        let tensors: NamedTensors<'_, _> = inputs.each().into_iter().collect();
        BlockSparsePlan::of_call((&call, Version::V1), inputs.query, &tensors, || {
            let target = context.target()?;
            let problem = call.check(target)?;
            let allowed = self.allowed.ids(lints_of::<Version>)?;
            call.lint(target, &allowed)?;
            if call.attention_out.is_none() {
                return Err(operation::no_elements(inputs.query));
            }
            let kept = MaskChecks {
                problem,
                block_shape: self.block_shape,
                lengths: self.lengths.clone(),
                leaves_rows: allowed.contains(&ROWS_WITHOUT_KEYS.id),
            };
            kept.admits(inputs.mask)?;
            Ok((PlainOperation::new(kept, []), problem.is_idle()))
        })
    }

    /// The call with queries, keys, values and a mask, without outputs.
    fn call(&self, context: &Context, [query, key, value, mask]: [TensorDesc; 4]) -> Result<BlockSparseCall<'_>> {
        let sizes = self.layout.input().extents(&key.shape, 0);
        let lengths = lengths_of(self.lengths.as_ref());
        Ok(BlockSparseCall {
            query: Some(query),
            key: Some(key),
            value: Some(value),
            block_sparse_mask: Some(mask),
            block_shape: Some(&self.block_shape),
            actual_seq_lengths: lengths[0],
            actual_seq_lengths_kv: lengths[1],
            q_input_layout: self.layout.as_str(),
            kv_input_layout: self.layout.as_str(),
            num_key_value_heads: sizes.map_or(0, |sizes| sizes.heads),
            scale: self.scale,
            inner_precise: match self.inner_precise {
                Some(inner_precise) => inner_precise,
                None if context.soc()? == Soc::Ascend950 => 4,
                None => 0,
            },
            softmax_lse_flag: self.softmax_lse.into(),
            ..BlockSparseCall::default()
        })
    }

    /// Whether the operator is installed and takes a call with queries, keys, values and a mask like these. Nothing is
    /// made, and a refusal is not recorded.
    pub(crate) fn takes(&self, context: &Context, tensors: [TensorDesc; 4]) -> Result<bool> {
        if !phases_of(Version::V1).are_installed(context.runtime().api()) {
            return Ok(false);
        }
        let given = self.call(context, tensors)?;
        let (attention_out, lse) = given.outputs().unzip();
        let call = BlockSparseCall { attention_out, softmax_lse: lse.flatten(), ..given };
        Ok(call.check(context.target()?).is_ok())
    }
}

/// The mask of a call: a byte for each sequence, query head, block of query rows and block of keys, 1 where the rows
/// see the keys and 0 where they do not.
///
/// [`BlockMask::upload`] makes it of bytes of the host, which are kept to check that they name no block behind the keys
/// of a sequence. A mask that the device has made, `BlockMask::from` a tensor, is taken where each sequence has as many
/// blocks of keys as the mask.
#[derive(Clone, Debug)]
pub struct BlockMask {
    tensor: Tensor<i8>,
    bytes: Option<Arc<[u8]>>,
    /// Rows and keys of a block of the maps that the mask is made from.
    sides: Option<[NonZeroU64; 2]>,
}

impl BlockMask {
    /// Copies the bytes of a mask `[sequences, query heads, blocks of rows, blocks of keys]` to the device.
    ///
    /// # Errors
    /// As for [`Stream::upload`].
    pub fn upload(stream: &Stream, bytes: &[i8], shape: impl AsRef<[usize]>) -> Result<Self> {
        Ok(Self {
            tensor: stream.upload(bytes, shape)?,
            bytes: Some(bytes.iter().map(|byte| byte.cast_unsigned()).collect()),
            sides: None,
        })
    }

    /// Marks the full blocks of a mask for each sequence, in which every row sees every key, alike for all heads. The
    /// maps have the same sides, which are those of [`BlockSparseAttention::block_shape`].
    ///
    /// Partial blocks, in which some rows see some keys, are not marked, since the operator would show the others too:
    /// they are the [runs](BlockMap::runs) of [`Tile::Mixed`], and
    /// [`BlockwiseAttention`](crate::blockwise::BlockwiseAttention) computes them as well. A mask of the host has a map
    /// by [`HostMask::entry`](crate::mask::HostMask::entry), one of a rule by
    /// [`HostMask::from_fn`](crate::mask::HostMask::from_fn), one of a bitmap by
    /// [`HostMask::from_bitmap`](crate::mask::HostMask::from_bitmap).
    ///
    /// # Errors
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for maps of different sides, and for more than 4 GiB of blocks;
    /// as for [`Stream::upload`].
    pub fn full_blocks<V: Visibility>(stream: &Stream, maps: &[BlockMap<'_, V>], heads: usize) -> Result<Self> {
        FullBlocks::new(maps)?.upload(stream, heads)
    }

    /// Bytes of the tensor.
    pub(crate) fn tensor_bytes(&self) -> usize {
        self.tensor.len()
    }
}

/// The full blocks of some masks, for one head.
#[derive(Clone, Debug)]
pub(crate) struct FullBlocks {
    /// A byte for each sequence, block of rows and block of keys.
    bytes: Vec<i8>,
    sequences: usize,
    /// Blocks of rows and of keys of the longest sequence.
    blocks: [usize; 2],
    /// Rows and keys of a block, where there is a sequence.
    sides: Option<[NonZeroU64; 2]>,
}

impl FullBlocks {
    /// Most bytes of a mask, over all heads.
    const MAX_BYTES: usize = 1 << 32;

    /// Marks the full blocks of a mask for each sequence.
    pub(crate) fn new<V: Visibility>(maps: &[BlockMap<'_, V>]) -> Result<Self> {
        let sides = maps.first().map(BlockMap::sides);
        if let Some((other, first)) = maps.iter().map(BlockMap::sides).zip(sides.iter().cycle()).find(|(a, b)| a != *b)
        {
            return Err(Error::invalid(
                "maps",
                format_args!("blocks of {} rows and {} keys beside others", other[0], other[1]),
                format_args!("blocks of {} rows and {} keys, as of the first map", first[0], first[1]),
            )
            .fix("cut the masks of all sequences into blocks of the same sides"));
        }
        let longest =
            |lengths: &mut dyn Iterator<Item = u64>| usize::try_from(lengths.max().unwrap_or(0)).unwrap_or(usize::MAX);
        let rows = longest(&mut maps.iter().map(|map| map.rows()));
        let columns = longest(&mut maps.iter().map(|map| map.columns()));
        let (sequences, blocks) = (maps.len(), [rows, columns]);
        let count = Self::count(sequences, blocks)?;
        let mut bytes = Vec::new();
        mask::reserve(&mut bytes, count)?;
        bytes.resize(count, 0);
        for (sequence, map) in maps.iter().enumerate() {
            for run in map.runs().filter(|run| run.tile == Tile::All) {
                let row = (sequence * rows + run.row as usize) * columns;
                let blocks = run.blocks.start as usize..run.blocks.end as usize;
                let of_row = bytes.get_mut(row..).and_then(|row| row.get_mut(..columns));
                if let Some(marked) = of_row.and_then(|row| row.get_mut(blocks)) {
                    marked.fill(1);
                }
            }
        }
        Ok(Self { bytes, sequences, blocks, sides })
    }

    /// Number of bytes: sequences times heads, times the blocks of rows and of keys.
    fn count(sequences_and_heads: usize, blocks: [usize; 2]) -> Result<usize> {
        let count = blocks.into_iter().try_fold(sequences_and_heads, usize::checked_mul);
        count.filter(|count| *count <= Self::MAX_BYTES).ok_or_else(|| {
            Error::invalid(
                "maps",
                format_args!("{sequences_and_heads} times {} x {} blocks", blocks[0], blocks[1]),
                format_args!("at most {} blocks over all sequences and heads", Self::MAX_BYTES),
            )
            .fix("make a mask for fewer sequences at a time, or larger blocks")
        })
    }

    /// Also marks the first block of keys where none is marked, in the blocks of rows that each sequence has, so that
    /// every row of a call is written.
    pub(crate) fn fill_empty_rows<V: Visibility>(&mut self, maps: &[BlockMap<'_, V>]) {
        let [rows, columns] = self.blocks.map(|blocks| blocks.max(1));
        for (sequence, map) in self.bytes.chunks_mut(rows.saturating_mul(columns)).zip(maps) {
            for row in sequence.chunks_mut(columns).take(map.rows() as usize) {
                let is_empty = row.iter().all(|byte| *byte == 0);
                if let Some(first) = row.first_mut().filter(|_| is_empty) {
                    *first = 1;
                }
            }
        }
    }

    /// Copies the mask to the device, alike for all heads.
    pub(crate) fn upload(&self, stream: &Stream, heads: usize) -> Result<BlockMask> {
        let [rows, columns] = self.blocks;
        let of_sequence = rows * columns;
        let sequences_and_heads = self.sequences.saturating_mul(heads);
        let mut bytes = Vec::new();
        mask::reserve(&mut bytes, Self::count(sequences_and_heads, self.blocks)?)?;
        for sequence in self.bytes.chunks(of_sequence.max(1)) {
            (0..heads).for_each(|_| bytes.extend_from_slice(sequence));
        }
        let mask = BlockMask::upload(stream, &bytes, [self.sequences, heads, rows, columns])?;
        Ok(BlockMask { sides: self.sides, ..mask })
    }
}

impl From<Tensor<i8>> for BlockMask {
    /// A mask that the host does not know.
    fn from(tensor: Tensor<i8>) -> Self {
        Self { tensor, bytes: None, sides: None }
    }
}

/// What a launch reads. From queries, keys, values and the mask.
#[derive(Clone, Copy, Debug)]
pub struct BlockSparseInputs<'a, T: Element> {
    query: &'a Tensor<T>,
    key: &'a Tensor<T>,
    value: &'a Tensor<T>,
    mask: &'a BlockMask,
}

/// Queries, keys, values and the mask.
type Given<'a, T> = (&'a Tensor<T>, &'a Tensor<T>, &'a Tensor<T>, &'a BlockMask);

impl<'a, T: Element> From<Given<'a, T>> for BlockSparseInputs<'a, T> {
    fn from((query, key, value, mask): Given<'a, T>) -> Self {
        Self { query, key, value, mask }
    }
}

impl<'a, T: Element> BlockSparseInputs<'a, T> {
    /// The tensor of each argument.
    fn each(&self) -> [(Parameter, &'a AnyTensor); 4] {
        [
            (Parameter::Query, self.query),
            (Parameter::Key, self.key),
            (Parameter::Value, self.value),
            (Parameter::BlockSparseMask, &self.mask.tensor),
        ]
    }
}

/// What a launch writes.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct BlockSparseOutput<T: Element> {
    /// Attention, with the shape of the queries. Rows for which the mask names no key, and rows behind their sequence,
    /// are not written.
    pub out: Tensor<T>,
    /// The log-sum-exp of each row and head, with the shape of the queries but for a last axis of 1, where it is asked
    /// for.
    pub softmax_lse: Option<Tensor<f32>>,
}

outputs! { BlockSparseOutput { out, softmax_lse } }

/// A call of BlockSparseAttention that was checked and prepared. From [`BlockSparseAttention::plan`].
///
/// A launch reads queries, keys, values and mask, and writes contiguous [`BlockSparseOutput`].
pub type BlockSparsePlan = operation::Plan<PlainOperation<BlockSparseAttention>>;

/// What a plan of BlockSparseAttention checks masks by.
#[doc(hidden)]
#[derive(Debug)]
pub struct MaskChecks {
    problem: BlockSparseProblem,
    block_shape: [i64; 2],
    lengths: Option<[Vec<i64>; 2]>,
    /// Whether masks may name no keys for some rows.
    leaves_rows: bool,
}

impl MaskChecks {
    /// Refuses a mask of other blocks, one by which the device would read keys of other sequences or other memory, and
    /// unless it is allowed one by which rows stay unwritten.
    fn admits(&self, mask: &BlockMask) -> Result<()> {
        let [rows, keys] = self.block_shape;
        let differ =
            |sides: &[NonZeroU64; 2]| sides.map(|side| i64::try_from(side.get()).ok()) != [Some(rows), Some(keys)];
        if let Some([height, width]) = mask.sides.filter(differ) {
            return Err(Error::invalid(
                "mask",
                format_args!("blocks of {height} rows and {width} keys"),
                format_args!("blocks of {rows} rows and {keys} keys, as `block_shape` says"),
            )
            .fix(format_args!("make the maps by `BlockMap::of_sides` with {rows} rows and {keys} keys")));
        }
        let [queries, keys] = lengths_of(self.lengths.as_ref());
        let call =
            BlockSparseCall { actual_seq_lengths: queries, actual_seq_lengths_kv: keys, ..BlockSparseCall::default() };
        let bytes = mask.bytes.as_deref();
        self.problem.checked_mask(&call, bytes)?;
        match bytes.filter(|_| !self.leaves_rows) {
            Some(bytes) => Ok(self.problem.lint_mask(&call, bytes)?),
            None => Ok(()),
        }
    }
}

/// The lengths of queries and of keys, where they are given.
fn lengths_of(lengths: Option<&[Vec<i64>; 2]>) -> [Option<&[i64]>; 2] {
    [0, 1].map(|side| lengths.map(|lengths| lengths[side].as_slice()))
}

impl Sealed for BlockSparseAttention {}

impl PlainCall for BlockSparseAttention {
    type Inputs<'a, T: Element> = BlockSparseInputs<'a, T>;
    type Output<T: Element> = BlockSparseOutput<T>;
    type Parameter = Parameter;
    type Kept = MaskChecks;
    const OUTPUTS: &'static [Parameter] = &[Parameter::AttentionOut, Parameter::SoftmaxLse];

    fn tensors<'t, 'i: 't, T: Element>(
        _: &'t MaskChecks,
        inputs: &'t BlockSparseInputs<'i, T>,
    ) -> impl Iterator<Item = (Parameter, &'t AnyTensor)> {
        inputs.each().into_iter()
    }

    fn admits<T: Element>(kept: &MaskChecks, inputs: &BlockSparseInputs<'_, T>) -> Result<()> {
        kept.admits(inputs.mask)
    }
}

#[cfg(test)]
mod tests {
    use ascend_spec::geometry::MaskGeometry;

    use super::*;

    #[test]
    fn rows_behind_a_short_sequence_name_no_block() {
        let masks = [MaskGeometry::prefix(300, 300, 0), MaskGeometry::prefix(100, 100, 0)];
        let maps = masks.each_ref().map(|mask| BlockMap::new(mask, NonZeroU64::MIN.saturating_add(127)));
        let mut full = FullBlocks::new(&maps).unwrap();
        full.fill_empty_rows(&maps);
        let long = [[1, 0, 0], [1, 0, 0], [1, 1, 0]];
        let short = [[1, 0, 0], [0, 0, 0], [0, 0, 0]];
        assert_eq!(full.bytes, [long, short].as_flattened().as_flattened());
    }
}
