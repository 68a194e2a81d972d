//! Parts that the programs of the benchmark share.

pub mod process;
pub mod sample;
pub mod wire;

use std::process::ExitCode;

/// An error of any kind: a benchmark that fails ends with its text.
pub type Any = Box<dyn std::error::Error + Send + Sync>;

/// Returns the exit code of a program, and writes the text of its error to standard error.
pub fn exit(result: Result<(), Any>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
