//! The identity of the tables: a random text, created with the row of `hapax_secrets`.
//!
//! A store that was emptied would execute its operations again. So the tables have an identity,
//! which is lost when they are dropped, when `hapax_secrets` is emptied, and, by a trigger, when
//! `hapax_cells` is truncated. Processes that had the tables open, or were given their identity
//! ([`PostgresOptions::identity`](crate::PostgresOptions::identity)), then claim no new key under
//! `block` or `reconcile` until an operator confirms:
//! [`PostgresStore::confirm`](crate::PostgresStore::confirm) marks the present identity, and every
//! process accepts a marked one.
//!
//! The claim's own statement compares the identity, and writes nothing if it differs. It reads the
//! identity in the transaction that writes: TRUNCATE and DROP wait for that transaction to end.

use hapax_core::store::parts::Recognition;
use tokio_postgres::Client;

use crate::error::PostgresConnectError;
use crate::link::ConnectionSetup;
use crate::secret::{Purpose, log_new};
use crate::sql::qualified;

/// Compares the identity of the tables with the expected one; if none is expected, the found one is
/// from now on. If the tables have none and none is expected, creates one if the purpose is
/// writing. Returns whether claims may continue.
pub(crate) async fn recognise(
    client: &Client,
    setup: &ConnectionSetup,
    purpose: Purpose,
) -> Result<bool, PostgresConnectError> {
    let secrets = qualified(setup.options.schema.as_deref(), "hapax_secrets");
    let expected = setup.known.expected();
    if expected.is_none() && purpose == Purpose::Write {
        let make = format!(
            "UPDATE {secrets} SET identity = gen_random_uuid()::text, since = clock_timestamp()
            WHERE identity IS NULL RETURNING 1"
        );
        let made = client.query_typed(&make, &[]).await.map_err(PostgresConnectError::Query)?;
        if !made.is_empty() {
            log_new(setup);
        }
    }
    let text = format!("SELECT identity, confirmed FROM {secrets} WHERE identity IS NOT NULL");
    let rows = client.query_typed(&text, &[]).await.map_err(PostgresConnectError::Query)?;
    let found = match rows.first() {
        Some(row) => Some((
            row.try_get::<_, String>(0).map_err(PostgresConnectError::Query)?,
            row.try_get::<_, bool>(1).map_err(PostgresConnectError::Query)?,
        )),
        None => None,
    };
    if expected.is_none() && found.is_none() {
        // Read before another connection created the identity that is expected now.
        return Ok(true);
    }
    let (found, is_confirmed) = found.unzip();
    Ok(match setup.known.recognise(found.as_deref(), is_confirmed == Some(true)) {
        Recognition::Expected => true,
        Recognition::Confirmed => {
            tracing::warn!("an operator confirmed the store that replaced the one before");
            true
        }
        Recognition::Replaced { is_new } => {
            if is_new {
                tracing::error!(
                    "the tables were emptied or replaced: operations whose records were lost execute \
                     again under reexecute; under block and reconcile new keys are rejected until an operator \
                     runs `hapax store confirm`"
                );
            }
            false
        }
    })
}

/// Marks the present identity, or a new one, as confirmed by an operator.
pub(crate) async fn confirm(
    client: &Client,
    setup: &ConnectionSetup,
) -> Result<(), PostgresConnectError> {
    let secrets = qualified(setup.options.schema.as_deref(), "hapax_secrets");
    let mark = format!(
        "UPDATE {secrets} SET confirmed = true, identity = coalesce(identity, \
         gen_random_uuid()::text), since = CASE WHEN identity IS NULL THEN clock_timestamp() \
         ELSE since END"
    );
    client.batch_execute(&mark).await.map_err(PostgresConnectError::Query)?;
    recognise(client, setup, Purpose::Inspect).await.map(drop)
}
