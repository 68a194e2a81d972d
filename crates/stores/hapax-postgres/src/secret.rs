//! The check that all processes that share the tables name keys by the same secret.

use std::sync::atomic::Ordering;

use hapax_core::{Clock, Key, Namespace, OperationId, Scope, Secret, SystemClock};
use tokio_postgres::Client;
use tokio_postgres::types::Type;

use crate::error::PostgresConnectError;
use crate::link::ConnectionSetup;
use crate::sql::qualified;

/// The purpose of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Purpose {
    /// Reading or removing: an empty `hapax_secrets` stays empty.
    Inspect,
    /// Writing records, which are named by our secret: it is entered if there is none.
    Write,
}

/// Rejects tables that are used with another secret. If no secret is entered yet, enters ours if
/// the `purpose` is writing. Returns whether it is entered.
pub(crate) async fn agree(
    client: &Client,
    setup: &ConnectionSetup,
    purpose: Purpose,
) -> Result<bool, PostgresConnectError> {
    let secrets = qualified(setup.options.schema.as_deref(), "hapax_secrets");
    let name = name(setup.options.naming_secret());
    let known = format!(
        "SELECT EXISTS (SELECT FROM {secrets} WHERE name = $1), EXISTS (SELECT FROM {secrets})"
    );
    match both(client, &known, &name).await? {
        (true, _) => {
            setup.agreed.store(true, Ordering::Relaxed);
            return Ok(true);
        }
        (false, true) => return Err(PostgresConnectError::OtherSecret),
        (false, false) => {
            if setup.agreed.swap(false, Ordering::Relaxed) {
                tracing::error!("the tables were emptied: their operations execute again");
            }
            if purpose == Purpose::Inspect {
                return Ok(false);
            }
        }
    }
    // Under a lock: two first processes with different secrets must not both find nothing.
    let limit = setup.answer * 3 / 4;
    let begin = format!(
        "{}; LOCK TABLE {secrets} IN SHARE ROW EXCLUSIVE MODE",
        setup.begin_with(limit, limit)
    );
    client.batch_execute(&begin).await.map_err(PostgresConnectError::Query)?;
    let enter = format!(
        "WITH entered AS (
            INSERT INTO {secrets} (name, identity) SELECT $1, gen_random_uuid()::text WHERE NOT EXISTS (SELECT FROM {secrets})
            RETURNING 1
        )
        SELECT EXISTS (SELECT FROM entered), EXISTS (SELECT FROM {secrets} WHERE name = $1)"
    );
    let (entered, found) = both(client, &enter, &name).await?;
    // No statement in it has failed, so COMMIT commits or returns an error.
    client
        .batch_execute("SET LOCAL statement_timeout = 0")
        .await
        .map_err(PostgresConnectError::Query)?;
    client.batch_execute("COMMIT").await.map_err(PostgresConnectError::Query)?;
    if entered {
        log_new(setup);
    }
    if entered || found {
        setup.agreed.store(true, Ordering::Relaxed);
        return Ok(true);
    }
    Err(PostgresConnectError::OtherSecret)
}

/// Logs that tables got an identity, and with it the time of their creation.
pub(crate) fn log_new(setup: &ConnectionSetup) {
    tracing::warn!(
        tables = setup.options.place(),
        created = %SystemClock.now(),
        "a new store was created: it has no records, so a request that another store has recorded \
         executes again"
    );
}

async fn both(
    client: &Client,
    text: &str,
    name: &[u8],
) -> Result<(bool, bool), PostgresConnectError> {
    let row = client.query_typed_one(text, &[(&name, Type::BYTEA)]).await;
    let row = row.map_err(PostgresConnectError::Query)?;
    let column = |at: usize| row.try_get(at).map_err(PostgresConnectError::Query);
    Ok((column(0)?, column(1)?))
}

/// Returns a value that differs for each secret and does not reveal it.
fn name(secret: Option<&Secret>) -> Vec<u8> {
    let Some(secret) = secret else { return b"none".to_vec() };
    let scope = Scope::of([("hapax-postgres", "secret check")]);
    // The shortest key: any would do, within a scope that no caller has.
    let key = Key::new("-").ok();
    let named = key.map(|key| {
        OperationId::derive(Some(secret), &Namespace::default(), &scope, &key).as_bytes().to_vec()
    });
    named.unwrap_or_default()
}
