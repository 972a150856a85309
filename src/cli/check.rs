//! `ascend-attn check`: the contract's verdict on calls, without running them.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use ascend_attention::case::{Case, Expect, ParameterCase};
use ascend_attention::spec::fia::{FiaCall, Version};
use ascend_attention::spec::{Refusal, Soc};
use serde_json::json;

use super::area::Area;
use super::output::Output;
use super::{Stop, explain, replay};

/// Say what the operator would make of calls, without running them
///
/// Takes case files, folders of them, and JSON lines (*.jsonl) that describe calls by shapes, dtypes and attributes.
/// Prints for each call whether the operator accepts it, the rule that refuses it or the lints that it breaks, and
/// whether that is what the file expects. Ends with the counts, and with exit code 1 if any verdict is not as expected.
#[derive(clap::Args)]
pub(super) struct Arguments {
    /// Case files, folders of case files, or JSON lines
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
    #[arg(long, value_name = "RULE", conflicts_with = "files")]
    explain: Option<String>,
}

/// The verdict on one call.
struct Checked {
    id: String,
    area: Area,
    expected: Option<bool>,
    accepted: bool,
    rule: Option<&'static str>,
    message: Option<String>,
    lints: Vec<&'static str>,
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
        self.accepted_wrong + self.rejected_wrong
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
    let soc = Soc::from_name(&arguments.soc)
        .ok_or_else(|| Stop::Trouble(format!("{}: no chip that is known", arguments.soc)))?;
    let mut totals = Totals::default();
    let mut take = |checked: &Checked, output: &mut Output| {
        totals.count(checked);
        if arguments.summary {
            return Ok(());
        }
        report(checked, arguments.json, output)
    };
    let mut artefacts = 0;
    for file in &arguments.files {
        if file
            .extension()
            .is_some_and(|extension| extension == "jsonl")
        {
            for case in lines(file)? {
                if case.artefact {
                    artefacts += 1;
                    continue;
                }
                let checked = check(case.id.clone(), case.accepted, &case.call(), soc);
                take(&checked, output)?;
            }
            continue;
        }
        for file in replay::collect(std::slice::from_ref(file))? {
            let case = Case::read(&file)
                .map_err(|error| Stop::Trouble(format!("{}: {error}", file.display())))?;
            let expected = Some(case.expect == Expect::Ok);
            let description = case.describe();
            let checked = check(case.name.clone(), expected, &description.call(&case), soc);
            take(&checked, output)?;
        }
    }
    totals.all.artefacts = artefacts;
    if arguments.summary {
        areas(&totals, arguments.json, output)?;
    }
    summary(&totals.all, arguments.json, output)?;
    Ok(ExitCode::from(u8::from(totals.all.failed() > 0)))
}

/// The calls of a file of JSON lines; empty lines are passed over.
fn lines(file: &Path) -> Result<Vec<ParameterCase>, Stop> {
    let trouble = |at: usize, error: &dyn std::fmt::Display| {
        Stop::Trouble(format!("{}:{at}: {error}", file.display()))
    };
    let text = fs::read_to_string(file).map_err(|error| trouble(0, &error))?;
    text.lines()
        .enumerate()
        .filter(|(_, line)| !line.trim().is_empty())
        .map(|(at, line)| ParameterCase::from_json(line).map_err(|error| trouble(at + 1, &error)))
        .collect()
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
        Ok(problem) => problem.each_lint(&mut |violation| checked.lints.push(violation.rule.id)),
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

fn report(checked: &Checked, json: bool, output: &mut Output) -> Result<(), Stop> {
    let verdict = if checked.accepted { "accept" } else { "reject" };
    let agrees = checked
        .expected
        .map(|expected| expected == checked.accepted);
    if json {
        return output.line(json!({
            "id": checked.id,
            "verdict": verdict,
            "rule": checked.rule,
            "message": checked.message,
            "lints": checked.lints,
            "agrees": agrees,
        }));
    }
    let agreement = match agrees {
        Some(true) => "as expected",
        Some(false) => "NOT AS EXPECTED",
        None => "nothing expected",
    };
    let message = checked.message.as_deref().unwrap_or("");
    let lints = checked.lints.join(", ");
    output.line(format_args!(
        "{}: {verdict}, {agreement}{}{message}{}{lints}",
        checked.id,
        if message.is_empty() { "" } else { "; " },
        if lints.is_empty() { "" } else { "; lints: " },
    ))
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
        return output.line(json!({
            "passed": passed,
            "failed": failed,
            "accepted_right": counts.accepted_right,
            "accepted_wrong": counts.accepted_wrong,
            "rejected_right": counts.rejected_right,
            "rejected_wrong": counts.rejected_wrong,
            "without_expectation": counts.without_expectation,
            "artefacts": counts.artefacts,
        }));
    }
    output.line(format_args!(
        "accepted: {} right, {} wrong; rejected: {} right, {} wrong; {} without expectation, {} artefacts passed over",
        counts.accepted_right,
        counts.accepted_wrong,
        counts.rejected_right,
        counts.rejected_wrong,
        counts.without_expectation,
        counts.artefacts,
    ))?;
    output.line(format_args!("{passed} passed, {failed} failed"))
}
