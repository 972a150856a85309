//! The command line program `ascend-attn`: replays case files and says what this machine has to run them on.

#[path = "../cli/mod.rs"]
mod cli;

fn main() -> std::process::ExitCode {
    cli::main()
}
