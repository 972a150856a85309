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
mod target;
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
  look into: the lines with an error code, such as EZ9999, around the failure, or the host's log of CANN
             (ASCEND_PROCESS_LOG_PATH, ~/ascend/log); give them here";

/// What is said where no rule fits a failure of ATB.
const NO_RULE_OF_ATB: &str = "\
no rule fits: ATB checks its calls by itself, and its callers pass on no more than that one failed
  look into: its own log (~/atb/log, ~/ascend/log); give its lines here";

/// What is said of rules for a text that has no message.
const PROSE: &str = "\
no message of CANN is in the text: these are the rules that its words come nearest to; for wrong numbers without an
error see symptoms.md in the book";

/// How to get at a call that a text does not describe: an emulation to run the program on.
const EMULATION: &str = "  \
  or run:    the program on the emulation, whose errors name the rule, in a clone of the repository:
               cargo run -p xtask -- emu-libs toolkit --toolkit
               source toolkit/set_env.sh
               export ASCEND_EMU_CANN=9.1 ASCEND_EMU_SOC=Ascend910B3    # your release and chip";

/// The command that follows where the emulation records nothing.
const RUN: &str = "               python program.py                                        # or a program in C";

/// The commands that follow where it records calls, and how to give one.
const RECORD: &str = "               \
               ASCEND_RECORD=calls python program.py                    # or a program in C
               ascend-attn check calls                                  # of FusedInferAttentionScore
             a program in Rust that uses this library takes ASCEND_RECORD alone, and on an NPU as well
  or give:   the call as JSON lines (json-lines.md in the book): ascend-attn explain --call call.jsonl";

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
        output
            .line(format_args!("outside of the rules: {function} is none of the operators that rules are known of"))?;
    }
    let ranked = ranking::ranked(&reading);
    if ranked.is_empty() {
        if !reading.is_outside() {
            let (no_rule, commands) = match reading.operator {
                Some(Operator::Atb) => (NO_RULE_OF_ATB, RUN),
                _ => (NO_RULE, RECORD),
            };
            output.line(format_args!("{no_rule}\n{EMULATION}\n{commands}"))?;
        }
        return Ok(ExitCode::from(1));
    }
    if reading.is_prose() {
        output.line(PROSE)?;
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
        (Level::Lint, _) => "by the safe layer and the emulation: the operator takes the call".to_owned(),
        (_, None) => format!("by {}, before any operator is called", rule.source),
        (_, Some(since)) if rule.scope == Scope::ATLAS_INFERENCE => {
            format!("{}, on 310P alone", since.symbol())
        }
        (_, Some(since)) => {
            let spans = [("Atlas A2 and A3", rule.scope.a2_a3), ("Ascend 950", rule.scope.ascend950)];
            let spans = spans.into_iter().filter_map(|(product, span)| Some((product, span?)));
            let spans: Vec<_> = spans.map(|(product, span)| format!("{product}: {span}")).collect();
            format!("{}, {}", since.symbol(), spans.join("; "))
        }
    }
}

/// The text of a file, or of standard input. Logs have bytes of other encodings, which say nothing of a call.
fn text(file: Option<&Path>) -> Result<String, String> {
    let bytes = match file {
        Some(file) if file != Path::new("-") => case::read_file(file, MOST_BYTES).map_err(|error| error.to_string()),
        _ => standard_input(),
    };
    Ok(String::from_utf8_lossy(&bytes?).into_owned())
}

fn standard_input() -> Result<Vec<u8>, String> {
    if io::stdin().is_terminal() {
        output::remark("paste what the failed call printed, then end it with Ctrl-D on a line of its own");
    }
    let mut bytes = Vec::new();
    let read = io::stdin().lock().take(MOST_BYTES).read_to_end(&mut bytes);
    read.map_err(|error| format!("standard input: {error}"))?;
    Ok(bytes)
}
