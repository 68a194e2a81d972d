//! What is done once, before the first request.

use std::time::Duration;

use hapax::{Key, Scope, Secret, StoreKey};
use tokio::time::timeout;
use tokio_postgres::Client;
use tokio_postgres::types::Type;

use crate::error::ConnectError;
use crate::link::{Link, Setup};
use crate::look;
use crate::schema::{self, VERSION};
use crate::sql::qualified;

/// How long a migration may take: other processes may be at it.
const MIGRATION: Duration = Duration::from_secs(60);

/// Looks at the server, migrates, and makes sure that everybody uses the same secret. Returns the
/// connection it did that on.
///
/// Dropping it closes its connection, and with it what was under way there is undone.
pub(crate) async fn prepare(setup: &Setup) -> Result<Link, ConnectError> {
    let options = &setup.options;
    let timed_out = || ConnectError::TimedOut;
    let mut link = {
        let look = async {
            let link = Link::connect(setup).await?;
            look::check(link.client(), options).await?;
            Ok::<_, ConnectError>(link)
        };
        timeout(setup.answer, look).await.unwrap_or_else(|_| Err(timed_out()))?
    };
    let work = async {
        let found = look::version(link.client(), options).await?;
        if look::needs_migration(found)? {
            if !options.migrate {
                return Err(ConnectError::NotMigrated { found, needed: VERSION });
            }
            schema::migrate(link.client(), options.schema.as_deref()).await?;
            // Unlogged by a default of the schema, say.
            look::check(link.client(), options).await?;
        }
        let schema = options.schema.as_deref();
        agree(link.client(), schema, options.naming_secret()).await?;
        link.prepare(setup).await
    };
    timeout(MIGRATION, work).await.unwrap_or_else(|_| Err(timed_out()))?;
    Ok(link)
}

/// Makes sure that everybody names keys by the same secret.
async fn agree(
    client: &Client,
    schema: Option<&str>,
    secret: Option<&Secret>,
) -> Result<(), ConnectError> {
    let secrets = qualified(schema, "hapax_secrets");
    let name = name(secret);
    let known = format!("SELECT EXISTS (SELECT FROM {secrets} WHERE name = $1)");
    if is_true(client, &known, &[(&name, Type::BYTEA)]).await? {
        return Ok(());
    }
    // Under a lock: two that come first with different secrets must not both find nothing.
    let begin = format!("BEGIN; LOCK TABLE {secrets} IN SHARE ROW EXCLUSIVE MODE");
    client.batch_execute(&begin).await.map_err(ConnectError::Query)?;
    let enter = format!(
        "WITH entered AS (
            INSERT INTO {secrets} (name) SELECT $1 WHERE NOT EXISTS (SELECT FROM {secrets})
            RETURNING 1
        )
        SELECT EXISTS (SELECT FROM entered) OR EXISTS (SELECT FROM {secrets} WHERE name = $1)"
    );
    let entered = is_true(client, &enter, &[(&name, Type::BYTEA)]).await?;
    client.batch_execute("COMMIT").await.map_err(ConnectError::Query)?;
    if entered { Ok(()) } else { Err(ConnectError::OtherSecret) }
}

async fn is_true(
    client: &Client,
    text: &str,
    parameters: &[(crate::link::Parameter<'_>, Type)],
) -> Result<bool, ConnectError> {
    let row = client.query_typed_one(text, parameters).await.map_err(ConnectError::Query)?;
    row.try_get(0).map_err(ConnectError::Query)
}

/// Tells a secret from others without telling it.
fn name(secret: Option<&Secret>) -> Vec<u8> {
    let Some(secret) = secret else { return b"none".to_vec() };
    let scope = Scope::of([("hapax-postgres", "secret check")]);
    // The shortest of keys: any would do, within a scope that nobody else has.
    let key = Key::new("-").ok();
    let named = key.map(|key| StoreKey::derive(Some(secret), &scope, &key).as_bytes().to_vec());
    named.unwrap_or_default()
}
