//! The tables and functions, by numbered migrations.

use tokio_postgres::Client;

// One transaction. The advisory lock is released with it, so that it also works behind a pooler in
// transaction mode. Without the lock, two processes that create the same table at once would fail,
// in spite of IF NOT EXISTS.
const SCRIPT: &str = concat!(
    "BEGIN ISOLATION LEVEL READ COMMITTED;\n",
    "SET LOCAL client_min_messages = warning;\n",
    "SELECT pg_advisory_xact_lock(5216694956356254306);\n",
    "SET LOCAL lock_timeout = '5s';\n\n",
    "CREATE TABLE IF NOT EXISTS hapax_messages_migrations (\n",
    "    version integer PRIMARY KEY,\n",
    "    applied timestamptz NOT NULL DEFAULT clock_timestamp()\n",
    ");\n\n",
    include_str!("migrations/0001_messages.sql"),
    "\n",
    include_str!("migrations/0002_outbox_put_text.sql"),
    "\n",
    include_str!("migrations/0003_positions.sql"),
    "\nINSERT INTO hapax_messages_migrations (version) VALUES (1), (2), (3) ON CONFLICT DO NOTHING;\n",
    "COMMIT;\n",
);

/// Returns a script that creates the tables and functions or migrates them, for `psql` or as a file
/// of a migration tool. It may be run any number of times, by any number of processes at once, and
/// does not stop the users of the tables. Run psql with `ON_ERROR_STOP`: otherwise it reports success
/// after an error.
#[must_use]
pub const fn message_migrations() -> &'static str {
    SCRIPT
}

/// Runs [`message_migrations`], in the schema of the connection's search path. The connection is in
/// no transaction afterwards.
///
/// # Errors
/// The driver's error; nothing was changed.
pub async fn migrate_messages(client: &Client) -> Result<(), tokio_postgres::Error> {
    let migrated = client.batch_execute(SCRIPT).await;
    if migrated.is_err() {
        // The script stopped within its transaction. If this fails too, the connection is lost.
        let _ = client.batch_execute("ROLLBACK").await;
    }
    migrated
}
