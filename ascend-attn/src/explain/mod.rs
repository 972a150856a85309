//! `ascend-attn explain`: which rules fit what a failed call printed.

mod borders;
mod cause;
mod likelihood;
mod message;
mod operator_names;
mod ranking;
mod reading;
mod rule_words;
mod status;
mod words;

use std::io::{self, IsTerminal as _, Read as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use ascend_attention::case;
use ascend_attention::spec::{Level, Rule, Scope};

use super::output::{self, Output};
use super::{Stop, check};
use operator_names::Operator;
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
/// With the call itself as a case file or a JSON line, the rule that it breaks is known: `--call` alone prints its
/// verdict, as `ascend-attn check` does, and reads no text.
#[derive(clap::Args)]
pub(super) struct Arguments {
    /// The text; standard input if it is `-`, or left out without --call
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
const NO_RULE: &str = "\
no rule fits: the text says that a call failed, and nothing of the call that a rule is about
  the reason: in lines with an error code, such as EZ9999, around the failure, or in the host's log of CANN
              (ASCEND_PROCESS_LOG_PATH, ~/ascend/log)
  the call:   described by --call FILE.jsonl (json-lines.md in the book), or recorded; a program in Rust records by
              itself, one in C or Python on the emulation, in a clone of the repository:
                cargo run --release -p xtask -- emu-libs toolkit --toolkit
                source toolkit/set_env.sh
                ASCEND_RECORD=calls python program.py
                ascend-attn check calls";

/// What is said where no rule fits a failure of ATB.
const NO_RULE_OF_ATB: &str = "\
no rule fits: ATB checks its calls by itself and says to its caller only that one failed
  the reason: in its own log (~/atb/log, ~/ascend/log); give that here
  the call:   on the emulation the error names the rule; for a library of it see python.md in the book";

/// Prints the verdict on the call, if there is one, and the rules that fit the text.
pub(super) fn run(arguments: &Arguments, output: &mut Output) -> Result<ExitCode, Stop> {
    if let Some(call) = &arguments.call {
        let verdict = check::verdict_on(call, output)?;
        if arguments.file.is_none() {
            return Ok(verdict);
        }
    }
    let reading = Reading::new(&text(arguments.file.as_deref()).map_err(Stop::Trouble)?);
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
        match reading.operator {
            _ if reading.is_outside() => {}
            Some(Operator::Atb) => output.line(NO_RULE_OF_ATB)?,
            _ => output.line(NO_RULE)?,
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

/// The text of a file, or of standard input. Logs have bytes of other encodings, which say nothing of a call.
fn text(file: Option<&Path>) -> Result<String, String> {
    let bytes = match file {
        Some(file) if file != Path::new("-") => {
            case::read_file(file, MOST_BYTES).map_err(|error| error.to_string())
        }
        _ => standard_input(),
    };
    Ok(String::from_utf8_lossy(&bytes?).into_owned())
}

fn standard_input() -> Result<Vec<u8>, String> {
    if io::stdin().is_terminal() {
        output::remark(
            "paste what the failed call printed, then end it with Ctrl-D on a line of its own",
        );
    }
    let mut bytes = Vec::new();
    let read = io::stdin().lock().take(MOST_BYTES).read_to_end(&mut bytes);
    read.map_err(|error| format!("standard input: {error}"))?;
    Ok(bytes)
}
