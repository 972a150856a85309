//! `ascend-attn check`: the contract's verdict on calls, without running them.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use ascend_attention::case::{Case, Expect, ParameterCase};
use ascend_attention::spec::fia::{FiaCall, Version};
use ascend_attention::spec::{Refusal, Soc, Violation};
use serde_json::json;

use super::area::Area;
use super::output::Output;
use super::{Stop, explain, replay};

/// Say what the operator would make of calls, without running them
///
/// Takes case files, JSON lines (*.jsonl) that describe calls by shapes, dtypes and attributes, and folders of both.
/// Prints for each call its file, whether the operator accepts it, the rule that refuses it or the lints that it breaks,
/// and whether that is what the file expects. Ends with the counts, and with exit code 1 if any verdict is not as expected
/// or any file or line cannot be read.
#[derive(clap::Args)]
pub(super) struct Arguments {
    /// Case files, JSON lines, or folders: all *.safetensors and *.jsonl files in a folder, by name
    #[arg(required_unless_present = "explain", value_name = "FILE")]
    files: Vec<PathBuf>,
    /// The chip whose operator is asked, as CANN names it
    #[arg(long, value_name = "NAME", default_value = "Ascend910B3")]
    soc: String,
    /// Print a JSON object for each call, and one with the counts
    #[arg(long)]
    json: bool,
    /// Print no line for each call, but the counts of each area: prefill, decode, page attention and so on
    #[arg(long)]
    summary: bool,
    /// Print the text of a rule or lint instead, its source, and what to change in a call that breaks it
    #[arg(long, value_name = "RULE", conflicts_with_all = ["files", "soc", "json", "summary"])]
    explain: Option<String>,
}

/// Where a call stands.
struct Place<'a> {
    file: &'a Path,
    /// The line of a file of JSON lines, from 1 on.
    line: Option<usize>,
}

impl fmt::Display for Place<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&replay::stem(self.file))?;
        match self.line {
            Some(line) => write!(f, ":{line}"),
            None => Ok(()),
        }
    }
}

/// The verdict on one call.
struct Checked {
    id: String,
    area: Area,
    expected: Option<bool>,
    accepted: bool,
    rule: Option<&'static str>,
    message: Option<String>,
    lints: Vec<Violation>,
}

/// Verdicts, counted apart.
#[derive(Clone, Copy, Default)]
struct Counts {
    accepted_right: usize,
    accepted_wrong: usize,
    rejected_right: usize,
    rejected_wrong: usize,
    without_expectation: usize,
    artefacts: usize,
    unreadable: usize,
}

impl Counts {
    fn count(&mut self, checked: &Checked) {
        let place = match (checked.expected, checked.accepted) {
            (None, _) => &mut self.without_expectation,
            (Some(true), true) => &mut self.accepted_right,
            (Some(false), true) => &mut self.accepted_wrong,
            (Some(false), false) => &mut self.rejected_right,
            (Some(true), false) => &mut self.rejected_wrong,
        };
        *place += 1;
    }

    fn passed(&self) -> usize {
        self.accepted_right + self.rejected_right
    }

    fn failed(&self) -> usize {
        self.accepted_wrong + self.rejected_wrong + self.unreadable
    }
}

/// Counts of all calls, and of those of each area.
#[derive(Default)]
struct Totals {
    all: Counts,
    areas: BTreeMap<Area, Counts>,
}

impl Totals {
    fn count(&mut self, checked: &Checked) {
        self.all.count(checked);
        self.areas.entry(checked.area).or_default().count(checked);
    }
}

pub(super) fn run(arguments: &Arguments, output: &mut Output) -> Result<ExitCode, Stop> {
    if let Some(id) = &arguments.explain {
        return explain::rule(id, output);
    }
    let soc = Soc::from_name(&arguments.soc).ok_or_else(|| {
        Stop::Trouble(format!(
            "--soc {}: no chip that is known; allowed are names such as Ascend910B3, Ascend910_9382 and Ascend950PR_9599",
            arguments.soc
        ))
    })?;
    let files = replay::collect(&arguments.files, &[replay::CASES, replay::CALLS])?;
    let mut totals = Totals::default();
    for file in &files {
        let mut take = |place: &Place<'_>, read: Result<Read, String>| {
            let checked = match read {
                Err(error) => {
                    totals.all.unreadable += 1;
                    return unreadable(place, &error, arguments.json, output);
                }
                Ok(Read::Line(case)) if case.artefact => {
                    totals.all.artefacts += 1;
                    return Ok(());
                }
                Ok(Read::Line(case)) => check(case.id.clone(), case.accepted, &case.call(), soc),
                Ok(Read::Case(case)) => {
                    let expected = Some(case.expect == Expect::Ok);
                    let description = case.describe();
                    check(case.name.clone(), expected, &description.call(&case), soc)
                }
            };
            totals.count(&checked);
            match arguments.summary {
                true => Ok(()),
                false => report(place, &checked, arguments.json, output),
            }
        };
        each_call(file, &mut take)?;
    }
    if arguments.summary {
        areas(&totals, arguments.json, output)?;
    }
    summary(&totals.all, arguments.json, output)?;
    Ok(ExitCode::from(u8::from(totals.all.failed() > 0)))
}

/// Takes a call, or what is wrong where one should be.
type Take<'t> = dyn FnMut(&Place<'_>, Result<Read, String>) -> Result<(), Stop> + 't;

/// What a file says of a call.
enum Read {
    Case(Box<Case>),
    Line(Box<ParameterCase>),
}

/// Calls `take` with every call of a file, or with what is wrong with the file or the line; empty lines are passed over.
fn each_call(file: &Path, take: &mut Take<'_>) -> Result<(), Stop> {
    let whole = Place { file, line: None };
    if !replay::has_extension(file, replay::CALLS) {
        let case = Case::read(file).map_err(|error| error.to_string());
        return take(&whole, case.map(|case| Read::Case(Box::new(case))));
    }
    let text = match fs::read_to_string(file) {
        Ok(text) => text,
        Err(error) => return take(&whole, Err(format!("{}: {error}", file.display()))),
    };
    for (at, line) in text.lines().enumerate() {
        if line.trim().is_empty() {
            continue;
        }
        let place = Place {
            file,
            line: Some(at + 1),
        };
        let case = ParameterCase::from_json(line).map_err(|error| error.to_string());
        take(&place, case.map(|case| Read::Line(Box::new(case))))?;
    }
    Ok(())
}

fn check(id: String, expected: Option<bool>, call: &FiaCall<'_>, soc: Soc) -> Checked {
    let version = match soc {
        Soc::Ascend950 => Version::V5,
        _ => Version::oldest_for(call),
    };
    let mut checked = Checked {
        id,
        area: Area::of(call),
        expected,
        accepted: true,
        rule: None,
        message: None,
        lints: Vec::new(),
    };
    match call.check(version, soc) {
        Ok(problem) => problem.each_lint(&mut |violation| checked.lints.push(violation)),
        // The operator takes it; this release alone does not compute it.
        Err(Refusal::Unsupported(unsupported)) => checked.message = Some(unsupported.to_string()),
        Err(Refusal::Violation(violation)) => {
            checked.accepted = false;
            checked.rule = Some(violation.rule.id);
            checked.message = Some(violation.to_string());
        }
    }
    checked
}

fn report(
    place: &Place<'_>,
    checked: &Checked,
    json: bool,
    output: &mut Output,
) -> Result<(), Stop> {
    let verdict = if checked.accepted { "accept" } else { "reject" };
    let agrees = checked
        .expected
        .map(|expected| expected == checked.accepted);
    if json {
        let lints = checked.lints.iter().map(ToString::to_string);
        return output.line(json!({
            "file": place.file.to_string_lossy(),
            "line": place.line,
            "id": checked.id,
            "verdict": verdict,
            "rule": checked.rule,
            "message": checked.message,
            "lints": lints.collect::<Vec<_>>(),
            "agrees": agrees,
        }));
    }
    let agreement = match agrees {
        Some(true) => "as expected",
        Some(false) => "NOT AS EXPECTED",
        None => "nothing expected",
    };
    let message = checked.message.as_deref().unwrap_or("");
    let lints: Vec<&str> = checked.lints.iter().map(|lint| lint.rule.id).collect();
    // The name inside a case file is often the file's.
    let id = match &checked.id {
        id if id.is_empty() || place.to_string().ends_with(id) => String::new(),
        // A file may call it anything.
        id => format!(" ({})", id.escape_debug()),
    };
    output.line(format_args!(
        "{place}{id}: {verdict}, {agreement}{}{message}{}{}",
        if message.is_empty() { "" } else { "; " },
        if lints.is_empty() { "" } else { "; lints: " },
        lints.join(", "),
    ))
}

/// Says that a file or a line is none that describes a call.
fn unreadable(place: &Place<'_>, error: &str, json: bool, output: &mut Output) -> Result<(), Stop> {
    if json {
        return output.line(json!({
            "file": place.file.to_string_lossy(),
            "line": place.line,
            "id": null,
            "verdict": "unreadable",
            "rule": null,
            "message": error,
            "lints": [],
            "agrees": null,
        }));
    }
    output.line(format_args!("{place}: UNREADABLE; {error}"))
}

/// The counts of each area, in a table.
fn areas(totals: &Totals, json: bool, output: &mut Output) -> Result<(), Stop> {
    if !json {
        output.line(format_args!(
            "{:<16} {:>14} {:>14} {:>14} {:>14}",
            "area", "accepted right", "accepted wrong", "rejected right", "rejected wrong",
        ))?;
    }
    for (area, counts) in &totals.areas {
        let Counts {
            accepted_right,
            accepted_wrong,
            rejected_right,
            rejected_wrong,
            ..
        } = counts;
        if json {
            output.line(json!({
                "area": area.name(),
                "accepted_right": accepted_right,
                "accepted_wrong": accepted_wrong,
                "rejected_right": rejected_right,
                "rejected_wrong": rejected_wrong,
            }))?;
        } else {
            output.line(format_args!(
                "{:<16} {accepted_right:>14} {accepted_wrong:>14} {rejected_right:>14} {rejected_wrong:>14}",
                area.name(),
            ))?;
        }
    }
    Ok(())
}

fn summary(counts: &Counts, json: bool, output: &mut Output) -> Result<(), Stop> {
    let (passed, failed) = (counts.passed(), counts.failed());
    if json {
        return output.line(json!({ "summary": {
            "passed": passed,
            "failed": failed,
            "accepted_right": counts.accepted_right,
            "accepted_wrong": counts.accepted_wrong,
            "rejected_right": counts.rejected_right,
            "rejected_wrong": counts.rejected_wrong,
            "without_expectation": counts.without_expectation,
            "artefacts": counts.artefacts,
            "unreadable": counts.unreadable,
        }}));
    }
    output.line(format_args!(
        "accepted: {} right, {} wrong; rejected: {} right, {} wrong; {} without expectation, {} artefacts passed over, {} \
         unreadable",
        counts.accepted_right,
        counts.accepted_wrong,
        counts.rejected_right,
        counts.rejected_wrong,
        counts.without_expectation,
        counts.artefacts,
        counts.unreadable,
    ))?;
    output.line(format_args!("{passed} passed, {failed} failed"))
}
