//! How far attention over a quantised cache is from attention over one of 16 bits.

use ascend_attention::{Number, Stream};

use crate::backends::LayerInputs;
use crate::batch::{BatchRequest, StatePolicy};
use crate::error::{Error, Result};

use super::attention::Attention;
use super::output_deviation::OutputDeviation;

/// Runs the same causal steps of one sequence over two caches, such as one of 16 bits and a
/// [quantised](crate::kv::PagedKvCache::quantised) one, and reports for each layer how far the outputs are apart.
/// `steps` are the new tokens of each step, usually a prompt and then single tokens; `layers` has the inputs of all of
/// them for each layer of the model, without latents. It waits for the stream: use it to choose scales and layers
/// before serving, not while serving.
///
/// Attention alone is compared, on the same queries, keys and values: in a model later layers get other ones.
///
/// # Errors
/// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for no step or no layer, for steps whose tokens are
/// not all of the rows, and another number of layers than the caches have; as for [`Attention::grow`],
/// [`Attention::begin`] and [`Step::forward`](crate::Step::forward). The blocks of the sequence are free again,
/// whatever happens.
pub fn compare_caches<T: Number>(
    stream: &Stream,
    exact: &mut Attention<T>,
    quantised: &mut Attention<T>,
    steps: &[usize],
    layers: &[LayerInputs<'_, T>],
) -> Result<Vec<OutputDeviation>> {
    let tokens = (steps.iter()).try_fold(0usize, |sum, new| sum.checked_add(*new));
    let tensors = layers.iter().flat_map(|layer| [layer.query, layer.key, layer.value]);
    let mut rows = tensors.map(|rows| rows.shape().first().copied().unwrap_or(0));
    let other = rows.find(|rows| Some(*rows) != tokens);
    if layers.is_empty() || steps.is_empty() || other.is_some() {
        return Err(Error::invalid(
            "steps",
            format_args!(
                "{} tokens in {} steps for {} rows",
                tokens.map_or_else(|| "too many".into(), |tokens| tokens.to_string()),
                steps.len(),
                other.unwrap_or(0)
            ),
            "steps whose tokens are the rows of the layers",
        )
        .fix("say how many of the rows each step has, in order, so that all of them are in one"));
    }
    let counts = [&*exact, &*quantised].map(|attention| attention.places.len());
    if counts != [layers.len(); 2] {
        return Err(Error::invalid("layers", layers.len(), format_args!("{counts:?}, as the models have"))
            .fix("bring rows for each layer of the models"));
    }
    let mut deviations = vec![OutputDeviation::default(); layers.len()];
    let mut runs = [exact, quantised].map(|attention| {
        let sequence = attention.sequence();
        (attention, sequence)
    });
    let mut first = 0usize;
    for new in steps {
        let place = first..first.saturating_add(*new);
        let mut outputs = Vec::with_capacity(runs.len());
        for (attention, sequence) in &mut runs {
            attention.grow(stream, sequence, *new)?;
            let metadata = attention.metadata(&[BatchRequest::of(sequence, *new)], StatePolicy::default())?;
            let mut step = attention.begin(stream, &metadata)?;
            let mut of_layers = Vec::with_capacity(layers.len());
            for (at, layer) in layers.iter().enumerate() {
                let [query, key, value] =
                    [layer.query, layer.key, layer.value].map(|rows| rows.narrow(0, place.clone()));
                let inputs = LayerInputs { query: &query?, key: &key?, value: &value?, ..*layer };
                let output = step.forward(at, inputs)?;
                of_layers.push(output.download(stream)?);
            }
            outputs.push(of_layers);
        }
        if let [exact, got] = &outputs[..] {
            for (deviation, (exact, got)) in deviations.iter_mut().zip(exact.iter().zip(got)) {
                deviation.add(exact, got);
            }
        }
        first = place.end;
    }
    Ok(deviations)
}
