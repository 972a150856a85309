//! Quantised calls: which tensors are integers, and the scales that say what they stand for.

use ascend_spec::fia::{AntiquantMode, Parameter as P};

use crate::tensor::{AnyTensor, Tensor};

/// A scale, and an offset if there is one.
#[derive(Clone, Copy, Debug)]
pub struct Affine<'a> {
    /// Factor.
    pub scale: &'a AnyTensor,
    /// Summand, of the scale's shape and element type; absent: 0.
    pub offset: Option<&'a AnyTensor>,
}

impl<'a> Affine<'a> {
    /// A scale without an offset.
    pub fn scale(scale: &'a AnyTensor) -> Self {
        Self {
            scale,
            offset: None,
        }
    }

    /// A scale with an offset.
    pub fn new(scale: &'a AnyTensor, offset: &'a AnyTensor) -> Self {
        Self {
            scale,
            offset: Some(offset),
        }
    }
}

/// How key and value of integers become numbers: `(stored + offset) * scale`.
///
/// What a scale looks like in each mode is said at [`AntiquantMode`].
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Antiquantisation<'a> {
    /// One tensor for both, the key's half first: per channel `[2, N, 1, D]`, `[2, N, D]`, `[2, N * D]`, or per tensor
    /// `[2]` (`antiquantScale`, `antiquantMode` 0). The query's element type.
    Merged(Affine<'a>),
    /// One tensor for both, the key's half first: FLOAT32 `[2, B, S]` (`antiquantMode` 1).
    MergedPerToken(Affine<'a>),
    /// A tensor for each (`keyAntiquantScale`, `valueAntiquantScale`), of the same mode. Since V2 of the operator.
    Split {
        /// Which elements share a scale.
        mode: AntiquantMode,
        /// For the key.
        key: Affine<'a>,
        /// For the value.
        value: Affine<'a>,
    },
    /// A scale for each head and dimension of the key, and for each token of the value: the one pair of different modes
    /// that the operator takes. INT8 with a FLOAT16 query. Since V2 of the operator.
    PerChannelKeyPerTokenValue {
        /// For the key, [`AntiquantMode::PerChannel`].
        key: Affine<'a>,
        /// For the value, [`AntiquantMode::PerToken`].
        value: Affine<'a>,
    },
}

/// The quantisation of a call: a scheme that the operator has, with exactly the tensors that it takes.
///
/// Part of [`Inputs`](super::Inputs): the scales differ from layer to layer, so each launch brings its own, of the
/// planned shapes.
///
/// Since CANN 8.1.
///
/// ```
/// use ascend_attention::attention::{Affine, Inputs, Quantisation};
/// use ascend_attention::{FusedInferAttention, Layout, Runtime, f16};
///
/// # fn main() -> ascend_attention::Result<()> {
/// # #[cfg(feature = "emulation")] {
/// let stream = Runtime::emulated()?.device(0)?.stream()?;
/// let x = stream.upload(&vec![f16::ONE; 2 * 32 * 64], [1, 2, 32, 64])?;
/// let scale = stream.upload(&[50f32], [1])?;
/// let inputs = Inputs::new(&x, &x, &x).quantisation(Quantisation::Output(Affine::scale(&scale)));
/// let plan = FusedInferAttention::new(Layout::Bnsd).scale(0.125).heads(2).plan_with(&inputs)?;
/// let output = plan.launch_with::<i8>(&stream, &inputs)?;
/// assert_eq!(output.attention.download(&stream)?, vec![50; 2 * 32 * 64]);
/// # }
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub enum Quantisation<'a> {
    /// FLOAT16 or BF16 throughout.
    #[default]
    None,
    /// FLOAT16 or BF16 in, INT8 out: `round(x * scale + offset)`. FLOAT32, or BF16 with a BF16 query; one element, or one
    /// for each head and dimension (`quantScale2`, `quantOffset2`).
    Output(Affine<'a>),
    /// INT8 in; FLOAT16 out, or INT8 with `output`. One element each.
    Int8 {
        /// Factor after Q K^T (`deqScale1`): UINT64 or FLOAT32.
        deq_scale1: &'a AnyTensor,
        /// Quantisation of the probabilities (`quantScale1`).
        quant_scale1: &'a Tensor<f32>,
        /// Factor after P V (`deqScale2`): UINT64 or FLOAT32.
        deq_scale2: &'a AnyTensor,
        /// As [`Quantisation::Output`].
        output: Option<Affine<'a>>,
    },
    /// FLOAT16 or BF16 query, key and value of INT8 or INT4 (also packed as INT32, eight in each). The output has the
    /// query's type, or is INT8 with `output`.
    KeyValue {
        /// Scales of key and value.
        antiquantisation: Antiquantisation<'a>,
        /// As [`Quantisation::Output`].
        output: Option<Affine<'a>>,
    },
    /// Multi-head latent attention, absorbed form, all in INT8 but the rotary parts: INT8 query, key and value, BF16
    /// rotary parts and output (`queryQuantMode` 3). Since V4 of the operator.
    Latent {
        /// A factor for each row and head of the query (`dequantScaleQuery`): its shape without the head dimension.
        dequant_scale_query: &'a Tensor<f32>,
        /// The key's factor, `[1]` (`keyAntiquantScale`).
        key_scale: &'a Tensor<f32>,
        /// The value's factor, `[1]` (`valueAntiquantScale`).
        value_scale: &'a Tensor<f32>,
    },
}

/// The modes that a quantisation asks for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Modes {
    pub(super) merged: i64,
    pub(super) key: i64,
    pub(super) value: i64,
    pub(super) query: i64,
}

/// CANN's number for a query with a scale for each token and head.
const QUERY_PER_TOKEN_HEAD: i64 = 3;

impl<'a> Quantisation<'a> {
    pub(super) fn modes(&self) -> Modes {
        let none = Modes::default();
        match self {
            Self::Latent { .. } => Modes {
                query: QUERY_PER_TOKEN_HEAD,
                ..none
            },
            Self::KeyValue {
                antiquantisation, ..
            } => match antiquantisation {
                Antiquantisation::Merged(_) => none,
                Antiquantisation::MergedPerToken(_) => Modes {
                    merged: AntiquantMode::PerToken.acl(),
                    ..none
                },
                Antiquantisation::Split { mode, .. } => Modes {
                    key: mode.acl(),
                    value: mode.acl(),
                    ..none
                },
                Antiquantisation::PerChannelKeyPerTokenValue { .. } => Modes {
                    key: AntiquantMode::PerChannel.acl(),
                    value: AntiquantMode::PerToken.acl(),
                    ..none
                },
            },
            Self::None | Self::Output(_) | Self::Int8 { .. } => none,
        }
    }

    /// Its tensors, in the operator's order.
    pub(super) fn each<E>(
        &self,
        visit: &mut impl FnMut(P, &'a AnyTensor) -> Result<(), E>,
    ) -> Result<(), E> {
        let output = match self {
            Self::None | Self::Latent { .. } => None,
            Self::Output(output) => Some(*output),
            Self::Int8 { output, .. } | Self::KeyValue { output, .. } => *output,
        };
        if let Self::Int8 {
            deq_scale1,
            quant_scale1,
            deq_scale2,
            ..
        } = self
        {
            visit(P::DeqScale1, deq_scale1)?;
            visit(P::QuantScale1, quant_scale1)?;
            visit(P::DeqScale2, deq_scale2)?;
        }
        let mut affine = |scale, offset, of: Affine<'a>| {
            visit(scale, of.scale)?;
            of.offset.map_or(Ok(()), |tensor| visit(offset, tensor))
        };
        if let Some(output) = output {
            affine(P::QuantScale2, P::QuantOffset2, output)?;
        }
        let (key, value) = match self {
            Self::KeyValue {
                antiquantisation, ..
            } => match *antiquantisation {
                Antiquantisation::Merged(both) | Antiquantisation::MergedPerToken(both) => {
                    return affine(P::AntiquantScale, P::AntiquantOffset, both);
                }
                Antiquantisation::Split { key, value, .. }
                | Antiquantisation::PerChannelKeyPerTokenValue { key, value } => (key, value),
            },
            Self::Latent {
                key_scale,
                value_scale,
                ..
            } => (Affine::scale(key_scale), Affine::scale(value_scale)),
            Self::None | Self::Output(_) | Self::Int8 { .. } => return Ok(()),
        };
        affine(P::KeyAntiquantScale, P::KeyAntiquantOffset, key)?;
        affine(P::ValueAntiquantScale, P::ValueAntiquantOffset, value)?;
        match self {
            Self::Latent {
                dequant_scale_query,
                ..
            } => visit(P::DequantScaleQuery, dequant_scale_query),
            _ => Ok(()),
        }
    }
}
