//! Checks that the tensors of a layer fit the step and its other layers.

use std::fmt;

use ascend_attention::{AnyTensor, Device, Element, Violation};

use crate::backends::{
    LatentForm, LatentFormKind, LatentTensors, LayerTensors, StepContext, apart, names_of_keys, size,
};
use crate::error::{Error, Result};
use crate::kv::CacheShape;
use crate::rules;

/// The kinds of inputs of the first layer of a step, for which the step is planned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct InputKinds {
    sink: bool,
    latent: Option<LatentFormKind>,
}

impl InputKinds {
    pub(crate) fn of<T: Element>(layer: &LayerTensors<'_, T>) -> Self {
        Self { sink: layer.learnable_sink.is_some(), latent: layer.latent_form() }
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
            format_args!("{}, as the first layer of the step with this mask and scale", self.describe()),
            "give sinks to every layer or to none (-inf is a sink that changes nothing), and latents alike, with \
             queries in one form; divide layers of several kinds into the groups of `Attention::of_groups`",
        ))
    }

    fn describe(self) -> String {
        let sinks = if self.sink { "sinks" } else { "no sinks" };
        match self.latent {
            None => format!("{sinks}, keys and values"),
            Some(form) => format!("{sinks}, latents with queries in the form {form:?}"),
        }
    }
}

/// Refuses tensors of another device, and tensors that do not have the step's tokens or the model's heads.
pub(crate) fn check_layer<T: Element>(step: &StepContext<'_>, layer: &LayerTensors<'_, T>) -> Result<()> {
    let device = step.stream.device();
    let [key, value] = names_of_keys(layer.latent.is_some());
    let keys = [(key, &**layer.key), (value, &**layer.value)];
    for (name, tensor) in layer.queries().chain(keys) {
        tensor.check_device(name, device)?;
    }
    if let Some(sink) = layer.learnable_sink {
        sink.check_device("learnable_sink", device)?;
    }
    let rows = StepRows {
        actual: step.metadata.actual_tokens(),
        padded: step.metadata.tokens(),
        padding: true,
        fixes: [rules::STEP_TOKENS.fix, STEP_HEADS_FIX],
    };
    if let Some(latent) = layer.latent {
        return check_latent(
            step,
            layer,
            &latent,
            StepRows { fixes: [rules::STEP_TOKENS.fix, LATENT_HEADS_FIX], ..rows },
        );
    }
    let (heads, kv_heads, dim) = (step.shape.heads, step.shape.kv_heads, step.shape.head_dim);
    let wanted = [(heads, Some(dim)), (kv_heads, Some(dim)), (kv_heads, None)];
    for ((name, tensor), (heads, dim)) in [("query", &**layer.query)].into_iter().chain(keys).zip(wanted) {
        rows.check(name, tensor, Some(layer.layer), heads, dim)?;
    }
    Ok(())
}

/// Refuses tensors of latent attention with other rows, heads or sizes than the step and the form of its queries have.
fn check_latent<T: Element>(
    step: &StepContext<'_>,
    layer: &LayerTensors<'_, T>,
    latent: &LatentTensors<'_, T>,
    rows: StepRows,
) -> Result<()> {
    let CacheShape { key_dim: latent_dim, value_dim: rope_dim, kv_heads, .. } = CacheShape::latent(1);
    let (heads, plain_dim) = (step.shape.heads, step.shape.head_dim.saturating_sub(rope_dim));
    let check = |rows: StepRows, name, tensor: &AnyTensor, heads, dim| {
        rows.check(name, tensor, Some(layer.layer), heads, Some(dim))
    };
    match latent.form {
        LatentForm::Absorbed => check(rows, "query", layer.query, heads, latent_dim)?,
        LatentForm::Quantised(queries) => {
            check(rows, "query", queries.query(), heads, latent_dim)?;
            latent.check_query(layer.query, layer.layer, &rules::STEP_HEADS)?;
        }
        LatentForm::Plain(_) => check(rows, "query", layer.query, heads, plain_dim)?,
        LatentForm::Mixed { .. } | LatentForm::QuantisedMixed { .. } => {
            let Some((absorbed, decoded)) = layer.mixed() else {
                return Ok(());
            };
            let metadata = step.metadata;
            if metadata.decodes() == 0 || metadata.prefills() == 0 || !metadata.decodes_lead() {
                // No backend computes mixed queries of such a step, which it says.
                return Ok(());
            }
            let decodes = metadata.decode_tokens();
            let [actual, padded] = [rows.actual, rows.padded].map(|rows| rows.saturating_sub(decodes));
            check(StepRows { actual, padded, ..rows }, "query", layer.query, heads, plain_dim)?;
            check(StepRows { actual: decodes, padded: decodes, ..rows }, "absorbed", absorbed, heads, latent_dim)?;
            decoded.check_device("decoded", step.stream.device())?;
            if decoded.shape() != [heads, decodes, latent_dim] {
                return Err(Violation::new(
                    &rules::STEP_HEADS,
                    format_args!("decoded {:?} in layer {}", decoded.shape(), layer.layer),
                    format_args!("[{heads}, {decodes}, {latent_dim}], as the absorbed queries have it"),
                    "make the output of the decodes with the heads in front",
                )
                .into());
            }
            if !decoded.is_contiguous() {
                let given = format_args!("decoded {} in layer {}", decoded.desc(), layer.layer);
                return Err(rules::STEP_CONTIGUOUS.broken(given, "row-major strides").into());
            }
        }
    }
    check(rows, "query_rope", latent.query_rope, heads, rope_dim)?;
    let [latents, key_rope] = names_of_keys(true);
    check(rows, latents, layer.key, kv_heads, latent_dim)?;
    Ok(check(rows, key_rope, layer.value, kv_heads, rope_dim)?)
}

/// Refuses an output of the caller that is not a contiguous tensor of the device and of the shape that a layer writes,
/// or that shares memory with what the layer reads, or with what else it writes.
pub(crate) fn check_output<'a>(
    name: &'static str,
    output: &AnyTensor,
    (device, shape): (&Device, &[usize]),
    others: impl IntoIterator<Item = (&'static str, &'a AnyTensor)>,
) -> Result<()> {
    output.check_device(name, device)?;
    if output.shape() != shape || !output.is_contiguous() {
        let planned = format_args!("a contiguous tensor of {shape:?}");
        return Err(Error::not_as_planned(name, output.desc(), planned));
    }
    apart(name, output, others)
}

/// The advice on heads of a layer of latent attention.
const LATENT_HEADS_FIX: &str = "bring queries of 512 where they are absorbed and of 128 where they are plain, rotary \
     parts of 64, latents of 512 and rotary keys of 64, each in its place of `LayerInputs::latent`, with the heads of \
     the `AttentionShape`";

/// The advice on heads of a layer of a step.
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
    /// The advice on other rows, and on other heads.
    pub(crate) fixes: [&'static str; 2],
}

impl StepRows {
    /// Refuses a tensor, of a layer if there are several, with other rows, other heads, or another head dimension where
    /// there is only one, and one that is not contiguous.
    pub(crate) fn check(
        self,
        name: &str,
        tensor: &AnyTensor,
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
                format_args!("[{rows}, {heads}, {dim}]"),
                fixes[1],
            ));
        }
        if !tensor.is_contiguous() {
            return Err(rules::STEP_CONTIGUOUS.broken(given(&tensor.desc()), "row-major strides"));
        }
        Ok(())
    }
}
