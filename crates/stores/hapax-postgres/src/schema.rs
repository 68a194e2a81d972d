//! The tables, by numbered migrations.

use tokio_postgres::Client;
use tokio_postgres::types::Type;

use crate::error::PostgresConnectError;
use crate::options::PostgresOptions;
use crate::server_info::{needs_migration, version};

/// The version that this build reads and writes.
pub(crate) const VERSION: i32 = 3;

/// The oldest version whose records this build reads and writes. It has no schedule.
pub(crate) const RECORDS: i32 = 2;

/// The name of a schema in which the tables and functions are.
///
/// Default: `public`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SchemaName(String);

/// Error of a name of a schema.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "expected the name of a schema: 1 to 63 bytes without quotes, backslashes, @, %, control characters \
     and $schema$, and none of PostgreSQL's own, found {0:?}: choose another one"
)]
pub struct SchemaNameError(String);

/// The only dollar quote of the scripts in which a name appears, so that no name may end it.
const QUOTE_TAG: &str = "$schema$";

impl SchemaName {
    /// Creates a name. It is quoted where it is used, so that upper case and spaces are kept.
    ///
    /// # Errors
    /// [`SchemaNameError`].
    pub fn new(name: impl Into<String>) -> Result<Self, SchemaNameError> {
        let name = name.into();
        let is_other = |it: char| it.is_control() || matches!(it, '\'' | '"' | '\\' | '@' | '%');
        let is_own = name.starts_with("pg_") || name == "information_schema";
        let is_other = name.contains(is_other) || name.contains(QUOTE_TAG);
        match (1..=63).contains(&name.len()) && !is_other && !is_own {
            true => Ok(Self(name)),
            false => Err(SchemaNameError(name)),
        }
    }

    /// Returns the name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns the name as a quoted SQL identifier.
    #[must_use]
    pub fn quoted(&self) -> String {
        quoted(&self.0)
    }

    /// Returns a script of migrations with this name in place of `@schema@`, quoted, and of `@name@`, as it
    /// is.
    #[must_use]
    pub fn fill(&self, script: &str) -> String {
        script.replace("@schema@", &self.quoted()).replace("@name@", &self.0)
    }
}

impl Default for SchemaName {
    fn default() -> Self {
        Self("public".to_owned())
    }
}

impl std::str::FromStr for SchemaName {
    type Err = SchemaNameError;

    fn from_str(name: &str) -> Result<Self, SchemaNameError> {
        Self::new(name)
    }
}

/// Returns a script that creates the tables in a schema or migrates them, for `psql` or as a file of a
/// migration tool. It may be run any number of times, by any number of processes at once, whatever the
/// search path and the other settings of its role are. It fails if the tables are in another schema of the
/// database only: the second ones would be empty, and operations would execute again.
#[must_use]
pub fn migrations(schema: &SchemaName) -> String {
    script(schema, "false")
}

/// Returns [`migrations`] that also create the tables if other schemas of the database have some: a store of its
/// own, for a service whose role has this schema first in its search path.
#[must_use]
pub fn migrations_beside_others(schema: &SchemaName) -> String {
    script(schema, "true")
}

fn script(schema: &SchemaName, is_beside_others: &str) -> String {
    let check = CHECK.replace("@beside@", is_beside_others);
    schema.fill(&format!("{BEGIN}{SETTINGS}{check}{BODY}"))
}

// One transaction. The advisory lock is released with it, so that it also works behind a pooler in
// transaction mode. Without the lock, two processes that create the same table at once would fail,
// in spite of IF NOT EXISTS.
const SETTINGS: &str = concat!(
    "SET LOCAL client_min_messages = warning;\n",
    "SET LOCAL statement_timeout = 0;\n",
    "SELECT pg_catalog.pg_advisory_xact_lock(5216694956356254305);\n",
    // Gateways queue behind a lock request that waits: a long transaction of another program must
    // not stop them.
    "SET LOCAL lock_timeout = '5s';\n",
    "SET LOCAL search_path = @schema@, pg_temp;\n\n",
);

const CHECK: &str = include_str!("migrations/schema.sql");

const BODY: &str = concat!(
    "\nCREATE TABLE IF NOT EXISTS hapax_migrations (\n",
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

/// Runs the script, in the schema of `options` if there is one, which is created as well; else in the schema
/// in which the search path finds the tables, or in its first one.
///
/// The version is checked again under the lock: of processes that start at once only the first runs
/// the script, because the others would lock the tables against its claims.
pub(crate) async fn migrate(
    client: &Client,
    options: &PostgresOptions,
) -> Result<(), PostgresConnectError> {
    let lock = format!("{BEGIN}SELECT pg_catalog.pg_advisory_xact_lock(5216694956356254305);");
    client.batch_execute(&lock).await.map_err(PostgresConnectError::Migration)?;
    if !needs_migration(version(client, options).await?)? {
        return client.batch_execute("ROLLBACK").await.map_err(PostgresConnectError::Migration);
    }
    let schema = match &options.schema {
        Some(schema) => {
            let schema = quoted(schema);
            // CREATE SCHEMA IF NOT EXISTS requires the privilege for one that exists, too.
            let create = format!("CREATE SCHEMA IF NOT EXISTS {schema}");
            if !exists(client, &schema).await? {
                client.batch_execute(&create).await.map_err(PostgresConnectError::Migration)?;
            }
            schema
        }
        None => found(client).await?,
    };
    let script = format!("{SETTINGS}{BODY}").replace("@schema@", &schema);
    // If it fails, it stopped within its transaction; the connection is not used any further.
    client.batch_execute(&script).await.map_err(PostgresConnectError::Migration)
}

async fn exists(client: &Client, schema: &str) -> Result<bool, PostgresConnectError> {
    let text = "SELECT to_regnamespace($1) IS NOT NULL";
    let row = client.query_typed_one(text, &[(&schema, Type::TEXT)]).await;
    row.and_then(|row| row.try_get(0)).map_err(PostgresConnectError::Query)
}

/// Returns the schema of the tables, quoted: that in which the search path finds them, else its first one. If
/// only other schemas have tables, the search path is wrong, or has changed.
async fn found(client: &Client) -> Result<String, PostgresConnectError> {
    let text = "SELECT
            (SELECT c.relnamespace::regnamespace::text FROM pg_class c
                WHERE c.oid = to_regclass('hapax_migrations')),
            quote_ident(current_schema()),
            (SELECT string_agg(c.relnamespace::regnamespace::text, ', ') FROM pg_class c
                WHERE c.relname = 'hapax_migrations' AND c.relkind IN ('r', 'p')
                    AND c.relpersistence <> 't')";
    let row = client.query_typed_one(text, &[]).await.map_err(PostgresConnectError::Query)?;
    let column = |at: usize| row.try_get(at).map_err(PostgresConnectError::Query);
    let [present, first, others] = [column(0)?, column(1)?, column(2)?];
    match (present, first, others) {
        (Some(present), _, _) => Ok(present),
        (None, _, Some(others)) => Err(PostgresConnectError::OtherSchema { found: others }),
        (None, Some(first), None) => Ok(first),
        (None, None, None) => Err(PostgresConnectError::NoSchema),
    }
}

/// A transaction each of whose statements sees everything committed before it.
const BEGIN: &str = "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE;\n";

/// Returns a quoted SQL identifier.
pub(crate) fn quoted(identifier: &str) -> String {
    format!("\"{}\"", identifier.replace('"', "\"\""))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_script_names_its_schema_and_nothing_else_is_left_open() {
        let script = migrations(&SchemaName::new("Or ders").unwrap());
        assert!(script.contains("SET LOCAL search_path = \"Or ders\", pg_temp;"));
        assert!(
            !script.contains('@') && !script.contains('\\') && !script.contains("FROM CURRENT")
        );
    }

    #[test]
    fn a_quote_in_an_identifier_is_escaped() {
        assert_eq!(quoted("a\"b"), "\"a\"\"b\"");
    }

    #[test]
    fn a_name_that_needs_an_escape_or_is_the_servers_is_rejected() {
        for name in [
            "",
            "a'b",
            "a\"b",
            "a\\b",
            "a\nb",
            "a$schema$b",
            "pg_temp",
            "information_schema",
            &"x".repeat(64),
        ] {
            SchemaName::new(name).unwrap_err();
        }
        assert_eq!(SchemaName::new("Shop 1").unwrap().quoted(), "\"Shop 1\"");
    }
}
