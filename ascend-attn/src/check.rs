//! `ascend-attn check`: the contract's verdict on calls, without running them.

mod matrix;
mod report;

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use ascend_attention::Machine;
use ascend_attention::case::{Case, Expect, ParameterCase};
use ascend_attention::spec::declared::{AnyArguments, DeclaredOperator};
use ascend_attention::spec::{Cann, FIND_KERNEL_ERROR, Soc, Target, TensorDesc, Violation};

use serde_json::Value;

use super::area::Area;
use super::output::Output;
use super::targets::Targets;
use super::{Stop, replay, rule_text, text_file};

/// Say what the operator would make of calls, without running them
///
/// Takes case files, JSON lines (*.jsonl) that describe calls by shapes, dtypes and attributes, and folders of both.
/// Prints for each call its file, whether the operator accepts it, the rule that refuses it or the lints that it
/// breaks, and whether that is what the file expects. Ends with the counts, and with exit code 1 if any verdict is
/// not as expected or any file or line cannot be read. A verdict of which nothing is expected, which is so of cases
/// that expect something of another release only, neither passes nor fails: it is counted apart.
///
/// A call is judged for a CANN release and a chip: those that are named here, otherwise those that its file or line
/// names, otherwise those that the emulation passes for where nothing is chosen: Ascend910B3 with the default
/// release, or the newest for a chip that the default one does not know. A verdict on FusedInferAttentionScore that a
/// line states without a release is one of release 8.1, for which such a line is judged. With `all` in their place a
/// call is judged for each release and chip, and a table shows the verdicts.
#[derive(clap::Args)]
pub(super) struct Arguments {
    /// Case files, JSON lines, or folders: all *.safetensors and *.jsonl files in a folder, by name
    #[arg(required_unless_present = "explain", value_name = "FILE")]
    files: Vec<PathBuf>,
    /// The CANN release whose operator is asked: 8.1 (which stands for 8.1 to 8.4), 8.5, 9.0, 9.1, 9.2 (a preview), or
    /// all
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

/// The file and line of a call.
struct CallLocation<'a> {
    file: &'a Path,
    /// The line of a file of JSON lines, from 1 on.
    line: Option<usize>,
}

impl fmt::Display for CallLocation<'_> {
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
    /// A target that accepts a refused call.
    taken_by: Option<Target>,
    lints: Vec<Violation>,
    /// How the verdict differs from the expected rule or status.
    other_rule: Option<String>,
    /// The lint that a case expects, if the call breaks it.
    stopped_by: Option<String>,
    /// The default that is assumed for an argument that a line leaves out.
    taken_for: Option<&'static str>,
}

/// The note on a line of FusedInferAttentionScore without `inner_precise`.
const DEFAULT_PRECISE: &str = "inner_precise is not given and taken for 1, the operator's default; PyTorch passes 0, \
    which other checks judge";

impl Checked {
    /// Compares the verdict with the rule or lint that a case records as the cause of its refusal.
    fn compare_rule(&mut self, recorded: &str) {
        if self.expected != Some(self.accepted) {
            return;
        }
        let lint = || self.lints.iter().any(|lint| lint.rule.id == recorded);
        match self.rule {
            Some(rule) if rule == recorded => {}
            Some(rule) => {
                self.other_rule = Some(format!("rejected by another rule than recorded ({rule}, recorded {recorded})"));
            }
            None if lint() => self.stopped_by = Some(recorded.to_owned()),
            None => {
                self.other_rule = Some(format!("the lint {recorded} should be there, and is not"));
            }
        }
    }

    /// Compares the verdict's status with the recorded status of a refused call.
    fn compare_status(&mut self, recorded: Option<i64>) {
        let Some(recorded) = recorded else { return };
        let refused = self.expected == Some(false) && !self.accepted;
        if refused && i64::from(self.status) != recorded {
            self.other_rule = Some(format!("rejected with status {} instead of {recorded}", self.status));
        }
    }

    /// As [`Checked::compare_status`], for a case, which may expect a refusal without naming a status.
    fn compare_expected(&mut self, expect: Expect) {
        if let Expect::Reject { status } = expect {
            self.compare_status(status.map(i64::from));
        }
    }

    /// Whether the verdict is the expected one; `None` if nothing is expected.
    fn agrees(&self) -> Option<bool> {
        let expected = self.expected?;
        Some(expected == self.accepted && self.other_rule.is_none())
    }
}

/// Numbers of verdicts by kind.
#[derive(Clone, Copy, Default)]
struct Counts {
    accepted_right: usize,
    accepted_wrong: usize,
    rejected_right: usize,
    rejected_wrong: usize,
    /// Accepted and rejected calls of which nothing is expected.
    accepted_unasked: usize,
    rejected_unasked: usize,
    artefacts: usize,
    unreadable: usize,
}

impl Counts {
    fn count(&mut self, checked: &Checked) {
        let count = match (checked.agrees(), checked.accepted) {
            (None, true) => &mut self.accepted_unasked,
            (None, false) => &mut self.rejected_unasked,
            (Some(true), true) => &mut self.accepted_right,
            (Some(false), true) => &mut self.accepted_wrong,
            (Some(true), false) => &mut self.rejected_right,
            (Some(false), false) => &mut self.rejected_wrong,
        };
        *count += 1;
    }

    fn passed(&self) -> usize {
        self.accepted_right + self.rejected_right
    }

    fn without_expectation(&self) -> usize {
        self.accepted_unasked + self.rejected_unasked
    }

    fn failed(&self) -> usize {
        self.accepted_wrong + self.rejected_wrong + self.unreadable
    }
}

/// Counts of all calls, and of the calls of each area.
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
        return rule_text::print(id, output);
    }
    let asked = Targets::of(arguments.soc.as_deref(), arguments.cann.as_deref())?;
    let files = replay::collect(&arguments.files, &[replay::CASES, replay::CALLS])?;
    let mut totals = Totals::default();
    for file in &files {
        let mut take = |location: &CallLocation<'_>, read: Result<Read, String>| {
            let all: Vec<Checked> = match read {
                Err(error) => {
                    totals.all.unreadable += 1;
                    return report::unreadable(location, &error, arguments.json, output);
                }
                Ok(Read::Line(case, _)) if case.artefact => {
                    totals.all.artefacts += 1;
                    return Ok(());
                }
                Ok(Read::Line(case, says_precise)) => {
                    let named = case.accepted.iter().filter_map(|(release, _)| *release);
                    let inference = DeclaredOperator::FusedInferAttentionScore;
                    let otherwise = match case.arguments.operator() == inference {
                        // A line that states verdicts without naming a release was recorded before there were
                        // several.
                        true if !case.accepted.is_empty() => Cann::V8_1,
                        _ => Machine::DEFAULT_CANN,
                    };
                    let release = case.release.filter(|_| case.accepted.is_empty());
                    let targets = match asked.of_call(case.soc, named.chain(release), otherwise) {
                        Ok(targets) => targets,
                        Err(error) => {
                            totals.all.unreadable += 1;
                            return report::unreadable(location, &error.to_string(), arguments.json, output);
                        }
                    };
                    let one = |target| {
                        let expected = (case.accepted_on(target), case.soc.is_some());
                        let call = (&case.arguments, None);
                        let mut checked = check(case.id.clone(), expected, call, case.version, target);
                        checked.compare_status(case.status_on(target.cann));
                        let says = says_precise || case.arguments.operator() != inference;
                        checked.taken_for = (!says).then_some(DEFAULT_PRECISE);
                        checked
                    };
                    targets.into_iter().map(one).collect()
                }
                Ok(Read::Case(case)) => match of_case(&case, &asked) {
                    Ok(checked) => checked,
                    Err(Stop::Trouble(error)) => {
                        totals.all.unreadable += 1;
                        return report::unreadable(location, &error, arguments.json, output);
                    }
                    Err(closed) => return Err(closed),
                },
            };
            for checked in &all {
                totals.count(checked);
                if !arguments.summary && (arguments.json || !asked.all) {
                    report::verdict(location, checked, all.len() > 1, arguments.json, output)?;
                }
            }
            match all.first() {
                Some(first) if asked.all && !arguments.json && !arguments.summary => {
                    output.line(format_args!("{location}{}", report::named(location, &first.id)))?;
                    matrix::print(&all, output)
                }
                _ => Ok(()),
            }
        };
        each_call(file, &mut take)?;
    }
    if arguments.summary {
        report::areas(&totals, arguments.json, output)?;
    }
    report::summary(&totals.all, arguments.json, output)?;
    Ok(ExitCode::from(u8::from(totals.all.failed() > 0)))
}

/// Prints the verdict on the calls of one file, as `check FILE` does.
pub(super) fn verdict_on(file: &Path, output: &mut Output) -> Result<ExitCode, Stop> {
    let arguments =
        Arguments { files: vec![file.to_owned()], cann: None, soc: None, json: false, summary: false, explain: None };
    run(&arguments, output)
}

/// Is called with a call, or with the error of a file or line that should describe one.
type Take<'t> = dyn FnMut(&CallLocation<'_>, Result<Read, String>) -> Result<(), Stop> + 't;

/// A call as a file or a line describes it.
enum Read {
    Case(Box<Case>),
    /// A line, and whether it has `inner_precise`.
    Line(Box<ParameterCase>, bool),
}

/// Calls `take` with every call of a file, or with the error of the file or the line; empty lines are ignored.
fn each_call(file: &Path, take: &mut Take<'_>) -> Result<(), Stop> {
    let whole = CallLocation { file, line: None };
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
        let location = CallLocation { file, line: Some(at + 1) };
        let case = ParameterCase::from_json(line).map_err(|error| error.to_string());
        let object: Option<Value> = serde_json::from_str(line).ok();
        let says = object.is_some_and(|line| !line["attrs"]["inner_precise"].is_null());
        take(&location, case.map(|case| Read::Line(Box::new(case), says)))?;
    }
    Ok(())
}

/// The verdicts on a case.
fn of_case(case: &Case, asked: &Targets) -> Result<Vec<Checked>, Stop> {
    let arguments = case.describe();
    let own = case.target(Target::new(Soc::AtlasA2, Machine::DEFAULT_CANN));
    let expectation = (case.expect, case.soc_name.is_some(), own);
    let targets = asked.of_case(case.soc_name.as_deref(), case.cann)?;
    let one = |target| {
        let version = case.version(&arguments, target);
        let call = (&arguments, Some(case));
        let mut checked = check(
            case.name.clone(),
            (expected(expectation, target), case.soc_name.is_some()),
            call,
            Some(version),
            target,
        );
        checked.compare_expected(case.expect);
        checked
    };
    Ok(targets.into_iter().map(one).collect())
}

/// Whether a case expects `target` to accept its call: it expects something only in the release that it names or
/// would run on, and, if it names a product, only on that product.
fn expected((expect, names_soc, own): (Expect, bool, Target), target: Target) -> Option<bool> {
    let same = !names_soc || own.soc.is_kin(target.soc);
    (target.cann == own.cann && same).then_some(expect == Expect::Ok)
}

/// The verdict on a call. `expected` is what its file or line expects, and whether that names a product: if it names
/// none, nothing is expected of products that do not have the operator at all. A case knows the contents of its
/// tensors.
fn check(
    id: String,
    (expected, names_soc): (Option<bool>, bool),
    (arguments, case): (&AnyArguments<TensorDesc>, Option<&Case>),
    version: Option<u8>,
    target: Target,
) -> Checked {
    let version = version.unwrap_or_else(|| arguments.chosen_on(1, target));
    let mut checked = Checked {
        id,
        target,
        area: Area::of(arguments),
        expected,
        accepted: true,
        rule: None,
        status: 0,
        message: None,
        taken_by: None,
        lints: Vec::new(),
        other_rule: None,
        stopped_by: None,
        taken_for: None,
    };
    let mut report = |lint| checked.lints.push(lint);
    let accepted = match case {
        Some(case) => case.check(arguments, version, target, &mut report),
        None => arguments.check(version, target, &mut report),
    };
    match accepted {
        Ok(()) => {
            if let Some(case) = case {
                checked.lints.extend(case.check_contents(arguments, version, target).err());
                case.lint_contents(arguments, version, target, &mut |lint| checked.lints.push(lint));
            }
        }
        // The operator takes the call; only this crate does not compute it.
        Err(unsupported) if unsupported.is_unsupported() => {
            checked.message = Some(unsupported.to_string());
        }
        Err(violation) => {
            checked.accepted = false;
            checked.rule = Some(violation.rule.id);
            checked.status = violation.status();
            if checked.status == FIND_KERNEL_ERROR && !names_soc {
                checked.expected = None;
            }
            checked.taken_by = arguments.taken_by(version, target);
            checked.message = Some(match checked.taken_by {
                Some(other) => format!("{violation}; {other} takes the call"),
                None => violation.to_string(),
            });
        }
    }
    let recorded = case.and_then(|case| case.expect_rule.as_deref());
    if let Some(recorded) = recorded {
        checked.compare_rule(recorded);
    }
    checked
}
