//! Replayed steps of every shape of linear layers have the bits of steps without graphs.

use ascend_attention::delta_rule::DeltaTensors;
use ascend_attention::spec::Cann;
use ascend_attention::{Stream, Tensor, bf16};
use ascend_serving::kv::{Convolution, Sequence, StatePool, StateShape};
use ascend_serving::{
    Attention, AttentionGraphs, BatchRequest, Causality, ConvolutionInputs, GraphLimits, Result, StatePolicy,
};

use super::model::{DIM, HEADS, KEY_HEADS, SHAPE, SLOTS, VALUES, group, number, stream_of, upload};

const FULL: usize = 1;
const LAYERS: usize = 2;
const CHANNELS: usize = 16;

/// A model of a linear layer and a full one.
#[derive(Clone, Copy, Debug)]
struct Variant {
    cann: Cann,
    /// Whether the states are of `f32`.
    floats: bool,
    width: Option<usize>,
    has_bias: bool,
    /// Decays of heads, and of columns.
    decays: [bool; 2],
    drafts: usize,
    /// Tokens of a request in captured steps.
    each: usize,
}

impl Variant {
    fn attention(self, stream: &Stream) -> Attention<bf16> {
        let convolution = self.width.map(|width| Convolution { width, channels: CHANNELS, silu: self.has_bias });
        let [g, gk] = self.decays;
        let shape = StateShape { layers: 1, g, gk, drafts: self.drafts, convolution, ..SHAPE };
        let states = match self.floats {
            true => StatePool::new::<f32>(stream, SLOTS, shape),
            false => StatePool::new::<bf16>(stream, SLOTS, shape),
        };
        Attention::of_hybrid(LAYERS, [group(stream, FULL)], [0], states.unwrap()).unwrap()
    }

    fn capture(self, attention: &Attention<bf16>, stream: &Stream, weights: &Weights) -> AttentionGraphs<bf16> {
        let limits = GraphLimits::new([2, SLOTS / self.each], 128).tokens_each(self.each);
        let limits = limits.convolutions(weights.clone());
        attention.capture(stream, Causality::Causal, &limits).unwrap()
    }

    fn weights(self, stream: &Stream) -> Weights {
        let numbers = |name, count: usize| (0..count).map(move |at| number(name, 0, at));
        let width = self.width?;
        let weight = upload(stream, numbers(3, width * CHANNELS), &[width, CHANNELS]);
        Some((weight, self.has_bias.then(|| upload(stream, numbers(4, CHANNELS), &[CHANNELS]))))
    }
}

type Weights = Option<(Tensor<bf16>, Option<Tensor<bf16>>)>;

/// Computes a step of both layers by one model, and returns the bits of both outputs.
fn step(
    variant: Variant,
    (stream, attention): (&Stream, &mut Attention<bf16>),
    graphs: Option<&mut AttentionGraphs<bf16>>,
    weights: &Weights,
    (sequences, work, name): (&[Sequence], &[usize], u64),
) -> Result<Vec<bf16>> {
    let count: usize = work.iter().sum();
    let rows = |which: u64, of_row: &[usize]| {
        let numbers = (0..count * of_row.iter().product::<usize>()).map(|at| number(name * 16 + which, 0, at) / 2.0);
        upload(stream, numbers, &[&[count], of_row].concat())
    };
    let decays = |wanted: bool, of_row: &[usize]| {
        let all = count * of_row.iter().product::<usize>();
        let numbers: Vec<f32> = (0..all).map(|at| -0.5 + number(name, 1, at) as f32 / 4.0).collect();
        wanted.then(|| stream.upload(&numbers, [&[count], of_row].concat()).unwrap())
    };
    let keys = [KEY_HEADS, SHAPE.key_dim];
    let (query, key, beta) = (rows(0, &keys), rows(1, &keys), rows(2, &[SHAPE.value_heads]));
    let x = rows(3, &[CHANNELS]);
    let g = decays(variant.decays[0], &[SHAPE.value_heads]);
    let gk = decays(variant.decays[1], &[SHAPE.value_heads, SHAPE.key_dim]);
    let wide = [rows(4, &[HEADS, DIM]), rows(5, &[1, DIM]), rows(6, &[1, DIM])];
    let batch = sequences.iter().zip(work).filter(|(_, new)| **new > 0);
    let batch: Vec<_> = batch.map(|(sequence, new)| BatchRequest::of(sequence, *new)).collect();
    let mut metadata = attention.metadata(&batch, StatePolicy::default())?;
    let values = |convolved: Option<Tensor<bf16>>| {
        let rows = convolved.unwrap_or_else(|| x.clone()).narrow(0, 0..count)?.narrow(1, 0..VALUES)?;
        rows.contiguous(stream)?.reshape([count, SHAPE.value_heads, SHAPE.value_dim])
    };
    let inputs = weights.as_ref().map(|(weight, bias)| {
        let inputs = ConvolutionInputs::from((&x, weight));
        bias.as_ref().map_or(inputs, |bias| inputs.bias(bias))
    });
    let tensors = |value| {
        let mut tensors = DeltaTensors::new((&query, &key, value), &beta);
        (tensors.g, tensors.gk) = (g.as_ref(), gk.as_ref());
        tensors
    };
    let attended = (&wide[0], &wide[1], &wide[2]);
    let rows = |output: &Tensor<bf16>| output.narrow(0, 0..count)?.contiguous(stream)?.download(stream);
    let mut step = match graphs {
        Some(graphs) => graphs.begin(stream, &mut metadata)?,
        None => attention.begin(stream, &metadata)?,
    };
    let convolved = inputs.map(|inputs| step.convolve(0, inputs).cloned()).transpose()?;
    let value = values(convolved)?;
    let linear = rows(step.forward(0, tensors(&value))?)?;
    let full = rows(step.forward(FULL, attended)?)?;
    step.end()?;
    Ok([linear, full].concat())
}

fn has_equal_bits(variant: Variant) {
    let stream = stream_of(variant.cann);
    let weights = variant.weights(&stream);
    let mut models = [variant.attention(&stream), variant.attention(&stream)];
    let mut graphs = variant.capture(&models[1], &stream, &weights);
    let mut sequences = models.each_ref().map(|model| [0; 2].map(|_| model.sequence()));
    // Prompts, then decodes and drafts of which some are rejected.
    let steps = [([7, 5], 0), ([1, 1], 0), ([3, 1], 2), ([0, 2], 1), ([2, 3], 1), ([1, 0], 0), ([3, 3], 0)];
    for (name, (work, rejected)) in steps.into_iter().enumerate() {
        let most = if name == 0 { usize::MAX } else { variant.each.min(variant.drafts + 1) };
        let work = work.map(|new: usize| new.min(most));
        let mut outputs = Vec::new();
        for (at, (model, sequences)) in models.iter_mut().zip(&mut sequences).enumerate() {
            for (sequence, new) in sequences.iter_mut().zip(work) {
                model.grow(&stream, sequence, new).unwrap();
            }
            let graphs = Some(&mut graphs).filter(|_| at == 1 && name > 0);
            let given = (&sequences[..], &work[..], name as u64);
            outputs.push(step(variant, (&stream, model), graphs, &weights, given).unwrap());
            for (sequence, new) in sequences.iter_mut().zip(work) {
                sequence.truncate(sequence.len() - rejected.min(new.saturating_sub(1))).unwrap();
            }
        }
        assert!(outputs[0] == outputs[1] && !outputs[0].is_empty(), "step {name} of {variant:?}");
    }
}

#[test]
fn replayed_steps_of_every_shape_have_the_bits_of_others() {
    let _strict = ascend_emu::check_scope(ascend_emu::Check::Strict);
    let plain = Variant {
        cann: Cann::V9_1,
        floats: false,
        width: Some(4),
        has_bias: false,
        decays: [true, false],
        drafts: 2,
        each: 3,
    };
    for width in [None, Some(2), Some(3), Some(4)] {
        for each in [1, 2, 3] {
            has_equal_bits(Variant { width, each, has_bias: each == 3, ..plain });
        }
        has_equal_bits(Variant { width, cann: Cann::V8_5, ..plain });
    }
    // Columns, as Kimi has them; both decays, and none; states of single precision; no drafts.
    for decays in [[false, true], [true, true], [false, false]] {
        has_equal_bits(Variant { decays, ..plain });
    }
    has_equal_bits(Variant { cann: Cann::V9_2, floats: true, ..plain });
    has_equal_bits(Variant { drafts: 0, each: 1, ..plain });
}
