//! The tables, by numbered migrations.

use tokio_postgres::Client;

use crate::error::ConnectError;

/// The version that this build reads and writes.
pub(crate) const VERSION: i32 = 2;

/// A script that makes the tables, or brings them up to date, for those who run migrations
/// themselves: for `psql`, or as a file of their own tool. It may be run any number of times, by
/// any number of processes at once.
#[must_use]
pub const fn migrations() -> &'static str {
    SCRIPT
}

// One transaction. The advisory lock is released with it, so that it holds behind a pooler that
// hands out connections by transaction, too; two processes that create the same table at once
// would otherwise fail on each other, in spite of IF NOT EXISTS.
const SCRIPT: &str = concat!(
    "BEGIN;\n",
    "SET LOCAL client_min_messages = warning;\n",
    "SELECT pg_advisory_xact_lock(5216694956356254305);\n",
    // Gateways wait behind a lock that waits: a long transaction of others must not stop them.
    "SET LOCAL lock_timeout = '5s';\n\n",
    "CREATE TABLE IF NOT EXISTS hapax_migrations (\n",
    "    version integer PRIMARY KEY,\n",
    "    applied timestamptz NOT NULL DEFAULT clock_timestamp()\n",
    ");\n\n",
    include_str!("migrations/0001_cells.sql"),
    "\n",
    include_str!("migrations/0002_identity.sql"),
    "\nINSERT INTO hapax_migrations (version) VALUES (1), (2) ON CONFLICT DO NOTHING;\n",
    "COMMIT;\n",
);

/// Runs the script, in `schema` if there is one, which is made as well.
pub(crate) async fn migrate(client: &Client, schema: Option<&str>) -> Result<(), ConnectError> {
    let script = match schema {
        None => SCRIPT.to_owned(),
        Some(schema) => {
            let schema = quoted(schema);
            SCRIPT.replacen(
                LOCK_END,
                &format!("{LOCK_END}\nCREATE SCHEMA IF NOT EXISTS {schema};\nSET LOCAL search_path = {schema};"),
                1,
            )
        }
    };
    let migrated = client.batch_execute(&script).await;
    if let Err(error) = migrated {
        // It stopped within its transaction; the connection is not used any further.
        return Err(ConnectError::Migration(error));
    }
    Ok(())
}

const LOCK_END: &str = "SELECT pg_advisory_xact_lock(5216694956356254305);";

/// An identifier as SQL writes it.
pub(crate) fn quoted(identifier: &str) -> String {
    format!("\"{}\"", identifier.replace('"', "\"\""))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_script_has_the_line_after_which_the_schema_is_chosen() {
        assert_eq!(SCRIPT.matches(LOCK_END).count(), 1);
    }

    #[test]
    fn an_identifier_cannot_end_its_quotes() {
        assert_eq!(quoted("a\"b"), "\"a\"\"b\"");
    }
}
