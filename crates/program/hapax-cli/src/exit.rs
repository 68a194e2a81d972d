//! Errors that end the program: one line on standard error, and an exit code of `sysexits.h`.

use std::borrow::Cow;
use std::fmt;
use std::process::ExitCode;

use serde_json::json;

/// Returns the usage error of a flag. It does not repeat the flag's value, which may be secret.
pub(crate) fn of<E: fmt::Display>(flag: &str) -> impl FnOnce(E) -> CliError {
    move |error| CliError::usage(format!("{flag}: {error}"))
}

/// An error that ends the program.
#[derive(Debug)]
pub(crate) struct CliError {
    code: u8,
    /// The code in JSON output.
    name: Cow<'static, str>,
    message: String,
}

impl CliError {
    /// An error with exit code 1: the command ran, and its result is negative.
    pub(crate) fn no(message: impl fmt::Display) -> Self {
        Self { code: 1, name: "refused".into(), message: message.to_string() }
    }

    /// An error with exit code 64: arguments or configuration are not valid.
    pub(crate) fn usage(message: impl fmt::Display) -> Self {
        Self { code: 64, name: "usage".into(), message: message.to_string() }
    }

    /// An error with exit code 69: something that the command needs is not available.
    pub(crate) fn unavailable(message: impl fmt::Display) -> Self {
        Self { code: 69, name: "unavailable".into(), message: message.to_string() }
    }

    /// Appends to the message.
    pub(crate) fn and(mut self, more: &str) -> Self {
        self.message.push_str(more);
        self
    }

    /// Sets the code in JSON output.
    pub(crate) fn named(mut self, name: impl Into<Cow<'static, str>>) -> Self {
        self.name = name.into();
        self
    }

    /// Prints the error in one line on standard error, on request as JSON, and returns the exit
    /// code.
    pub(crate) fn report(&self, as_json: bool) -> ExitCode {
        if as_json {
            eprintln!("{}", json!({ "code": self.name, "message": self.to_string() }));
        } else {
            eprintln!("hapax: {self}");
        }
        ExitCode::from(self.code)
    }
}

impl fmt::Display for CliError {
    /// Writes the message in one line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let words: Vec<&str> = self.message.split_whitespace().collect();
        f.write_str(&words.join(" "))
    }
}
