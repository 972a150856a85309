//! `ascend-attn backends`: two backends of the serving layer on the same recorded steps.

mod report;

use std::path::PathBuf;
use std::process::ExitCode;

use ascend_attention::spec::ops::fused_infer_attention_score::Cache;
use ascend_attention::{Number, Stream, Violation, bf16, f16};
use ascend_serving::kv::{CacheShape, PagedKvCache};
use ascend_serving::{
    Attention, AttentionShape, Backends, BatchSettings, LayerMask, RecordedBatch, StepComparison, compare_backends,
};
use clap::ValueEnum;

use super::output::Output;
use super::platform::{DeviceChoice, DeviceReport};
use super::triangle::Half;
use super::{Stop, text_file};

/// Compare two backends of the serving layer on recorded steps
///
/// A step is a line of JSON, as `RecordedBatch` of ascend-serving writes it; docs/src/recorded-steps.md has the
/// format. Runs the steps of all files, one after the other, by both sides over caches of their own with the same
/// random numbers, and prints for each which backend served it and how long that took, how many elements are equal
/// bit by bit, and the element that is furthest apart.
///
/// Exit code 1 if no step was compared, or with --most if an element is further apart.
#[derive(clap::Args)]
pub(super) struct Arguments {
    /// Files of recorded steps, one in a line
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    #[arg(long, required = true, value_name = "NAMES", value_parser = names, help = of_first_side())]
    first: String,
    /// Backends of the second side
    #[arg(long, required = true, value_name = "NAMES", value_parser = names)]
    second: String,
    /// Query heads
    #[arg(long, value_name = "COUNT")]
    heads: usize,
    /// Key heads, as many as query heads if not given
    #[arg(long, value_name = "COUNT")]
    kv_heads: Option<usize>,
    /// Elements of a head
    #[arg(long, value_name = "SIZE", default_value_t = 128)]
    head_dim: usize,
    /// Layers
    #[arg(long, value_name = "COUNT", default_value_t = 1)]
    layers: usize,
    /// The layout of the cache
    #[arg(long, value_enum, default_value_t)]
    format: Format,
    /// The mask of every step, in the place of the recorded one: bidirectional, causal, window:KEYS, chunk:TOKENS,
    /// prefix:KEYS or sinks:SINKS:KEYS; the last two are for named_mask
    #[arg(long, value_name = "MASK", value_parser = mask)]
    mask: Option<String>,
    /// Element type
    #[arg(long, value_enum, default_value_t)]
    dtype: Half,
    /// Which random numbers
    #[arg(long, value_name = "SEED", default_value_t = 0)]
    seed: u64,
    /// How often each side computes a step: the quickest time counts
    #[arg(long, value_name = "COUNT", default_value_t = 3)]
    runs: usize,
    /// How far apart elements may be
    #[arg(long, value_name = "DISTANCE", allow_negative_numbers = true, value_parser = distance)]
    most: Option<f64>,
    #[command(flatten)]
    device: DeviceChoice,
    /// Print a JSON object for each step, and one with the sums
    #[arg(long)]
    json: bool,
}

/// Reads the names of backends, which exist for any element type.
fn names(text: &str) -> Result<String, String> {
    let read = text.parse::<Backends<f16>>();
    read.map(|_| text.to_owned()).map_err(|refused| refused.allowed)
}

/// The help of the first side, with every name.
fn of_first_side() -> String {
    let known = names("").err().unwrap_or_default();
    format!("Backends of the first side, divided by commas, in the order in which they are tried: {known}")
}

/// Reads the name and parameters of a mask.
fn mask(text: &str) -> Result<String, String> {
    let read = text.parse::<LayerMask>();
    read.map(|_| text.to_owned()).map_err(|refused: Violation| refused.allowed)
}

/// Parses a distance that elements may be apart.
fn distance(text: &str) -> Result<f64, String> {
    let distance = text.parse().ok();
    let distance = distance.filter(|distance: &f64| distance.is_finite() && *distance >= 0.0);
    distance.ok_or_else(|| "a finite number of at least 0".to_owned())
}

/// The memory layout of a cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum Format {
    #[default]
    Bnbsh,
    Bnnbsd,
    Nz,
}

/// Most bytes of a file.
const MOST_BYTES: u64 = 1 << 28;

pub(super) fn run(arguments: &Arguments, output: &mut Output) -> Result<ExitCode, Stop> {
    let mut steps = Vec::new();
    for file in &arguments.files {
        let text = text_file::read(file, MOST_BYTES).map_err(Stop::Trouble)?;
        for (line, json) in text.lines().enumerate() {
            if json.trim().is_empty() {
                continue;
            }
            let step = RecordedBatch::from_json(json).and_then(|step| match &arguments.mask {
                Some(mask) => step.masked(mask),
                None => Ok(step),
            });
            let wrong = |error| Stop::Trouble(format!("{}:{}: {error}", file.display(), line + 1));
            steps.push(step.map_err(wrong)?);
        }
    }
    let Some(RecordedBatch { settings, .. }) = steps.first() else {
        return Err(Stop::Trouble("the files have no steps: record at least one".into()));
    };
    let stream = arguments.device.stream()?;
    let platform = DeviceReport::of(&stream);
    if !arguments.json {
        output.line(&platform)?;
    }
    let found = match arguments.dtype {
        Half::F16 => compare::<f16>(arguments, &stream, settings, &steps),
        Half::Bf16 => compare::<bf16>(arguments, &stream, settings, &steps),
    };
    let found = found.map_err(|error| Stop::Trouble(error.to_string()))?;
    for (at, step) in found.iter().enumerate() {
        match arguments.json {
            true => output.line(report::step_json(at, step))?,
            false => output.line(report::step_text(at, step))?,
        }
    }
    let sums = report::Sums::of(&found);
    match arguments.json {
        true => output.line(platform.summary(sums.json()))?,
        false => output.line(sums.text())?,
    }
    let far = |most: f64| sums.furthest.is_some_and(|(_, furthest)| furthest.distance > most);
    let wrong = sums.elements == 0 || arguments.most.is_some_and(far);
    Ok(ExitCode::from(u8::from(wrong)))
}

fn compare<T: Number>(
    arguments: &Arguments,
    stream: &Stream,
    settings: &BatchSettings,
    steps: &[RecordedBatch],
) -> ascend_serving::Result<Vec<StepComparison>> {
    let Arguments { heads, head_dim, .. } = *arguments;
    let kv_heads = arguments.kv_heads.unwrap_or(heads);
    let shape = AttentionShape::new(heads, kv_heads, head_dim);
    let format = match arguments.format {
        Format::Bnbsh => Cache::BnBsH,
        Format::Bnnbsd => Cache::BnNBsD,
        Format::Nz => Cache::Nz,
    };
    let cache_shape = CacheShape::new(arguments.layers, kv_heads, head_dim).format(format);
    let attention = |names: &str| -> ascend_serving::Result<_> {
        let (blocks, block_size) = (settings.blocks(), settings.block_size());
        let cache = PagedKvCache::<T>::new(stream.device(), blocks, block_size, cache_shape, settings.pad())?;
        Ok(Attention::new(shape, cache, names.parse::<Backends<T>>()?))
    };
    let (mut first, mut second) = (attention(&arguments.first)?, attention(&arguments.second)?);
    compare_backends(stream, [&mut first, &mut second], steps, arguments.seed, arguments.runs)
}
