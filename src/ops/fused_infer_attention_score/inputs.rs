//! What a call reads and writes, layer by layer.

use std::fmt;
use std::marker::PhantomData;

use ascend_spec::ops::fused_infer_attention_score::{Argument, FiaCall, Parameter as P};

use crate::error::{Error, Result};
use crate::memory::Element;
use crate::operator::Tensors;
use crate::ops::operation::outputs;
use crate::tensor::{AnyTensor, Tensor};

use super::block_table::BlockTable;
use super::contents::GivenContents;
use super::contents::PaddingSize;
use super::pse_shift::PseShift;
use super::quantisation::{Modes, Quantisation};
use super::shared_prefix::SharedPrefix;

/// What a launch computes.
#[derive(Clone, Debug)]
pub struct Output<T: Element> {
    /// The attention output (`attentionOut`), in the output order of the layout.
    pub attention: Tensor<T>,
    /// The log-sum-exp of each row's scores, `[B, N, Sq, 1]` (`softmaxLse`), if requested. A row that saw no key has
    /// +inf.
    pub softmax_lse: Option<Tensor<f32>>,
}

outputs! { Output { attention, softmax_lse } }

impl<T: Element> From<Tensor<T>> for Output<T> {
    /// An output without log-sum-exps.
    fn from(attention: Tensor<T>) -> Self {
        Self { attention, softmax_lse: None }
    }
}

/// The tensors of a call or a launch, and what comes with them.
pub(crate) trait Bindings: Tensors<P> {
    /// The attributes that came with the tensors; none where all attributes are the plan's.
    fn features(&self) -> Option<Features>;

    /// The tensors whose elements are positions in others; none where the caller has checked them.
    fn contents(&self) -> GivenContents<'_>;
}

/// The tensors of a call that differ from layer to layer, or from step to step.
///
/// One value describes a call to [`plan`](crate::FusedInferAttention::plan) and is what
/// [`launch`](crate::operation::Plan::launch) reads: a launch provides exactly what its plan was made with, each tensor
/// of the planned shape and element type, at any address. It borrows the tensors and is cheap to make and copy. `T` is
/// the element type of the output that a launch makes or writes: the query's, or what
/// [`output_type`](Self::output_type) names.
///
/// Calls of query, key and value alone need no name for them: both take the tuple `(&query, &key, &value)`.
///
/// ```
/// use ascend_attention::attention::Inputs;
/// use ascend_attention::{CausalOrigin, FusedInferAttention, Layout, Runtime, bf16};
///
/// # fn main() -> ascend_attention::Result<()> {
/// # #[cfg(feature = "emulation")] {
/// let device = Runtime::emulated()?.device(0)?;
/// let stream = device.stream()?;
/// let ones = |shape: [usize; 3]| stream.upload(&vec![bf16::ONE; shape.iter().product()], shape);
///
/// // Two packed sequences of 3 and 5 tokens, four heads, with rotary parts apart.
/// let (query, key, value) = (ones([8, 4, 128])?, ones([8, 4, 128])?, ones([8, 4, 128])?);
/// let (query_rope, key_rope) = (ones([8, 4, 64])?, ones([8, 4, 64])?);
/// let inputs = Inputs::new(&query, &key, &value).rope(&query_rope, &key_rope);
/// let plan = FusedInferAttention::new(Layout::Tnd)
///     .heads(4)
///     .kv_heads(4)
///     .scale(1.0 / 192f64.sqrt())
///     .actual_seq_lengths([3, 8])
///     .actual_seq_lengths_kv([3, 8])
///     .mask(device.masks().causal(CausalOrigin::RightDown)?)
///     .plan(inputs)?;
/// let output = plan.launch(&stream, inputs)?;
/// assert_eq!(output.attention.download(&stream)?, vec![bf16::ONE; 8 * 4 * 128]);
/// # }
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy)]
#[must_use = "a description of tensors does nothing until planned or launched"]
pub struct Inputs<'a, T> {
    tensors: CallTensors<'a>,
    output: PhantomData<T>,
}

impl<'a, T: Element> Inputs<'a, T> {
    /// Query, key and value, in the order of the call's layout. Element types are checked when the call is planned.
    pub fn new(query: &'a Tensor<T>, key: &'a AnyTensor, value: &'a AnyTensor) -> Self {
        Self::of_any(query, key, value)
    }

    /// As [`new`](Self::new), but for a query whose element type is known at run time. The output's has to be named:
    /// `Inputs::<f16>::of_any`.
    pub fn of_any(query: &'a AnyTensor, key: &'a AnyTensor, value: &'a AnyTensor) -> Self {
        Self::with(query, List::One(key), List::One(value))
    }

    /// A query of several sequences, with a tensor of keys and one of values for each.
    ///
    /// Since CANN 8.1.
    pub fn lists(query: &'a Tensor<T>, key: &'a [&'a AnyTensor], value: &'a [&'a AnyTensor]) -> Self {
        Self::lists_of_any(query, key, value)
    }

    /// As [`lists`](Self::lists), but for a query whose element type is known at run time.
    pub fn lists_of_any(query: &'a AnyTensor, key: &'a [&'a AnyTensor], value: &'a [&'a AnyTensor]) -> Self {
        Self::with(query, List::Many(key), List::Many(value))
    }

    fn with(query: &'a AnyTensor, key: List<'a>, value: List<'a>) -> Self {
        Self {
            tensors: CallTensors {
                query,
                key,
                value,
                pse_shift: None,
                block_table: None,
                query_padding: None,
                kv_padding: None,
                shared_prefix: None,
                rope: None,
                learnable_sink: None,
                quantisation: Quantisation::None,
            },
            output: PhantomData,
        }
    }

    /// These tensors, for a call whose output has elements `U`, not the query's: where the query is quantised, or
    /// the output is, as in the example of [`Quantisation`].
    pub fn output_type<U: Element>(self) -> Inputs<'a, U> {
        Inputs { tensors: self.tensors, output: PhantomData }
    }

    /// Key and value are a paged cache, whose blocks the table names (`blockTable`, `blockSize`).
    ///
    /// Since CANN 8.1.
    pub fn paged(mut self, block_table: &'a BlockTable) -> Self {
        self.tensors.block_table = Some(block_table);
        self
    }

    /// The rotary parts of query and key, whose products are added to the scores (`queryRope`, `keyRope`): shaped as
    /// query and key, with 64 for the head dimension. FLOAT16 or BF16.
    ///
    /// Since V3 of the operator, CANN 8.1.
    pub fn rope<R: Element>(self, query_rope: &'a Tensor<R>, key_rope: &'a Tensor<R>) -> Self {
        self.rope_of_any(query_rope, key_rope)
    }

    /// As [`rope`](Self::rope), but for tensors whose element type is known at run time.
    pub fn rope_of_any(mut self, query_rope: &'a AnyTensor, key_rope: &'a AnyTensor) -> Self {
        self.tensors.rope = Some([query_rope, key_rope]);
        self
    }

    /// Keys and values that all sequences begin with.
    pub fn shared_prefix(mut self, prefix: SharedPrefix<'a>) -> Self {
        self.tensors.shared_prefix = Some(prefix);
        self
    }

    /// Position bias.
    pub fn pse_shift(mut self, pse_shift: PseShift<'a>) -> Self {
        self.tensors.pse_shift = Some(pse_shift);
        self
    }

    /// One more logit for each head, in the maximum and the denominator of the softmax but without a value
    /// (`learnableSink`): `[N]`, of BF16; of the query's type from CANN 9.0 on where it is packed, and on Ascend 950.
    ///
    /// Since V4 of the operator, CANN 8.5, in every layout.
    pub fn learnable_sink<S: Element>(self, sink: &'a Tensor<S>) -> Self {
        self.learnable_sink_of_any(sink)
    }

    /// As [`learnable_sink`](Self::learnable_sink), but for a tensor whose element type is known at run time.
    pub fn learnable_sink_of_any(mut self, sink: &'a AnyTensor) -> Self {
        self.tensors.learnable_sink = Some(sink);
        self
    }

    /// The query's rows are at the end of each sequence, before `padding` unused ones (`queryPaddingSize`). Needs
    /// [`actual_seq_lengths`](crate::FusedInferAttention::actual_seq_lengths).
    ///
    /// Since CANN 8.1.
    pub fn query_padding(mut self, padding: &'a PaddingSize) -> Self {
        self.tensors.query_padding = Some(padding);
        self
    }

    /// The rows of key and value are at the end of each sequence, before `padding` unused ones (`kvPaddingSize`).
    /// Needs [`actual_seq_lengths_kv`](crate::FusedInferAttention::actual_seq_lengths_kv).
    ///
    /// Since CANN 8.1.
    pub fn kv_padding(mut self, padding: &'a PaddingSize) -> Self {
        self.tensors.kv_padding = Some(padding);
        self
    }

    /// Which tensors are integers, and their scales.
    pub fn quantisation(mut self, quantisation: Quantisation<'a>) -> Self {
        self.tensors.quantisation = quantisation;
        self
    }

    /// The tensors without the output's type.
    #[inline]
    pub(crate) fn tensors(&self) -> CallTensors<'a> {
        self.tensors
    }
}

impl<'a, T: Element> From<(&'a Tensor<T>, &'a Tensor<T>, &'a Tensor<T>)> for Inputs<'a, T> {
    /// Query, key and value.
    #[inline]
    fn from((query, key, value): (&'a Tensor<T>, &'a Tensor<T>, &'a Tensor<T>)) -> Self {
        Self::new(query, key, value)
    }
}

impl<'a, T: Element> From<&Inputs<'a, T>> for Inputs<'a, T> {
    #[inline]
    fn from(inputs: &Inputs<'a, T>) -> Self {
        *inputs
    }
}

impl<T> fmt::Debug for Inputs<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Inputs").field(&self.tensors).finish()
    }
}

/// The tensors of [`Inputs`], whatever the output's element type.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CallTensors<'a> {
    query: &'a AnyTensor,
    key: List<'a>,
    value: List<'a>,
    pse_shift: Option<PseShift<'a>>,
    block_table: Option<&'a BlockTable>,
    query_padding: Option<&'a PaddingSize>,
    kv_padding: Option<&'a PaddingSize>,
    shared_prefix: Option<SharedPrefix<'a>>,
    rope: Option<[&'a AnyTensor; 2]>,
    learnable_sink: Option<&'a AnyTensor>,
    quantisation: Quantisation<'a>,
}

impl<'a> CallTensors<'a> {
    /// The attributes that come with the tensors.
    #[inline]
    pub(crate) fn features(&self) -> Features {
        Features {
            block_size: self.block_table.map_or(0, |table| table.acl_block_size()),
            modes: self.quantisation.modes(),
            shared_prefix_len: self.shared_prefix.and_then(|prefix| prefix.len),
            pse_type: self.pse_shift.map_or(0, |pse| pse.acl()),
            starts: self.pse_shift.and_then(|pse| pse.starts()),
        }
    }

    /// The tensors whose elements are positions in others.
    #[inline]
    pub(crate) fn contents(&self) -> GivenContents<'a> {
        GivenContents { block_table: self.block_table, query_padding: self.query_padding, kv_padding: self.kv_padding }
    }

    /// Visits every tensor, in the operator's order but for the lists, which come last.
    #[inline]
    pub(crate) fn visit(&self, mut visit: impl FnMut(Argument, &'a AnyTensor) -> Result<()>) -> Result<()> {
        let mut some = |parameter: P, tensor: Option<&'a AnyTensor>| match tensor {
            Some(tensor) => visit(parameter.into(), tensor),
            None => Ok(()),
        };
        some(P::Query, Some(self.query))?;
        some(P::PseShift, self.pse_shift.map(|pse| pse.tensor()))?;
        let table = self.block_table.map(|table| &**table.tensor());
        some(P::BlockTable, table)?;
        let padding = |size: Option<&'a PaddingSize>| size.map(|size| &**size.tensor());
        some(P::QueryPaddingSize, padding(self.query_padding))?;
        some(P::KvPaddingSize, padding(self.kv_padding))?;
        if let Some(prefix) = self.shared_prefix {
            some(P::KeySharedPrefix, Some(prefix.key))?;
            some(P::ValueSharedPrefix, Some(prefix.value))?;
        }
        if let Some([query, key]) = self.rope {
            some(P::QueryRope, Some(query))?;
            some(P::KeyRope, Some(key))?;
        }
        some(P::LearnableSink, self.learnable_sink)?;
        self.quantisation.each(&mut |parameter, tensor| visit(parameter.into(), tensor))?;
        for (index, tensor) in self.key.iter().enumerate() {
            visit(Argument::element(P::Key, index), tensor)?;
        }
        for (index, tensor) in self.value.iter().enumerate() {
            visit(Argument::element(P::Value, index), tensor)?;
        }
        Ok(())
    }
}

/// The tensors of key or value.
#[derive(Clone, Copy, Debug)]
enum List<'a> {
    One(&'a AnyTensor),
    Many(&'a [&'a AnyTensor]),
}

impl<'a> List<'a> {
    fn iter(self) -> impl Iterator<Item = &'a AnyTensor> {
        let (one, many) = match self {
            Self::One(tensor) => (Some(tensor), Default::default()),
            Self::Many(tensors) => (None, tensors),
        };
        one.into_iter().chain(many.iter().copied())
    }
}

/// Attributes that come with [`Inputs`]. They are part of a plan.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Features {
    block_size: i64,
    modes: Modes,
    shared_prefix_len: Option<i64>,
    pse_type: i64,
    /// First places of query and key.
    starts: Option<[i64; 2]>,
}

impl Features {
    /// Writes the attributes into a call.
    pub(super) fn describe<'c>(&'c self, call: &mut FiaCall<'c>) {
        call.block_size = self.block_size;
        call.antiquant_mode = self.modes.merged;
        call.key_antiquant_mode = self.modes.key;
        call.value_antiquant_mode = self.modes.value;
        call.query_quant_mode = self.modes.query;
        call.actual_shared_prefix_len = self.shared_prefix_len.as_ref().map(std::slice::from_ref);
        call.pse_type = self.pse_type;
        if let Some([query, key]) = &self.starts {
            call.q_start_idx = Some(std::slice::from_ref(query));
            call.kv_start_idx = Some(std::slice::from_ref(key));
        }
    }

    /// Tokens in a block of the paged cache, 0 without one.
    pub(crate) fn block_size(&self) -> i64 {
        self.block_size
    }

    /// Refuses all but the block size, for operators that have no other of these attributes.
    pub(crate) fn block_size_alone(&self) -> Result<()> {
        let alone = Self { block_size: self.block_size, ..Self::default() };
        self.are_as_planned(&alone)
    }

    /// Refuses the attributes of a launch that are not the planned ones.
    #[inline]
    pub(crate) fn are_as_planned(&self, planned: &Self) -> Result<()> {
        if self == planned { Ok(()) } else { Err(self.difference(planned)) }
    }

    #[cold]
    fn difference(&self, planned: &Self) -> Error {
        let pair = |argument, given: &dyn std::fmt::Debug, planned: &dyn std::fmt::Debug| {
            Error::not_as_planned(argument, format_args!("{given:?}"), format_args!("{planned:?}"))
        };
        let (a, b) = (&self.modes, &planned.modes);
        let numbers = [
            ("block_size", self.block_size, planned.block_size),
            ("antiquant_mode", a.merged, b.merged),
            ("key_antiquant_mode", a.key, b.key),
            ("value_antiquant_mode", a.value, b.value),
            ("query_quant_mode", a.query, b.query),
            ("pse_type", self.pse_type, planned.pse_type),
        ];
        if let Some((argument, given, planned)) = numbers.iter().find(|(_, a, b)| a != b) {
            return pair(argument, given, planned);
        }
        if self.shared_prefix_len != planned.shared_prefix_len {
            let (given, planned) = (&self.shared_prefix_len, &planned.shared_prefix_len);
            return pair("actual_shared_prefix_len", given, planned);
        }
        pair("start indices", &self.starts, &planned.starts)
    }
}

/// A launch of typed inputs.
pub(crate) struct Launch<'a> {
    pub(crate) inputs: CallTensors<'a>,
    pub(crate) attention_out: &'a AnyTensor,
    pub(crate) softmax_lse: Option<&'a AnyTensor>,
}

impl<'a> Launch<'a> {
    pub(crate) fn new<T: Element>(inputs: CallTensors<'a>, output: &'a Output<T>) -> Self {
        Self { inputs, attention_out: &output.attention, softmax_lse: output.softmax_lse.as_deref() }
    }
}

impl Tensors<P> for Launch<'_> {
    fn each<'b>(&'b self, mut visit: impl FnMut(Argument, &'b AnyTensor) -> Result<()>) -> Result<()> {
        visit(P::AttentionOut.into(), self.attention_out)?;
        if let Some(lse) = self.softmax_lse {
            visit(P::SoftmaxLse.into(), lse)?;
        }
        self.inputs.visit(visit)
    }
}

impl Bindings for Launch<'_> {
    fn features(&self) -> Option<Features> {
        Some(self.inputs.features())
    }

    fn contents(&self) -> GivenContents<'_> {
        self.inputs.contents()
    }
}

impl Tensors<P> for CallTensors<'_> {
    fn each<'b>(&'b self, visit: impl FnMut(Argument, &'b AnyTensor) -> Result<()>) -> Result<()> {
        self.visit(visit)
    }
}

impl Bindings for CallTensors<'_> {
    fn features(&self) -> Option<Features> {
        Some(CallTensors::features(self))
    }

    fn contents(&self) -> GivenContents<'_> {
        CallTensors::contents(self)
    }
}
