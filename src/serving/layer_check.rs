//! Whether the tensors of a layer go with the step and with its other layers.

use crate::error::Result;
use crate::kv::{Refused, Rule, refused};
use crate::memory::Element;

use super::backend::{LayerTensors, StepContext, size};

/// What the first layer of a step brought, which the step is planned for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Brought {
    sink: bool,
    latent: bool,
}

impl Brought {
    pub(super) fn by<T: Element>(layer: &LayerTensors<'_, T>) -> Self {
        Self {
            sink: layer.learnable_sink.is_some(),
            latent: layer.latent.is_some(),
        }
    }

    /// Refuses another layer that brings more or less: the plans look at the first one only.
    pub(super) fn again<T: Element>(self, layer: &LayerTensors<'_, T>) -> Result<(), Refused> {
        let given = Self::by(layer);
        if given == self {
            return Ok(());
        }
        Err(refused(
            Rule::StepLayers,
            format_args!("layer {}: {}", layer.layer, given.told()),
            format_args!("{}, as the first layer of the step", self.told()),
            "bring sinks in every layer or in none (-inf is a sink that changes nothing), and latents alike; begin a step \
             of its own for layers of another kind",
        ))
    }

    fn told(self) -> &'static str {
        match (self.sink, self.latent) {
            (false, false) => "no sinks, keys and values",
            (true, false) => "sinks, keys and values",
            (false, true) => "no sinks, latents",
            (true, true) => "sinks, latents",
        }
    }
}

/// Refuses tensors of another device, and ones that have not the step's tokens or the model's heads. Of latent attention
/// the shapes are the backend's matter.
pub(super) fn check_layer<T: Element>(
    step: &StepContext<'_>,
    layer: &LayerTensors<'_, T>,
) -> Result<()> {
    let context = step.stream.context();
    let named = [
        ("query", layer.query),
        ("key", layer.key),
        ("value", layer.value),
    ];
    for (name, tensor) in named {
        tensor.on(name, context)?;
    }
    if let Some(sink) = layer.learnable_sink {
        sink.on("learnable_sink", context)?;
    }
    if layer.latent.is_some() {
        return Ok(());
    }
    let tokens = step.metadata.tokens() as usize;
    let (heads, kv_heads, dim) = (step.shape.heads, step.shape.kv_heads, step.shape.head_dim);
    let wanted = [heads, kv_heads, kv_heads];
    for ((name, tensor), heads) in named.into_iter().zip(wanted) {
        let told = || format!("{name} {:?} in layer {}", tensor.shape(), layer.layer);
        if size(tensor, 0) != tokens {
            return Err(refused(
                Rule::StepTokens,
                told(),
                format_args!(
                    "{tokens} rows: {} of the requests and {} of padding",
                    step.metadata.actual_tokens(),
                    tokens.saturating_sub(step.metadata.actual_tokens() as usize),
                ),
                "bring the rows of the batch that the metadata was made of, and as many more as `pad_to` added",
            )
            .into());
        }
        let own_dim = name == "value" || size(tensor, 2) == dim;
        if tensor.shape().len() != 3 || size(tensor, 1) != heads || !own_dim {
            let dim = match name {
                "value" => "of any size".to_owned(),
                _ => dim.to_string(),
            };
            return Err(refused(
                Rule::StepHeads,
                told(),
                format_args!("[{tokens}, {heads}, {dim}], as the `AttentionShape` has it"),
                "make the `AttentionShape` with the heads of these tensors; of heads that were filled up it has the filled \
                 size, and the scale of the true one",
            )
            .into());
        }
    }
    Ok(())
}
