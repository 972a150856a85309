//! What the graphs of a size read and write in layers of linear attention, and the calls that they record.

use std::sync::Arc;

use ascend_attention::delta_rule::{DeltaSequences, DeltaTensors};
use ascend_attention::graph::Capturing;
use ascend_attention::recurrent_delta_rule::{RecurrentDeltaPlan, RecurrentGatedDeltaRule};
use ascend_attention::spec::ops::delta_rule::MOST_TOKENS;
use ascend_attention::{AnyTensor, DType, Element, Stream, Tensor, Violation};

use crate::error::{Error, Result};
use crate::graphs::{ConvolutionWeights, GraphLimits, GroupBuffers, RowsPerRequest, zeros};
use crate::kv::{Convolution, StateLease, StatePool, no_layer};
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
    /// The layers over a pool, with the convolutions of limits, which were checked.
    pub(super) fn new(pool: &Arc<StatePool>, limits: &GraphLimits) -> Result<Self> {
        let typed = |(weight, bias): &ConvolutionWeights| {
            let bias = bias.as_ref().map(|bias| bias.clone().typed::<T>()).transpose()?;
            Ok((weight.clone().typed::<T>()?, bias))
        };
        let convolutions = limits.convolutions.iter().map(typed).collect::<Result<_>>()?;
        Ok(Self { pool: Arc::clone(pool), convolutions })
    }
}

/// The tensors of a captured layer of linear attention, with a row for each token of the captured size. All such layers
/// of a size have the same tensors. Rows of padding are neither read nor written.
#[derive(Debug)]
#[non_exhaustive]
pub struct LinearGraphTensors<T: Element> {
    /// What the convolution in front reads, `[rows, channels]`; `None` where the pool has none.
    pub x: Option<Tensor<T>>,
    /// What the convolution in front writes, `[rows, channels]`; `None` where the pool has none. The next convolution
    /// overwrites it, so that [`Step::convolve`](crate::Step::convolve) alone lends it.
    pub(crate) y: Option<Tensor<T>>,
    /// Queries, `[rows, Nk, Dk]`.
    pub query: Tensor<T>,
    /// Keys, `[rows, Nk, Dk]`.
    pub key: Tensor<T>,
    /// Values, `[rows, Nv, Dv]`.
    pub value: Tensor<T>,
    /// The part of each correction that is made, `[rows, Nv]`.
    pub beta: Tensor<T>,
    /// The logarithm of the decay of each head, `[rows, Nv]`, where the layers have it.
    pub g: Option<Tensor<f32>>,
    /// The logarithm of the decay of each column, `[rows, Nv, Dk]`, where the layers have it.
    pub gk: Option<Tensor<f32>>,
    /// What is read from the states, `[rows, Nv, Dv]`. The next layer overwrites it, so that
    /// [`Step::forward`](crate::Step::forward) alone lends it.
    pub(crate) output: Tensor<T>,
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
    /// Refuses limits of which no graph can be captured: more tokens of a request than the operator takes, weights of
    /// another number of layers than the pool has, or of any where it has no convolution, and weights of other shapes
    /// or another type.
    pub(super) fn check(pool: &StatePool, limits: &GraphLimits) -> Result<(), Violation> {
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
        let shape = pool.shape();
        let (given, wanted) = (limits.convolutions.len(), shape.convolution.map_or(0, |_| shape.layers));
        if given != wanted {
            return Err(Violation::new(
                &rules::GRAPH_INPUTS,
                format_args!("weights of the convolutions of {given} layers of linear attention"),
                match shape.convolution {
                    Some(_) => format!("of all {wanted}, as the `StateShape` has a convolution"),
                    None => "none, as the `StateShape` has no convolution".to_owned(),
                },
                "give the weights of each layer of linear attention to `GraphLimits::convolutions`, where the pool of \
                 states has a convolution",
            ));
        }
        shape.convolution.map_or(Ok(()), |convolution| check_weights(&limits.convolutions, convolution, T::DTYPE))
    }

    /// Allocates the buffers of `requests` requests with `rows` rows together, and plans their calls.
    pub(super) fn new(linear: &CapturedLinear<T>, stream: &Stream, (requests, rows): (usize, usize)) -> Result<Self> {
        let pool = &*linear.pool;
        let device = stream.device();
        let shape = pool.shape();
        let [heads, dim] = [shape.value_heads, shape.value_dim];
        let keys = || zeros::<T>(device, [rows, shape.key_heads, shape.key_dim]);
        let decays = |wanted: bool, columns: usize| wanted.then(|| zeros::<f32>(device, [rows, heads, columns]));
        let of_heads = decays(shape.g, 1).transpose()?.map(|g| g.reshape([rows, heads]));
        let mut tensors = LinearGraphTensors {
            x: None,
            y: None,
            query: keys()?,
            key: keys()?,
            value: zeros(device, [rows, heads, dim])?,
            beta: zeros::<T>(device, [rows, heads, 1])?.reshape([rows, heads])?,
            g: of_heads.transpose()?,
            gk: decays(shape.gk, shape.key_dim).transpose()?,
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
                (tensors.x, tensors.y) = (Some(x), Some(y));
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
        let LinearGraphTensors { x: Some(x), y: Some(y), .. } = &self.tensors else {
            return Err(no_layer(layer, 0));
        };
        let (Some(calls), Some((weight, bias))) = (&self.convolution, linear.convolutions.get(layer)) else {
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

/// Refuses weights of other shapes than the convolution's or of another type, and biases of some layers alone.
fn check_weights(
    convolutions: &[ConvolutionWeights],
    Convolution { width, channels, .. }: Convolution,
    dtype: DType,
) -> Result<(), Violation> {
    let has_bias = convolutions.first().is_some_and(|(_, bias)| bias.is_some());
    for (own, (weight, bias)) in convolutions.iter().enumerate() {
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
                if has_bias { format!("a bias [{channels}] in every layer") } else { "no bias in any layer".into() }
            ),
            "give weights as `[width, channels]`, the model's `[channels, width]` transposed, of the type of the \
                 cache, and a bias of all layers or of none: zeros are none",
        ));
    }
    Ok(())
}
