//! The command line program `ascend-attn`: arguments and exit codes.

mod area;
mod backends;
#[cfg(feature = "emulation")]
mod bench;
mod check;
mod determinism;
mod doctor;
mod drawing;
mod explain;
mod installation;
mod mask;
mod output;
mod platform;
mod random;
mod ranks;
mod replay;
mod report;
mod rule_text;
mod targets;
mod text_file;
mod triangle;

use std::process::ExitCode;

use ascend_attention::sys;
use clap::{Parser, Subcommand};

use output::Output;

/// Exit code for a wrong command line, or for a machine that cannot run the command.
const TROUBLE: u8 = 2;
/// Exit code when the output's reader is gone: what a shell shows for a program that SIGPIPE ended.
const CLOSED: u8 = 141;

#[derive(Parser)]
#[command(
    name = "ascend-attn",
    version,
    about = "Runs attention of Huawei Ascend CANN from case files, on an NPU or on its CPU emulation",
    after_help = "Exit codes: 0 everything passed, 1 something failed, 2 the command could not be carried out.",
    color = clap::ColorChoice::Never,
    arg_required_else_help = true
)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Run(replay::Arguments),
    Check(check::Arguments),
    Costs(ranks::costs::Arguments),
    Backends(Box<backends::Arguments>),
    #[cfg(feature = "emulation")]
    Bench(bench::Arguments),
    Determinism(determinism::Arguments),
    Doctor(doctor::Arguments),
    Explain(explain::Arguments),
    Mask(Box<mask::Arguments>),
    Ranks(ranks::Arguments),
    Triangle(Box<triangle::Arguments>),
}

/// Why a command ends early.
enum Stop {
    /// The command cannot be carried out.
    Trouble(String),
    /// The output's reader is gone.
    Closed,
}

impl From<ascend_attention::Error> for Stop {
    fn from(error: ascend_attention::Error) -> Self {
        Self::Trouble(error.to_string())
    }
}

impl From<ascend_serving::Error> for Stop {
    fn from(error: ascend_serving::Error) -> Self {
        Self::Trouble(error.to_string())
    }
}

fn main() -> ExitCode {
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(error) => {
            // Printing fails only if the output's reader is gone, so the error is ignored.
            let _ = error.print();
            return ExitCode::from(if error.use_stderr() { TROUBLE } else { 0 });
        }
    };
    // All unknown variables are reported here, or in the report of `doctor`: the library and the emulation need not
    // report the misspelt ones.
    sys::misspelt_variables_once();
    if !matches!(arguments.command, Command::Doctor(_)) {
        for variable in sys::unknown_variables() {
            output::remark(&variable.to_string());
        }
    }
    let mut output = Output::standard();
    let done = match arguments.command {
        Command::Run(arguments) => replay::run(&arguments, &mut output),
        Command::Check(arguments) => check::run(&arguments, &mut output),
        Command::Costs(arguments) => ranks::costs::run(&arguments, &mut output),
        Command::Backends(arguments) => backends::run(&arguments, &mut output),
        #[cfg(feature = "emulation")]
        Command::Bench(arguments) => bench::run(&arguments, &mut output),
        Command::Determinism(arguments) => determinism::run(&arguments, &mut output),
        Command::Doctor(arguments) => doctor::run(&arguments, &mut output),
        Command::Explain(arguments) => explain::run(&arguments, &mut output),
        Command::Mask(arguments) => mask::run(&arguments, &mut output),
        Command::Ranks(arguments) => ranks::run(&arguments, &mut output),
        Command::Triangle(arguments) => triangle::run(&arguments, &mut output),
    };
    match done {
        Ok(code) => code,
        Err(Stop::Trouble(message)) => {
            output::complain(&message);
            ExitCode::from(TROUBLE)
        }
        Err(Stop::Closed) => ExitCode::from(CLOSED),
    }
}
