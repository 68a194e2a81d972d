//! Exit codes of `sysexits.h`, and errors of one line on standard error.

use std::borrow::Cow;
use std::error::Error;
use std::fmt;
use std::process::ExitCode;

use serde_json::json;

use crate::output::line;

/// Returns the error of a flag whose value, which may be secret, is not repeated.
pub(crate) fn of<E: fmt::Display>(flag: &str) -> impl FnOnce(E) -> CliError {
    move |error| CliError::usage(format!("{flag}: {error}"))
}

/// Returns an error and its causes: libraries leave the reason to the source.
pub(crate) fn with_causes(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        let more = error.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        source = error.source();
    }
    text
}

/// An error that ends the program.
#[derive(Debug)]
pub(crate) struct CliError {
    code: u8,
    /// The code for programs.
    name: Cow<'static, str>,
    message: String,
}

impl CliError {
    /// Creates the error of a check with a negative result: exit code 1.
    pub(crate) fn no(message: impl fmt::Display) -> Self {
        Self { code: 1, name: "refused".into(), message: message.to_string() }
    }

    /// Creates the error of invalid arguments: exit code 64.
    pub(crate) fn usage(message: impl fmt::Display) -> Self {
        Self { code: 64, name: "usage".into(), message: message.to_string() }
    }

    /// Creates the error of something that is unavailable: exit code 69.
    pub(crate) fn unavailable(message: impl fmt::Display) -> Self {
        Self { code: 69, name: "unavailable".into(), message: message.to_string() }
    }

    /// Creates an error with another exit code.
    pub(crate) fn exit(code: u8, name: &'static str, message: impl fmt::Display) -> Self {
        Self { code, name: name.into(), message: message.to_string() }
    }

    /// Changes the exit code to 69: another start may succeed without a change of the configuration.
    pub(crate) fn may_end(self) -> Self {
        Self { code: 69, name: "unavailable".into(), ..self }
    }

    /// Appends `more` to the message.
    pub(crate) fn and(mut self, more: &str) -> Self {
        self.message.push_str(more);
        self
    }

    /// Returns the exit code.
    pub(crate) const fn code(&self) -> u8 {
        self.code
    }

    /// Returns the code for programs.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Sets the code for programs.
    pub(crate) fn named(mut self, name: impl Into<Cow<'static, str>>) -> Self {
        self.name = name.into();
        self
    }

    /// Reports the error in one line; as JSON if the caller reads that.
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
    /// Writes one line, without characters that control a terminal: it may have text of others.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let words: Vec<&str> = self.message.split_whitespace().collect();
        f.write_str(&line(&words.join(" ")))
    }
}
