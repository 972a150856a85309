//! A call that holds every rule, resolved to what it computes.

use super::{Bias, FlashAttentionCall, InputLayout, MaskKind, Sequence, SoftmaxOrder, Version};
use crate::attention_problem::{Work, size};
use crate::{Lengths, MaskGeometry, SparseMode, Target, TensorDesc};

/// A call that holds every rule: sizes, lengths and visibility, ready to compute.
///
/// Made by [`FlashAttentionCall::check`] alone, so that a kernel may rely on it: lengths lie within the tensors'
/// axes, heads divide, mask and bias cover every row and key that is looked up.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct FlashAttentionProblem<'a> {
    /// The call as the entry point reads it: arguments that the version lacks have their defaults.
    pub call: FlashAttentionCall<'a>,
    /// Entry point.
    pub version: Version,
    /// What the call was checked for.
    pub target: Target,
    /// What a kernel has to do. Unless it is [`Work::Attend`], no field below except the layout is known: the others
    /// are 0 or none.
    pub work: Work,
    /// Axis orders.
    pub layout: InputLayout,
    /// Number of sequences as the host counts them: of packed sequences that are run as a batch only those with rows.
    pub(super) batch: i64,
    /// Query heads.
    pub heads: i64,
    /// Key and value heads; divides `heads`.
    pub kv_heads: i64,
    /// Rows of the longest query, and of every query with a batch axis.
    pub q_rows: i64,
    /// Keys of the longest sequence, and of every sequence with a batch axis.
    pub kv_rows: i64,
    /// Head dimension of query and key, without the rotary part.
    pub head_dim: i64,
    /// Head dimension of value and output.
    pub value_dim: i64,
    /// Head dimension of the rotary parts; 0 without them.
    pub rope_dim: i64,
    /// Rows and keys of each sequence, including those without rows.
    pub lengths: Lengths<'a>,
    /// Whether the host runs packed sequences, which are of one length, as a batch.
    pub as_batch: bool,
    /// Sparse mode in force: mode 5 with a prefix that is dropped is mode 1.
    pub mode: SparseMode,
    /// What the mask tensor is for.
    pub mask: MaskKind,
    /// Position bias.
    pub bias: Bias,
    /// Whether rows without visible keys are corrected: their output is 0, their maximum the least FLOAT and their
    /// sum the largest. Otherwise the output is the mean of the values.
    pub zeroes_masked_rows: bool,
    /// The sequence that modes 7 and 8 treat as a band.
    pub(super) cut_sequence: Option<usize>,
    /// Order of the softmax outputs.
    pub softmax_order: SoftmaxOrder,
}

impl<'a> FlashAttentionProblem<'a> {
    /// A problem of size 0.
    pub(super) fn without_work(
        call: FlashAttentionCall<'a>,
        version: Version,
        target: Target,
        layout: InputLayout,
    ) -> Self {
        FlashAttentionProblem {
            call,
            version,
            target,
            work: Work::Nothing,
            layout,
            batch: 0,
            heads: 0,
            kv_heads: 0,
            q_rows: 0,
            kv_rows: 0,
            head_dim: 0,
            value_dim: 0,
            rope_dim: 0,
            lengths: Lengths::Dense { batch: 0, q_len: 0, kv_len: 0 },
            as_batch: false,
            mode: SparseMode::DefaultMask,
            mask: MaskKind::None,
            bias: Bias::None,
            zeroes_masked_rows: false,
            cut_sequence: None,
            softmax_order: SoftmaxOrder::Batches,
        }
    }

    /// Size of the row axes of query and key: of one sequence, or of all where they are packed.
    pub fn axis_rows(&self) -> (usize, usize) {
        let axis = self.layout.row_axis();
        let rows_of = |desc: Option<TensorDesc>| {
            let rows = desc.and_then(|desc| desc.shape.get(axis).copied());
            rows.map_or(0, size)
        };
        (rows_of(self.call.query), rows_of(self.call.key))
    }

    /// Whether the lengths are those of packed sequences. A call that computes nothing has none.
    fn has_packed_lengths(&self) -> bool {
        matches!(self.lengths, Lengths::Packed { .. })
    }

    /// Packed sequences, unless the host runs them as a batch.
    pub(super) fn unequal(&self) -> Option<Lengths<'a>> {
        (self.has_packed_lengths() && !self.as_batch).then_some(self.lengths)
    }

    /// Query rows and keys of all sequences together, where they are packed.
    pub(super) fn sums(&self) -> Option<(i64, i64)> {
        self.has_packed_lengths().then(|| self.lengths.sums())
    }

    /// Where the rows and keys of each sequence are, in order.
    pub fn sequences(&self) -> impl Iterator<Item = Sequence> + 'a {
        self.lengths.sequences()
    }

    /// Whether rows after the last packed sequence are filled with 0. Without a mark for them, arrays that end with
    /// 0, they are not written.
    pub fn fills_tail(&self) -> bool {
        self.lengths.end_with_zero()
    }

    /// The keys that each row of a sequence sees, before a full mask hides some of them.
    pub fn geometry(&self, sequence: &Sequence) -> MaskGeometry {
        let (q_len, kv_len) = (sequence.q_len as u64, sequence.kv_len as u64);
        if self.mask == MaskKind::None {
            return MaskGeometry::full(q_len, kv_len);
        }
        if self.mode.reads_prefix() {
            let prefix = u64::try_from(self.prefix(sequence)).unwrap_or(0);
            return MaskGeometry::prefix(q_len, kv_len, prefix);
        }
        let (pre, next) = (self.call.pre_tokens, self.call.next_tokens);
        let mode = self.mode.of_sequence(self.cut_sequence == Some(sequence.index));
        MaskGeometry::new(mode, true, q_len, kv_len, pre, next)
    }

    /// Number of keys that every row of a sequence sees in modes 5 and 6. If packed sequences are run as a batch,
    /// those without rows have no entry.
    fn prefix(&self, sequence: &Sequence) -> i64 {
        let entry = match self.as_batch {
            true => sequence.q_first / size(self.q_rows).max(1),
            false => sequence.index,
        };
        let prefix = self.call.prefix.unwrap_or_default();
        prefix.get(entry).copied().unwrap_or(0)
    }

    /// The first key's position minus the first query's, for slopes: `kvStartIdx - qStartIdx`; 0 if only one of the
    /// arrays is given.
    pub fn key_offset(&self) -> i64 {
        let first = |indices: &[i64]| indices.first().copied().unwrap_or(0);
        match (self.call.q_start_idx, self.call.kv_start_idx) {
            (Some(query), Some(key)) => first(key).saturating_sub(first(query)),
            _ => 0,
        }
    }

    /// As [`FlashAttentionProblem::key_offset`] for one sequence: in mode 8 the arrays are those of sequence 0,
    /// whether it has rows or not, and the offset of every other sequence is 0.
    pub fn key_offset_of(&self, sequence: &Sequence) -> i64 {
        match self.mode == SparseMode::BandLeftUpCausal && sequence.index > 0 {
            true => 0,
            false => self.key_offset(),
        }
    }

    /// Number of bits that `dropMask` must have: one for each score of each head, as
    /// [`Sequence::scores`] locates them. Bit `k % 8`, the least significant first, of byte `k / 8` keeps the score if
    /// it is 1.
    pub fn drop_bits(&self) -> u64 {
        let bits = self.lengths.scores().saturating_mul(i128::from(self.heads));
        u64::try_from(bits).unwrap_or(u64::MAX)
    }

    /// Number of bytes in a `dropMask` of `bits` bits: the operator loads 16 bytes at once.
    pub const fn drop_mask_bytes(bits: u64) -> u64 {
        bits.div_ceil(128).saturating_mul(16)
    }
}
