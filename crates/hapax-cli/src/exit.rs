//! How the program ends: one line on standard error, and an exit code of `sysexits.h`.

use std::fmt;
use std::process::ExitCode;

/// A flag cannot be what it was given, which is not repeated: it may be secret.
pub(crate) fn of<E: fmt::Display>(flag: &str) -> impl FnOnce(E) -> Failure {
    move |error| Failure::usage(format!("{flag}: {error}"))
}

/// Why the program ends without having done what it was asked.
#[derive(Debug)]
pub(crate) struct Failure {
    code: u8,
    message: String,
}

impl Failure {
    /// 1: it looked, and the answer is no.
    pub(crate) fn no(message: impl fmt::Display) -> Self {
        Self { code: 1, message: message.to_string() }
    }

    /// 64: what it was told cannot be.
    pub(crate) fn usage(message: impl fmt::Display) -> Self {
        Self { code: 64, message: message.to_string() }
    }

    /// 69: something it needs is not available.
    pub(crate) fn unavailable(message: impl fmt::Display) -> Self {
        Self { code: 69, message: message.to_string() }
    }

    /// With this at the end of its message.
    pub(crate) fn and(mut self, more: &str) -> Self {
        self.message.push_str(more);
        self
    }

    /// Says why, in one line.
    pub(crate) fn report(&self) -> ExitCode {
        eprintln!("hapax: {self}");
        ExitCode::from(self.code)
    }
}

impl fmt::Display for Failure {
    /// One line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let words: Vec<&str> = self.message.split_whitespace().collect();
        f.write_str(&words.join(" "))
    }
}
