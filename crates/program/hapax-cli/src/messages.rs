//! `hapax messages`.

mod args;
mod broker;
mod properties;
mod redrive;
mod render;
mod sink;

use std::borrow::Cow;
use std::process::ExitCode;

use hapax_messages::RelayLimits;
use hapax_postgres::{PostgresConnectError, PostgresOptions};
use hapax_postgres_messages::{
    DeadLetterQuery, DeadLetterSummary, PgDeadLetterStore, SchemaName, SharedConnection,
    message_schemas,
};

use crate::exit::{CliError, of, with_causes};
use crate::keys::user;
use crate::output::print;
use args::MessagesCommand;
pub(crate) use args::{DatabaseSelector, HiddenUrl, MessagesArgs, SchemaSelector};
pub(crate) use broker::BrokerArgs;
pub(crate) use properties::{PROPERTIES, PropertyArgs};
#[cfg(feature = "kafka")]
pub(crate) use properties::{SERVERS, not_started};
#[cfg(not(feature = "kafka"))]
pub(crate) use sink::without_kafka;
pub(crate) use sink::{found_scheme, kafka_sink, rabbit_sink, scheme, sink};

/// Least number of digits that identifies a dead letter.
const PREFIX: usize = 8;

/// Runs `hapax messages`.
pub(crate) async fn run(args: MessagesArgs) -> Result<ExitCode, CliError> {
    match args.command {
        MessagesCommand::Migrations { roles } => crate::sql::run_by_earlier_name(&roles),
        MessagesCommand::List { at, consumer, parked_as, after, limit, json } => {
            let dead_letters = dead_letters(&at).await?;
            let after = match after {
                Some(prefix) => Some(find(&dead_letters, &prefix).await?.position()),
                None => None,
            };
            let reason = parked_as.map(Into::into);
            let query = DeadLetterQuery { consumer, reason, after, limit };
            let listed = dead_letters.list(&query).await.map_err(unavailable)?;
            print(&if json { render::json_list(&listed)? } else { render::list(&listed) });
        }
        MessagesCommand::Show { at, dead_letter, json } => {
            let dead_letters = dead_letters(&at).await?;
            let view = find(&dead_letters, &dead_letter).await?;
            let contents = dead_letters.contents(&view.id).await.map_err(unavailable)?;
            let contents = contents.ok_or_else(|| gone(&dead_letter))?;
            let text = match json {
                true => render::json(&view, &contents)?,
                false => render::show(&view, &contents),
            };
            print(&text);
        }
        MessagesCommand::Redrive(args) => redrive::run(*args).await?,
        MessagesCommand::Drop { at, dead_letters: named, reason } => {
            let dead_letters = dead_letters(&at).await?;
            for prefix in named {
                let view = find(&dead_letters, &prefix).await?;
                let dropped = dead_letters.drop_dead_letter(&view.id, &user(), &reason).await;
                if !dropped.map_err(unavailable)? {
                    return Err(gone(&prefix));
                }
                print(&format!("dropped {}\n", render::hex(&view.id)));
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns the destination to which a message of this origin was published: of
/// `nats://STREAM/SUBJECT` the subject, of `amqp://QUEUE/ROUTING-KEY` the routing key, of `kafka://TOPIC` the
/// topic. Of another origin all of it.
pub(crate) fn destination(origin: &str) -> &str {
    if let Some(topic) = origin.strip_prefix("kafka://") {
        return topic;
    }
    let rest = ["nats://", "amqp://"].iter().find_map(|scheme| origin.strip_prefix(scheme));
    rest.and_then(|rest| rest.split_once('/')).map_or(origin, |(_, destination)| destination)
}

/// Returns the destination at which the consumer of a message of this origin receives it again. Of
/// `amqp://QUEUE/ROUTING-KEY` that is the queue: by the routing key other consumers would receive it too.
fn redrive_destination(origin: &str) -> Cow<'_, str> {
    match hapax_rabbitmq::queue_of_origin(origin) {
        Some(queue) => Cow::Owned(queue),
        None => Cow::Borrowed(destination(origin)),
    }
}

/// Returns the connection to the database of the flags.
pub(crate) fn connection(url: &HiddenUrl, flag: &str) -> Result<SharedConnection, CliError> {
    let options: PostgresOptions = url.0.parse().map_err(|error| match error {
        // The files of certificates may come later, one after the other.
        PostgresConnectError::CertificateFile { .. } | PostgresConnectError::Certificates(_) => {
            of(flag)(error).may_end()
        }
        _ => of(flag)(error),
    })?;
    let options = options.timeout(crate::keys::TIMEOUT);
    Ok(SharedConnection::new(move || {
        let options = options.clone();
        async move { options.client().await }
    }))
}

/// Returns the connection to the database of the flags, whose statements name the schema of the messages: that of
/// the flag, or the only one that has them.
pub(crate) async fn connection_to_messages(
    url: &HiddenUrl,
    flag: &str,
    selector: &SchemaSelector,
) -> Result<SharedConnection, CliError> {
    let connection = connection(url, flag)?;
    let finding = message_schemas(&connection);
    let found = tokio::time::timeout(RelayLimits::default().outbox_timeout, finding).await;
    let found = found.map_err(|_| {
        CliError::unavailable(format!(
            "{flag}: expected the tables of messages, found no answer: check the URL and the server"
        ))
    })?;
    let found = found.map_err(|error| {
        CliError::unavailable(format!(
            "{flag}: expected the tables of messages, found an error: {}: check the URL, the server and the \
             role's privileges",
            with_causes(&*error)
        ))
    })?;
    let schema = the_schema(found, selector.schema.as_ref(), flag)?;
    Ok(connection.schema(schema))
}

/// Chooses one of the schemas that have the tables of messages.
fn the_schema(
    mut found: Vec<String>,
    wanted: Option<&SchemaName>,
    flag: &str,
) -> Result<SchemaName, CliError> {
    if let Some(wanted) = wanted {
        if found.iter().any(|name| name == wanted.as_str()) {
            return Ok(wanted.clone());
        }
        let wanted = wanted.as_str();
        // The script fails in a schema without tables if another one has them.
        let remedy = match found.is_empty() {
            true => {
                format!(": run the SQL of `hapax sql --schema {wanted}` in the database of {flag}")
            }
            false => format!("; they are in {}: pass that schema", found.join(", ")),
        };
        return Err(CliError::usage(format!(
            "--schema: expected a schema with the tables of messages, found none of them in {wanted}{remedy}"
        )));
    }
    match (found.pop(), found.is_empty()) {
        (Some(one), true) => SchemaName::new(one).map_err(CliError::usage),
        (Some(last), false) => Err(CliError::usage(format!(
            "{flag}: expected the tables of messages in one schema, found them in {} and {last}: pass the \
             schema that the services use by --schema; then move the rows of the other one, which are not used, \
             and drop it",
            found.join(", ")
        ))),
        (None, _) => Err(CliError::unavailable(format!(
            "{flag}: expected the tables of messages, found none: check the URL, and run the SQL of `hapax sql` \
             there"
        ))),
    }
}

async fn dead_letters(at: &DatabaseSelector) -> Result<PgDeadLetterStore, CliError> {
    let connection = connection_to_messages(&at.database, "--database", &at.schema).await?;
    Ok(PgDeadLetterStore::new(&connection).statement_timeout(crate::keys::TIMEOUT))
}

/// Finds the dead letter whose id begins with `prefix`.
async fn find(
    dead_letters: &PgDeadLetterStore,
    prefix: &str,
) -> Result<DeadLetterSummary, CliError> {
    if prefix.len() < PREFIX || !prefix.bytes().all(|digit| digit.is_ascii_hexdigit()) {
        return Err(CliError::usage(format!(
            "expected the id of a dead letter, at least its first {PREFIX} hexadecimal digits, found \
             {prefix:?}"
        )));
    }
    let mut found = dead_letters.find(prefix).await.map_err(unavailable)?;
    match (found.pop(), found.pop()) {
        (Some(one), None) => Ok(one),
        (None, _) => Err(gone(prefix)),
        (Some(_), Some(_)) => Err(CliError::no(format!(
            "expected one dead letter that begins with {prefix}, found several: add digits"
        ))),
    }
}

fn gone(prefix: &str) -> CliError {
    CliError::no(format!(
        "expected a dead letter {prefix}, found none: list those that exist with `hapax messages \
         list`"
    ))
}

fn unavailable(error: hapax_postgres_messages::ConnectCause) -> CliError {
    CliError::unavailable(format!("--database: {}", with_causes(&*error)))
}
