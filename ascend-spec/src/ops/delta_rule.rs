//! The gated delta rule: what the operators RecurrentGatedDeltaRule and ChunkGatedDeltaRule have in common.
//!
//! Each value head of a sequence has a state `S`, `[Dv, Dk]`. A token lets it decay by `exp(g)`, in each column also by
//! `exp(gk)`, corrects what it remembers of the token's key, `S += beta (v - S k) kᵀ`, and reads it by the token's
//! query, `out = scale S q`. Value head `h` has query and key of head `h / (Nv / Nk)`.
//!
//! Lengths, and the slots of states in a pool, are numbers on the device: [`DeltaRuleProblem::runs`] follows them, and
//! finds those that lead elsewhere.

use crate::allowed::{Checked, MultiplesOf, Named, Rank, has_shape};
use crate::content_fault::{ContentFault, check_faults, shown_by_texts};
use crate::{Rule, TensorDesc, Violation};
use std::collections::HashMap;

/// Most tokens of a sequence in a call of RecurrentGatedDeltaRule.
pub const MOST_TOKENS: i64 = 8;

/// A call of RecurrentGatedDeltaRule or ChunkGatedDeltaRule that holds every rule, resolved.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DeltaRuleProblem {
    /// Number of sequences, B.
    pub sequences: usize,
    /// Rows of the queries, T.
    pub tokens: usize,
    /// Heads of queries and keys, Nk.
    pub key_heads: usize,
    /// Heads of values and states, Nv.
    pub value_heads: usize,
    /// Elements of a query's and a key's head, Dk.
    pub key_dim: usize,
    /// Elements of a value's head, Dv.
    pub value_dim: usize,
    /// Factor of the output.
    pub scale: f32,
    /// States in the pool; `None` where each sequence has an initial state of its own.
    pub slots: Option<usize>,
    /// Whether the pool is read and written as if its elements lay one after the other, whatever its strides say.
    pub dense_state: bool,
    /// Whether the outputs are written to a copy that is thrown away.
    pub loses_out: bool,
    /// Whether a launch may leave the call's tensors.
    pub overruns: bool,
}

/// The numbers of a call that are known on the device alone; an absent tensor has none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeltaRuleContents<'a> {
    /// Tokens of each sequence.
    pub lengths: &'a [i64],
    /// The state that each token writes, by its number in the pool.
    pub slots: &'a [i64],
    /// Tokens of each sequence's step before that were accepted: the state of the last one is where it goes on.
    pub accepted: &'a [i64],
}

/// A sequence of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Its number.
    pub sequence: usize,
    /// Number of its first token.
    pub first: usize,
    /// Its tokens.
    pub tokens: usize,
    /// Where its state begins: a slot of the pool, or its own number.
    pub start: usize,
}

/// A number on the device that leads elsewhere than to the sequence's own tokens and states.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeltaRuleFault {
    /// A length is below 0, beyond the rows of the queries, or beyond what the operator computes at once.
    Length {
        /// Number of the sequence.
        sequence: usize,
        /// Its length.
        given: i64,
        /// The largest that would do.
        most: i64,
    },
    /// An accepted count is not that of one of the sequence's tokens.
    Accepted {
        /// Number of the sequence.
        sequence: usize,
        /// The count.
        given: i64,
        /// Tokens of the sequence.
        tokens: usize,
    },
    /// A token's state is not in the pool.
    NoSlot {
        /// Number of the token.
        token: usize,
        /// The slot.
        given: i64,
        /// Number of slots.
        slots: usize,
    },
    /// There are fewer slots than tokens, or fewer counts than sequences.
    Few {
        /// The tensor.
        tensor: &'static str,
        /// Its numbers.
        given: usize,
        /// As many as are needed at least.
        needed: usize,
    },
    /// Tokens of two sequences name one state.
    SharedSlot {
        /// The slot.
        slot: i64,
        /// Numbers of the sequences.
        sequences: [usize; 2],
    },
    /// Two tokens of a sequence name one state, which keeps that of the later one, and an accepted count chooses
    /// between them.
    RepeatedSlot {
        /// The slot.
        slot: i64,
        /// Number of the sequence.
        sequence: usize,
    },
}

impl DeltaRuleFault {
    /// The tensor that holds the number.
    pub fn tensor(&self) -> &'static str {
        match self {
            DeltaRuleFault::Length { .. } => "actualSeqLengths",
            DeltaRuleFault::Accepted { .. } => "numAcceptedTokens",
            DeltaRuleFault::NoSlot { .. } | DeltaRuleFault::SharedSlot { .. } | DeltaRuleFault::RepeatedSlot { .. } => {
                "ssmStateIndices"
            }
            DeltaRuleFault::Few { tensor, .. } => tensor,
        }
    }
}

impl ContentFault for DeltaRuleFault {
    fn texts(&self) -> [String; 2] {
        match self {
            DeltaRuleFault::Length { sequence, given, most } => {
                [format!("{given} tokens of sequence {sequence}"), format!("0 to {most}")]
            }
            DeltaRuleFault::Accepted { sequence, given, tokens } => [
                format!("{given} accepted tokens of sequence {sequence}"),
                format!("1 to {tokens}, as it names states for as many tokens"),
            ],
            DeltaRuleFault::NoSlot { token, given, slots } => {
                [format!("slot {given} of token {token}"), format!("0 to {}", slots.saturating_sub(1))]
            }
            DeltaRuleFault::Few { given, needed, .. } => [format!("{given} numbers"), format!("{needed} or more")],
            DeltaRuleFault::SharedSlot { slot, sequences: [one, other] } => {
                [format!("slot {slot} of sequences {one} and {other}"), "a slot for each sequence".to_owned()]
            }
            DeltaRuleFault::RepeatedSlot { slot, sequence } => [
                format!("slot {slot} of two tokens of sequence {sequence}, which has accepted tokens"),
                "a slot for each of its tokens".to_owned(),
            ],
        }
    }
}

shown_by_texts! { DeltaRuleFault }

impl DeltaRuleProblem {
    /// A call without tokens.
    pub(crate) const fn none() -> Self {
        Self {
            sequences: 0,
            tokens: 0,
            key_heads: 0,
            value_heads: 0,
            key_dim: 0,
            value_dim: 0,
            scale: 0.0,
            slots: None,
            dense_state: false,
            loses_out: false,
            overruns: false,
        }
    }

    /// Whether nothing is written.
    pub fn is_idle(&self) -> bool {
        self.tokens == 0 || self.sequences == 0
    }

    /// The key head of a value head.
    pub fn key_head(&self, value_head: usize) -> usize {
        value_head / (self.value_heads / self.key_heads.max(1)).max(1)
    }

    /// Follows the numbers on the device: each sequence with tokens, or the fault for which it is left out. What comes
    /// after a length that is wrong is left out, since it is not known where its tokens begin.
    pub fn runs<'a>(
        &'a self,
        contents: DeltaRuleContents<'a>,
    ) -> impl Iterator<Item = Result<Run, DeltaRuleFault>> + 'a {
        let mut first = 0;
        let mut lost = false;
        let lengths = contents.lengths.iter().take(self.sequences).enumerate();
        lengths.filter_map(move |(sequence, &given)| {
            if lost {
                return None;
            }
            let most = match self.slots {
                Some(_) => MOST_TOKENS.min((self.tokens - first) as i64),
                None => (self.tokens - first) as i64,
            };
            let Some(tokens) = usize::try_from(given).ok().filter(|_| given <= most) else {
                lost = true;
                return Some(Err(DeltaRuleFault::Length { sequence, given, most }));
            };
            let run = Run { sequence, first, tokens, start: sequence };
            first += tokens;
            match self.slots {
                _ if tokens == 0 => None,
                Some(slots) => Some(self.start(run, slots, &contents)),
                None => Some(Ok(run)),
            }
        })
    }

    /// The run with the slot of its first state.
    fn start(&self, run: Run, slots: usize, contents: &DeltaRuleContents<'_>) -> Result<Run, DeltaRuleFault> {
        let Run { sequence, first, tokens, .. } = run;
        let few = |tensor, given, needed| DeltaRuleFault::Few { tensor, given, needed };
        let Some(named) = contents.slots.get(first..first + tokens) else {
            return Err(few("ssmStateIndices", contents.slots.len(), first + tokens));
        };
        let outside = |given: i64| usize::try_from(given).map_or(true, |slot| slot >= slots);
        if let Some(at) = named.iter().position(|&given| outside(given)) {
            return Err(DeltaRuleFault::NoSlot { token: first + at, given: named[at], slots });
        }
        let accepted = match contents.accepted {
            // Without counts a sequence begins at its first slot.
            [] => 1,
            counts => *counts.get(sequence).ok_or_else(|| few("numAcceptedTokens", counts.len(), sequence + 1))?,
        };
        let last = usize::try_from(accepted).ok().and_then(|count| count.checked_sub(1));
        match last.and_then(|last| named.get(last)) {
            Some(&slot) => Ok(Run { start: slot as usize, ..run }),
            None => Err(DeltaRuleFault::Accepted { sequence, given: accepted, tokens }),
        }
    }

    /// Refuses by the rule a call whose numbers lead elsewhere than to its own tokens and states.
    pub fn checked_contents(&self, contents: DeltaRuleContents<'_>, rule: &'static Rule) -> Result<(), Violation> {
        check_faults(self.runs(contents).filter_map(Result::err), |_| Some(rule))
    }

    /// What is unusual about the lengths: by the first rule tokens of no sequence, by the second sequences without
    /// tokens.
    pub fn unusual(&self, lengths: &[i64], [left_out, no_tokens]: [&'static Rule; 2]) -> [Option<Violation>; 2] {
        let sum = lengths.iter().fold(0i64, |sum, length| sum.saturating_add((*length).max(0)));
        let tokens = self.tokens as i64;
        let empty = lengths.iter().position(|length| *length <= 0);
        [
            (sum < tokens).then(|| {
                left_out.broken(
                    format_args!("{tokens} tokens, {sum} in sequences"),
                    format_args!("lengths that sum up to {tokens}"),
                )
            }),
            empty.map(|sequence| no_tokens.broken(format_args!("no token of sequence {sequence}"), "1 or more")),
        ]
    }

    /// The first state that tokens of two sequences name: nothing orders the writes of one and the reads of the other.
    pub fn shared_slot(&self, contents: DeltaRuleContents<'_>) -> Option<DeltaRuleFault> {
        let mut owners = HashMap::new();
        for run in self.runs(contents).filter_map(Result::ok) {
            for &slot in contents.slots.get(run.first..run.first + run.tokens).unwrap_or(&[]) {
                let owner = *owners.entry(slot).or_insert(run.sequence);
                if owner != run.sequence {
                    return Some(DeltaRuleFault::SharedSlot { slot, sequences: [owner, run.sequence] });
                }
            }
        }
        None
    }

    /// The first state that two tokens of a sequence name, whose accepted count chooses between them. The operator
    /// takes it; it goes on from the state of the later one.
    pub fn repeated_slot(&self, contents: DeltaRuleContents<'_>) -> Option<DeltaRuleFault> {
        self.runs(contents).filter_map(Result::ok).find_map(|Run { sequence, first, tokens, .. }| {
            contents.accepted.get(sequence).filter(|count| **count > 1)?;
            let named = contents.slots.get(first..first + tokens)?;
            let again = (1..tokens).find(|&at| named[..at].contains(&named[at]))?;
            Some(DeltaRuleFault::RepeatedSlot { slot: named[again], sequence })
        })
    }
}

/// The rules of the shapes of an operator of the gated delta rule.
pub(crate) struct ShapeRules {
    pub(crate) rank: &'static Rule,
    pub(crate) heads: &'static Rule,
    pub(crate) dims: &'static Rule,
    pub(crate) shape: &'static Rule,
    /// Most heads, and most elements of one.
    pub(crate) most: [i64; 2],
}

/// The sizes of a call: T, Nk, Nv, Dk and Dv.
#[derive(Clone, Copy)]
pub(crate) struct DeltaRuleSizes {
    pub(crate) tokens: i64,
    pub(crate) key_heads: i64,
    pub(crate) value_heads: i64,
    pub(crate) key_dim: i64,
    pub(crate) value_dim: i64,
}

impl ShapeRules {
    /// The sizes that queries and values have, checked.
    pub(crate) fn sizes(&self, query: &TensorDesc, value: &TensorDesc) -> Result<DeltaRuleSizes, Violation> {
        for (name, desc) in [("query", query), ("value", value)] {
            self.rank.takes(Named(name, desc.shape), Rank(3))?;
        }
        let [most_heads, most_dim] = self.most;
        let sizes = DeltaRuleSizes {
            tokens: query.shape[0],
            key_heads: query.shape[1],
            value_heads: value.shape[1],
            key_dim: query.shape[2],
            value_dim: value.shape[2],
        };
        self.heads.takes(Named("key heads", sizes.key_heads), 1..=most_heads)?;
        self.heads.takes(Named("value heads", sizes.value_heads), 1..=most_heads)?;
        self.heads.takes(Named("value heads", sizes.value_heads), MultiplesOf(sizes.key_heads))?;
        self.dims.takes(Named("elements of a key", sizes.key_dim), 1..=most_dim)?;
        self.dims.takes(Named("elements of a value", sizes.value_dim), 1..=most_dim)?;
        Ok(sizes)
    }

    /// Checks that a tensor, if it is given, has this shape.
    pub(crate) fn is(&self, name: &str, desc: Option<&TensorDesc>, shape: &[i64]) -> Checked {
        has_shape([self.rank, self.shape], name, desc, shape)
    }
}
