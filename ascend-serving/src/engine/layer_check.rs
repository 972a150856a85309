//! Checks that the tensors of a layer fit the step and its other layers.

use std::fmt;

use ascend_attention::{Element, Tensor, Violation};

use crate::backends::{LayerTensors, StepContext, size};
use crate::error::Result;
use crate::rules;

/// The kinds of inputs of the first layer of a step, for which the step is planned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct InputKinds {
    sink: bool,
    latent: bool,
}

impl InputKinds {
    pub(crate) fn of<T: Element>(layer: &LayerTensors<'_, T>) -> Self {
        Self { sink: layer.learnable_sink.is_some(), latent: layer.latent.is_some() }
    }

    /// Refuses another layer with other kinds of inputs: the plans are made for the first one.
    pub(crate) fn check_same<T: Element>(self, layer: &LayerTensors<'_, T>) -> Result<(), Violation> {
        let given = Self::of(layer);
        if given == self {
            return Ok(());
        }
        Err(Violation::new(
            &rules::STEP_LAYERS,
            format_args!("layer {}: {}", layer.layer, given.describe()),
            format_args!("{}, as the first layer of the step with this mask", self.describe()),
            "give sinks to every layer or to none (-inf is a sink that changes nothing), and latents alike; divide \
             layers of several kinds into the groups of `Attention::of_groups`",
        ))
    }

    fn describe(self) -> &'static str {
        match (self.sink, self.latent) {
            (false, false) => "no sinks, keys and values",
            (true, false) => "sinks, keys and values",
            (false, true) => "no sinks, latents",
            (true, true) => "sinks, latents",
        }
    }
}

/// Refuses tensors of another device, and tensors that do not have the step's tokens or the model's heads. The shapes
/// of latent attention are checked by the backend.
pub(crate) fn check_layer<T: Element>(step: &StepContext<'_>, layer: &LayerTensors<'_, T>) -> Result<()> {
    let device = step.stream.device();
    let named = [("query", layer.query), ("key", layer.key), ("value", layer.value)];
    for (name, tensor) in named {
        tensor.check_device(name, device)?;
    }
    if let Some(sink) = layer.learnable_sink {
        sink.check_device("learnable_sink", device)?;
    }
    if layer.latent.is_some() {
        return Ok(());
    }
    let rows = StepRows {
        actual: step.metadata.actual_tokens(),
        padded: step.metadata.tokens(),
        padding: true,
        fixes: [rules::STEP_TOKENS.fix, STEP_HEADS_FIX],
    };
    let (heads, kv_heads, dim) = (step.shape.heads, step.shape.kv_heads, step.shape.head_dim);
    let wanted = [(heads, Some(dim)), (kv_heads, Some(dim)), (kv_heads, None)];
    for ((name, tensor), (heads, dim)) in named.into_iter().zip(wanted) {
        rows.check(name, tensor, Some(layer.layer), heads, dim)?;
    }
    Ok(())
}

/// How to bring the heads of a layer of a step.
pub(crate) const STEP_HEADS_FIX: &str = "bring query, key and value in this order, or make the `AttentionShape`, and \
     the cache if there is one, with the heads of these tensors; of heads that were filled up it has the filled size, \
     and the scale of the true one; layers over latents have their tensors from `LayerInputs::latent`";

/// Numbers of rows that a step's tensors may have.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepRows {
    /// Rows of the requests.
    pub(crate) actual: usize,
    /// Rows including the padding.
    pub(crate) padded: usize,
    /// Whether the tensors have to include the padding.
    pub(crate) padding: bool,
    /// How to bring as many rows, and other heads.
    pub(crate) fixes: [&'static str; 2],
}

impl StepRows {
    /// Refuses a tensor, of a layer if there are several, with other rows, other heads, or another head dimension where
    /// there is only one, and one that is not contiguous.
    pub(crate) fn check<T: Element>(
        self,
        name: &str,
        tensor: &Tensor<T>,
        layer: Option<usize>,
        heads: usize,
        dim: Option<usize>,
    ) -> Result<(), Violation> {
        let given = |tensor: &dyn fmt::Display| match layer {
            Some(layer) => format!("{name} {tensor} in layer {layer}"),
            None => format!("{name} {tensor}"),
        };
        let of_shape = || given(&format_args!("{:?}", tensor.shape()));
        let Self { actual, padded, padding, fixes } = self;
        let is_packed = tensor.shape().len() == 3;
        let rows = if is_packed { size(tensor, 0) } else { padded };
        let least = if padding { padded } else { actual };
        if !(least..=padded).contains(&rows) {
            let dummies = padded.saturating_sub(actual);
            let allowed = match (padding, dummies) {
                (_, 0) => format!("[{actual}, {heads}, D], a row for each token"),
                (true, _) => format!("[{padded}, {heads}, D]: {actual} rows of the requests and {dummies} of padding"),
                (false, _) => {
                    format!("[{actual}, {heads}, D]: the rows of the requests, and up to {dummies} of padding")
                }
            };
            let rule = &rules::STEP_TOKENS;
            return Err(Violation::new(rule, of_shape(), allowed, fixes[0]));
        }
        let other_dim = dim.is_some_and(|dim| size(tensor, 2) != dim);
        if !is_packed || size(tensor, 1) != heads || other_dim {
            let dim = dim.map_or_else(|| "of any size".to_owned(), |dim| dim.to_string());
            return Err(Violation::new(
                &rules::STEP_HEADS,
                of_shape(),
                format_args!("[{rows}, {heads}, {dim}], as the `AttentionShape` has it"),
                fixes[1],
            ));
        }
        if !tensor.is_contiguous() {
            return Err(rules::STEP_CONTIGUOUS.broken(given(&tensor.desc()), "row-major strides"));
        }
        Ok(())
    }
}
