//! What a call reads, layer by layer.

use std::fmt;
use std::marker::PhantomData;

use ascend_spec::ops::flash_attention_score::{Argument, FlashAttentionCall, FlashAttentionProblem, Parameter as P};

use crate::error::{Error, Result};
use crate::memory::Element;
use crate::operator::Tensors;
use crate::tensor::{AnyTensor, Tensor};

use super::{Dropout, PositionBias};

/// The tensors of a call that differ from layer to layer, or from step to step.
///
/// One value describes a call to [`plan`](super::FlashAttention::plan) and is what
/// [`launch`](crate::operation::Plan::launch) reads: a launch provides exactly what its plan was made with, each tensor
/// of the planned shape and element type, at any address. It borrows the tensors and is cheap to make and copy. `T` is
/// the element type of query and output.
///
/// Calls of query, key and value alone need no name for them: both take the tuple `(&query, &key, &value)`.
#[derive(Clone, Copy)]
#[must_use = "a description of tensors does nothing until planned or launched"]
pub struct FlashInputs<'a, T> {
    tensors: FlashTensors<'a>,
    output: PhantomData<T>,
}

impl<'a, T: Element> FlashInputs<'a, T> {
    /// Query, key and value, in the order of the call's layout. Element types are checked when the call is planned.
    pub fn new(query: &'a Tensor<T>, key: &'a AnyTensor, value: &'a AnyTensor) -> Self {
        Self::of_any(query, key, value)
    }

    /// As [`new`](Self::new), but for a query whose element type is known at run time. The output's has to be named:
    /// `FlashInputs::<f16>::of_any`.
    pub fn of_any(query: &'a AnyTensor, key: &'a AnyTensor, value: &'a AnyTensor) -> Self {
        Self {
            tensors: FlashTensors { query, key, value, rope: None, bias: None, dropout: None, sink: None },
            output: PhantomData,
        }
    }

    /// The rotary parts of query and key, whose products are added to the scores (`queryRope`, `keyRope`): packed
    /// sequences of BF16, shaped as query and key but for the head dimension.
    ///
    /// Since V3 of the operator for packed sequences, after CANN 8.1.
    pub fn rope<R: Element>(mut self, query_rope: &'a Tensor<R>, key_rope: &'a Tensor<R>) -> Self {
        self.tensors.rope = Some([query_rope, key_rope]);
        self
    }

    /// Position bias.
    pub fn bias(mut self, bias: PositionBias<'a>) -> Self {
        self.tensors.bias = Some(bias);
        self
    }

    /// Which probabilities are dropped. A launch may use another mask of the same size and share.
    pub fn dropout(mut self, dropout: &'a Dropout) -> Self {
        self.tensors.dropout = Some(dropout);
        self
    }

    /// One more logit for each head, in the maximum and the denominator of the softmax but without a value (`sink`):
    /// FLOAT32 `[N]`.
    ///
    /// Since V3 of the operator, V5 for packed sequences, CANN 8.5.
    pub fn sink(mut self, sink: &'a Tensor<f32>) -> Self {
        self.tensors.sink = Some(sink);
        self
    }

    /// The tensors without the output's type.
    #[inline]
    pub(super) fn tensors(&self) -> FlashTensors<'a> {
        self.tensors
    }
}

impl<'a, T: Element> From<(&'a Tensor<T>, &'a Tensor<T>, &'a Tensor<T>)> for FlashInputs<'a, T> {
    /// Query, key and value.
    #[inline]
    fn from((query, key, value): (&'a Tensor<T>, &'a Tensor<T>, &'a Tensor<T>)) -> Self {
        Self::new(query, key, value)
    }
}

impl<'a, T: Element> From<&FlashInputs<'a, T>> for FlashInputs<'a, T> {
    #[inline]
    fn from(inputs: &FlashInputs<'a, T>) -> Self {
        *inputs
    }
}

impl<T> fmt::Debug for FlashInputs<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("FlashInputs").field(&self.tensors).finish()
    }
}

/// The tensors of [`FlashInputs`], whatever the output's element type.
#[derive(Clone, Copy, Debug)]
pub(super) struct FlashTensors<'a> {
    query: &'a AnyTensor,
    key: &'a AnyTensor,
    value: &'a AnyTensor,
    rope: Option<[&'a AnyTensor; 2]>,
    bias: Option<PositionBias<'a>>,
    dropout: Option<&'a Dropout>,
    sink: Option<&'a AnyTensor>,
}

impl<'a> FlashTensors<'a> {
    pub(super) fn query(&self) -> &'a AnyTensor {
        self.query
    }

    /// The attributes that come with the tensors.
    #[inline]
    pub(super) fn features(&self) -> Features {
        Features {
            pse_type: self.bias.map_or(FlashAttentionCall::DEFAULT_PSE_TYPE, |bias| bias.acl()),
            starts: self.bias.and_then(|bias| bias.starts()),
            keep_prob: self.dropout.map_or(1.0, Dropout::keep_prob),
            scores: self.dropout.and_then(Dropout::scores),
        }
    }

    /// Visits every tensor.
    #[inline]
    pub(super) fn visit(&self, mut visit: impl FnMut(Argument, &'a AnyTensor) -> Result<()>) -> Result<()> {
        visit(P::Query.into(), self.query)?;
        visit(P::Key.into(), self.key)?;
        visit(P::Value.into(), self.value)?;
        if let Some(bias) = self.bias {
            visit(P::RealShift.into(), bias.tensor())?;
        }
        if let Some(dropout) = self.dropout {
            visit(P::DropMask.into(), dropout.mask())?;
        }
        if let Some([query, key]) = self.rope {
            visit(P::QueryRope.into(), query)?;
            visit(P::KeyRope.into(), key)?;
        }
        match self.sink {
            Some(sink) => visit(P::Sink.into(), sink),
            None => Ok(()),
        }
    }
}

impl Tensors<P> for FlashTensors<'_> {
    fn each<'t>(&'t self, visit: impl FnMut(Argument, &'t AnyTensor) -> Result<()>) -> Result<()> {
        self.visit(visit)
    }
}

/// Attributes that come with [`FlashInputs`]. They are part of a plan.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Features {
    pse_type: i64,
    /// First places of query and key.
    starts: Option<[i64; 2]>,
    keep_prob: f64,
    /// Number of scores that the dropout was made for, if it is known.
    scores: Option<u64>,
}

impl Features {
    /// Refuses a dropout that was made for another number of scores than the call has.
    pub(super) fn of_scores(self, problem: &FlashAttentionProblem<'_>) -> Result<Self> {
        if let Some(scores) = self.scores {
            problem.admits_drop_bits(scores)?;
        }
        Ok(Self { scores: Some(problem.drop_bits()), ..self })
    }

    /// Writes the attributes into a call.
    pub(super) fn describe<'c>(&'c self, call: &mut FlashAttentionCall<'c>) {
        call.pse_type = self.pse_type;
        call.keep_prob = self.keep_prob;
        if let Some([query, key]) = &self.starts {
            call.q_start_idx = Some(std::slice::from_ref(query));
            call.kv_start_idx = Some(std::slice::from_ref(key));
        }
    }

    /// Refuses the attributes of a launch that are not the planned ones.
    #[inline]
    pub(super) fn are_as_planned(&self, planned: &Self) -> Result<()> {
        let scores = self.scores.or(planned.scores);
        if (Self { scores, ..*self }) == *planned {
            return Ok(());
        }
        Err(Error::not_as_planned("inputs", self, planned))
    }
}

impl fmt::Display for Features {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "a position bias of type {}, first places {:?}, keep_prob {}",
            self.pse_type, self.starts, self.keep_prob
        )?;
        match self.scores {
            Some(scores) => write!(f, ", {scores} scores"),
            None => Ok(()),
        }
    }
}
