//! `hapax messages`.

mod args;
mod redrive;
mod render;

use std::io::Write;
use std::process::ExitCode;

use hapax_postgres::PostgresOptions;
use hapax_postgres_messages::{
    LetterQuery, LetterView, PgDeadLetters, SharedConnection, message_migrations,
};

use crate::exit::{CliError, of};
use crate::keys::user;
use args::MessagesCommand;
pub(crate) use args::{DatabaseSelector, HiddenUrl, MessagesArgs};
pub(crate) use redrive::sink;

/// The least number of digits that names a letter.
const PREFIX: usize = 8;

/// Runs `hapax messages`.
pub(crate) async fn run(args: MessagesArgs) -> Result<ExitCode, CliError> {
    match args.command {
        // Without that, psql goes on after an error and reports success.
        MessagesCommand::Migrations => {
            print(&format!("\\set ON_ERROR_STOP on\n{}", message_migrations()));
        }
        MessagesCommand::List { at, consumer, parked_as, after, limit, json } => {
            let letters = letters(&at)?;
            let after = match after {
                Some(prefix) => Some(find(&letters, &prefix).await?.place()),
                None => None,
            };
            let reason = parked_as.map(Into::into);
            let query = LetterQuery { consumer, reason, after, limit };
            let listed = letters.list(&query).await.map_err(unavailable)?;
            print(&if json { render::json_list(&listed) } else { render::list(&listed) });
        }
        MessagesCommand::Show { at, letter, json } => {
            let letters = letters(&at)?;
            let view = find(&letters, &letter).await?;
            let contents = letters.contents(&view.id).await.map_err(unavailable)?;
            let contents = contents.ok_or_else(|| gone(&letter))?;
            let text = match json {
                true => render::json(&view, &contents),
                false => render::show(&view, &contents),
            };
            print(&text);
        }
        MessagesCommand::Redrive(args) => redrive::run(*args).await?,
        MessagesCommand::Drop { at, letters: named, reason } => {
            let letters = letters(&at)?;
            for prefix in named {
                let view = find(&letters, &prefix).await?;
                let dropped = letters.drop_letter(&view.id, &user(), &reason).await;
                if !dropped.map_err(unavailable)? {
                    return Err(gone(&prefix));
                }
                print(&format!("dropped {}\n", render::hex(&view.id)));
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns the connection to the database of the flags.
pub(crate) fn connection(at: &DatabaseSelector) -> Result<SharedConnection, CliError> {
    let options: PostgresOptions = at.database.0.parse().map_err(of("--database"))?;
    let options = options.timeout(crate::keys::TIMEOUT);
    Ok(SharedConnection::new(move || {
        let options = options.clone();
        async move { options.client().await }
    }))
}

fn letters(at: &DatabaseSelector) -> Result<PgDeadLetters, CliError> {
    Ok(PgDeadLetters::new(&connection(at)?))
}

/// Finds the letter whose id begins with `prefix`.
async fn find(letters: &PgDeadLetters, prefix: &str) -> Result<LetterView, CliError> {
    if prefix.len() < PREFIX || !prefix.bytes().all(|digit| digit.is_ascii_hexdigit()) {
        return Err(CliError::usage(format!(
            "expected the id of a dead letter, at least its first {PREFIX} hexadecimal digits, found \
             {prefix:?}"
        )));
    }
    let mut found = letters.find(prefix).await.map_err(unavailable)?;
    match (found.pop(), found.pop()) {
        (Some(one), None) => Ok(one),
        (None, _) => Err(gone(prefix)),
        (Some(_), Some(_)) => {
            Err(CliError::no(format!("several dead letters begin with {prefix}: add digits")))
        }
    }
}

fn gone(prefix: &str) -> CliError {
    CliError::no(format!("there is no dead letter {prefix}"))
}

fn unavailable(error: hapax_postgres_messages::ConnectCause) -> CliError {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text = format!("{text}: {error}");
        source = error.source();
    }
    CliError::unavailable(format!("--database: {text}"))
}

fn print(text: &str) {
    // Standard output may be closed.
    let _ = std::io::stdout().write_all(text.as_bytes());
}
