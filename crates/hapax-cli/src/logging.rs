//! Logs: on standard error, as text or JSON.

use std::io::{IsTerminal, stderr};

use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use tracing_subscriber::EnvFilter;

use crate::exit::Failure;

/// How log lines look.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum LogFormat {
    Text,
    Json,
}

/// Begins to log what `level` lets through: a level, or directives like
/// `info,hapax_gateway=debug`.
pub(crate) fn start(format: LogFormat, level: &str) -> Result<(), Failure> {
    let filter = EnvFilter::builder()
        .parse(level)
        .map_err(|error| Failure::usage(format!("--log-level {level}: {error}")))?;
    let subscriber = tracing_subscriber::fmt().with_env_filter(filter).with_writer(stderr);
    let begun = match format {
        LogFormat::Text => subscriber.with_ansi(stderr().is_terminal()).try_init(),
        LogFormat::Json => subscriber.json().flatten_event(true).try_init(),
    };
    begun.map_err(|error| Failure::unavailable(format!("logging cannot be started: {error}")))
}
