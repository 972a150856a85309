//! `ascend-attn ranks`: a batch on one device, and divided over ranks.

pub(super) mod costs;
mod divided;
mod report;
mod rows;
mod timeline;
mod whole;

use std::env;
use std::path::PathBuf;
use std::process::{Command, ExitCode};

use ascend_attention::{Number, Platform, Runtime, bf16, f16};
use ascend_serving::ContextParallel;

use super::Stop;
use super::drawing;
use super::output::Output;
use super::platform::{DeviceChoice, DeviceReport};
use super::triangle::Half;

use divided::RankSteps;
use report::Report;

/// The numbers of ranks that a context is divided over.
const RANKS: std::ops::RangeInclusive<i64> = 1..=ContextParallel::MAX_RANKS as i64;

/// The variable with the emulation's number of devices.
const DEVICES: &str = "ASCEND_EMU_DEVICES";

/// Compute steps of a batch on one device and with the contexts divided over ranks, and compare results and times
///
/// Each rank has a part of every request's keys, and computes some of the query heads of every new token (decode
/// context parallelism), or with --by-rows all heads of some new tokens (prefill context parallelism): rank r is on the
/// r-th device from --device on, and a thread of its own. The same batch is computed on one device first, with the
/// heads of all ranks. Prints the largest difference of an output element, the bytes that each rank sends, the times of
/// a step, and those of its parts, of the rank for which it takes longest; of several steps the medians. What a layer
/// costs on paper on NPUs, by published speeds (see `costs`), is printed beside them.
///
/// The keys are random numbers that are written to the caches, and not computed. On the emulation a process with as
/// many devices as ranks is started. Exit code 1: an element differs by more than --within, or is no number.
#[derive(clap::Args)]
pub(super) struct Arguments {
    /// Number of ranks, at most 15
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u8).range(RANKS))]
    ranks: u8,
    /// Tokens of each request that are cached before the first step
    #[arg(long, value_name = "N", default_value_t = 32768, value_parser = number(1..=1 << 24))]
    tokens: u64,
    /// Number of requests
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = number(1..=4096))]
    requests: u64,
    /// New tokens of each request in a step: 1 for decoding, more for a chunk of a prompt or drafts
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = number(1..=4096))]
    new: u64,
    /// Divide the new tokens of a step in the place of the heads: a rank computes the heads of all ranks for its tokens
    #[arg(long)]
    by_rows: bool,
    /// Query heads of the model for each rank; with --by-rows a rank computes those of all
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = number(1..=256))]
    heads: u64,
    /// Key heads, which all ranks share: a divisor of --heads
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = number(1..=256))]
    kv_heads: u64,
    /// Elements of a head
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = number(1..=1024))]
    head_dim: u64,
    /// Tokens in a block of a cache
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = number(1..=4096))]
    block_size: u64,
    /// Consecutive tokens on one rank (interleave): a divisor of --block-size
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = number(1..=4096))]
    run: u64,
    /// Number of steps, of which the first is not timed
    #[arg(long, value_name = "N", default_value_t = 6, value_parser = number(2..=1000))]
    steps: u64,
    /// Element type of queries, keys and values
    #[arg(long, value_enum, default_value_t)]
    dtype: Half,
    /// Largest difference of an element that passes
    #[arg(long, value_name = "DIFFERENCE", default_value_t = 0.01, allow_negative_numbers = true)]
    within: f64,
    /// Write a picture of who waits for whom in a step to a PNG file
    #[arg(long, value_name = "FILE")]
    png: Option<PathBuf>,
    /// Write that picture to an SVG file
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    #[command(flatten)]
    device: DeviceChoice,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

fn number(range: impl std::ops::RangeBounds<u64>) -> clap::builder::RangedU64ValueParser<u64> {
    clap::value_parser!(u64).range(range)
}

/// What is computed.
#[derive(Clone, Copy, Debug)]
struct Work {
    ranks: usize,
    requests: usize,
    tokens: usize,
    new: usize,
    by_rows: bool,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    block_size: usize,
    run: usize,
    steps: usize,
}

impl Work {
    /// The query heads that a rank computes.
    fn heads_of_rank(&self) -> usize {
        if self.by_rows { self.heads * self.ranks } else { self.heads }
    }

    /// The rows of a step.
    fn rows(&self) -> usize {
        self.requests * self.new
    }

    /// The tokens of a request behind the last step.
    fn all_tokens(&self) -> usize {
        self.tokens + self.new * self.steps
    }
}

pub(super) fn run(arguments: &Arguments, output: &mut Output) -> Result<ExitCode, Stop> {
    let runtime = arguments.device.runtime()?;
    let (first, ranks) = (arguments.device.number(), usize::from(arguments.ranks));
    let needed = usize::try_from(first).unwrap_or(0) + ranks;
    if runtime.device_count()? < needed {
        return match (runtime.platform(), env::var_os(DEVICES)) {
            (Platform::Emulated, None) => elsewhere(needed),
            (platform, _) => Err(Stop::Trouble(format!(
                "{ranks} ranks need the devices {first} to {}, and the platform {platform} has {} devices; on the \
                 emulation set {DEVICES}={needed}, or leave it unset",
                needed - 1,
                runtime.device_count()?,
            ))),
        };
    }
    let size = |size: u64| usize::try_from(size).unwrap_or(usize::MAX);
    let work = Work {
        ranks,
        requests: size(arguments.requests),
        tokens: size(arguments.tokens),
        new: size(arguments.new),
        by_rows: arguments.by_rows,
        heads: size(arguments.heads),
        kv_heads: size(arguments.kv_heads),
        head_dim: size(arguments.head_dim),
        block_size: size(arguments.block_size),
        run: size(arguments.run),
        steps: size(arguments.steps),
    };
    let platform = DeviceReport::of(&runtime.device(first)?.stream()?);
    let (report, ranks) = match arguments.dtype {
        Half::Bf16 => compared::<bf16>(&runtime, first, &work)?,
        Half::F16 => compared::<f16>(&runtime, first, &work)?,
    };
    let files = [arguments.png.as_deref(), arguments.svg.as_deref()];
    if files != [None, None] {
        drawing::write(&timeline::draw(&report.title(), &ranks), files)?;
    }
    if arguments.json {
        output.line(platform.summary(report.json()))?;
    } else {
        output.line(&platform)?;
        output.line(&report)?;
    }
    // Also a difference that is no number fails.
    let passes = report.difference <= arguments.within;
    Ok(ExitCode::from(u8::from(!passes)))
}

/// Runs this command in a process whose emulation has as many devices as ranks: a process chooses the number once.
fn elsewhere(devices: usize) -> Result<ExitCode, Stop> {
    let program = env::current_exe().map_err(|error| Stop::Trouble(error.to_string()))?;
    let run = Command::new(program).args(env::args_os().skip(1)).env(DEVICES, devices.to_string()).status();
    let status = run.map_err(|error| Stop::Trouble(format!("a process with {DEVICES}={devices}: {error}")))?;
    match status.code().and_then(|code| u8::try_from(code).ok()) {
        Some(code) => Ok(ExitCode::from(code)),
        None => Err(Stop::Trouble(format!("a process with {DEVICES}={devices}: {status}"))),
    }
}

fn compared<T: Number>(runtime: &Runtime, first: i32, work: &Work) -> Result<(Report, Vec<RankSteps>), Stop> {
    let whole = whole::steps::<T>(&runtime.device(first)?, work)?;
    let devices = (0..work.ranks).map(|rank| runtime.device(first + i32::try_from(rank).unwrap_or(i32::MAX)));
    let devices = devices.collect::<Result<Vec<_>, _>>()?;
    let ranks = divided::steps::<T>(&devices, work)?;
    Ok((Report::new(work, &whole, &ranks), ranks))
}
