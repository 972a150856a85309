//! The maxima and sums of a launch's rows.

use std::fmt;
use std::sync::Arc;

use ascend_spec::TensorDesc;
use ascend_spec::ops::flash_attention_score::{InputLayout, Parameter, SoftmaxOrder};

use crate::error::{Error, Result};
use crate::memory::Element;
use crate::ops::operation::new_output;
use crate::runtime::{Context, LaunchQueue};
use crate::tensor::{AnyTensor, Tensor};

/// The maximum of each row's scores, and the sum of `exp(score - maximum)`: what the softmax over other keys goes on
/// from.
///
/// Only [`FlashAttention`](super::FlashAttention) and [`RingUpdate`](crate::ring::RingUpdate) make it, and it knows
/// what its tensors do not show: their order in memory, and where packed sequences end. Both tensors are FLOAT32
/// `[B, N, S, 8]`, for packed sequences `[T, N, 8]`, with eight equal numbers for a row.
///
/// A clone has the same device memory, and goes on describing what was computed when it was made: after a launch into
/// the original, or into the clone, use that value alone.
///
/// A row that sees no key and is corrected has the least FLOAT32 as its maximum and the largest as its sum; rows of a
/// packed sequence without keys have 0 and 0.
#[derive(Clone, Debug)]
pub struct SoftmaxState {
    max: Tensor<f32>,
    sum: Tensor<f32>,
    rows: StateRows,
    keyless: Keyless,
}

/// For each packed sequence whether it has rows and no keys; `None` if no sequence is so.
pub(crate) type Keyless = Option<Arc<[bool]>>;

/// Finds the sequences that have rows and no keys by where rows and keys end.
pub(super) fn keyless(ends: &[i64], key_ends: &[i64]) -> Keyless {
    let mut before = (0, 0);
    let sequences = ends.iter().zip(key_ends).map(|(&rows, &keys)| {
        let is_keyless = rows > before.0 && keys == before.1;
        before = (rows, keys);
        is_keyless
    });
    let sequences: Arc<[bool]> = sequences.collect();
    sequences.contains(&true).then_some(sequences)
}

/// The rows that a state describes, and their order in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct StateRows {
    pub(crate) layout: InputLayout,
    pub(crate) order: SoftmaxOrder,
    /// Ends of packed sequences.
    pub(crate) ends: Option<Arc<[i64]>>,
}

impl fmt::Display for StateRows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 8;
        write!(f, "layout {}, order {:?}", self.layout, self.order)?;
        match &self.ends {
            None => Ok(()),
            Some(ends) if ends.len() <= SHOWN => write!(f, ", sequences that end at {ends:?}"),
            Some(ends) => {
                write!(f, ", {} sequences that end at {:?} and so on", ends.len(), ends.get(..SHOWN).unwrap_or(ends))
            }
        }
    }
}

impl SoftmaxState {
    /// A state of this shape with unspecified numbers.
    pub(crate) fn empty(context: &Arc<Context>, desc: TensorDesc, rows: StateRows, keyless: Keyless) -> Result<Self> {
        Ok(Self {
            max: AnyTensor::empty(context, desc)?.typed()?,
            sum: AnyTensor::empty(context, desc)?.typed()?,
            rows,
            keyless,
        })
    }

    /// Maximum of each row's scores.
    pub fn max(&self) -> &Tensor<f32> {
        &self.max
    }

    /// Sum of each row's exponentials.
    pub fn sum(&self) -> &Tensor<f32> {
        &self.sum
    }

    /// The order of both tensors in memory.
    pub fn order(&self) -> SoftmaxOrder {
        self.rows.order
    }

    /// Axis order of the attention beside it.
    pub fn layout(&self) -> InputLayout {
        self.rows.layout
    }

    pub(crate) fn rows(&self) -> &StateRows {
        &self.rows
    }

    /// Notes what a launch is about to write into the state.
    pub(crate) fn rewrite(&mut self, rows: &StateRows, keyless: Keyless) {
        if self.rows != *rows {
            self.rows = rows.clone();
        }
        self.keyless = keyless;
    }

    /// Refuses a state that describes other rows or keyless sequences where replays will write it: a capture cannot
    /// change the description.
    pub(crate) fn admits(
        &self,
        queue: &impl LaunchQueue,
        argument: &'static str,
        rows: &StateRows,
        keyless: &Keyless,
    ) -> Result<()> {
        if queue.runs_now() || self.rows == *rows && self.keyless == *keyless {
            return Ok(());
        }
        Err(Error::not_as_planned(
            argument,
            format_args!("{}, keyless {:?}", self.rows, self.keyless),
            format_args!("{rows}, keyless {keyless:?}: an output of the plan's own"),
        ))
    }

    /// The packed sequences whose maximum and sum are 0, since they have no keys.
    pub(crate) fn keyless(&self) -> &Keyless {
        &self.keyless
    }
}

/// What a launch computes. Clones share device memory: see [`SoftmaxState`]. The memory into which a graph has captured
/// a launch is written by each replay: launch other plans into outputs of their own, since an output describes the
/// sequences of the last launch into it.
#[derive(Clone, Debug)]
pub struct FlashOutput<T: Element> {
    /// The attention output (`attentionOut`): the query's shape, with the value's head dimension.
    pub attention: Tensor<T>,
    /// Maximum and sum of each row (`softmaxMax`, `softmaxSum`).
    pub softmax: SoftmaxState,
}

/// The outputs of a planned call.
#[derive(Debug)]
pub(crate) struct PlannedOutput {
    pub(crate) attention: TensorDesc,
    /// Descriptor of the maxima, and of the sums.
    pub(crate) softmax: TensorDesc,
    pub(crate) rows: StateRows,
    pub(crate) keyless: Keyless,
}

impl PlannedOutput {
    /// New tensors with unspecified content.
    pub(crate) fn empty<T: Element>(&self, context: &Arc<Context>) -> Result<FlashOutput<T>> {
        Ok(FlashOutput {
            attention: new_output(context, Parameter::AttentionOut.name(), self.attention)?,
            softmax: SoftmaxState::empty(context, self.softmax, self.rows.clone(), self.keyless.clone())?,
        })
    }
}
