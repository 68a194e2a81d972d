//! How the program ends: one line on standard error, and an exit code of `sysexits.h`.

use std::borrow::Cow;
use std::fmt;
use std::process::ExitCode;

use serde_json::json;

/// A flag cannot be what it was given, which is not repeated: it may be secret.
pub(crate) fn of<E: fmt::Display>(flag: &str) -> impl FnOnce(E) -> CliError {
    move |error| CliError::usage(format!("{flag}: {error}"))
}

/// Why the program ends without having done what it was asked.
#[derive(Debug)]
pub(crate) struct CliError {
    code: u8,
    /// What programs know it by.
    name: Cow<'static, str>,
    message: String,
}

impl CliError {
    /// 1: it looked, and the answer is no.
    pub(crate) fn no(message: impl fmt::Display) -> Self {
        Self { code: 1, name: "refused".into(), message: message.to_string() }
    }

    /// 64: what it was told cannot be.
    pub(crate) fn usage(message: impl fmt::Display) -> Self {
        Self { code: 64, name: "usage".into(), message: message.to_string() }
    }

    /// 69: something it needs is not available.
    pub(crate) fn unavailable(message: impl fmt::Display) -> Self {
        Self { code: 69, name: "unavailable".into(), message: message.to_string() }
    }

    /// With this at the end of its message.
    pub(crate) fn and(mut self, more: &str) -> Self {
        self.message.push_str(more);
        self
    }

    /// Known to programs by this name.
    pub(crate) fn named(mut self, name: impl Into<Cow<'static, str>>) -> Self {
        self.name = name.into();
        self
    }

    /// Says why, in one line; as JSON if whoever started the program reads that.
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
    /// One line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let words: Vec<&str> = self.message.split_whitespace().collect();
        f.write_str(&words.join(" "))
    }
}
