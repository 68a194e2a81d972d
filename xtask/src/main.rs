//! The project's command list: `cargo xtask COMMAND`. There is no other.

mod args;
mod ci;
mod deps;
mod features;
mod lint;
mod long;
mod setup;
mod sh;
mod soak;
mod sources;
mod test;
mod tools;
mod words;

use std::process::ExitCode;

use args::Args;
use sh::Outcome;

struct Command {
    name: &'static str,
    summary: &'static str,
    /// Text that `--help` prints after the summary.
    help: &'static str,
    run: fn(&mut Args) -> Outcome,
}

const COMMANDS: [&Command; 11] = [
    &setup::COMMAND,
    &test::COMMAND,
    &lint::COMMAND,
    &features::COMMAND,
    &deps::COMMAND,
    &tools::DENY,
    &tools::FUZZ,
    &long::SIM,
    &long::TORTURE,
    &soak::SOAK,
    &ci::COMMAND,
];

fn main() -> ExitCode {
    let mut words = std::env::args().skip(1);
    let name = words.next().unwrap_or_else(|| "help".into());
    let mut args = Args::new(words);
    if matches!(name.as_str(), "help" | "--help" | "-h") {
        overview();
        return ExitCode::SUCCESS;
    }
    let Some(command) = COMMANDS.iter().find(|command| command.name == name) else {
        eprintln!("xtask: there is no command `{name}`; `cargo xtask help` lists them");
        return ExitCode::from(64);
    };
    if args.wants_help() {
        println!("cargo xtask {}: {}\n\n{}", command.name, command.summary, command.help);
        return ExitCode::SUCCESS;
    }
    match (command.run)(&mut args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("xtask {name}: {failure}");
            failure.exit_code()
        }
    }
}

fn overview() {
    println!("cargo xtask COMMAND [OPTIONS]; `cargo xtask COMMAND --help` prints more\n");
    for command in COMMANDS {
        println!("  {:<8} {}", command.name, command.summary);
    }
}
