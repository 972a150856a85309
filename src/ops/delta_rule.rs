//! What the operators of the gated delta rule share: sequences, states, and the tensors of a launch.

use std::sync::Arc;

use ascend_spec::ops::delta_rule::{DeltaRuleContents, DeltaRuleProblem};
use ascend_spec::{ContentFault as _, Rule, TensorDesc};

use crate::error::{Error, Result};
use crate::memory::Element;
use crate::ops::known_numbers::{KnownNumbers, NumbersCheck, narrow, numbers};
use crate::runtime::{Context, Device, ReplayCheck, Stream};
use crate::tensor::{AnyTensor, Tensor};

/// The tokens of each sequence of a call and, for [`RecurrentGatedDeltaRule`], the slots of its states in the pool.
///
/// The operators read these numbers on the device, where nothing checks them: a slot of -1 writes in front of the pool.
/// Made here, the host knows them: plans refuse numbers that lead elsewhere than to the sequence's own tokens and
/// states. Those of slots can be [overwritten](Self::overwrite), for the next step of captured launches. Cloning shares
/// the memory.
///
/// [`RecurrentGatedDeltaRule`]: crate::recurrent_delta_rule::RecurrentGatedDeltaRule
#[derive(Clone, Debug)]
pub struct DeltaSequences {
    /// Lengths, slots and accepted counts.
    numbers: KnownNumbers<DeltaCheck, 3>,
}

impl DeltaSequences {
    /// Sequences of these numbers of tokens, for [`ChunkGatedDeltaRule`]: one after the other, each with a state of its
    /// own.
    ///
    /// # Errors
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for no sequence, and numbers beyond INT32; otherwise as for
    /// [`Stream::upload`].
    ///
    /// [`ChunkGatedDeltaRule`]: crate::chunk_delta_rule::ChunkGatedDeltaRule
    pub fn of_lengths(stream: &Stream, lengths: &[usize]) -> Result<Self> {
        Self::new(stream, [numbers("lengths", lengths.iter().copied())?, Vec::new(), Vec::new()])
    }

    fn new(stream: &Stream, numbers: [Vec<i64>; 3]) -> Result<Self> {
        if numbers[0].is_empty() {
            return Err(nothing_to_compute("no lengths"));
        }
        Ok(Self { numbers: KnownNumbers::upload(stream, "sequences", numbers, narrow)? })
    }

    fn with_slots(stream: &Stream, [lengths, slots]: [Vec<i64>; 2]) -> Result<Self> {
        if slots.is_empty() && !lengths.is_empty() {
            return Err(nothing_to_compute("no slots"));
        }
        Self::new(stream, [lengths, slots, Vec::new()])
    }

    /// Sequences whose tokens write these slots of the pool: a row for each, with a slot for each of its tokens. A
    /// sequence goes on from the state in its first slot, unless [`accepted`](Self::accepted) names another: clear it
    /// before a request begins ([`DeltaStates::clear`]).
    ///
    /// # Errors
    /// As for [`of_lengths`](Self::of_lengths), for no token, and for slots beyond INT32.
    pub fn of_slots(stream: &Stream, slots: &[impl AsRef<[usize]>]) -> Result<Self> {
        Self::with_slots(stream, lengths_and_slots(slots)?)
    }

    /// `sequences` sequences of a call of `tokens` rows, none of which has a token yet: a launch computes nothing until
    /// they are [overwritten](Self::overwrite). For launches that are captured before the first step is known.
    ///
    /// # Errors
    /// As for [`of_slots`](Self::of_slots).
    pub fn without_tokens(stream: &Stream, sequences: usize, tokens: usize) -> Result<Self> {
        let zeros = |name, count: usize| {
            let mut zeros = Vec::new();
            let room = zeros.try_reserve_exact(count).is_ok() && i32::try_from(count).is_ok();
            zeros.resize(if room { count } else { 0 }, 0);
            room.then_some(zeros)
                .ok_or_else(|| Error::invalid(name, count, "numbers that memory can hold").fix("capture smaller steps"))
        };
        Self::with_slots(stream, [zeros("lengths", sequences)?, zeros("slots", tokens)?])
    }

    /// Waits for a stream, then replaces the slots, of as many sequences as there are: plans, and launches that were
    /// captured, read the new ones. A row may have fewer slots than before, or none: its sequence has as many tokens,
    /// which follow those of the sequence before. The operator leaves out sequences without tokens, and rows behind the
    /// last token: a [`launch`](crate::operation::Plan::launch) returns zeros there, and
    /// [`launch_into`](crate::operation::Plan::launch_into) leaves what was there. Other streams that use the sequences
    /// have to be waited for before.
    ///
    /// # Errors
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for another number of rows, more slots than the call has
    /// tokens, sequences of lengths alone, and those with accepted counts, which begin each row elsewhere;
    /// [`Error::Violation`] for what a plan refuses that was made of the sequences or of a clone of them, or a captured
    /// launch of such a plan, for as long as the plan or the graph is there. Nothing is replaced then.
    /// [`ARGUMENT_DEVICE`](crate::rules::ARGUMENT_DEVICE) for a stream of another device; as for
    /// [`Stream::synchronize`]. Where writing itself fails, the sequences are refused by plans, launches and replays
    /// until they are overwritten again. No other thread may queue work meanwhile that reads them.
    pub fn overwrite(&self, stream: &Stream, slots: &[impl AsRef<[usize]>]) -> Result<()> {
        let (Some(tensor), None) = (self.slots(), self.accepted_tokens()) else {
            let given =
                if self.accepted_tokens().is_some() { "sequences with accepted counts" } else { "lengths alone" };
            return Err(Error::invalid("sequences", given, "sequences of slots, without counts").fix(
                "make them by `DeltaSequences::of_slots`, and begin each row with the slot of its last accepted token",
            ));
        };
        let [lengths, mut named] = lengths_and_slots(slots)?;
        let (sequences, tokens) = (self.lengths().len(), tensor.len());
        if lengths.len() != sequences || named.len() > tokens {
            let given = format_args!("{} rows of {} slots", lengths.len(), named.len());
            let allowed = format_args!("{sequences} rows of at most {tokens} slots together, as there are");
            return Err(Error::invalid("slots", given, allowed)
                .fix("make sequences as large as the largest step, and leave rows of smaller ones empty"));
        }
        // Slots of no sequence, which nothing reads.
        named.resize(tokens, 0);
        self.numbers.overwrite(stream, [lengths, named, Vec::new()])
    }

    /// The sequences, each of which goes on behind this number of accepted tokens of the step before, of which the
    /// first counts: from the state in the slot that its token of this number names. The row of a sequence therefore
    /// begins with the slots of its row before, in their order. The states of the tokens that were not accepted are
    /// taken back by that; without counts a sequence goes on behind the first token of the step before.
    ///
    /// # Errors
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for another number of counts than of sequences, and for
    /// sequences without slots; otherwise as for [`Stream::upload`].
    pub fn accepted(self, stream: &Stream, counts: &[usize]) -> Result<Self> {
        let sequences = self.lengths().len();
        if counts.len() != sequences || self.slots().is_none() {
            let kind = if self.slots().is_some() { "slots" } else { "lengths alone" };
            let given = format_args!("{} counts for {sequences} sequences of {kind}", counts.len());
            return Err(Error::invalid("accepted", given, "a count for each sequence of slots")
                .fix("make sequences by `DeltaSequences::of_slots`, and counts from the same batch"));
        }
        let counts = numbers("accepted", counts.iter().copied())?;
        // Tensors of their own: clones of the sequences can be overwritten.
        let [lengths, slots] = self.numbers.read(|[lengths, slots, _]| [lengths.clone(), slots.clone()])?;
        Self::new(stream, [lengths, slots, counts])
    }

    /// Tokens of each sequence on the device, `[B]`. Only [`overwrite`](Self::overwrite) can write to them.
    pub fn lengths(&self) -> &Tensor<i32> {
        self.numbers.tensor(0)
    }

    /// The slot of each token on the device, `[T]`. Only [`overwrite`](Self::overwrite) can write to them.
    pub fn slots(&self) -> Option<&Tensor<i32>> {
        self.numbers.given(1)
    }

    /// Accepted tokens of each sequence on the device, `[B]`. Nothing can be written to them.
    pub fn accepted_tokens(&self) -> Option<&Tensor<i32>> {
        self.numbers.given(2)
    }

    /// The first of the last rows that belong to no token, if there are any, of a call of slots.
    pub(crate) fn first_unwritten(&self) -> Result<Option<usize>> {
        let rows = self.slots().map_or(0, |slots| slots.len());
        let tokens = self.numbers.read(|[lengths, ..]| lengths.iter().sum::<i64>())?;
        Ok(usize::try_from(tokens).ok().filter(|tokens| *tokens < rows))
    }

    /// The tensors as the arguments of a call: lengths, slots and accepted counts.
    pub(crate) fn each<P>(&self, parameters: [P; 3]) -> impl Iterator<Item = (P, &AnyTensor)> {
        self.numbers.each(parameters)
    }

    /// Refuses tensors that are not on this device, and sequences of another operator, which has slots or has not.
    pub(crate) fn on(&self, context: &Arc<Context>, has_slots: bool) -> Result<()> {
        if self.slots().is_some() != has_slots {
            let name = |slots: bool| if slots { "sequences of slots" } else { "sequences of lengths" };
            return Err(Error::invalid("sequences", name(!has_slots), name(has_slots)).fix(match has_slots {
                true => "make them by `DeltaSequences::of_slots`",
                false => "make them by `DeltaSequences::of_lengths`",
            }));
        }
        self.numbers.on(context)
    }

    /// Refuses by the rule numbers that lead elsewhere than to the sequence's own tokens and states, then by the lints
    /// that are not allowed: of a state of two sequences, or of tokens of no sequence and sequences without tokens.
    /// For as long as what it returns is kept, the numbers of each [overwrite](Self::overwrite) are checked, too.
    pub(crate) fn check(
        &self,
        problem: &DeltaRuleProblem,
        within: &'static Rule,
        lints: DeltaLints,
        allowed: &[&str],
    ) -> Result<Arc<dyn ReplayCheck>> {
        let allowed = allowed.iter().map(|&id| id.into()).collect();
        self.numbers.require(DeltaCheck { problem: *problem, within, lints, allowed })
    }
}

/// What a plan requires of the numbers.
#[derive(Clone, Debug, PartialEq)]
struct DeltaCheck {
    problem: DeltaRuleProblem,
    /// The rule of numbers that lead to the sequences' own tokens and states.
    within: &'static Rule,
    lints: DeltaLints,
    allowed: Vec<Box<str>>,
}

impl NumbersCheck<3> for DeltaCheck {
    fn check(&self, [lengths, slots, accepted]: &[Vec<i64>; 3]) -> Result<()> {
        let Self { problem, within, lints, allowed } = self;
        let contents = DeltaRuleContents { lengths, slots, accepted };
        problem.checked_contents(contents, within)?;
        let broken = match lints {
            DeltaLints::Recurrent { shared } => {
                let fault = problem.shared_slot(contents).or_else(|| problem.repeated_slot(contents));
                let fault = fault.map(|fault| fault.texts());
                [fault.map(|[given, allowed]| shared.broken(given, allowed)), None]
            }
            DeltaLints::Chunk(rules) => problem.unusual(lengths, *rules),
        };
        let mut broken = broken.into_iter().flatten();
        match broken.find(|lint| !allowed.iter().any(|id| **id == *lint.rule.id)) {
            Some(lint) => Err(lint.into()),
            None => Ok(()),
        }
    }
}

/// The lints of an operator about the numbers of its sequences.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum DeltaLints {
    Recurrent {
        /// A state of two sequences.
        shared: &'static Rule,
    },
    /// Tokens of no sequence, and sequences without tokens.
    Chunk([&'static Rule; 2]),
}

/// The lengths of rows of slots, and the slots of all.
fn lengths_and_slots(rows: &[impl AsRef<[usize]>]) -> Result<[Vec<i64>; 2]> {
    let lengths = numbers("lengths", rows.iter().map(|row| row.as_ref().len()))?;
    Ok([lengths, numbers("slots", rows.iter().flat_map(|row| row.as_ref()).copied())?])
}

/// States of the gated delta rule, `[slots, Nv, Dv, Dk]`: a row for each element of a value, and a column for each of a
/// key. Where `Dv` is `Dk` no shape tells a transposed state from a right one, and operators and engines differ: a
/// tensor becomes states by saying which axis is which. Cloning shares the memory.
#[derive(Clone, Debug)]
pub struct DeltaStates {
    tensor: AnyTensor,
}

impl DeltaStates {
    /// States of zeros, with which sequences begin, of `bf16` or of another type that the operator takes.
    ///
    /// # Errors
    /// As for [`Device::alloc_zeroed`]; [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for states whose elements
    /// cannot be counted.
    pub fn zeroed<S: Element>(
        device: &Device,
        slots: usize,
        heads: usize,
        value_dim: usize,
        key_dim: usize,
    ) -> Result<Self> {
        let shape = [slots, heads, value_dim, key_dim];
        let elements = shape.iter().try_fold(1usize, |product, axis| product.checked_mul(*axis)).ok_or_else(|| {
            Error::invalid("states", format_args!("{shape:?}"), "elements that can be counted").fix("give fewer slots")
        })?;
        Ok(Self::with_key_columns(&*Tensor::from_buffer(&device.alloc_zeroed::<S>(elements)?, shape)?))
    }

    /// Queues zeros for the states in some slots, with which requests begin: a slot keeps the state of the request that
    /// had it before. Allocates nothing.
    ///
    /// # Errors
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for slots that there are not; as for [`AnyTensor::clear`].
    pub fn clear(&self, stream: &Stream, slots: &[usize]) -> Result<()> {
        let count = self.tensor.shape().first().copied().unwrap_or(0);
        if let Some(slot) = slots.iter().find(|slot| **slot >= count) {
            return Err(Error::invalid("slots", slot, format_args!("below {count}, the states of the pool"))
                .fix("give slots of this pool"));
        }
        let rows = slots.iter().map(|&slot| self.tensor.narrow(0, slot..slot.saturating_add(1)));
        rows.collect::<Result<Vec<_>>>()?.iter().try_for_each(|row| row.clear(stream))
    }

    /// States in a tensor `[slots, Nv, Dv, Dk]`, whose last axis is that of the elements of a key, as CANN has them. A
    /// tensor `[slots, Nv, Dk, Dv]` is transposed before, by [`Tensor::permute`] of `[0, 1, 3, 2]` and a copy.
    pub fn with_key_columns(tensor: &AnyTensor) -> Self {
        Self { tensor: tensor.clone() }
    }

    /// The tensor, `[slots, Nv, Dv, Dk]`.
    pub fn tensor(&self) -> &AnyTensor {
        &self.tensor
    }
}

/// What a launch reads besides states: queries, keys and values, the part of each correction that is made, and decays.
#[derive(Clone, Copy, Debug)]
#[must_use = "a description of tensors does nothing until planned or launched"]
#[non_exhaustive]
pub struct DeltaTensors<'a, T: Element> {
    /// Queries, `[T, Nk, Dk]`, normalised.
    pub query: &'a Tensor<T>,
    /// Keys, `[T, Nk, Dk]`, normalised.
    pub key: &'a Tensor<T>,
    /// Values, `[T, Nv, Dv]`.
    pub value: &'a Tensor<T>,
    /// The part of each correction that is made, `[T, Nv]`.
    pub beta: &'a Tensor<T>,
    /// The logarithm of the decay of each head, `[T, Nv]`.
    pub g: Option<&'a Tensor<f32>>,
    /// The logarithm of the decay of each column of a state, `[T, Nv, Dk]`.
    pub gk: Option<&'a Tensor<f32>>,
}

impl<'a, T: Element> DeltaTensors<'a, T> {
    /// Queries and keys `[T, Nk, Dk]`, values `[T, Nv, Dv]`, and `beta`, `[T, Nv]`, of `bf16`. Queries and keys are
    /// normalised before: the operators do not.
    pub fn new((query, key, value): (&'a Tensor<T>, &'a Tensor<T>, &'a Tensor<T>), beta: &'a Tensor<T>) -> Self {
        Self { query, key, value, beta, g: None, gk: None }
    }

    /// Sets the logarithm of the decay of each head, `[T, Nv]`, at most 0. Without it nothing decays.
    pub fn g(mut self, g: &'a Tensor<f32>) -> Self {
        self.g = Some(g);
        self
    }

    /// Sets the logarithm of the decay of each column of a state, `[T, Nv, Dk]`, at most 0: that of Kimi delta
    /// attention. Only RecurrentGatedDeltaRule has it, from CANN 9.0 on.
    pub fn gk(mut self, gk: &'a Tensor<f32>) -> Self {
        self.gk = Some(gk);
        self
    }

    /// The tensor of each argument; `[query, key, value, beta, g, gk]` name them.
    pub(crate) fn each<P>(self, parameters: [P; 6]) -> impl Iterator<Item = (P, &'a AnyTensor)> {
        let tensors: [Option<&'a AnyTensor>; 6] = [
            Some(self.query),
            Some(self.key),
            Some(self.value),
            Some(self.beta),
            self.g.map(|tensor| &**tensor),
            self.gk.map(|tensor| &**tensor),
        ];
        let given = parameters.into_iter().zip(tensors);
        given.filter_map(|(parameter, tensor)| Some((parameter, tensor?)))
    }
}

/// Refuses outputs that memory cannot hold.
pub(crate) fn require_held(outputs: &[Option<TensorDesc>], value: &AnyTensor) -> Result<()> {
    match outputs.iter().all(|output| output.is_some_and(|output| output.byte_range().is_some())) {
        true => Ok(()),
        false => Err(Error::invalid("value", value.desc(), "rows whose outputs memory can hold")
            .fix("compute fewer tokens in a call")),
    }
}

/// The refusal of a call without sequences or tokens.
fn nothing_to_compute(given: &str) -> Error {
    Error::invalid("sequences", given, "at least one sequence with a token")
        .fix("leave the call out where there is nothing to compute")
}
