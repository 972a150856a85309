//! What graphs of layers of linear attention are captured for, besides sizes.

use ascend_attention::{AnyTensor, Element, Tensor, Violation};

use crate::kv::{CacheShape, StatePool};
use crate::rules;

/// The weights of a layer's convolution and its bias, if it has one.
pub(super) type ConvolutionWeights = (AnyTensor, Option<AnyTensor>);

/// What graphs of layers of linear attention are captured for: what a step without graphs learns from the tensors of
/// its first layer. For [`GraphLimits::linear`](crate::GraphLimits::linear).
#[derive(Clone, Debug)]
#[must_use = "a description does nothing until it is part of limits"]
pub struct LinearCapture {
    pub(super) key_heads: usize,
    /// Whether there are decays of heads, and of columns.
    pub(super) decays: [bool; 2],
    pub(super) convolutions: Vec<ConvolutionWeights>,
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

    /// Sets the weights `[width, channels]` of the convolution of each layer of linear attention, in the order in which
    /// [`Attention::of_hybrid`](crate::Attention::of_hybrid) names the layers, and the bias `[channels]` of those that
    /// have one: of all layers or of none. The graphs read them where they are: to change them, copy other numbers into
    /// the tensors. At most one layer more than [`CacheShape::MAX_LAYERS`] is kept: no model has more.
    pub fn convolutions<E: Element>(
        mut self,
        layers: impl IntoIterator<Item = (Tensor<E>, Option<Tensor<E>>)>,
    ) -> Self {
        let layers = layers.into_iter().take(CacheShape::MAX_LAYERS.saturating_add(1));
        self.convolutions = layers.map(|(weight, bias)| (weight.into(), bias.map(AnyTensor::from))).collect();
        self
    }

    /// Refuses weights of another number of layers than the pool has, or of any where it has no convolution.
    pub(super) fn check(&self, pool: &StatePool) -> Result<(), Violation> {
        let shape = pool.shape();
        let (given, wanted) = (self.convolutions.len(), shape.convolution.map_or(0, |_| shape.layers));
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
}
