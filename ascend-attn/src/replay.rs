//! `ascend-attn run`: replays cases.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use ascend_attention::case::{Case, Verdict};
use ascend_attention::{Error, Stream};
use serde_json::json;

use super::Stop;
use super::output::Output;
use super::platform::{DeviceChoice, DeviceReport};
use super::report::{Report, Tally};

/// Replay case files and compare what comes out with what they expect
///
/// A case is one operator call in a safetensors file. Prints a line for each: its name, `pass`, `FAIL`, `computed`
/// (the file expects no outputs), `unsupported` or `skipped`, and the worst error against its tolerance. Ends with
/// the counts, and with exit code 1 if any case failed.
///
/// A case that names a product or a CANN release runs on the emulation of these; an NPU that is another product or
/// has an older release skips it.
#[derive(clap::Args)]
pub(super) struct Arguments {
    /// Case files, or folders: all *.safetensors files in a folder, by name
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    #[command(flatten)]
    device: DeviceChoice,
    /// Write each case with the outputs computed here, as a case file of the same name, into this folder
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Ask the device for deterministic operators (ACL_OPT_DETERMINISTIC)
    #[arg(long)]
    deterministic: bool,
    /// Print a JSON object for each case, and one with the counts
    #[arg(long)]
    json: bool,
}

pub(super) fn run(arguments: &Arguments, output: &mut Output) -> Result<ExitCode, Stop> {
    let files = collect(&arguments.files, &[CASES])?;
    let out = match &arguments.out {
        Some(folder) => Some(Written::into(folder, &files)?),
        None => None,
    };
    let stream = arguments.device.stream()?;
    if arguments.deterministic {
        stream.device().set_deterministic(true)?;
    }
    let platform = DeviceReport::of(&stream);
    if !arguments.json {
        output.line(&platform)?;
    }
    let width = files.iter().map(|file| stem(file).chars().count()).max();
    let mut tally = Tally::default();
    for file in &files {
        let report = replay(file, &stream, out.as_ref());
        tally.count(&report);
        if arguments.json {
            output.line(report.json())?;
        } else {
            output.line(report.text(width.unwrap_or(0)))?;
        }
    }
    if arguments.json {
        output.line(platform.summary(json!(tally)))?;
    } else {
        output.line(&tally)?;
    }
    Ok(ExitCode::from(u8::from(tally.failed > 0)))
}

/// Replays one file; any error is a failure of this file, and the next one is tried all the same.
fn replay(file: &Path, stream: &Stream, out: Option<&Written>) -> Report {
    let begin = Instant::now();
    let mut report = Report { file: file.to_owned(), stem: stem(file), ..Report::default() };
    if has_extension(file, CALLS) {
        report.failure = Some(
            "calls without data cannot be run: `ascend-attn check` says what the operator makes of them".to_owned(),
        );
        return report;
    }
    match Case::read(file) {
        Err(error) => report.failure = Some(error.to_string()),
        Ok(case) => {
            report.name.clone_from(&case.name);
            report.note.clone_from(&case.note);
            match case.launch(stream) {
                Err(error @ Error::OtherTarget { .. }) => report.skipped = Some(error.to_string()),
                Err(error) => report.failure = Some(error.to_string()),
                Ok(outcome) => {
                    if let (Some(out), Verdict::Passed | Verdict::Failed { .. } | Verdict::Computed) =
                        (out, &outcome.verdict)
                        && !outcome.outputs.is_empty()
                    {
                        let written = case.with_outputs(&outcome).and_then(|computed| computed.write(out.path(file)));
                        report.failure = written.err().map(|error| error.to_string());
                    }
                    report.outcome = Some(outcome);
                }
            }
        }
    }
    report.elapsed = begin.elapsed();
    report
}

/// Extension of case files.
pub(super) const CASES: &str = "safetensors";
/// Extension of files of calls without data, one call a line.
pub(super) const CALLS: &str = "jsonl";

pub(super) fn has_extension(file: &Path, extension: &str) -> bool {
    file.extension().is_some_and(|of| of == extension)
}

/// The file's name without its extension.
pub(super) fn stem(file: &Path) -> String {
    let stem = file.file_stem().unwrap_or(file.as_os_str());
    stem.to_string_lossy().into_owned()
}

/// The files that the arguments name, with folders replaced by the files in them that have one of these extensions.
pub(super) fn collect(arguments: &[PathBuf], extensions: &[&str]) -> Result<Vec<PathBuf>, Stop> {
    let mut files = Vec::new();
    for path in arguments {
        let unreadable = |error| Stop::Trouble(format!("{}: {error}", path.display()));
        if !fs::metadata(path).map_err(unreadable)?.is_dir() {
            files.push(path.clone());
            continue;
        }
        let mut found = Vec::new();
        let mut calls = false;
        for entry in fs::read_dir(path).map_err(unreadable)? {
            let file = entry.map_err(unreadable)?.path();
            calls |= has_extension(&file, CALLS);
            if extensions.iter().any(|of| has_extension(&file, of)) {
                found.push(file);
            }
        }
        if found.is_empty() {
            return Err(Stop::Trouble(format!(
                "{}: no *.{} file in this folder{}",
                path.display(),
                extensions.join(" or *."),
                if calls { "; `ascend-attn check` reads its *.jsonl files" } else { "" }
            )));
        }
        found.sort();
        files.append(&mut found);
    }
    Ok(files)
}

/// The folder that computed cases are written into.
struct Written(PathBuf);

impl Written {
    /// Makes the folder, and checks that no file in it is an input or is written twice.
    fn into(folder: &Path, files: &[PathBuf]) -> Result<Self, Stop> {
        let trouble = |error| Stop::Trouble(format!("--out {}: {error}; name a folder", folder.display()));
        fs::create_dir_all(folder).map_err(trouble)?;
        let folder = folder.canonicalize().map_err(trouble)?;
        let mut names = BTreeMap::new();
        for file in files {
            if let Some(other) = names.insert(file.file_name(), file) {
                return Err(Stop::Trouble(format!(
                    "{} and {} would be written to the same file",
                    other.display(),
                    file.display()
                )));
            }
            let target = file.file_name().map(|name| folder.join(name));
            if file.canonicalize().ok() == target {
                return Err(Stop::Trouble(format!(
                    "{} would be overwritten: choose another folder for --out",
                    file.display()
                )));
            }
        }
        Ok(Self(folder))
    }

    fn path(&self, input: &Path) -> PathBuf {
        self.0.join(input.file_name().unwrap_or(input.as_os_str()))
    }
}
