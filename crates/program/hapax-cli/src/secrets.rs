//! Secrets that other users of the machine could see: in arguments, and in files.

use std::ffi::OsString;
use std::path::Path;

use clap::Command;
use hapax_gateway::{ServerUrl, StoreOpenError, StoreOpener};
use hapax_operators::{is_key_open_to_others, is_open_to_others};

use crate::exit::CliError;

/// Rejects a URL of a store, database or broker with a password or token among the arguments, which every user of the
/// machine sees. Of `hapax call` that is its journal: it rejects other URLs itself, and an argument may be the body of a
/// request.
///
/// # Errors
/// Names the flag, and the variable that may have the URL.
pub(crate) fn reject_shown(command: &Command, words: &[OsString]) -> Result<(), CliError> {
    let is_call = words.first().is_some_and(|word| word == "call");
    let mut flag = "";
    for word in words {
        let Some(word) = word.to_str() else { continue };
        let value = match word.split_once('=') {
            Some((name, value)) if name.starts_with("--") && !name.contains("://") => {
                flag = name;
                value
            }
            _ => word,
        };
        if has_secret(value) && (!is_call || flag == "--journal") {
            let variable = variable(command, words, flag);
            let instead = variable.map_or_else(
                || "name a file with it".to_owned(),
                |variable| format!("set {variable} instead"),
            );
            return Err(CliError::usage(format!(
                "{flag}: expected a URL without a password or token on the command line, where other users of this machine \
                 see it, found one with it: {instead}"
            )));
        }
        flag = word;
    }
    Ok(())
}

/// Returns whether `text` is the URL of a store, database or broker with a password or token.
fn has_secret(text: &str) -> bool {
    let Some((scheme, rest)) = text.split_once("://") else { return false };
    match scheme.to_ascii_lowercase().as_str() {
        // A user without a password is a token in a URL of NATS.
        "nats" | "tls" | "amqp" | "amqps" => {
            rest.split('/').next().is_some_and(|it| it.contains('@'))
        }
        "postgres" | "postgresql" => ServerUrl::new(text).has_password(),
        scheme if scheme.starts_with("redis") => ServerUrl::new(text).has_password(),
        _ => false,
    }
}

/// Returns the environment variable of a flag of the command that `words` name.
fn variable(command: &Command, words: &[OsString], flag: &str) -> Option<String> {
    let mut command = command;
    for word in words {
        command = command.find_subcommand(word).unwrap_or(command);
    }
    let name = flag.strip_prefix("--")?;
    let argument = command.get_arguments().find(|it| it.get_long() == Some(name))?;
    Some(argument.get_env()?.to_str()?.to_owned())
}

/// Returns whether a store did not open since the file `named` for its secret is not there: it may come later.
pub(crate) fn is_not_there(error: &StoreOpenError, named: Option<&Path>) -> bool {
    matches!(error, StoreOpenError::Secret { path, .. } if named == Some(path) && !path.exists())
}

/// Warns if other users can read the secret of a store, or the private key for its server.
pub(crate) fn warn_of_store(opener: &StoreOpener) {
    let named = opener.secret_file.clone().or_else(|| opener.store.secret_file());
    if let Some(path) = named {
        warn_if_open(&path);
    }
    if let Some(path) = opener.store.key_file() {
        warn_if_key_open(&path);
    }
}

/// Warns of a file with a private key that other users can read.
pub(crate) fn warn_if_key_open(path: &Path) {
    if is_key_open_to_others(path) {
        warn(path, "other users can read this private key: chmod 600 it, or 640 if root owns it");
    }
}

/// Warns of a file with a secret that other users can read, in the log or, without one, on standard error.
pub(crate) fn warn_if_open(path: &Path) {
    if is_open_to_others(path) {
        warn(path, "other users can read this secret: chmod 600 it");
    }
}

fn warn(path: &Path, what: &str) {
    let path = path.display();
    match tracing::dispatcher::has_been_set() {
        true => tracing::warn!(%path, "{what}"),
        false => eprintln!("hapax: warning: {path}: {what}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_has_a_secret_if_other_users_may_use_it() {
        for (text, has) in [
            ("postgres://u:p@h/d", true),
            ("postgres://u@h/d", false),
            ("POSTGRES://h/d?password=p", true),
            ("redis+sentinel://:p@h", true),
            ("rediss://h", false),
            ("nats://token@h", true),
            ("nats://h", false),
            ("amqp://u@h", true),
            (r#"{"url": "nats://token@h"}"#, false),
            ("file:a@b:c", false),
        ] {
            assert_eq!(has_secret(text), has, "{text}");
        }
    }
}
