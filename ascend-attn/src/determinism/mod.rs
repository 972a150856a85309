//! `ascend-attn determinism`: which rows' bits depend on how a call is made.

mod axis;
mod chunks;
mod pages;
mod report;
mod rows;
mod sequences;
mod threads;
mod variation;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use ascend_attention::case::{AttentionCase, Case, CaseError, CaseTensor, Verdict};
use ascend_attention::spec::Target;
use ascend_attention::{Error, Stream};
use serde_json::json;

use super::Stop;
use super::output::Output;
use super::platform::{DeviceChoice, DeviceReport};
use super::replay::{CASES, collect, stem};

use report::{CaseReport, Found, Tally};
use rows::{ComputedRows, Difference};
use sequences::Sequences;
use variation::{Call, Piece, Variation, variations};

/// Compute the same requests in other batches, chunks, pages and numbers of threads, and say which rows' bits differ
///
/// Takes cases of FusedInferAttentionScore. Each is computed as it stands, then again: once more, each of its sequences
/// alone, the batch in reverse and twice, prompts in chunks, keys in blocks of other sizes and in another order, and on
/// the emulation with other numbers of threads. Prints for each way how many rows (of one token, head and output) have
/// other bits than in the first computation, the largest difference and the first element that differs; or why the case
/// cannot be computed so.
///
/// Differences are an answer, not a failure: exit code 1 stands for a case that could not be computed as it stands, and
/// with --same for rows that differ.
#[derive(clap::Args)]
pub(super) struct Arguments {
    /// Case files, or folders: all *.safetensors files in a folder, by name
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    #[command(flatten)]
    device: DeviceChoice,
    /// Ask the device for deterministic operators (ACL_OPT_DETERMINISTIC)
    #[arg(long)]
    deterministic: bool,
    /// Exit with code 1 if any row differs
    #[arg(long)]
    same: bool,
    /// Print a JSON object for each case, and one with the counts
    #[arg(long)]
    json: bool,
}

pub(super) fn run(arguments: &Arguments, output: &mut Output) -> Result<ExitCode, Stop> {
    let files = collect(&arguments.files, &[CASES])?;
    let stream = arguments.device.stream()?;
    if arguments.deterministic {
        stream.device().set_deterministic(true)?;
    }
    let target = stream.device().target()?;
    let platform = DeviceReport::of(&stream);
    if !arguments.json {
        output.line(&platform)?;
    }
    let mut tally = Tally::default();
    for file in &files {
        let report = examine(file, &stream, target);
        tally.count(&report);
        if arguments.json {
            output.line(report.json())?;
        } else {
            output.line(&report)?;
        }
    }
    if arguments.json {
        output.line(platform.summary(json!(tally)))?;
    } else {
        output.line(&tally)?;
    }
    let failed = tally.failed > 0 || arguments.same && tally.differing > 0;
    Ok(ExitCode::from(u8::from(failed)))
}

/// Examines one file; any error is a failure of this file, and the next one is tried all the same.
fn examine(file: &Path, stream: &Stream, target: Target) -> CaseReport {
    let mut report = CaseReport::new(file, stem(file));
    let case = match Case::read(file).and_then(Case::attention) {
        Ok(case) => case,
        Err(CaseError::OtherOp(operator)) => {
            report.skipped =
                Some(format!("a case of {operator}; only those of FusedInferAttentionScore are taken apart"));
            return report;
        }
        Err(error) => {
            report.failure = Some(error.to_string());
            return report;
        }
    };
    match vary(case, stream, target, &mut report) {
        Ok(()) => {}
        Err(Why::Elsewhere(reason)) => report.skipped = Some(reason),
        Err(Why::Failure(reason)) => report.failure = Some(reason),
    }
    report
}

/// Why a case or one of its variations has no outputs.
enum Why {
    /// The case is for another device.
    Elsewhere(String),
    /// The case cannot be computed.
    Failure(String),
}

impl From<String> for Why {
    fn from(reason: String) -> Self {
        Self::Failure(reason)
    }
}

fn vary(case: AttentionCase, stream: &Stream, target: Target, report: &mut CaseReport) -> Result<(), Why> {
    let original = Sequences::of(case, target)?;
    let outputs = computed(original.case(), stream)?;
    let before = ComputedRows::of(&original, &outputs)?;
    report.sequences = original.count();
    report.heads = original.problem.heads;
    for Variation { name, calls } in variations(&original) {
        let found = calls.and_then(|calls| {
            compared(&original, &calls, &before, stream, target).map_err(|why| match why {
                Why::Elsewhere(reason) | Why::Failure(reason) => reason,
            })
        });
        report.found.push(Found::new(name, found));
    }
    let platform = stream.device().runtime().platform();
    let deterministic = stream.device().is_deterministic().map_err(|error| error.to_string())?;
    for count in threads::COUNTS {
        let found = threads::outputs(original.case(), count, platform, deterministic).and_then(|outputs| {
            let after = ComputedRows::of(&original, &outputs)?;
            let mut difference = Difference::default();
            for b in 0..original.count() {
                difference.add(&before, (b, 0), &after, b, report.heads)?;
            }
            Ok(difference)
        });
        report.found.push(Found::new(format!("threads: {count}"), found));
    }
    Ok(())
}

/// How the rows of these calls differ from the original's.
fn compared(
    original: &Sequences,
    calls: &[Call],
    before: &ComputedRows,
    stream: &Stream,
    target: Target,
) -> Result<Difference, Why> {
    let mut difference = Difference::default();
    for call in calls {
        let Piece { case, rows } = call.make(original, target)?;
        let outputs = computed(&case, stream)?;
        let sequences = Sequences::of(case, target)?;
        let after = ComputedRows::of(&sequences, &outputs)?;
        for (b, (sequence, tokens)) in rows.iter().enumerate() {
            let heads = sequences.problem.heads;
            difference.add(before, (*sequence, tokens.start), &after, b, heads)?;
        }
    }
    Ok(difference)
}

/// The outputs of a case.
fn computed(case: &AttentionCase, stream: &Stream) -> Result<Vec<(&'static str, CaseTensor)>, Why> {
    match case.launch(stream) {
        Ok(outcome) => match outcome.verdict {
            Verdict::Failed { reason } => Err(Why::Failure(reason)),
            Verdict::Unsupported(what) => Err(Why::Failure(what.given.clone())),
            _ => Ok(outcome.outputs),
        },
        Err(error @ Error::OtherTarget { .. }) => Err(Why::Elsewhere(error.to_string())),
        Err(error) => Err(Why::Failure(error.to_string())),
    }
}
