//! Logs on standard error, as text or JSON.

use std::io::{IsTerminal, stderr};

use hapax_gateway::LogFormat;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

use crate::exit::CliError;

/// Formats of the log, as a flag names them.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
pub(crate) enum FormatArg {
    Text,
    Json,
}

impl From<FormatArg> for LogFormat {
    fn from(format: FormatArg) -> Self {
        match format {
            FormatArg::Text => Self::Text,
            FormatArg::Json => Self::Json,
        }
    }
}

/// Returns the filter of `level`.
///
/// Rejects a bare word that is not a level. `EnvFilter` would take it as a target and drop the
/// events of all other targets.
pub(crate) fn filter(level: &str) -> Result<EnvFilter, String> {
    let words = level.split(',').map(str::trim).filter(|word| !word.is_empty());
    let no_level = |word: &&str| !word.contains(['=', '[']) && word.parse::<LevelFilter>().is_err();
    if let Some(word) = words.into_iter().find(no_level) {
        return Err(format!(
            "--log-level: `{word}` is no level: expected error, warn, info, debug, trace or off, \
             or TARGET=LEVEL"
        ));
    }
    // The client of RabbitMQ logs the payloads of messages that were routed to no queue.
    let directives = format!("lapin::returned_messages=error,{level}");
    EnvFilter::builder().parse(directives).map_err(|error| format!("--log-level {level}: {error}"))
}

/// Starts logging. `level` is a level, or directives like `info,hapax_gateway=debug`.
pub(crate) fn start(format: LogFormat, level: &str) -> Result<(), CliError> {
    let filter = filter(level).map_err(CliError::usage)?;
    let subscriber = tracing_subscriber::fmt().with_env_filter(filter).with_writer(stderr);
    let begun = match format {
        LogFormat::Text => subscriber.with_ansi(stderr().is_terminal()).try_init(),
        LogFormat::Json => subscriber.json().flatten_event(true).try_init(),
    };
    begun.map_err(|error| CliError::unavailable(format!("cannot start logging: {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn payloads_of_returned_messages_are_not_logged() {
        for level in ["info", "debug", "info,lapin=warn"] {
            let filter = filter(level).unwrap().to_string();
            assert!(filter.contains("lapin::returned_messages=error"), "{filter}");
        }
        // Unless the user wants them.
        let filter = filter("info,lapin::returned_messages=warn").unwrap().to_string();
        assert!(filter.contains("lapin::returned_messages=warn"), "{filter}");
    }
}
