//! The layers of linear attention of a step that is replayed from graphs.

use std::sync::Arc;

use ascend_attention::delta_rule::DeltaTensors;
use ascend_attention::{AnyTensor, Element, Stream, Tensor, Violation};

use crate::error::{Error, Result};
use crate::graphs::{ConvolutionWeights, GraphStep, check_captured, copy_rows};
use crate::kv::{StatePool, no_layer};
use crate::rules;

use super::convolution_step::ConvolutionInputs;
use super::leased_states::LeasedStates;
use super::linear_buffers::{LinearBuffers, LinearGraphTensors, SizeBuffers};

/// The layers of linear attention that were captured.
pub(super) struct CapturedLinear {
    pub(super) pool: Arc<StatePool>,
    /// The weights of each layer's convolution.
    pub(super) convolutions: Vec<ConvolutionWeights>,
}

/// A layer of linear attention, as the model numbers it and among those of linear attention, and how many layers the
/// model has: the graphs of convolutions come behind those of the layers.
#[derive(Clone, Copy)]
pub(super) struct LinearPlace {
    pub(super) layer: usize,
    pub(super) own: usize,
    pub(super) layers: usize,
}

impl LinearPlace {
    /// The number of the graph of the layer's convolution.
    fn convolution(self) -> usize {
        self.layers.saturating_add(self.own)
    }
}

/// Rows of a step's tensors, without the padding and with it.
#[derive(Clone, Copy)]
pub(super) struct ReplayedRows<'a> {
    pub(super) stream: &'a Stream,
    pub(super) actual: usize,
    pub(super) padded: usize,
}

/// How to bring the weights of a captured convolution.
const WEIGHTS_FIX: &str = "bring the tensor that `LinearCapture::convolutions` got for the layer, and copy other \
     numbers into it";

/// What layers of linear attention share in a step that is replayed.
pub(super) struct LinearReplay<'a> {
    captured: &'a CapturedLinear,
    leased: LeasedStates,
    /// Which layers are convolved, counted among those of linear attention.
    convolved: Vec<bool>,
    /// The layer whose rows the convolutions of the graphs have written last.
    last: Option<usize>,
}

impl<'a> LinearReplay<'a> {
    pub(super) fn new(captured: &'a CapturedLinear, leased: LeasedStates) -> Self {
        let convolved = vec![false; captured.convolutions.len()];
        Self { captured, leased, convolved, last: None }
    }

    /// Whether a layer may have written states.
    pub(super) fn has_written(&self) -> bool {
        self.leased.has_written()
    }

    /// The end of a step of which every layer is queued.
    pub(super) fn advance(&mut self) {
        self.leased.advance();
    }

    /// Copies what a layer convolves into its tensor, and launches the graph of its convolution.
    pub(super) fn convolve<T: Element>(
        &mut self,
        step: &mut GraphStep<'a, SizeBuffers<T>>,
        rows: ReplayedRows<'_>,
        place: LinearPlace,
        inputs: &ConvolutionInputs<'_, T>,
    ) -> Result<&'a Tensor<T>> {
        let LinearPlace { layer, own, .. } = place;
        let [x, _] = self.check_convolution(step, place)?;
        let ConvolutionInputs { x: given, weight, bias } = *inputs;
        if let Some((own_weight, own_bias)) = self.captured.convolutions.get(own) {
            let given = [("weight", Some(&**weight)), ("bias", bias.map(|bias| &**bias))];
            for ((name, given), captured) in given.into_iter().zip([Some(own_weight), own_bias.as_ref()]) {
                check_captured((name, format_args!("the convolution of layer {layer}")), given, captured, WEIGHTS_FIX)?;
            }
        }
        check_rows(("x", given, x), layer, rows)?;
        copy_rows(rows.stream, std::iter::once(("x", &**given, &**x)))?;
        self.launch_convolution(step, place)
    }

    /// Launches the graph of a layer's convolution.
    pub(super) fn launch_convolution<T: Element>(
        &mut self,
        step: &mut GraphStep<'a, SizeBuffers<T>>,
        place: LinearPlace,
    ) -> Result<&'a Tensor<T>> {
        let [_, y] = self.check_convolution(step, place)?;
        self.leased.note_call(step.launch(place.convolution()))?;
        self.leased.end_write();
        self.last = Some(place.own);
        if let Some(convolved) = self.convolved.get_mut(place.own) {
            *convolved = true;
        }
        Ok(y)
    }

    /// Copies the tensors of a layer into those of its graph, and launches it.
    pub(super) fn forward<T: Element>(
        &mut self,
        step: &mut GraphStep<'a, SizeBuffers<T>>,
        rows: ReplayedRows<'_>,
        place: LinearPlace,
        inputs: &DeltaTensors<'_, T>,
    ) -> Result<&'a LinearGraphTensors<T>> {
        let layer = place.layer;
        self.check_layer(step, place)?;
        let tensors = &buffers(step, place)?.tensors;
        let copies = tensors.copies(inputs);
        let convolved = tensors.convolution.as_ref().filter(|_| self.last != Some(place.own));
        for (name, given, captured) in copies {
            if let (Some([_, rows]), Some(given)) = (convolved, given)
                && given.overlaps(rows)
            {
                let text =
                    format_args!("{name} in layer {layer}, in rows that the convolution of another has overwritten");
                return Err(Error::shared("memory", text, "rows of the layer's own convolution, or a copy").fix(
                    "queue each layer behind its own convolution, or copy the rows before the next one; a part of them \
                     that is contiguous already is no copy, whatever `contiguous` and `reshape` return",
                ));
            }
            match (given, captured) {
                (Some(given), Some(captured)) => check_rows((name, given, captured), layer, rows)?,
                (None, None) => {}
                (given, _) => {
                    let [given, allowed] = match given {
                        Some(_) => ["", "no "],
                        None => ["no ", ""],
                    };
                    return Err(Violation::new(
                        &rules::GRAPH_INPUTS,
                        format_args!("{given}`{name}` in layer {layer} of linear attention"),
                        format_args!("{allowed}`{name}`, as the layers were captured"),
                        "bring the decays that `LinearCapture` names, or capture with those that the layers bring; \
                         zeros are no decay",
                    )
                    .into());
                }
            }
        }
        copy_rows(rows.stream, copies.iter().filter_map(|(name, from, to)| Some((*name, (*from)?, (*to)?))))?;
        self.launch(step, place)
    }

    /// Launches the graph of a layer.
    pub(super) fn launch<T: Element>(
        &mut self,
        step: &mut GraphStep<'a, SizeBuffers<T>>,
        place: LinearPlace,
    ) -> Result<&'a LinearGraphTensors<T>> {
        self.check_layer(step, place)?;
        let tensors = &buffers(step, place)?.tensors;
        self.leased.note_call(step.launch(place.layer))?;
        self.leased.end_write();
        Ok(tensors)
    }

    /// Refuses a layer that was replayed, that is not convolved yet, or that comes behind one that failed.
    fn check_layer<T: Element>(&self, step: &GraphStep<'_, SizeBuffers<T>>, place: LinearPlace) -> Result<()> {
        let LinearPlace { layer, own, .. } = place;
        step.admits(layer)?;
        self.leased.check_not_half_written(layer)?;
        if self.convolved.get(own) == Some(&false) {
            let given = format_args!("layer {layer}, which was not convolved in this step");
            return Err(rules::STEP_CONVOLUTION.broken(given, "the layer behind its convolution").into());
        }
        Ok(())
    }

    /// The tensors of a layer's convolution, which was not queued yet.
    fn check_convolution<T: Element>(
        &self,
        step: &GraphStep<'a, SizeBuffers<T>>,
        place: LinearPlace,
    ) -> Result<&'a [Tensor<T>; 2]> {
        let LinearPlace { layer, own, .. } = place;
        step.admits(layer)?;
        self.leased.check_not_half_written(layer)?;
        // A pool without a convolution is refused by that.
        self.captured.pool.windows(own)?;
        if self.convolved.get(own) == Some(&true) {
            let given = format_args!("layer {layer} twice");
            return Err(rules::STEP_CONVOLUTION.broken(given, "each layer once in a step").into());
        }
        let tensors = &buffers(step, place)?.tensors;
        tensors.convolution.as_ref().ok_or_else(|| no_layer(layer, place.layers))
    }
}

/// The buffers of layers of linear attention.
fn buffers<'a, T: Element>(step: &GraphStep<'a, SizeBuffers<T>>, place: LinearPlace) -> Result<&'a LinearBuffers<T>> {
    step.buffers().linear.as_ref().ok_or_else(|| no_layer(place.layer, place.layers))
}

/// Refuses a tensor of other rows than those of the step, with or without the padding, and of other sizes or with gaps.
fn check_rows(
    (name, given, captured): (&str, &AnyTensor, &AnyTensor),
    layer: usize,
    rows: ReplayedRows<'_>,
) -> Result<(), Violation> {
    let ReplayedRows { actual, padded, .. } = rows;
    let text = format_args!("{name} {} in layer {layer} of linear attention", given.desc());
    let (shape, wanted) = (given.shape(), captured.shape());
    if !shape.first().is_some_and(|rows| (actual..=padded).contains(rows)) {
        let allowed = format_args!("{actual} rows, or up to {padded} with the padding");
        return Err(rules::STEP_TOKENS.broken(text, allowed));
    }
    if shape.get(1..) != wanted.get(1..) {
        return Err(Violation::new(
            &rules::STEP_HEADS,
            text,
            format_args!("rows of {:?}", wanted.get(1..).unwrap_or_default()),
            match name {
                "x" => "bring the channels of the convolution in the `StateShape`",
                _ => "bring the heads of the `StateShape` and of `LinearCapture`",
            },
        ));
    }
    match given.is_contiguous() {
        true => Ok(()),
        false => Err(rules::STEP_CONTIGUOUS.broken(text, "row-major strides")),
    }
}
