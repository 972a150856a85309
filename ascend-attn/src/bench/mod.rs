//! `ascend-attn bench`: how fast the emulation's kernels are on this machine, as ratios to what it can do at best.

pub(crate) mod cases;
pub(crate) mod measure;

use std::process::ExitCode;
use std::thread;
use std::time::Duration;

use ascend_attention::Runtime;
use ascend_attention::spec::DType;
use ascend_emu::kernel;
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;

use super::Stop;
use super::output::Output;
use cases::{CASES, Case};
use measure::{Bench, Measured};

/// Measure the emulation's attention kernels on this machine
///
/// Runs each case in f16, bf16 and f32 (which only the kernels have, not the operator), at least five times, and
/// prints the median time, the rate of arithmetic and of memory, and the fraction of this machine's own peak, which
/// is measured between the runs: multiply-adds for most cases, reading memory for those that are bound by it.
#[derive(clap::Args)]
pub(super) struct Arguments {
    /// Only cases whose name contains this; several, separated by commas
    #[arg(long, value_name = "TEXT")]
    filter: Option<String>,
    /// Only this element type: f16, bf16 or f32
    #[arg(long, value_name = "TYPE")]
    dtype: Option<String>,
    /// Threads; by default all that the machine has
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=4096))]
    threads: Option<u16>,
    /// Print a JSON object for each case
    #[arg(long)]
    json: bool,
}

/// Element types, by the names of the command line.
const TYPES: [(&str, DType); 3] = [("f16", DType::Float16), ("bf16", DType::Bf16), ("f32", DType::Float)];

pub(super) fn run(arguments: &Arguments, output: &mut Output) -> Result<ExitCode, Stop> {
    let chosen = choose(arguments)?;
    // This reports a variable that the emulation refuses; the kernels are called without the emulation, and ignore
    // such a variable.
    Runtime::emulated()?;
    let threads = match arguments.threads {
        Some(threads) => usize::from(threads),
        None => thread::available_parallelism().map_or(1, usize::from),
    };
    let mut bench = Bench::new(threads).map_err(Stop::Trouble)?;
    let progress = progress(chosen.len());
    if !arguments.json {
        let line = heading(threads);
        progress.suspend(|| output.line(line))?;
    }
    for (case, (name, held)) in chosen {
        progress.set_message(format!("{} {name}", case.name));
        let measured = case
            .prepare(held)
            .and_then(|mut prepared| prepared.with(|ready| bench.measure(case, held, ready))?)
            .map_err(|error| Stop::Trouble(format!("{}: {error}", case.name)))?;
        let line = match arguments.json {
            true => json(case, name, threads, &measured),
            false => text(case, name, &measured),
        };
        progress.suspend(|| output.line(line))?;
        progress.inc(1);
    }
    progress.finish_and_clear();
    Ok(ExitCode::SUCCESS)
}

/// A case and the element type to run it in, with its name.
type Choice = (&'static Case, (&'static str, DType));

/// The cases and element types that the arguments select.
fn choose(arguments: &Arguments) -> Result<Vec<Choice>, Stop> {
    let wanted = |case: &&Case| match &arguments.filter {
        Some(filter) => filter.split(',').any(|part| case.name.contains(part)),
        None => true,
    };
    let types: Vec<_> =
        TYPES.into_iter().filter(|(name, _)| arguments.dtype.as_deref().is_none_or(|it| it == *name)).collect();
    if types.is_empty() {
        let given = arguments.dtype.as_deref().unwrap_or_default();
        let message = format!("--dtype {given}: allowed are f16, bf16 and f32");
        return Err(Stop::Trouble(message));
    }
    let parts = arguments.filter.iter().flat_map(|filter| filter.split(','));
    for part in parts {
        let names = || CASES.iter().map(|case| case.name);
        if part.is_empty() || !names().any(|name| name.contains(part)) {
            return Err(Stop::Trouble(format!(
                "--filter {part:?}: no such case among {}",
                names().collect::<Vec<_>>().join(", ")
            )));
        }
    }
    let cases = CASES.iter().filter(wanted);
    Ok(cases.flat_map(|case| types.iter().map(move |dtype| (case, *dtype))).collect())
}

/// A progress bar on standard error; hidden if that is no terminal.
fn progress(count: usize) -> ProgressBar {
    let progress = ProgressBar::new(count as u64);
    if let Ok(style) = ProgressStyle::with_template("{wide_bar} {pos}/{len} {msg}") {
        progress.set_style(style);
    }
    progress.enable_steady_tick(Duration::from_millis(200));
    progress
}

fn heading(threads: usize) -> String {
    let noun = if threads == 1 { "thread" } else { "threads" };
    format!(
        "{threads} {noun}, {}\n{:34} {:5} {:>10} {:>9} {:>9} {:>8} of",
        kernel::instruction_set(),
        "case",
        "type",
        "ms",
        "GFLOP/s",
        "GB/s",
        "of roof"
    )
}

fn text(case: &Case, dtype: &str, measured: &Measured) -> String {
    let roof = if measured.memory_bound {
        format!("{:.1} GB/s read", measured.read_bytes_per_second / 1e9)
    } else {
        format!("{:.0} GFLOP/s", measured.peak_gflops)
    };
    format!(
        "{:34} {dtype:5} {:10.3} {:9.1} {:9.2} {:7.1}% {roof}",
        case.name,
        measured.seconds * 1e3,
        measured.gflops,
        measured.bytes_per_second / 1e9,
        measured.fraction_of_peak * 100.0,
    )
}

fn json(case: &Case, dtype: &str, threads: usize, measured: &Measured) -> String {
    json!({
        "case": case.name,
        "impl": format!("ascend-emu/{}", kernel::instruction_set()),
        "threads": threads,
        "dtype": dtype,
        "seconds": measured.seconds,
        "gflops": measured.gflops,
        "fraction_of_peak": measured.fraction_of_peak,
        "bytes_per_second": measured.bytes_per_second,
        "bound": if measured.memory_bound { "memory" } else { "arithmetic" },
        "peak_gflops": measured.peak_gflops,
        "read_bytes_per_second": measured.read_bytes_per_second,
        "copy_bytes_per_second": measured.copy_bytes_per_second,
        "runs": measured.runs,
        "scratch_bytes": measured.scratch_bytes,
    })
    .to_string()
}
