//! Checks that the tensors of a layer fit the step and its other layers.

use std::fmt;

use ascend_attention::spec::Rule;
use ascend_attention::{AnyTensor, Device, Element, Stream, Violation};

use crate::backends::{LatentForm, LatentFormKind, LatentTensors, LayerTensors, StepContext, apart, names_of_keys};
use crate::batch::AttentionMetadata;
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
    let rows = StepRows::of_step(step.stream, step.metadata, None);
    if let Some(latent) = layer.latent {
        return check_latent(step, layer, &latent, StepRows { heads_fix: LATENT_HEADS_FIX, ..rows });
    }
    let (heads, kv_heads, dim) = (step.shape.heads, step.shape.kv_heads, step.shape.head_dim);
    let value_dim = layer.value.shape().get(2).copied().unwrap_or(dim);
    let place = format_args!("layer {}", layer.layer);
    rows.check("query", place, layer.query, &[heads, dim])?;
    rows.check(key, place, layer.key, &[kv_heads, dim])?;
    rows.check(value, place, layer.value, &[kv_heads, value_dim])
}

/// Refuses tensors of latent attention with other rows, heads or sizes than the step and the form of its queries have.
fn check_latent<T: Element>(
    step: &StepContext<'_>,
    layer: &LayerTensors<'_, T>,
    latent: &LatentTensors<'_, T>,
    rows: StepRows<'_>,
) -> Result<()> {
    let CacheShape { key_dim: latent_dim, value_dim: rope_dim, kv_heads, .. } = CacheShape::latent(1);
    let (heads, plain_dim) = (step.shape.heads, step.shape.head_dim.saturating_sub(rope_dim));
    let check = |rows: StepRows<'_>, name, tensor: &AnyTensor, heads, dim| {
        rows.check(name, format_args!("layer {}", layer.layer), tensor, &[heads, dim])
    };
    if let Some(queries) = layer.quantised_queries() {
        queries.check_latents(layer.layer, layer.quantised)?;
    }
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
    check(rows, key_rope, layer.value, kv_heads, rope_dim)
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

/// The advice on rows of a step that is replayed.
const REPLAYED_ROWS_FIX: &str = "bring a row for each token of the batch that the metadata was made of, and of the \
     padding all rows (`tokens` of the step) or none";

/// The rows that tensors of a step may have, their device, and the advice on others.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepRows<'a> {
    pub(crate) device: &'a Device,
    /// Rows of the requests.
    pub(crate) actual: usize,
    /// Rows including the padding.
    pub(crate) padded: usize,
    /// Rows that the metadata had before graphs filled it up, in a step that is replayed. Tensors may leave the
    /// padding out there, all of it or what the graphs have added; in other steps they have it.
    pub(crate) unfilled: Option<usize>,
    /// The advice on another number of rows.
    pub(crate) rows_fix: &'static str,
    /// The advice on rows of other sizes.
    pub(crate) heads_fix: &'static str,
}

impl<'a> StepRows<'a> {
    /// The rows of a step of this metadata; of a replay, which has filled it up, also those that it had before.
    pub(crate) fn of_step(stream: &'a Stream, metadata: &AttentionMetadata, unfilled: Option<usize>) -> Self {
        let rows_fix = match unfilled {
            Some(_) => REPLAYED_ROWS_FIX,
            None => rules::STEP_TOKENS.fix,
        };
        let (actual, padded) = (metadata.actual_tokens(), metadata.tokens());
        Self { device: stream.device(), actual, padded, unfilled, rows_fix, heads_fix: STEP_HEADS_FIX }
    }

    /// Rows without padding, and the advice on another number of them and on rows of other sizes.
    pub(crate) fn without_padding(stream: &'a Stream, rows: usize, [rows_fix, heads_fix]: [&'static str; 2]) -> Self {
        Self { device: stream.device(), actual: rows, padded: rows, unfilled: None, rows_fix, heads_fix }
    }

    /// Whether tensors may have this number of rows.
    fn admits(&self, rows: usize) -> bool {
        rows == self.padded || self.unfilled.is_some_and(|unfilled| rows == unfilled || rows == self.actual)
    }

    /// Refuses a tensor of another number of rows.
    pub(crate) fn check_number(
        &self,
        name: &str,
        place: impl fmt::Display,
        tensor: &AnyTensor,
    ) -> Result<(), Violation> {
        if tensor.shape().first().is_some_and(|rows| self.admits(*rows)) {
            return Ok(());
        }
        let of_row = tensor.shape().get(1..).unwrap_or_default();
        Err(self.refusal(
            &rules::STEP_TOKENS,
            self.rows_fix,
            format_args!("{name} {} in {place}", tensor.desc()),
            of_row,
        ))
    }

    /// Refuses a tensor of another device, of another number of rows, of rows of other sizes than `of_row`, and one
    /// that is not contiguous.
    pub(crate) fn check(
        &self,
        name: &'static str,
        place: impl fmt::Display,
        tensor: &AnyTensor,
        of_row: &[usize],
    ) -> Result<()> {
        tensor.check_device(name, self.device)?;
        let (rule, fix) = match tensor.shape().split_first() {
            Some((rows, own)) if own.len() == of_row.len() && !self.admits(*rows) => {
                (&rules::STEP_TOKENS, self.rows_fix)
            }
            Some((_, own)) if own == of_row && tensor.is_contiguous() => return Ok(()),
            Some((_, own)) if own == of_row => (&rules::STEP_CONTIGUOUS, rules::STEP_CONTIGUOUS.fix),
            _ => (&rules::STEP_HEADS, self.heads_fix),
        };
        Err(self.refusal(rule, fix, format_args!("{name} {} in {place}", tensor.desc()), of_row).into())
    }

    #[cold]
    fn refusal(
        &self,
        rule: &'static Rule,
        fix: &'static str,
        given: fmt::Arguments<'_>,
        of_row: &[usize],
    ) -> Violation {
        let Self { actual, padded, unfilled, .. } = *self;
        let sizes: String = of_row.iter().map(|size| format!(", {size}")).collect();
        let padding = match (padded.saturating_sub(actual), unfilled) {
            (0, _) => String::new(),
            (dummies, None) => format!(" and {dummies} of padding"),
            (dummies, Some(unfilled)) if unfilled == actual || unfilled == padded => {
                format!(" and {dummies} of padding, which may be left out as a whole")
            }
            (dummies, Some(unfilled)) => format!(
                " and {dummies} of padding, which may be left out, all or those behind the first {unfilled} rows"
            ),
        };
        let strides = if *rule == rules::STEP_CONTIGUOUS { ", with row-major strides" } else { "" };
        let allowed = format_args!("[{padded}{sizes}]: {actual} rows of the requests{padding}{strides}");
        Violation::new(rule, given, allowed, fix)
    }
}
