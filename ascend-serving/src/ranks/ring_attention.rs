//! Attention of one long sequence whose rows are divided over ranks, with keys and values that go round.

use std::ops::Range;

use ascend_attention::comm::{Communicator, Message};
use ascend_attention::flash::{FlashAttention, FlashMask, FlashOutput, InputLayout};
use ascend_attention::ring::RingUpdate;
use ascend_attention::spec::DType;
use ascend_attention::{CausalOrigin, Element, Stream, Tensor, Violation};

use crate::backends::AttentionShape;
use crate::error::Result;
use crate::rules;

use super::context_attention::left;
use super::step_agreement::{
    ELEMENT_TYPE, KEY_ELEMENTS, KEY_HEADS, QUERY_HEADS, SCALE, Term, differing, gather, number,
};
use super::zigzag::zigzag;

/// What the ranks of a ring have in common.
const TERMS: [Term; 6] =
    [("tokens of the sequence", number), QUERY_HEADS, KEY_HEADS, KEY_ELEMENTS, ELEMENT_TYPE, SCALE];

/// One rank of a ring: causal attention of a sequence whose rows are divided over the ranks, each with their keys and
/// values, as in the training of long contexts.
///
/// The sequence is cut into two chunks for each rank. Rank `r` of `P` has chunk `r` and chunk `2 P - 1 - r` (zigzag),
/// so that all have as much to do: a late chunk sees more keys than an early one. Chunks differ by one row where the
/// length does not divide, and the last ones are empty in short sequences.
///
/// In each of `P` steps a rank attends to the keys and values that it has just got, by FlashAttentionScore, and merges
/// the result into what it has, by RingAttentionUpdate; meanwhile it passes them on to the next rank, on a stream of
/// its own. Only calls with visible keys are made. The host waits for what the stream has queued before, and for each
/// exchange. It is the forward pass alone.
///
/// Since CANN 8.1, on Atlas A2, A3 and Ascend 950, heads of a multiple of 64 elements.
///
/// ```
/// # fn main() -> ascend_serving::Result<()> {
/// # #[cfg(feature = "emulation")] {
/// use ascend_attention::comm::Communicator;
/// use ascend_attention::{Runtime, bf16};
/// use ascend_serving::{AttentionShape, RingAttention};
///
/// // One rank, which has every row; more come of `Communicator::all`, each on a thread of its own.
/// let rank = Communicator::all(&[Runtime::emulated()?.device(0)?])?.remove(0);
/// let stream = rank.device().stream()?;
/// let mut ring = RingAttention::new(rank, AttentionShape::new(2, 1, 64))?;
/// assert_eq!(ring.rows(0, 9), [0..5, 5..9]);
/// let query = stream.upload(&[bf16::ONE; 9 * 2 * 64], [9, 2, 64])?;
/// let key = stream.upload(&[bf16::ONE; 9 * 64], [9, 1, 64])?;
/// let output = ring.forward(&stream, 9, (&query, &key, &key))?;
/// assert_eq!(output.download(&stream)?, [bf16::ONE; 9 * 2 * 64]);
/// # }
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct RingAttention {
    /// `None` once the rank has left.
    communicator: Option<Communicator>,
    rank: usize,
    ranks: usize,
    shape: AttentionShape,
    /// Where keys and values go round.
    ring: Stream,
}

/// The keys and values of a rank, `[rows, Nkv, D]`, those of its first chunk in front.
#[derive(Clone, Debug)]
struct Block<T: Element> {
    key: Tensor<T>,
    value: Tensor<T>,
}

impl RingAttention {
    /// The ring of the communicator's ranks.
    ///
    /// # Errors
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) as for [`AttentionShape::check`],
    /// [`OPTION_SOFT_CAP`](crate::rules::OPTION_SOFT_CAP) for heads with a cap; as for
    /// [`Device::stream`](ascend_attention::Device::stream).
    pub fn new(communicator: Communicator, shape: AttentionShape) -> Result<Self> {
        shape.check()?;
        shape.check_no_soft_cap("FlashAttentionScore", "attend by `ContextAttention`")?;
        let ring = communicator.device().stream()?;
        let (rank, ranks) = (communicator.rank(), communicator.size());
        Ok(Self { communicator: Some(communicator), rank, ranks, shape, ring })
    }

    /// The rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// The rows of a sequence of `tokens` tokens that a rank has, of its two chunks. None for a rank that does not
    /// exist.
    pub fn rows(&self, rank: usize, tokens: usize) -> [Range<usize>; 2] {
        zigzag(self.ranks, rank, tokens)
    }

    /// The number of rows of a rank's first chunk, and of both.
    fn sizes(&self, rank: usize, tokens: usize) -> [usize; 2] {
        let [first, second] = self.rows(rank, tokens).map(|rows| rows.len());
        [first, first + second]
    }

    /// Queues the attention of the rank's [rows](Self::rows) of a sequence of `tokens` tokens, the same number on every
    /// rank: query `[rows, N, D]`, key and value `[rows, Nkv, D]`, those of the first chunk in front; returns
    /// `[rows, N, D]`. Every rank calls it, on a thread of its own.
    ///
    /// # Errors
    /// [`RANKS_LEFT`](crate::rules::RANKS_LEFT) once the rank has left its communicator;
    /// [`ARGUMENT_DEVICE`](crate::rules::ARGUMENT_DEVICE), and [`STEP_TOKENS`](crate::rules::STEP_TOKENS) or
    /// [`STEP_HEADS`](crate::rules::STEP_HEADS) for tensors of other shapes;
    /// [`RANKS_BATCH`](crate::rules::RANKS_BATCH) on every rank where ranks differ in tokens, heads, element type or
    /// scale; [`Error::Capturing`](ascend_attention::Error::Capturing) on a thread that captures a graph. Nothing was
    /// computed then, and the call can be repeated. Where one rank alone is refused, the others wait for it until it
    /// calls again or is dropped. Later errors, as for planning the calls, of launches and of HCCL: the rank has left,
    /// and the other ranks fail as for [`ContextAttention`](crate::ContextAttention).
    pub fn forward<T: Element>(
        &mut self,
        stream: &Stream,
        tokens: usize,
        (query, key, value): (&Tensor<T>, &Tensor<T>, &Tensor<T>),
    ) -> Result<Tensor<T>> {
        self.admits(stream, tokens, [query, key, value])?;
        let Some(mut communicator) = self.communicator.take() else {
            return Err(left(self.rank).into());
        };
        // Whether the other ranks may have come further, so that the rank leaves after an error.
        let mut exchanged = false;
        let outcome = match self.difference(&mut communicator, tokens, T::DTYPE, &mut exchanged) {
            Err(error) => Err(error),
            Ok(Some(difference)) => {
                exchanged = false;
                Err(difference.into())
            }
            Ok(None) => {
                let block = Block { key: key.clone(), value: value.clone() };
                self.go_round(&mut communicator, stream, tokens, (query, block))
            }
        };
        self.communicator = (outcome.is_ok() || !exchanged).then_some(communicator);
        outcome
    }

    /// Refuses tensors of other devices, rows or heads than those of the rank.
    fn admits<T: Element>(&self, stream: &Stream, tokens: usize, tensors: [&Tensor<T>; 3]) -> Result<()> {
        let AttentionShape { heads, kv_heads, head_dim, .. } = self.shape;
        stream.check_device("stream", self.ring.device())?;
        let rows = self.sizes(self.rank, tokens)[1];
        let heads = [("query", heads), ("key", kv_heads), ("value", kv_heads)];
        for ((name, heads), tensor) in heads.into_iter().zip(tensors) {
            tensor.check_device(name, stream.device())?;
            let wanted = [rows, heads, head_dim];
            if tensor.shape() != wanted || !tensor.is_contiguous() {
                let rule = if tensor.shape().first() == Some(&rows) { &rules::STEP_HEADS } else { &rules::STEP_TOKENS };
                return Err(Violation::new(
                    rule,
                    format_args!("{name} {}", tensor.desc()),
                    format_args!("{wanted:?}, contiguous"),
                    "bring the rows that `RingAttention::rows` says of the rank, behind each other",
                )
                .into());
            }
        }
        Ok(())
    }

    /// What the ranks differ in, the same on every rank. Waits for the ring.
    fn difference(
        &self,
        communicator: &mut Communicator,
        tokens: usize,
        dtype: DType,
        exchanged: &mut bool,
    ) -> Result<Option<Violation>> {
        let AttentionShape { heads, kv_heads, head_dim, scale, .. } = self.shape;
        let [tokens, heads, kv_heads, head_dim] = [tokens, heads, kv_heads, head_dim].map(|number| number as i64);
        let own = [tokens, heads, kv_heads, head_dim, dtype.acl().into(), scale.to_bits().cast_signed()];
        let all = gather(communicator, &self.ring, &own, exchanged)?;
        Ok(TERMS.into_iter().zip(own).enumerate().find_map(|(at, (term, own))| {
            let values: Vec<i64> = all.iter().skip(at).step_by(TERMS.len()).copied().collect();
            let differ = values.iter().any(|value| *value != own);
            let fix = "give all ranks the same sequence, and make their rings alike";
            differ.then(|| differing(term, "", &values, fix))
        }))
    }

    fn go_round<T: Element>(
        &self,
        communicator: &mut Communicator,
        stream: &Stream,
        tokens: usize,
        (query, mut block): (&Tensor<T>, Block<T>),
    ) -> Result<Tensor<T>> {
        let [first, rows] = self.sizes(self.rank, tokens);
        let output = Tensor::empty(stream.device(), query.shape())?;
        let mut merged: [Option<FlashOutput<T>>; 2] = [None, None];
        self.ring.wait_event(&stream.record_event()?)?;
        for step in 0..self.ranks {
            let source = (self.rank + self.ranks - step) % self.ranks;
            for (chunk, rows) in [0..first, first..rows].into_iter().enumerate() {
                let keys = self.keys(chunk, source, tokens);
                if rows.is_empty() || keys == 0 {
                    continue;
                }
                let own = query.narrow(0, rows)?;
                let (key, value) = (block.key.narrow(0, 0..keys)?, block.value.narrow(0, 0..keys)?);
                let attended = self.attend(stream, source == self.rank, (&own, &key, &value))?;
                merged[chunk] = Some(match merged[chunk].take() {
                    None => attended,
                    Some(before) => {
                        RingUpdate::new().plan(stream, (&before, &attended))?.launch(stream, (&before, &attended))?
                    }
                });
            }
            // The calls go on meanwhile. An exchange that fails does not fail their stream, so that the host waits for
            // it before anything reads what came.
            if step + 1 < self.ranks {
                block = self.pass_on(communicator, stream, tokens, (source, &block))?;
                self.ring.synchronize()?;
            }
        }
        for (rows, merged) in [0..first, first..rows].into_iter().zip(&merged) {
            if let Some(merged) = merged {
                output.narrow(0, rows)?.copy_from(stream, &merged.attention)?;
            }
        }
        Ok(output)
    }

    /// The number of keys of a rank, from its first on, that a chunk of this rank sees: causally where they are its
    /// own.
    fn keys(&self, chunk: usize, source: usize, tokens: usize) -> usize {
        let [first, both] = self.sizes(source, tokens);
        match (chunk, source.cmp(&self.rank)) {
            (0, std::cmp::Ordering::Greater) => 0,
            (0, _) | (_, std::cmp::Ordering::Less) => first,
            _ => both,
        }
    }

    /// Queues the exchange of a block with the neighbours, and returns the one that comes.
    fn pass_on<T: Element>(
        &self,
        communicator: &mut Communicator,
        stream: &Stream,
        tokens: usize,
        (source, block): (usize, &Block<T>),
    ) -> Result<Block<T>> {
        let (to, from) = ((self.rank + 1) % self.ranks, (self.rank + self.ranks - 1) % self.ranks);
        let coming = self.sizes((source + self.ranks - 1) % self.ranks, tokens)[1];
        let AttentionShape { kv_heads, head_dim, .. } = self.shape;
        let empty = || Tensor::empty(stream.device(), [coming, kv_heads, head_dim]);
        let next = Block { key: empty()?, value: empty()? };
        let sends = [&block.key, &block.value].map(|tensor| Message::Send { tensor, to });
        let receives = [&next.key, &next.value].map(|tensor| Message::Recv { tensor, from });
        let is_sent = |message: &Message<'_>| match message {
            Message::Send { tensor, .. } | Message::Recv { tensor, .. } => !tensor.is_empty(),
        };
        let messages: Vec<Message<'_>> = sends.into_iter().chain(receives).filter(is_sent).collect();
        if !messages.is_empty() {
            communicator.batch(&self.ring, &messages)?;
        }
        Ok(next)
    }

    /// Queues a call over some keys, all of which are visible, or causally those of the rank itself.
    fn attend<T: Element>(
        &self,
        stream: &Stream,
        causal: bool,
        inputs: (&Tensor<T>, &Tensor<T>, &Tensor<T>),
    ) -> Result<FlashOutput<T>> {
        let rows = |tensor: &Tensor<T>| tensor.shape().first().copied().unwrap_or(0);
        let masks = stream.device().masks();
        let mask = match causal {
            true => FlashMask::causal(&masks, CausalOrigin::RightDown)?,
            false => FlashMask::none(),
        };
        let call = FlashAttention::new(InputLayout::Tnd).heads(self.shape.heads).scale(self.shape.scale).mask(mask);
        let call = call.actual_seq_lengths([rows(inputs.0)]).actual_seq_lengths_kv([rows(inputs.1)]);
        Ok(call.plan(inputs)?.launch(stream, inputs)?)
    }
}
