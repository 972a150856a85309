//! `ascend-attn check`: the contract's verdict on calls, without running them.

mod matrix;

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use ascend_attention::Machine;
use ascend_attention::case::{Case, Expect, ParameterCase};
use ascend_attention::spec::fia::{FiaCall, Version};
use ascend_attention::spec::{Cann, Refusal, Soc, Target, Violation};
use serde_json::json;

use super::area::Area;
use super::output::Output;
use super::targets::Targets;
use super::{Stop, explain, replay, text_file};

/// Say what the operator would make of calls, without running them
///
/// Takes case files, JSON lines (*.jsonl) that describe calls by shapes, dtypes and attributes, and folders of both.
/// Prints for each call its file, whether the operator accepts it, the rule that refuses it or the lints that it breaks,
/// and whether that is what the file expects. Ends with the counts, and with exit code 1 if any verdict is not as expected
/// or any file or line cannot be read.
///
/// A call is judged for a CANN release and a chip: those that are named here, otherwise those that its file or line names,
/// otherwise those that the emulation passes for where nothing is chosen: Ascend910B3 with the default release, or the
/// newest for a chip that the default one does not know. A verdict that a line states without a release is one of release
/// 8.1, for which such a line is judged. With `all` in their place a call is judged for each release and chip, and a table
/// shows the verdicts.
#[derive(clap::Args)]
pub(super) struct Arguments {
    /// Case files, JSON lines, or folders: all *.safetensors and *.jsonl files in a folder, by name
    #[arg(required_unless_present = "explain", value_name = "FILE")]
    files: Vec<PathBuf>,
    /// The CANN release whose operator is asked: 8.1 (which stands for 8.1 to 8.4), 8.5, 9.0, 9.1, or all
    #[arg(long, value_name = "RELEASE")]
    cann: Option<String>,
    /// The chip whose operator is asked, as CANN names it, or all
    #[arg(long, value_name = "NAME")]
    soc: Option<String>,
    /// Print a JSON object for each call, and one with the counts
    #[arg(long)]
    json: bool,
    /// Print no line for each call, but the counts of each area: prefill, decode, page attention and so on
    #[arg(long)]
    summary: bool,
    /// Print the text of a rule or lint instead, its source, and what to change in a call that breaks it
    #[arg(long, value_name = "RULE", conflicts_with_all = ["files", "cann", "soc", "json", "summary"])]
    explain: Option<String>,
}

/// Most bytes of a file of JSON lines.
const MOST_LINES: u64 = 1 << 30;

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

/// The verdict on one call for one target.
pub(super) struct Checked {
    id: String,
    pub(super) target: Target,
    area: Area,
    expected: Option<bool>,
    pub(super) accepted: bool,
    pub(super) rule: Option<&'static str>,
    status: i32,
    pub(super) message: Option<String>,
    /// Where a refused call is accepted.
    taken_by: Option<Target>,
    lints: Vec<Violation>,
    /// What is otherwise than a case's `expect_rule` says.
    other_rule: Option<String>,
    /// The lint that a case expects, if it is there.
    stopped_by: Option<String>,
}

impl Checked {
    /// Compares with the rule or lint that a case says it was refused by.
    fn compare_rule(&mut self, recorded: &str) {
        if self.expected != Some(self.accepted) {
            return;
        }
        let lint = || self.lints.iter().any(|lint| lint.rule.id == recorded);
        match self.rule {
            Some(rule) if rule == recorded => {}
            Some(rule) => {
                self.other_rule = Some(format!(
                    "rejected by another rule than recorded ({rule}, recorded {recorded})"
                ));
            }
            None if lint() => self.stopped_by = Some(recorded.to_owned()),
            None => {
                self.other_rule = Some(format!("the lint {recorded} should be there, and is not"));
            }
        }
    }

    /// Whether the verdict is what is expected; `None` if nothing is.
    fn agrees(&self) -> Option<bool> {
        let expected = self.expected?;
        Some(expected == self.accepted && self.other_rule.is_none())
    }
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
    other_operators: usize,
    unreadable: usize,
}

impl Counts {
    fn count(&mut self, checked: &Checked) {
        let place = match (checked.agrees(), checked.accepted) {
            (None, _) => &mut self.without_expectation,
            (Some(true), true) => &mut self.accepted_right,
            (Some(false), true) => &mut self.accepted_wrong,
            (Some(true), false) => &mut self.rejected_right,
            (Some(false), false) => &mut self.rejected_wrong,
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
    let asked = Targets::of(arguments.soc.as_deref(), arguments.cann.as_deref())?;
    let files = replay::collect(&arguments.files, &[replay::CASES, replay::CALLS])?;
    let mut totals = Totals::default();
    for file in &files {
        let mut take = |place: &Place<'_>, read: Result<Read, String>| {
            let all: Vec<Checked> = match read {
                Err(error) => {
                    totals.all.unreadable += 1;
                    return unreadable(place, &error, arguments.json, output);
                }
                Ok(Read::Line(case)) if case.artefact => {
                    totals.all.artefacts += 1;
                    return Ok(());
                }
                Ok(Read::Line(case)) if case.operator.is_some() => {
                    totals.all.other_operators += 1;
                    return unjudged(place, &case, arguments, output);
                }
                Ok(Read::Line(case)) => {
                    let call = case.call();
                    let named = case.accepted.iter().filter_map(|(release, _)| *release);
                    let otherwise = match case.accepted.is_empty() {
                        true => Machine::DEFAULT_CANN,
                        // What states verdicts of no release was recorded before there were several.
                        false => Cann::V8_1,
                    };
                    let release = case.release.filter(|_| case.accepted.is_empty());
                    let targets = match asked.of_call(case.soc, named.chain(release), otherwise) {
                        Ok(targets) => targets,
                        Err(error) => {
                            totals.all.unreadable += 1;
                            return unreadable(place, &error.to_string(), arguments.json, output);
                        }
                    };
                    let one = |target| {
                        let expected = case.accepted_on(target);
                        check(
                            case.id.clone(),
                            expected,
                            (&call, None),
                            case.version,
                            target,
                        )
                    };
                    targets.into_iter().map(one).collect()
                }
                Ok(Read::Case(case)) => {
                    let description = case.describe();
                    let call = description.call();
                    let accepted = case.expect == Expect::Ok;
                    let own = case.target(Target::new(Soc::AtlasA2, Machine::DEFAULT_CANN));
                    // What a case file expects is of the release that it names, or of the one that it would run on.
                    let of = |target: Target| {
                        let same = case.soc_name.is_none() || own.soc.is_kin(target.soc);
                        (target.cann == own.cann && same).then_some(accepted)
                    };
                    let targets = match asked.of_case(&case) {
                        Ok(targets) => targets,
                        Err(error) => {
                            totals.all.unreadable += 1;
                            return unreadable(place, &error.to_string(), arguments.json, output);
                        }
                    };
                    let at_least = case.op_version.unwrap_or(Version::V1);
                    let one = |target| {
                        let content = Some(&*case);
                        let version = Version::oldest_on(&call, at_least, target);
                        check(
                            case.name.clone(),
                            of(target),
                            (&call, content),
                            Some(version),
                            target,
                        )
                    };
                    targets.into_iter().map(one).collect()
                }
            };
            for checked in &all {
                totals.count(checked);
                if !arguments.summary && (arguments.json || !asked.all) {
                    report(place, checked, all.len() > 1, arguments.json, output)?;
                }
            }
            match all.first() {
                Some(first) if asked.all && !arguments.json && !arguments.summary => {
                    output.line(format_args!("{place}{}", named(place, &first.id)))?;
                    matrix::print(&all, output)
                }
                _ => Ok(()),
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
    let text = match text_file::read(file, MOST_LINES) {
        Ok(text) => text,
        Err(error) => return take(&whole, Err(error)),
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

fn check(
    id: String,
    expected: Option<bool>,
    (call, content): (&FiaCall<'_>, Option<&Case>),
    version: Option<Version>,
    target: Target,
) -> Checked {
    let oldest = || Version::oldest_on(call, Version::V1, target);
    let version = version.unwrap_or_else(oldest);
    let mut checked = Checked {
        id,
        target,
        area: Area::of(call),
        expected,
        accepted: true,
        rule: None,
        status: 0,
        message: None,
        taken_by: None,
        lints: Vec::new(),
        other_rule: None,
        stopped_by: None,
    };
    match call.check(version, target) {
        Ok(problem) => {
            problem.each_lint(&mut |violation| checked.lints.push(violation));
            let misplaced = content.and_then(|case| case.check_places(&problem).err());
            checked.lints.extend(misplaced);
            if let Some(since) = content.and_then(|case| case.portable_since) {
                call.each_difference(version, target, since, &mut |lint| checked.lints.push(lint));
            }
        }
        // The operator takes it; this crate alone does not compute it.
        Err(Refusal::Unsupported(unsupported)) => checked.message = Some(unsupported.to_string()),
        Err(Refusal::Violation(violation)) => {
            checked.accepted = false;
            checked.rule = Some(violation.rule.id);
            checked.status = violation.rule.status;
            checked.taken_by = call.taken_by(version, target, &[]);
            checked.message = Some(match checked.taken_by {
                Some(other) => format!("{violation}; {other} takes the call"),
                None => violation.to_string(),
            });
        }
    }
    if let Some(recorded) = content.and_then(|case| case.expect_rule.as_deref()) {
        checked.compare_rule(recorded);
    }
    checked
}

/// Prints a verdict; as text with its target where the call has several.
fn report(
    place: &Place<'_>,
    checked: &Checked,
    several: bool,
    json: bool,
    output: &mut Output,
) -> Result<(), Stop> {
    let verdict = if checked.accepted { "accept" } else { "reject" };
    let agrees = checked.agrees();
    if json {
        let lints = checked.lints.iter().map(ToString::to_string);
        return output.line(json!({
            "file": place.file.to_string_lossy(),
            "line": place.line,
            "id": checked.id,
            "verdict": verdict,
            "rule": checked.rule,
            "status": checked.status,
            "message": checked.message,
            "taken_by": checked
                .taken_by
                .map(|Target { soc, cann }| json!({"soc": soc.name(), "cann": cann.name()})),
            "cann": checked.target.cann.name(),
            "soc": checked.target.soc.name(),
            "lints": lints.collect::<Vec<_>>(),
            "agrees": agrees,
            "other_rule": checked.other_rule,
        }));
    }
    let agreement = match agrees {
        Some(true) => "as expected",
        Some(false) => "NOT AS EXPECTED",
        None => "nothing expected",
    };
    let message = checked.message.as_deref().unwrap_or("");
    let lints: Vec<&str> = checked.lints.iter().map(|lint| lint.rule.id).collect();
    let id = named(place, &checked.id);
    let target = several.then(|| format!(" on {}", checked.target));
    let target = target.unwrap_or_default();
    let stopped = match (&checked.other_rule, &checked.stopped_by) {
        (Some(other), _) => format!("; {}", other.escape_debug()),
        (None, Some(lint)) => format!("; stopped by the lint {}", lint.escape_debug()),
        (None, None) => String::new(),
    };
    output.line(format_args!(
        "{place}{id}: {verdict}{target}, {agreement}{stopped}{}{message}{}{}",
        if message.is_empty() { "" } else { "; " },
        if lints.is_empty() { "" } else { "; lints: " },
        lints.join(", "),
    ))
}

/// A call's name behind its place, in brackets; the name inside a case file is often the file's.
fn named(place: &Place<'_>, id: &str) -> String {
    if id.is_empty() || place.to_string().ends_with(id) {
        String::new()
    } else {
        // A file may call it anything.
        format!(" ({})", id.escape_debug())
    }
}

/// Says that a line is a call of an operator without a contract here.
fn unjudged(
    place: &Place<'_>,
    case: &ParameterCase,
    arguments: &Arguments,
    output: &mut Output,
) -> Result<(), Stop> {
    if arguments.summary {
        return Ok(());
    }
    let operator = case.operator.as_deref().unwrap_or_default();
    let message = format!("{operator}: no contract of this operator");
    if arguments.json {
        return output.line(json!({
            "file": place.file.to_string_lossy(),
            "line": place.line,
            "id": case.id,
            "verdict": "unjudged",
            "rule": null,
            "status": null,
            "message": message,
            "cann": null,
            "soc": null,
            "lints": [],
            "agrees": null,
        }));
    }
    output.line(format_args!("{place} ({}): NOT JUDGED; {message}", case.id))
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
            "status": null,
            "message": error,
            "cann": null,
            "soc": null,
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
            "other_operators": counts.other_operators,
            "unreadable": counts.unreadable,
        }}));
    }
    output.line(format_args!(
        "accepted: {} right, {} wrong; rejected: {} right, {} wrong; {} without expectation, {} artefacts passed over, {} \
         of other operators, {} unreadable",
        counts.accepted_right,
        counts.accepted_wrong,
        counts.rejected_right,
        counts.rejected_wrong,
        counts.without_expectation,
        counts.artefacts,
        counts.other_operators,
        counts.unreadable,
    ))?;
    output.line(format_args!("{passed} passed, {failed} failed"))
}
