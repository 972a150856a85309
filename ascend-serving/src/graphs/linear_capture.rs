//! What graphs of layers of linear attention are captured for, besides sizes.

use ascend_attention::{AnyTensor, DType, Element, Tensor, Violation};

use crate::kv::{CacheShape, Convolution, StatePool};
use crate::rules;

/// The weights of a layer's convolution and its bias, if it has one.
pub(crate) type ConvolutionWeights = (AnyTensor, Option<AnyTensor>);

/// What graphs of layers of linear attention are captured for: what a step without graphs learns from the tensors of
/// its first layer. For [`GraphLimits::linear`](crate::GraphLimits::linear).
///
/// ```
/// use ascend_attention::delta_rule::DeltaTensors;
/// use ascend_attention::spec::{Cann, Soc};
/// use ascend_attention::{Machine, Runtime, bf16};
/// use ascend_serving::kv::{CacheShape, Convolution, PadPolicy, PagedKvCache, StatePool, StateShape};
/// use ascend_serving::{
///     Attention, AttentionShape, Backends, BatchRequest, Causality, GraphLimits, LayerGroup, LinearCapture,
///     StatePolicy,
/// };
///
/// # fn main() -> ascend_serving::Result<()> {
/// # #[cfg(feature = "emulation")] {
/// let stream = Runtime::emulated_as(&Machine::new(Soc::AtlasA2, Cann::V9_1))?.device(0)?.stream()?;
/// let device = stream.device();
/// let cache = PagedKvCache::<bf16>::new(device, 8, 128, CacheShape::new(1, 1, 64), PadPolicy::SkipNegative)?;
/// let full = AttentionShape::new(1, 1, 64);
/// let full = LayerGroup::new([1], Causality::Causal, full, cache, Backends::standard(device));
/// // Layer 0 has states of a head, behind a convolution of queries, keys and values of 16 elements each.
/// let convolution = Some(Convolution { width: 4, channels: 48, silu: true });
/// let shape =
///     StateShape { layers: 1, value_heads: 1, value_dim: 16, key_dim: 16, scale: 0.25, drafts: 0, convolution };
/// let mut attention = Attention::of_hybrid(2, [full], [0], StatePool::new::<bf16>(&stream, 4, shape)?)?;
/// let rows = |shape: &[usize]| stream.upload(&vec![bf16::from_f32(0.25); shape.iter().product()], shape);
/// let weight = rows(&[4, 48])?;
///
/// // Decodes of up to 4 requests, one for each slot.
/// let linear = LinearCapture::new(1).g().convolutions([(weight.clone(), None)]);
/// let limits = GraphLimits::new([1, 4], 512).linear(linear);
/// let mut graphs = attention.capture(&stream, Causality::Causal, &limits)?;
///
/// let mut sequence = attention.sequence();
/// let (mixed, wide, beta) = (rows(&[1, 48])?, rows(&[1, 1, 64])?, rows(&[1, 1])?);
/// let decay = stream.upload(&[-0.1f32], [1, 1])?;
/// for _ in 0..3 {
///     attention.grow(&stream, &mut sequence, 1)?;
///     let mut metadata = attention.metadata(&[BatchRequest::of(&sequence, 1)], StatePolicy::default())?;
///     let mut step = graphs.begin(&stream, &mut metadata)?;
///     let convolved = step.convolve(0, (&mixed, &weight))?.narrow(0, 0..1)?;
///     let part = |from: usize| convolved.narrow(1, from..from + 16)?.contiguous(&stream)?.reshape([1, 1, 16]);
///     // Here a model normalises queries and keys, each head to length 1: neither graph nor operator does.
///     let (query, key, value) = (part(0)?, part(16)?, part(32)?);
///     let output = step.forward(0, DeltaTensors::new((&query, &key, &value), &beta).g(&decay))?;
///     assert_eq!(output.shape(), [1, 1, 16]);
///     step.forward(1, (&wide, &wide, &wide))?;
///     step.end()?;
/// }
/// assert_eq!(attention.computed_tokens(&sequence)?, 3);
/// # }
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
#[must_use = "a description does nothing until it is part of limits"]
pub struct LinearCapture {
    pub(crate) key_heads: usize,
    /// Whether there are decays of heads, and of columns.
    pub(crate) decays: [bool; 2],
    pub(crate) convolutions: Vec<ConvolutionWeights>,
}

impl LinearCapture {
    /// Layers with this number of heads of queries and keys (`Nk`), without decays.
    pub fn new(key_heads: usize) -> Self {
        Self { key_heads, decays: [false; 2], convolutions: Vec::new() }
    }

    /// With the decay of each head, which the tensors of every layer then have
    /// ([`DeltaTensors::g`](ascend_attention::delta_rule::DeltaTensors::g)).
    pub fn g(mut self) -> Self {
        self.decays[0] = true;
        self
    }

    /// With the decay of each column of a state, which the tensors of every layer then have
    /// ([`DeltaTensors::gk`](ascend_attention::delta_rule::DeltaTensors::gk)). Since CANN 9.0.
    pub fn gk(mut self) -> Self {
        self.decays[1] = true;
        self
    }

    /// Sets the weights `[width, channels]` (those of PyTorch's modules transposed) of the convolution of each layer of
    /// linear attention, in the order in which [`Attention::of_hybrid`](crate::Attention::of_hybrid) names the layers,
    /// and the bias `[channels]` of those that have one: of all layers or of none. The graphs read them where they are:
    /// to change them, copy other numbers into the tensors. At most one layer more than [`CacheShape::MAX_LAYERS`] is
    /// kept: no model has more.
    pub fn convolutions<E: Element>(
        mut self,
        layers: impl IntoIterator<Item = (Tensor<E>, Option<Tensor<E>>)>,
    ) -> Self {
        let layers = layers.into_iter().take(CacheShape::MAX_LAYERS.saturating_add(1));
        self.convolutions = layers.map(|(weight, bias)| (weight.into(), bias.map(AnyTensor::from))).collect();
        self
    }

    /// Refuses heads that values cannot be divided among, weights of another number of layers than the pool has, or of
    /// any where it has no convolution, and weights of other shapes or another type.
    pub(crate) fn check(&self, pool: &StatePool, dtype: DType) -> Result<(), Violation> {
        let shape = pool.shape();
        if shape.value_heads.checked_rem(self.key_heads) != Some(0) {
            return Err(Violation::new(
                &rules::GRAPH_INPUTS,
                format_args!("{} heads of queries and keys", self.key_heads),
                format_args!("a divisor of the {} `value_heads` of the `StateShape`", shape.value_heads),
                "give `LinearCapture::new` the heads of the model's queries and keys (`Nk`)",
            ));
        }
        let (given, wanted) = (self.convolutions.len(), shape.convolution.map_or(0, |_| shape.layers));
        if let Some(convolution) = shape.convolution.filter(|_| given == wanted) {
            return self.check_weights(convolution, dtype);
        }
        if given == wanted {
            return Ok(());
        }
        Err(Violation::new(
            &rules::GRAPH_INPUTS,
            format_args!("weights of the convolutions of {given} layers of linear attention"),
            match shape.convolution {
                Some(_) => format!("of all {wanted}, as the `StateShape` has a convolution"),
                None => "none, as the `StateShape` has no convolution".to_owned(),
            },
            "give the weights of each layer of linear attention to `LinearCapture::convolutions`, where the pool of \
             states has a convolution",
        ))
    }

    fn check_weights(&self, Convolution { width, channels, .. }: Convolution, dtype: DType) -> Result<(), Violation> {
        let has_bias = self.convolutions.first().is_some_and(|(_, bias)| bias.is_some());
        for (own, (weight, bias)) in self.convolutions.iter().enumerate() {
            let fits = |tensor: &AnyTensor, shape: &[usize]| tensor.shape() == shape && tensor.dtype() == dtype;
            let bias_fits = bias.as_ref().map_or(!has_bias, |bias| has_bias && fits(bias, &[channels]));
            if fits(weight, &[width, channels]) && bias_fits {
                continue;
            }
            let bias = bias.as_ref().map_or_else(|| "no bias".to_owned(), |bias| format!("bias {}", bias.desc()));
            return Err(Violation::new(
                &rules::GRAPH_INPUTS,
                format_args!("weights {} and {bias} in layer {own} of linear attention, counted from 0", weight.desc()),
                format_args!(
                    "weights [{width}, {channels}] of {dtype}, and {}",
                    if has_bias {
                        format!("a bias [{channels}] in every layer")
                    } else {
                        "no bias in any layer".into()
                    }
                ),
                "give weights as `[width, channels]`, the model's `[channels, width]` transposed, of the type of the \
                 cache, and a bias of all layers or of none: zeros are none",
            ));
        }
        Ok(())
    }
}
