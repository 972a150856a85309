//! `ascend-attn triangle`: what TriangleMix saves, and what it changes.

mod analyse;
mod data;
mod measure;
mod report;

use std::num::NonZeroU64;
use std::path::PathBuf;
use std::process::ExitCode;

use ascend_attention::Platform;
use ascend_attention::spec::geometry::TriangleMix;
use ascend_serving::AttentionShape;
use ascend_trianglemix::{TriangleForecast, TriangleLayers, TrianglePrefill, TrianglePreset, TriangleThresholds};
use clap::{Subcommand, ValueEnum};

use super::Stop;
use super::mask::{self, Preset};
use super::output::Output;
use super::platform::DeviceChoice;
use data::Data;
use measure::Measured;

pub(super) use data::Half;

/// Say what TriangleMix saves over dense attention, and measure it
///
/// A prompt is computed at once; some layers leave out the middle of the causal triangle, the others are dense. Counts
/// pairs of row and key, blocks and bytes, and runs a dense and a sparse layer with the same numbers: the time of each
/// (the median of several runs), and how far the outputs differ. Random numbers say nothing about a model: give --data.
/// The predicted time is that of the dense layer times the share of its blocks that are left.
#[derive(clap::Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub(super) struct Arguments {
    #[command(subcommand)]
    from_layers: Option<FromLayers>,
    /// Tokens of the prompt
    #[arg(
        long,
        value_name = "N",
        required_unless_present = "data",
        value_parser = clap::value_parser!(u64).range(1..=TriangleForecast::MAX_TOKENS as u64)
    )]
    tokens: Option<u64>,
    /// Layers of the model [default: those of --model]
    #[arg(
        long,
        value_name = "N",
        required_unless_present = "model",
        value_parser = clap::value_parser!(u16).range(1..=4096)
    )]
    layers: Option<u16>,
    /// First layer that leaves out the middle, as all behind it do [default: half of the layers, which the paper
    /// found for Llama 3.1 8B]
    #[arg(long, value_name = "LAYER", conflicts_with_all = ["model", "only"])]
    start: Option<u16>,
    /// The layers that leave out the middle, as numbers and ranges: 5,7,15-35
    #[arg(long, value_name = "LAYERS", conflicts_with = "model")]
    only: Option<String>,
    /// Layers and sizes that are published for a model: Llama-3.1-8B, Llama-3-8B-262K, Qwen2.5-7B, Qwen3-8B,
    /// Qwen3-14B or Qwen3-32B
    #[arg(long, value_name = "NAME")]
    model: Option<String>,
    #[command(flatten)]
    sizes: SizeChoice,
    /// Heads of the queries [default: 32]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    heads: Option<u16>,
    /// Heads of keys and values [default: 8, or --heads if that is less]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    kv_heads: Option<u16>,
    /// Elements of a head [default: 128]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    dim: Option<u16>,
    /// Element type [default: that of the data, or bf16]
    #[arg(long, value_name = "TYPE")]
    dtype: Option<Half>,
    /// A safetensors file with `query` of [tokens, heads, dim], `key` and `value` of [tokens, kv_heads, dim]; or a
    /// case file, of which one sequence is taken in the case's layout, with its scale
    #[arg(long, value_name = "FILE", conflicts_with_all = ["tokens", "heads", "kv_heads", "dim", "seed"])]
    data: Option<PathBuf>,
    /// Which sequence of the case file [default: the first]
    #[arg(long, value_name = "N", requires = "data")]
    sequence: Option<usize>,
    /// Other random numbers
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Rows and keys of the blocks that are counted and drawn
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u64).range(16..))]
    block: u64,
    /// Whether to run the layers
    #[arg(long, value_enum, default_value_t)]
    measure: When,
    /// Runs of each layer behind a first that does not count
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..=1000))]
    runs: u16,
    /// Also compute which share of the attention each part gets: on the host, which takes longer than a dense layer
    #[arg(long)]
    mass: bool,
    #[command(flatten)]
    device: DeviceChoice,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    /// Write a picture of what a layer that leaves out the middle sees
    #[arg(long, value_name = "FILE")]
    png: Option<PathBuf>,
    /// Write a drawing of what a layer that leaves out the middle sees
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

#[derive(Subcommand)]
enum FromLayers {
    Analyse(analyse::Arguments),
}

/// The sizes of the triangle.
#[derive(clap::Args)]
struct SizeChoice {
    /// Keys at the start that every row sees
    #[arg(long, value_name = "N")]
    sink: Option<u64>,
    /// Keys of a row's window, its own among them, so that TriangleMix's sliding_window_size is one less
    #[arg(long, value_name = "N")]
    window: Option<u64>,
    /// Rows at the end of the prompt that see everything
    #[arg(long, value_name = "N")]
    last: Option<u64>,
    /// Sizes that --sink, --window and --last override [default: those of --model, or the paper's; for analyse those
    /// that the paper measures with: 64 sinks, a window of 129 keys, 128 last rows]
    #[arg(long, value_name = "NAME")]
    preset: Option<Preset>,
}

impl SizeChoice {
    /// The sizes that are given, over those of the preset or of `default`.
    fn over(&self, default: TriangleMix) -> Result<TriangleMix, Stop> {
        let preset = self.preset.map_or(default, Preset::sizes);
        mask::triangle_sizes(preset, self.sink, self.window, self.last)
    }
}

/// When to run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum When {
    /// On an NPU, and where a dense layer has at most 2 TFLOP, which take the emulation some seconds
    #[default]
    Auto,
    /// However long it takes
    Always,
    /// Only count
    Never,
}

/// Operations (two for each multiply-add) that [`When::Auto`] lets the emulation compute.
const PATIENCE: f64 = 2e12;

/// The command's results.
struct Findings {
    forecast: TriangleForecast,
    dtype: Half,
    /// Where the numbers of --model come from.
    model: Option<TrianglePreset>,
    measured: Result<Measured, String>,
}

pub(super) fn run(arguments: &Arguments, output: &mut Output) -> Result<ExitCode, Stop> {
    if let Some(FromLayers::Analyse(arguments)) = &arguments.from_layers {
        return analyse::run(arguments, output);
    }
    let model = arguments.model.as_deref().map(published).transpose()?;
    let data = match &arguments.data {
        Some(file) => Some(Data::read(file, arguments.sequence).map_err(Stop::Trouble)?),
        None => None,
    };
    let published = model.and_then(|model| model.sizes);
    let sizes = arguments.sizes.over(published.unwrap_or(TriangleMix::PAPER))?;
    let (tokens, shape) = match &data {
        Some(data) => (data.tokens, data.shape),
        None => {
            let heads = usize::from(arguments.heads.unwrap_or(32));
            let kv_heads = arguments.kv_heads.map_or(heads.min(8), usize::from);
            let dim = usize::from(arguments.dim.unwrap_or(128));
            let tokens = arguments.tokens.unwrap_or(1);
            let tokens = usize::try_from(tokens).unwrap_or(usize::MAX);
            (tokens, AttentionShape::new(heads, kv_heads, dim))
        }
    };
    let (layers, sparse) = layers(arguments, model)?;
    let prefill = TrianglePrefill { shape, sizes, thresholds: TriangleThresholds::ALWAYS };
    let block = NonZeroU64::new(arguments.block).unwrap_or(NonZeroU64::MIN);
    let forecast = TriangleForecast::new(&prefill, tokens, (layers, sparse), block)?;
    let of_data = data.as_ref().and_then(|data| data.half);
    let dtype = arguments.dtype.or(of_data).unwrap_or_default();
    let measured = match arguments.measure {
        When::Never => Err("--measure never".to_owned()),
        when => {
            let stream = arguments.device.stream()?;
            let npu = stream.device().runtime().platform() == Platform::Npu;
            let flops = forecast.dense_flops();
            if when == When::Auto && !npu && flops > PATIENCE {
                Err(format!(
                    "a dense layer has {:.1} TFLOP: --measure always lets the emulation compute them",
                    flops / 1e12
                ))
            } else {
                let data = match data {
                    Some(data) => data,
                    None => Data::random(tokens, shape, arguments.seed).map_err(Stop::Trouble)?,
                };
                let runs = usize::from(arguments.runs);
                Ok(measure::measure(&stream, &prefill, &data, (dtype, runs, arguments.mass))?)
            }
        }
    };
    let share = forecast.share();
    let title = format!(
        "TriangleMix of {tokens} tokens, sinks {}, window {}, last {}: {:.1}% of the dense pairs",
        sizes.num_sink_tokens,
        sizes.sliding_window_size.saturating_add(1),
        sizes.num_last_tokens,
        100.0 * share
    );
    let files = [arguments.png.as_deref(), arguments.svg.as_deref()];
    mask::draw_triangle(&title, sizes, tokens as u64, arguments.block, files)?;
    let findings = Findings { forecast, dtype, model, measured };
    if arguments.json {
        output.line(report::json(&findings))?;
    } else {
        for line in report::text(&findings) {
            output.line(line)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn published(model: &str) -> Result<TrianglePreset, Stop> {
    TrianglePreset::of_model(model).ok_or_else(|| {
        let known = TrianglePreset::ALL.map(|preset| preset.model);
        Stop::Trouble(format!(
            "--model {model}: nothing is published about it, only about {}; give --layers with --start or --only",
            known.join(", ")
        ))
    })
}

/// The number of layers, and the layers that leave out the middle.
fn layers(arguments: &Arguments, model: Option<TrianglePreset>) -> Result<(usize, TriangleLayers), Stop> {
    let given = arguments.layers.map(usize::from);
    let known = model.and_then(|model| model.layers);
    let Some(layers) = given.or(known) else {
        return Err(Stop::Trouble(
            "--model: how many layers it has is not published with them; give --layers".to_owned(),
        ));
    };
    let (sparse, flag) = match (model, &arguments.only) {
        (Some(model), _) => (model.triangle_layers(), "--model"),
        (None, Some(list)) => (listed(list)?, "--only"),
        (None, None) => {
            let start = arguments.start.map_or(layers.div_ceil(2), usize::from);
            (TriangleLayers::from_start(start, layers)?, "--start")
        }
    };
    match sparse.indices().last() {
        Some(last) if *last >= layers => {
            Err(Stop::Trouble(format!("{flag}: layer {last} of {layers}, which are counted from 0")))
        }
        _ => Ok((layers, sparse)),
    }
}

/// Parses numbers and ranges between commas.
fn listed(list: &str) -> Result<TriangleLayers, Stop> {
    let wrong = || Stop::Trouble(format!("--only {list:?}: numbers and ranges between commas, as in 5,7,15-35"));
    let number = |text: &str| text.trim().parse::<u16>().map_err(|_| wrong());
    let mut layers = Vec::new();
    for part in list.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (number(first)?, number(last)?);
        if first > last || usize::from(last) >= TriangleLayers::MAX_LAYERS {
            return Err(wrong());
        }
        layers.extend((first..=last).map(usize::from));
        if layers.len() > TriangleLayers::MAX_LAYERS {
            return Err(wrong());
        }
    }
    Ok(TriangleLayers::explicit(layers)?)
}
