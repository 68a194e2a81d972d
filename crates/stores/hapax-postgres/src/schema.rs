//! The tables, by numbered migrations.

use tokio_postgres::Client;

use crate::error::PostgresConnectError;
use crate::options::PostgresOptions;
use crate::server_info::{needs_migration, version};

/// The version that this build reads and writes.
pub(crate) const VERSION: i32 = 3;

/// The oldest version whose records this build reads and writes. It has no schedule.
pub(crate) const RECORDS: i32 = 2;

/// Returns a script that creates the tables or migrates them, for `psql` or as a file of a
/// migration tool. It may be run any number of times, by any number of processes at once.
#[must_use]
pub const fn migrations() -> &'static str {
    SCRIPT
}

// One transaction. The advisory lock is released with it, so that it also works behind a pooler in
// transaction mode. Without the lock, two processes that create the same table at once would fail,
// in spite of IF NOT EXISTS.
const SCRIPT: &str = concat!(
    "BEGIN ISOLATION LEVEL READ COMMITTED;\n",
    "SET LOCAL client_min_messages = warning;\n",
    "SELECT pg_advisory_xact_lock(5216694956356254305);\n",
    // Gateways queue behind a lock request that waits: a long transaction of another program must
    // not stop them.
    "SET LOCAL lock_timeout = '5s';\n\n",
    "CREATE TABLE IF NOT EXISTS hapax_migrations (\n",
    "    version integer PRIMARY KEY,\n",
    "    applied timestamptz NOT NULL DEFAULT clock_timestamp()\n",
    ");\n\n",
    include_str!("migrations/0001_cells.sql"),
    "\n",
    include_str!("migrations/0002_identity.sql"),
    "\n",
    include_str!("migrations/0003_schedule.sql"),
    "\nINSERT INTO hapax_migrations (version) VALUES (1), (2), (3) ON CONFLICT DO NOTHING;\n",
    "COMMIT;\n",
);

/// Runs the script, in the schema of `options` if there is one, which is created as well.
///
/// The version is checked again under the lock: of processes that start at once only the first runs
/// the script, because the others would lock the tables against its claims.
pub(crate) async fn migrate(
    client: &Client,
    options: &PostgresOptions,
) -> Result<(), PostgresConnectError> {
    let lock = format!("{BEGIN}{LOCK_END}");
    client.batch_execute(&lock).await.map_err(PostgresConnectError::Migration)?;
    if !needs_migration(version(client, options).await?)? {
        return client.batch_execute("ROLLBACK").await.map_err(PostgresConnectError::Migration);
    }
    let script = SCRIPT.strip_prefix(BEGIN).unwrap_or(SCRIPT);
    let script = match options.schema.as_deref() {
        None => script.to_owned(),
        Some(schema) => {
            let schema = quoted(schema);
            script.replacen(
                LOCK_END,
                &format!("{LOCK_END}\nCREATE SCHEMA IF NOT EXISTS {schema};\nSET LOCAL search_path = {schema};"),
                1,
            )
        }
    };
    // If it fails, it stopped within its transaction; the connection is not used any further.
    client.batch_execute(&script).await.map_err(PostgresConnectError::Migration)
}

/// A transaction each of whose statements sees everything committed before it.
const BEGIN: &str = "BEGIN ISOLATION LEVEL READ COMMITTED;\n";
const LOCK_END: &str = "SELECT pg_advisory_xact_lock(5216694956356254305);";

/// Returns a quoted SQL identifier.
pub(crate) fn quoted(identifier: &str) -> String {
    format!("\"{}\"", identifier.replace('"', "\"\""))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_script_has_the_line_after_which_the_schema_is_chosen() {
        assert_eq!(SCRIPT.matches(LOCK_END).count(), 1);
        assert!(SCRIPT.starts_with(BEGIN));
    }

    #[test]
    fn a_quote_in_an_identifier_is_escaped() {
        assert_eq!(quoted("a\"b"), "\"a\"\"b\"");
    }
}
