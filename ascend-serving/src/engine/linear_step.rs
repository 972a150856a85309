//! The layers of linear attention of a step in progress.

use ascend_attention::delta_rule::DeltaTensors;
use ascend_attention::{AnyTensor, Element, Stream, Tensor, Violation};

use crate::backends::size;
use crate::batch::{AttentionMetadata, LayerMask};
use crate::causality::Causality;
use crate::error::Result;
use crate::kv::{StateLease, StatePool, no_layer};
use crate::rules;

use super::convolution_step::{ConvolutionInputs, ConvolutionStep};
use super::linear_calls::{DeltaCall, DeltaRows, DeltaRun};

/// How to go on after a step that has written some layers of linear attention and not all layers.
pub(super) const STATES_AGAIN: &str = "queue every layer; where one of linear attention was queued, cut the requests' \
     sequences to 0 (`truncate`) and compute all tokens again, or go on from forks that were made before the step";

/// What the layers of linear attention share in a step: the states that it writes, and its calls.
#[derive(Debug)]
pub(super) struct LinearStep {
    states: Vec<StateLease>,
    runs: Vec<DeltaRun>,
    /// The convolutions in front of the layers, if the pool has their windows.
    convolution: Option<ConvolutionStep>,
    /// What the first layer has prepared for all.
    calls: Option<Vec<DeltaCall>>,
    /// Whether the first layer has decays of heads, and of columns.
    decays: Option<[bool; 2]>,
    /// Rows of the step, padding included.
    tokens: usize,
    /// Whether a layer may have written states.
    wrote: bool,
    /// Whether a layer may have written the states of some calls alone.
    half_written: bool,
    ended: bool,
}

/// Refuses a step of states that nothing goes on from.
pub(super) fn check_whole(pool: &StatePool, metadata: &AttentionMetadata) -> Result<(), Violation> {
    let states = metadata.recurrent_requests().filter_map(|request| request.state);
    states.filter_map(|state| state.upgrade()).try_for_each(|state| pool.check_state(Some(&state)))
}

impl LinearStep {
    /// Begins the layers of linear attention of a step.
    pub(super) fn begin(pool: &StatePool, stream: &Stream, metadata: &AttentionMetadata) -> Result<Self> {
        let mut states = Vec::with_capacity(metadata.requests());
        for (at, request) in metadata.recurrent_requests().enumerate() {
            let Some(state) = request.state else {
                return Err(rules::STATE_REQUESTS
                    .broken(
                        format_args!("request {at} without a state"),
                        "requests by `BatchRequest::of`, of sequences of `Attention::sequence`",
                    )
                    .into());
            };
            let Some(state) = state.upgrade() else {
                return Err(rules::SEQUENCE_CHANGED
                    .broken(
                        format_args!("metadata of request {at}, whose sequence is gone or has begun anew since"),
                        "sequences as they were when the metadata was made",
                    )
                    .into());
            };
            state.check_request(at, request.cached, request.new, request.drafts)?;
            states.push((state, request.new));
        }
        let states = pool.begin(stream, states)?;
        let runs = DeltaRun::of(&states);
        let convolution = ConvolutionStep::of(pool, &states);
        let tokens = metadata.tokens();
        Ok(Self {
            states,
            runs,
            convolution,
            calls: None,
            decays: None,
            tokens,
            wrote: false,
            half_written: false,
            ended: false,
        })
    }

    /// Whether a layer may have written states.
    pub(super) fn has_written(&self) -> bool {
        self.wrote
    }

    /// The end of a step of which every layer is queued.
    pub(super) fn advance(&mut self) {
        if !std::mem::replace(&mut self.ended, true) {
            self.states.iter_mut().for_each(StateLease::advance);
        }
    }

    /// Queues the convolution of a layer, counted among those of linear attention.
    pub(super) fn convolve<T: Element>(
        &mut self,
        pool: &StatePool,
        stream: &Stream,
        layer: usize,
        inputs: &ConvolutionInputs<'_, T>,
    ) -> Result<Tensor<T>> {
        self.check_not_half_written(layer)?;
        // A pool without a convolution is refused by that.
        pool.windows(layer)?;
        let Some(convolution) = &mut self.convolution else {
            return Err(no_layer(layer, 0));
        };
        let place = (layer, self.tokens);
        let y = convolution.queue_layer(pool, stream, place, inputs, || {
            self.wrote = true;
            self.half_written = true;
        })?;
        self.half_written = false;
        Ok(y)
    }

    fn check_not_half_written(&self, layer: usize) -> Result<(), Violation> {
        if !self.half_written {
            return Ok(());
        }
        let given = format_args!("layer {layer} of a step, of which a launch has failed between others");
        Err(rules::STATE_TORN.broken(given, "a step that is begun again"))
    }

    /// Queues a layer, counted among those of linear attention.
    pub(super) fn queue_layer<T: Element>(
        &mut self,
        pool: &StatePool,
        stream: &Stream,
        layer: usize,
        tensors: &DeltaTensors<'_, T>,
    ) -> Result<Tensor<T>> {
        self.check_not_half_written(layer)?;
        if self.convolution.as_ref().is_some_and(|convolution| !convolution.is_done(layer)) {
            let given = format_args!("layer {layer} of linear attention, which was not convolved in this step");
            return Err(rules::STEP_CONVOLUTION.broken(given, "the layer behind its convolution").into());
        }
        let states = pool.layer(layer)?;
        self.check_rows(layer, tensors)?;
        let decays = [tensors.g.is_some(), tensors.gk.is_some()];
        if let Some(first) = self.decays.filter(|first| *first != decays) {
            let text = |[heads, columns]: [bool; 2]| format!("{} of heads, {} of columns", some(heads), some(columns));
            return Err(Violation::new(
                &rules::STEP_LAYERS,
                format_args!("decays in layer {layer} of linear attention: {}", text(decays)),
                format_args!("those of the step's first one: {}", text(first)),
                "bring `g`, and `gk`, in every layer of linear attention or in none; zeros are no decay",
            )
            .into());
        }
        let calls = match &self.calls {
            Some(calls) => calls,
            None => {
                let calls = self.runs.iter().map(|run| run.plan(pool, stream, states, tensors));
                let calls = calls.collect::<Result<Vec<_>>>()?;
                self.decays = Some(decays);
                self.calls.insert(calls.into_iter().flatten().collect())
            }
        };
        // All rows before the first launch, so that nothing is written where one is refused.
        let rows = calls.iter().map(|call| DeltaRows::of(tensors, call.rows()));
        let rows = rows.collect::<Result<Vec<_>>>()?;
        let mut outputs = Vec::with_capacity(calls.len());
        for (call, rows) in calls.iter().zip(&rows) {
            outputs.push(call.launch(stream, states, rows, || {
                self.wrote = true;
                self.half_written = true;
            })?);
        }
        let output = joined(stream, self.tokens, calls, outputs)?;
        self.half_written = false;
        Ok(output)
    }

    /// Refuses tensors that do not have a row for each token of the step.
    fn check_rows<T: Element>(&self, layer: usize, tensors: &DeltaTensors<'_, T>) -> Result<()> {
        let DeltaTensors { query, key, value, beta, g, gk, .. } = *tensors;
        let given: [(_, Option<&AnyTensor>); 6] = [
            ("query", Some(query)),
            ("key", Some(key)),
            ("value", Some(value)),
            ("beta", Some(beta)),
            ("g", g.map(|tensor| &**tensor)),
            ("gk", gk.map(|tensor| &**tensor)),
        ];
        for (name, tensor) in given {
            let Some(tensor) = tensor else { continue };
            if tensor.shape().first() != Some(&self.tokens) {
                return Err(rules::STEP_TOKENS
                    .broken(
                        format_args!("{name} {} in layer {layer} of linear attention", tensor.desc()),
                        format_args!("{} rows", self.tokens),
                    )
                    .into());
            }
        }
        Ok(())
    }
}

fn some(given: bool) -> &'static str {
    if given { "some" } else { "none" }
}

impl Drop for LinearStep {
    fn drop(&mut self) {
        if !self.ended && !self.wrote {
            self.states.iter_mut().for_each(StateLease::restore);
        }
    }
}

/// Refuses a step whose tokens see later ones, or only some of those before: a state has taken all of them.
pub(super) fn check_states_causal(metadata: &AttentionMetadata) -> Result<(), Violation> {
    let is_causal = |mask: &&LayerMask| {
        matches!(mask, LayerMask::Causality(Causality::Causal | Causality::Window(_) | Causality::Chunk(_)))
    };
    match metadata.groups().map(AttentionMetadata::mask).find(|mask| !is_causal(mask)) {
        None => Ok(()),
        Some(other) => Err(Violation::new(
            &rules::STEP_CAUSALITY,
            format_args!("{other} with layers of linear attention"),
            "a causal step, with a window or without",
            "leave the mask of the metadata causal, and compute documents or items as requests of their own; a layer \
             of attention gets another mask by `LayerInputs::mask`",
        )),
    }
}

/// The outputs of the calls as one tensor; zeros for the padding.
fn joined<T: Element>(
    stream: &Stream,
    tokens: usize,
    calls: &[DeltaCall],
    mut outputs: Vec<Tensor<T>>,
) -> Result<Tensor<T>> {
    let Some(last) = outputs.pop() else {
        return Err(crate::error::Error::invalid("requests", 0, "1 or more").fix("leave out a step without requests"));
    };
    if outputs.is_empty() && size(&last, 0) == tokens {
        return Ok(last);
    }
    let output = Tensor::empty(stream.device(), [tokens, size(&last, 1), size(&last, 2)])?;
    outputs.push(last);
    let mut end = 0;
    for (call, part) in calls.iter().zip(outputs) {
        output.narrow(0, call.rows())?.copy_from(stream, &part)?;
        end = call.rows().end;
    }
    output.narrow(0, end..tokens)?.clear(stream)?;
    Ok(output)
}
