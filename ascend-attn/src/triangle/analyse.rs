//! `ascend-attn triangle analyse`: the layers that can do without the middle, from recorded layers.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;

use ascend_attention::case::{self, CaseTensor};
use ascend_attention::spec::geometry::TriangleMix;
use ascend_serving::AttentionShape;
use ascend_trianglemix::{LayerSample, ProbeMeasure, SampleMeasure, TriangleLayers, TriangleProbe};
use clap::ValueEnum;
use serde_json::json;

use super::SizeChoice;
use super::data::{Data, MOST_BYTES, to_f32};
use crate::Stop;
use crate::output::Output;

/// Name the layers that can leave out the middle, from recorded layers
///
/// A file is a prompt: a safetensors file with `layers.N.query` of [tokens, heads, dim], `layers.N.key` and
/// `layers.N.value` of [tokens, kv_heads, dim] of every layer N, counted from 0; with `layers.N.output_gradient` of
/// [tokens, heads, dim], the gradient with respect to the layer's output, the measures by gradients can be taken. Sums
/// up for each layer what sinks and window, last rows and middle contribute, in the mean over the files, and names the
/// layers whose middle contributes the least, with the command that says what leaving it out saves.
///
/// The paper takes about 100 prompts of about 2000 tokens and the gradient of the logit of the first right token. The
/// mass of the attention needs no gradient and says less: a middle that gets attention may still not matter.
#[derive(clap::Args)]
pub(super) struct Arguments {
    /// Files of recorded layers, one for each prompt
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// How many layers are to leave out the middle [default: half of the layers, as the paper found for Llama 3.1 8B]
    #[arg(long, value_name = "N")]
    count: Option<u16>,
    /// What is measured [default: weight-gradient if the files have gradients, else mass]
    #[arg(long, value_enum)]
    by: Option<Measure>,
    /// What scores are multiplied by [default: one over the root of a head's elements]
    #[arg(long, value_name = "NUMBER", allow_negative_numbers = true)]
    scale: Option<f64>,
    #[command(flatten)]
    sizes: SizeChoice,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Measure {
    /// The gradient with respect to the attention weights, as in the paper
    WeightGradient,
    /// The gradient with respect to the attention scores
    ScoreGradient,
    /// The share of the attention weights; needs no gradient
    Mass,
}

impl Measure {
    fn of_sample(self, gradient: &[f32]) -> SampleMeasure<'_, f32> {
        match self {
            Self::WeightGradient => SampleMeasure::WeightGradient(gradient),
            Self::ScoreGradient => SampleMeasure::ScoreGradient(gradient),
            Self::Mass => SampleMeasure::AttentionMass,
        }
    }
}

pub(super) fn run(arguments: &Arguments, output: &mut Output) -> Result<ExitCode, Stop> {
    let sizes = arguments.sizes.over(TriangleMix::PROBE)?;
    let mut measure = arguments.by;
    let mut probe: Option<(TriangleProbe, usize)> = None;
    let (mut prompts, mut shape) = (Vec::new(), None);
    for file in &arguments.files {
        let say = |what: String| Stop::Trouble(format!("{}: {what}", file.display()));
        let mut tensors = case::read_tensors(file, MOST_BYTES).map_err(|error| say(error.to_string()))?;
        let layers = layers_of(&tensors).map_err(say)?;
        let (probe, known) = match &mut probe {
            Some((probe, known)) => (probe, *known),
            empty => {
                let (probe, known) = empty.insert((TriangleProbe::new(layers, sizes)?, layers));
                (probe, *known)
            }
        };
        if layers != known {
            let first = arguments.files[0].display();
            return Err(say(format!("{layers} layers, and {known} in {first}: record all layers of each prompt")));
        }
        let mut tokens = None;
        for layer in 0..layers {
            let (own, layer_shape) =
                record(probe, layer, &mut tensors, (&mut measure, arguments.scale)).map_err(say)?;
            shape.get_or_insert(layer_shape);
            let first = *tokens.get_or_insert(own);
            if own != first {
                return Err(say(format!(
                    "{own} tokens in layer {layer}, and {first} in layer 0: a file is one prompt"
                )));
            }
        }
        prompts.extend(tokens);
        if let Some(unknown) = tensors.keys().next() {
            return Err(say(format!("tensor {unknown:?}: layers have query, key, value and output_gradient")));
        }
    }
    let (Some((probe, layers)), Some(shape)) = (probe, shape) else {
        return Err(Stop::Trouble("no file".to_owned()));
    };
    let count = arguments.count.map_or(layers / 2, usize::from);
    if count > layers {
        return Err(Stop::Trouble(format!("--count {count}: the files have {layers} layers")));
    }
    let found = Findings { probe, layers, shape, sparse_count: count, prompts };
    if arguments.json {
        output.line(found.json())?;
    } else {
        for line in found.text() {
            output.line(line)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// The number of layers of a file, which are numbered without a gap.
fn layers_of(tensors: &BTreeMap<String, CaseTensor>) -> Result<usize, String> {
    let mut numbers = Vec::new();
    for name in tensors.keys() {
        let number = name.strip_prefix("layers.").and_then(|rest| rest.split_once('.')?.0.parse::<u16>().ok());
        numbers.push(number.ok_or_else(|| format!("tensor {name:?}: names are layers.N.query, of key and value too"))?);
    }
    numbers.sort_unstable();
    numbers.dedup();
    match numbers.iter().zip(0u16..).find(|(number, at)| *number != at) {
        Some((_, at)) => Err(format!("no tensor of layer {at}, and some of later layers: record all layers")),
        None if numbers.is_empty() => Err("no tensors".to_owned()),
        None => Ok(numbers.len()),
    }
}

/// Adds a layer to the probe; returns its tokens and heads. The first layer decides what is measured if that is open.
fn record(
    probe: &mut TriangleProbe,
    layer: usize,
    tensors: &mut BTreeMap<String, CaseTensor>,
    (measure, scale): (&mut Option<Measure>, Option<f64>),
) -> Result<(usize, AttentionShape), String> {
    let prefix = format!("layers.{layer}.");
    let data = Data::of_tensors(tensors, &prefix)?;
    let (tokens, shape) = (data.tokens, data.shape);
    let sizes = probe.sizes();
    let not_middle = sizes.num_sink_tokens.saturating_add(sizes.sliding_window_size);
    let not_middle = not_middle.saturating_add(sizes.num_last_tokens).saturating_add(1);
    if tokens as u64 <= not_middle {
        return Err(format!(
            "{tokens} tokens: prompts of up to {not_middle} tokens have no middle; record longer ones, or give smaller \
             --sink, --window and --last"
        ));
    }
    let name = format!("{prefix}output_gradient");
    let gradient = tensors.remove(&name);
    let measure = *measure.get_or_insert(match gradient {
        Some(_) => Measure::WeightGradient,
        None => Measure::Mass,
    });
    let gradient = match (&gradient, measure) {
        (_, Measure::Mass) => Vec::new(),
        (Some(gradient), _) => {
            let wanted = [tokens, shape.heads, shape.head_dim];
            if gradient.shape() != wanted {
                return Err(format!("{name} {:?}: {wanted:?}, the shape of the query", gradient.shape()));
            }
            to_f32(&name, gradient)?
        }
        (None, _) => {
            return Err(format!(
                "no tensor {name:?}, and gradients are measured: record it for every layer, or give --by mass"
            ));
        }
    };
    let sample = LayerSample { scale: scale.unwrap_or(shape.scale), ..data.sample() };
    let recorded = probe.record_sample(layer, &sample, measure.of_sample(&gradient));
    recorded.map_err(|error| format!("layer {layer}: {error}"))?;
    Ok((tokens, shape))
}

/// The command's results.
struct Findings {
    probe: TriangleProbe,
    layers: usize,
    /// The heads of the first layer.
    shape: AttentionShape,
    /// The number of layers to leave the middle out in.
    sparse_count: usize,
    /// Tokens of each prompt.
    prompts: Vec<usize>,
}

impl Findings {
    fn sparse(&self) -> TriangleLayers {
        self.probe.layers(self.sparse_count)
    }

    fn measure(&self) -> &'static str {
        match self.probe.measure() {
            Some(ProbeMeasure::WeightGradient) => "the gradient with respect to the attention weights",
            Some(ProbeMeasure::ScoreGradient) => "the gradient with respect to the attention scores",
            _ => "the share of the attention",
        }
    }

    fn text(&self) -> Vec<String> {
        let sizes = self.probe.sizes();
        let window = sizes.sliding_window_size.saturating_add(1);
        let tokens = || self.prompts.iter().copied();
        let (least, most) = (tokens().min().unwrap_or(0), tokens().max().unwrap_or(0));
        let sparse = self.sparse();
        let mut lines = vec![
            format!("{} layers, {} prompts of {least} to {most} tokens", self.layers, self.prompts.len()),
            format!("measured: {}", self.measure()),
            format!("sinks {}, window {window}, last rows {}", sizes.num_sink_tokens, sizes.num_last_tokens),
            format!("{:>5} {:>14} {:>14} {:>14} {:>8}", "layer", "sinks, window", "last rows", "middle", "share"),
        ];
        for (layer, each) in self.probe.contributions().iter().enumerate() {
            let all = each.streaming + each.last + each.middle;
            let share = 100.0 * each.middle / all.max(f64::MIN_POSITIVE);
            let left_out = if sparse.contains(layer) { "  leaves it out" } else { "" };
            lines.push(format!(
                "{layer:>5} {:>14.4e} {:>14.4e} {:>14.4e} {share:>7.2}%{left_out}",
                each.streaming, each.last, each.middle
            ));
        }
        let order: Vec<String> = self.probe.ranking().iter().map(usize::to_string).collect();
        lines.push(format!("by the middle, the least first: {}", order.join(", ")));
        if self.sparse_count > 0 {
            let only = sparse.to_string().replace(", ", ",");
            let AttentionShape { heads, kv_heads, head_dim, .. } = self.shape;
            lines.push(format!(
                "what that saves: ascend-attn triangle --layers {} --only {only} --tokens {most} --sink {} --window \
                 {window} --last {} --heads {heads} --kv-heads {kv_heads} --dim {head_dim}",
                self.layers, sizes.num_sink_tokens, sizes.num_last_tokens
            ));
        }
        lines
    }

    fn json(&self) -> String {
        let sizes = self.probe.sizes();
        let contributions = self.probe.contributions();
        let contributions = contributions
            .iter()
            .map(|each| json!({ "streaming": each.streaming, "last": each.last, "middle": each.middle }));
        json!({
            "layers": self.layers,
            "tokens": self.prompts,
            "measure": self.measure(),
            "num_sink_tokens": sizes.num_sink_tokens,
            "sliding_window_size": sizes.sliding_window_size,
            "num_last_tokens": sizes.num_last_tokens,
            "contributions": contributions.collect::<Vec<_>>(),
            "order": self.probe.ranking(),
            "triangle_layers": self.sparse().indices(),
        })
        .to_string()
    }
}
