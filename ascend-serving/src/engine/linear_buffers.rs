//! What the graphs of a size read and write in layers of linear attention, and the calls that they record.

use std::sync::Arc;

use ascend_attention::delta_rule::{DeltaSequences, DeltaTensors};
use ascend_attention::graph::Capturing;
use ascend_attention::recurrent_delta_rule::{RecurrentDeltaPlan, RecurrentGatedDeltaRule};
use ascend_attention::spec::ops::delta_rule::MOST_TOKENS;
use ascend_attention::{Element, Stream, Tensor, Violation};

use crate::error::{Error, Result};
use crate::graphs::{ConvolutionWeights, GraphLimits, GroupBuffers, LinearCapture, RowsPerRequest, zeros};
use crate::kv::{StateLease, StatePool, no_layer};
use crate::rules;

use super::convolution_calls::{ConvolutionCalls, ConvolutionRows, ConvolutionTensors};

/// The buffers of the graphs of a size: of each group of layers, and of layers of linear attention.
pub(super) struct SizeBuffers<T: Element> {
    pub(super) groups: Vec<GroupBuffers<T>>,
    pub(super) linear: Option<LinearBuffers<T>>,
}

/// The layers of linear attention that were captured.
pub(super) struct CapturedLinear<T: Element> {
    pub(super) pool: Arc<StatePool>,
    /// The weights of each layer's convolution.
    pub(super) convolutions: Vec<TypedWeights<T>>,
}

/// The weights of a layer's convolution and its bias, if it has one, of the type of the step.
pub(super) type TypedWeights<T> = (Tensor<T>, Option<Tensor<T>>);

impl<T: Element> CapturedLinear<T> {
    /// The layers that limits describe, which were checked.
    pub(super) fn new(pool: &Arc<StatePool>, capture: &LinearCapture) -> Result<Self> {
        let typed = |(weight, bias): &ConvolutionWeights| {
            let bias = bias.as_ref().map(|bias| bias.clone().typed::<T>()).transpose()?;
            Ok((weight.clone().typed::<T>()?, bias))
        };
        let convolutions = capture.convolutions.iter().map(typed).collect::<Result<_>>()?;
        Ok(Self { pool: Arc::clone(pool), convolutions })
    }
}

/// The tensors of a captured layer of linear attention, with a row for each token of the captured size. All such layers
/// of a size have the same tensors. Rows of padding are neither read nor written.
#[derive(Debug)]
#[non_exhaustive]
pub struct LinearGraphTensors<T: Element> {
    /// The rows of the convolution in front; `None` where the pool has none.
    pub convolution: Option<ConvolutionGraphTensors<T>>,
    /// Queries, `[rows, Nk, Dk]`.
    pub query: Tensor<T>,
    /// Keys, `[rows, Nk, Dk]`.
    pub key: Tensor<T>,
    /// Values, `[rows, Nv, Dv]`.
    pub value: Tensor<T>,
    /// The part of each correction that is made, `[rows, Nv]`.
    pub beta: Tensor<T>,
    /// The logarithm of the decay of each head, `[rows, Nv]`, where it is captured.
    pub g: Option<Tensor<f32>>,
    /// The logarithm of the decay of each column, `[rows, Nv, Dk]`, where it is captured.
    pub gk: Option<Tensor<f32>>,
    /// What is read from the states, `[rows, Nv, Dv]`.
    pub output: Tensor<T>,
}

/// The rows of a captured convolution.
#[derive(Debug)]
#[non_exhaustive]
pub struct ConvolutionGraphTensors<T: Element> {
    /// What is convolved, `[rows, channels]`.
    pub x: Tensor<T>,
    /// What the convolution writes, `[rows, channels]`.
    pub y: Tensor<T>,
}

impl<T: Element> LinearGraphTensors<T> {
    /// The tensors that a layer reads, for [`Step::forward`](crate::Step::forward).
    pub fn inputs(&self) -> DeltaTensors<'_, T> {
        let mut tensors = DeltaTensors::new((&self.query, &self.key, &self.value), &self.beta);
        (tensors.g, tensors.gk) = (self.g.as_ref(), self.gk.as_ref());
        tensors
    }
}

/// The buffers of the graphs of a size for layers of linear attention, and their calls.
pub(super) struct LinearBuffers<T: Element> {
    sequences: DeltaSequences,
    plan: RecurrentDeltaPlan,
    convolution: Option<ConvolutionCalls<T>>,
    pub(super) tensors: LinearGraphTensors<T>,
    /// Requests and rows of the size.
    size: (usize, usize),
}

impl<T: Element> LinearBuffers<T> {
    /// Refuses limits of which no graph can be captured: more tokens of a request than the operator takes, and limits
    /// that do not say what the layers have.
    pub(super) fn check<'l>(pool: &StatePool, limits: &'l GraphLimits) -> Result<&'l LinearCapture, Violation> {
        let Some(capture) = &limits.linear else {
            return Err(Violation::new(
                &rules::GRAPH_INPUTS,
                "limits that do not say what layers of linear attention bring",
                "limits with their heads, decays and convolutions",
                "describe the layers by `GraphLimits::linear`",
            ));
        };
        let RowsPerRequest(each) = limits.each;
        let most = MOST_TOKENS as usize;
        if each > most {
            return Err(Violation::new(
                &rules::GRAPH_SIZE,
                format_args!("{each} tokens of a request with layers of linear attention"),
                format_args!("at most {most} a request, as RecurrentGatedDeltaRule takes"),
                "capture with fewer tokens a request (`GraphLimits::tokens_each`), and compute longer steps without a \
                 graph",
            ));
        }
        capture.check(pool, T::DTYPE)?;
        Ok(capture)
    }

    /// Allocates the buffers of `requests` requests with `rows` rows together, and plans their calls.
    pub(super) fn new(
        linear: &CapturedLinear<T>,
        stream: &Stream,
        capture: &LinearCapture,
        (requests, rows): (usize, usize),
    ) -> Result<Self> {
        let pool = &*linear.pool;
        let device = stream.device();
        let shape = pool.shape();
        let (key_heads, [g, gk]) = (capture.key_heads, capture.decays);
        let [heads, dim] = [shape.value_heads, shape.value_dim];
        let keys = || zeros::<T>(device, [rows, key_heads, shape.key_dim]);
        let decays = |wanted: bool, columns: usize| wanted.then(|| zeros::<f32>(device, [rows, heads, columns]));
        let of_heads = decays(g, 1).transpose()?.map(|g| g.reshape([rows, heads]));
        let mut tensors = LinearGraphTensors {
            convolution: None,
            query: keys()?,
            key: keys()?,
            value: zeros(device, [rows, heads, dim])?,
            beta: zeros::<T>(device, [rows, heads, 1])?.reshape([rows, heads])?,
            g: of_heads.transpose()?,
            gk: decays(gk, shape.key_dim).transpose()?,
            // Rows of padding are not written: they hold zeros, or what an earlier step has left there.
            output: zeros(device, [rows, heads, dim])?,
        };
        let sequences = DeltaSequences::without_tokens(stream, requests, rows)?;
        let states = pool.layer(0)?;
        let planned = RecurrentGatedDeltaRule::new(shape.scale).plan(&sequences, (tensors.inputs(), states));
        let plan = planned.map_err(|why| {
            let why = Error::from(why);
            match &why {
                Error::Violation(small) if small.rule.id == "recurrent_delta.pool" => why.fix(format_args!(
                    "give the `StatePool` at least {rows} slots, as many as the largest size has rows, or leave out \
                     the sizes with more than {} rows",
                    pool.slots()
                )),
                _ => why,
            }
        })?;
        let convolution = match (shape.convolution, linear.convolutions.first()) {
            (Some(convolution), Some((weight, bias))) => {
                let [x, y] = [(); 2].map(|()| zeros::<T>(device, [rows, convolution.channels, 1]));
                let [x, y] = [x?, y?].map(|rows_of| rows_of.reshape([rows, convolution.channels]));
                let [x, y] = [x?, y?];
                // Only a request with drafts keeps a window behind each token.
                let keeps = rows > requests && shape.drafts > 0;
                let numbers = ConvolutionRows::of(convolution.front(), &[], (requests, rows));
                let windows = pool.windows(0)?.clone().typed::<T>()?;
                let given = ConvolutionTensors { x: &x, weight, bias: bias.as_ref(), windows: &windows };
                let calls = ConvolutionCalls::plan(pool, stream, (&numbers, keeps), given)?;
                let x = calls.own_rows().cloned().unwrap_or(x);
                tensors.convolution = Some(ConvolutionGraphTensors { x, y });
                Some(calls)
            }
            _ => None,
        };
        Ok(Self { sequences, plan, convolution, tensors, size: (requests, rows) })
    }

    /// Records the convolution of a layer, counted among those of linear attention.
    pub(super) fn record_convolution(
        &self,
        capture: &Capturing<'_>,
        linear: &CapturedLinear<T>,
        layer: usize,
    ) -> Result<()> {
        let weights = linear.convolutions.get(layer);
        let rows = self.tensors.convolution.as_ref();
        let (Some(calls), Some(ConvolutionGraphTensors { x, y }), Some((weight, bias))) =
            (&self.convolution, rows, weights)
        else {
            return Err(no_layer(layer, linear.convolutions.len()));
        };
        let windows = linear.pool.windows(layer)?.clone().typed::<T>()?;
        let tensors = ConvolutionTensors { x, weight, bias: bias.as_ref(), windows: &windows };
        calls.launch(capture, tensors, &mut y.clone(), || ())
    }

    /// Records a layer, counted among those of linear attention.
    pub(super) fn record_layer(&self, capture: &Capturing<'_>, pool: &StatePool, layer: usize) -> Result<()> {
        let inputs = (self.tensors.inputs(), pool.layer(layer)?);
        Ok(self.plan.launch_into(capture, inputs, &mut self.tensors.output.clone())?)
    }

    /// Puts the slots of a step's states, and the rows of its convolutions, into the buffers. Requests of padding have
    /// no tokens, so that they read and write no state.
    pub(super) fn fill(&self, pool: &StatePool, stream: &Stream, states: &[StateLease]) -> Result<()> {
        let (requests, _) = self.size;
        let states_with_rows = states.iter().filter(|state| state.new_tokens() > 0);
        let mut slots: Vec<Vec<usize>> = states_with_rows.map(StateLease::slots_of_tokens).collect();
        slots.resize(requests.max(slots.len()), Vec::new());
        self.sequences.overwrite(stream, &slots)?;
        if let (Some(calls), Some(convolution)) = (&self.convolution, pool.shape().convolution) {
            calls.overwrite(stream, &ConvolutionRows::of(convolution.front(), states, self.size))?;
        }
        Ok(())
    }
}
