//! Quantised calls: which tensors are integers or small floats, and the scales that say what they stand for.

use ascend_spec::ops::fused_infer_attention_score::{AntiquantMode, Parameter as P};

use ascend_spec::minifloat::Float8E8M0;

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
        Self { scale, offset: None }
    }

    /// A scale with an offset.
    pub fn new(scale: &'a AnyTensor, offset: &'a AnyTensor) -> Self {
        Self { scale, offset: Some(offset) }
    }
}

/// How key and value of integers become numbers: `(stored + offset) * scale`.
///
/// [`AntiquantMode`] describes what a scale looks like in each mode.
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
/// Part of [`Inputs`](super::Inputs): the scales differ from layer to layer, so each launch provides its own, of the
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
/// let plan = FusedInferAttention::new(Layout::Bnsd).scale(0.125).heads(2).plan(inputs)?;
/// let output = plan.launch(&stream, inputs.output_type::<i8>())?;
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
    /// FLOAT16 or BF16 in, INT8 out: `round(x * scale + offset)`. FLOAT32, or BF16 with a BF16 query; one element, or
    /// one for each head and dimension (`quantScale2`, `quantOffset2`). On Ascend 950 also FLOAT8_E4M3FN or HIFLOAT8
    /// out: see [`out_dtype`](super::FusedInferAttention::out_dtype).
    Output(Affine<'a>),
    /// INT8 in; FLOAT16 out, or INT8 with `output`. One element each.
    Int8 {
        /// Factor after Q K^T (`deqScale1`): UINT64 or FLOAT32.
        deq_scale1: &'a AnyTensor,
        /// Quantisation of the probabilities (`quantScale1`).
        quant_scale1: &'a Tensor<f32>,
        /// Factor after P V (`deqScale2`): UINT64 or FLOAT32.
        deq_scale2: &'a AnyTensor,
        /// Quantises the output, as [`Quantisation::Output`] does.
        output: Option<Affine<'a>>,
    },
    /// FLOAT16 or BF16 query, key and value of INT8 or INT4 (also packed as INT32, eight in each), on Ascend 950 also
    /// of FLOAT8_E4M3FN, HIFLOAT8 or FLOAT4_E2M1. The output has the query's type, or is INT8 with `output`, or has
    /// the type that [`out_dtype`](super::FusedInferAttention::out_dtype) sets.
    KeyValue {
        /// Scales of key and value.
        antiquantisation: Antiquantisation<'a>,
        /// Quantises the output, as [`Quantisation::Output`] does.
        output: Option<Affine<'a>>,
    },
    /// Multi-head latent attention, absorbed form, all in INT8 but the rotary parts: INT8 query, key and value, BF16
    /// rotary parts and output (`queryQuantMode` 3). The scales are those of the rotary parts, too: store these
    /// divided by them. On Ascend 950 also FLOAT8_E4M3FN or HIFLOAT8. Since V4 of the operator.
    Latent {
        /// A factor for each row and head of the query (`dequantScaleQuery`): its shape without the head dimension.
        dequant_scale_query: &'a Tensor<f32>,
        /// The key's factor, `[1]` (`keyAntiquantScale`).
        key_scale: &'a Tensor<f32>,
        /// The value's factor, `[1]` (`valueAntiquantScale`).
        value_scale: &'a Tensor<f32>,
    },
    /// Ascend 950: query, key and value of FLOAT8_E4M3FN in groups of 32 that share a scale (MXFP8; `queryQuantMode`
    /// and `keyAntiquantMode` 6, `valueAntiquantMode` 8). FLOAT16 or BF16 out, as
    /// [`out_dtype`](super::FusedInferAttention::out_dtype) sets; BF16 with BF16 rotary parts, which are not
    /// quantised.
    ///
    /// The groups run along the head dimension of query and key, and along the tokens of each sequence's value; two of
    /// them are a pair. T rows of all sequences, N heads, D head dimension, G query heads for each of the Nk key heads.
    MxFp8 {
        /// For the query (`dequantScaleQuery`): `[T, N, D/64, 2]`, or `[Nk, T, G, D/64, 2]`, which is faster for few
        /// rows.
        query_scale: &'a Tensor<Float8E8M0>,
        /// For the key (`keyAntiquantScale`): `[T, Nk, D/64, 2]`; in the cache `[blocks, Nk, block_size, D/64, 2]`, or
        /// `[blocks, Nk, block_size/16, D/64, 16, 2]` for NZ.
        key_scale: &'a Tensor<Float8E8M0>,
        /// For the value (`valueAntiquantScale`): `[pairs of groups, Nk, D, 2]`; in the cache
        /// `[blocks, Nk, block_size/64, D, 2]`, or `[blocks, Nk, D/16, block_size/64, 16, 2]` for NZ.
        value_scale: &'a Tensor<Float8E8M0>,
        /// Factor of the probabilities before they are rounded, `[1]`, 1 to 448 (`quantScale1`). It leaves the output
        /// as it is, and adds its logarithm to the log-sum-exp. Absent: 1.
        quant_scale1: Option<&'a Tensor<f32>>,
    },
}

/// The modes of a quantisation, by CANN's numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Modes {
    pub(super) merged: i64,
    pub(super) key: i64,
    pub(super) value: i64,
    pub(super) query: i64,
}

/// CANN's number for a query with a scale for each token and head.
const QUERY_PER_TOKEN_HEAD: i64 = 3;
/// CANN's number for groups of 32 along the head dimension.
const GROUPS_OF_DIM: i64 = 6;
/// CANN's number for groups of 32 along the tokens.
const GROUPS_OF_TOKENS: i64 = 8;

impl<'a> Quantisation<'a> {
    pub(super) fn modes(&self) -> Modes {
        let none = Modes::default();
        match self {
            Self::Latent { .. } => Modes { query: QUERY_PER_TOKEN_HEAD, ..none },
            Self::MxFp8 { .. } => {
                Modes { merged: 0, key: GROUPS_OF_DIM, value: GROUPS_OF_TOKENS, query: GROUPS_OF_DIM }
            }
            Self::KeyValue { antiquantisation, .. } => match antiquantisation {
                Antiquantisation::Merged(_) => none,
                Antiquantisation::MergedPerToken(_) => Modes { merged: AntiquantMode::PerToken.acl(), ..none },
                Antiquantisation::Split { mode, .. } => Modes { key: mode.acl(), value: mode.acl(), ..none },
                Antiquantisation::PerChannelKeyPerTokenValue { .. } => {
                    Modes { key: AntiquantMode::PerChannel.acl(), value: AntiquantMode::PerToken.acl(), ..none }
                }
            },
            Self::None | Self::Output(_) | Self::Int8 { .. } => none,
        }
    }

    /// Visits the quantisation's tensors, in the operator's order.
    pub(super) fn each<E>(&self, visit: &mut impl FnMut(P, &'a AnyTensor) -> Result<(), E>) -> Result<(), E> {
        let output = match self {
            Self::None | Self::Latent { .. } | Self::MxFp8 { .. } => None,
            Self::Output(output) => Some(*output),
            Self::Int8 { output, .. } | Self::KeyValue { output, .. } => *output,
        };
        if let Self::Int8 { deq_scale1, quant_scale1, deq_scale2, .. } = self {
            visit(P::DeqScale1, deq_scale1)?;
            visit(P::QuantScale1, quant_scale1)?;
            visit(P::DeqScale2, deq_scale2)?;
        }
        if let Self::MxFp8 { quant_scale1: Some(scale), .. } = self {
            visit(P::QuantScale1, scale)?;
        }
        let mut affine = |scale, offset, factors: Affine<'a>| {
            visit(scale, factors.scale)?;
            factors.offset.map_or(Ok(()), |tensor| visit(offset, tensor))
        };
        if let Some(output) = output {
            affine(P::QuantScale2, P::QuantOffset2, output)?;
        }
        let (key, value) = match self {
            Self::KeyValue { antiquantisation, .. } => match *antiquantisation {
                Antiquantisation::Merged(both) | Antiquantisation::MergedPerToken(both) => {
                    return affine(P::AntiquantScale, P::AntiquantOffset, both);
                }
                Antiquantisation::Split { key, value, .. }
                | Antiquantisation::PerChannelKeyPerTokenValue { key, value } => (key, value),
            },
            Self::Latent { key_scale, value_scale, .. } => (Affine::scale(key_scale), Affine::scale(value_scale)),
            Self::MxFp8 { key_scale, value_scale, .. } => (Affine::scale(key_scale), Affine::scale(value_scale)),
            Self::None | Self::Output(_) | Self::Int8 { .. } => return Ok(()),
        };
        affine(P::KeyAntiquantScale, P::KeyAntiquantOffset, key)?;
        affine(P::ValueAntiquantScale, P::ValueAntiquantOffset, value)?;
        match self {
            Self::Latent { dequant_scale_query, .. } => visit(P::DequantScaleQuery, dequant_scale_query),
            Self::MxFp8 { query_scale, .. } => visit(P::DequantScaleQuery, query_scale),
            _ => Ok(()),
        }
    }
}
