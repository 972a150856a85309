//! `ascend-attn explain`: which rules fit what a failed call printed.

mod cause;
mod message;
mod operator_names;
mod ranking;
mod reading;
mod words;

use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use ascend_attention::spec::{Level, Rule, Scope};

use super::output::Output;
use super::{Stop, check, text_file};
use ranking::Ranked;
use reading::Reading;

/// Say which rules fit what a failed call printed
///
/// Takes a traceback of torch_npu, lines of a log, or an error of this library, and finds in it the operator, the
/// status, product and release, and the parameters, numbers and terms that the message of the checks names. Prints the
/// rules that fit best, each with what must hold, what to change, and where it is checked. The operators word their
/// messages otherwise in each release, so rules are found by what a message names and not by its sentences: the first
/// is the likeliest, not the proven one. Where no rule fits, or something else failed, such as an allocation, it says
/// so.
/// With the call itself as a case file or a JSON line, the rule that it breaks is known: see `ascend-attn check`.
#[derive(clap::Args)]
pub(super) struct Arguments {
    /// The text; standard input if it is left out
    #[arg(value_name = "FILE")]
    file: Option<PathBuf>,
    /// The call, as a case file or as JSON lines: its verdict is printed first
    #[arg(long, value_name = "FILE")]
    call: Option<PathBuf>,
    /// The most rules that are printed
    #[arg(long, value_name = "COUNT", default_value_t = 3)]
    rules: usize,
}

/// Most bytes of a text.
const MOST_BYTES: u64 = 64 << 20;

/// What is said where no rule fits.
const NO_RULE: &str = "no rule fits: the text says that a call failed, and nothing of the call that a rule is about. \
                       The reason stands in the lines with an error code, such as EZ9999, around the failure, or in \
                       the host's log of CANN (ASCEND_PROCESS_LOG_PATH, ~/ascend/log). Or give the call by --call, or \
                       record it with ASCEND_RECORD=DIR and ask `ascend-attn check`; for a status alone, such as \
                       507015, see symptoms.md in the book";

/// Prints the verdict on the call, if there is one, and the rules that fit the text.
pub(super) fn run(arguments: &Arguments, output: &mut Output) -> Result<ExitCode, Stop> {
    if let Some(call) = &arguments.call {
        check::verdict_on(call, output)?;
    }
    let text = match &arguments.file {
        Some(file) if file != Path::new("-") => {
            text_file::read(file, MOST_BYTES).map_err(Stop::Trouble)?
        }
        _ => standard_input().map_err(Stop::Trouble)?,
    };
    let reading = Reading::new(&text);
    output.line(format_args!("found: {reading}"))?;
    for cause in &reading.causes {
        output.line(format_args!("outside of the rules: {}", cause.name))?;
        output.line(format_args!("  do:        {}", cause.advice))?;
    }
    if let Some(function) = &reading.stranger {
        output.line(format_args!(
            "outside of the rules: {function} is none of the operators that rules are known of"
        ))?;
    }
    let ranked = ranking::ranked(&reading);
    if ranked.is_empty() {
        if !reading.is_outside() {
            output.line(NO_RULE)?;
        }
        return Ok(ExitCode::from(1));
    }
    for Ranked { rule, named } in ranked.into_iter().take(arguments.rules) {
        output.line(format_args!("{}: {}", rule.id, named.join(", ")))?;
        output.line(format_args!("  must hold: {}", rule.holds))?;
        output.line(format_args!("  fix:       {}", rule.fix))?;
        output.line(format_args!("  checked:   {}", checked(rule)))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Who checks a rule, and in which releases.
fn checked(rule: &Rule) -> String {
    match (rule.level, rule.since) {
        (Level::Lint, _) => {
            "by the safe layer and the emulation: the operator takes the call".to_owned()
        }
        (_, None) => format!("by {}, before any operator is called", rule.source),
        (_, Some(since)) if rule.scope == Scope::ATLAS_INFERENCE => {
            format!("{}, on 310P alone", since.symbol())
        }
        (_, Some(since)) => {
            let spans = [
                ("Atlas A2 and A3", rule.scope.a2_a3),
                ("Ascend 950", rule.scope.ascend950),
            ];
            let spans = spans
                .into_iter()
                .filter_map(|(product, span)| Some((product, span?)));
            let spans: Vec<_> = spans
                .map(|(product, span)| format!("{product}: {span}"))
                .collect();
            format!("{}, {}", since.symbol(), spans.join("; "))
        }
    }
}

fn standard_input() -> Result<String, String> {
    let mut bytes = Vec::new();
    let read = io::stdin().lock().take(MOST_BYTES).read_to_end(&mut bytes);
    read.map_err(|error| format!("standard input: {error}"))?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}
