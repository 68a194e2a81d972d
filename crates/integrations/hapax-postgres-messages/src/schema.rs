//! The tables and functions, by numbered migrations, and the schema in which they are.

use std::borrow::Cow;

use hapax_postgres::SchemaName;
use hapax_postgres_data::{Executor, SqlRow, SqlValue, StatementError};
use tokio_postgres::Client;

use crate::connections::{ConnectCause, StatementConnections};

// One transaction. The advisory lock is released with it, so that it also works behind a pooler in
// transaction mode. Without the lock, two processes that create the same table at once would fail,
// in spite of IF NOT EXISTS.
const SCRIPT: &str = concat!(
    "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE;\n",
    "SET LOCAL client_min_messages = warning;\n",
    "SET LOCAL statement_timeout = 0;\n",
    "SELECT pg_catalog.pg_advisory_xact_lock(5216694956356254306);\n",
    "SET LOCAL lock_timeout = '5s';\n",
    "SET LOCAL search_path = @schema@, pg_temp;\n\n",
    include_str!("migrations/schema.sql"),
    "\nCREATE TABLE IF NOT EXISTS hapax_messages_migrations (\n",
    "    version integer PRIMARY KEY,\n",
    "    applied timestamptz NOT NULL DEFAULT clock_timestamp()\n",
    ");\n\n",
    include_str!("migrations/0001_messages.sql"),
    "\n",
    include_str!("migrations/0002_outbox_put_text.sql"),
    "\n",
    include_str!("migrations/0003_positions.sql"),
    "\n",
    include_str!("migrations/0004_bounds.sql"),
    "\nINSERT INTO hapax_messages_migrations (version) VALUES (1), (2), (3), (4) ON CONFLICT DO NOTHING;\n",
    "COMMIT;\n",
);

/// Returns a script that creates the tables and functions in a schema or migrates them, for `psql` or as a
/// file of a migration tool. It may be run any number of times, by any number of processes at once, whatever
/// the search path and the other settings of its role are, and does not stop the users of the tables. A new
/// constraint waits for open transactions: writers wait behind it for half a second, then the script fails, and may
/// be run again. It also fails if the tables are in another schema of the database only. Run psql with `ON_ERROR_STOP`: otherwise it
/// reports success after an error.
#[must_use]
pub fn message_migrations(schema: &SchemaName) -> String {
    schema.fill(&SCRIPT.replace("@beside@", "false"))
}

/// Returns [`message_migrations`] that also create the tables if other schemas of the database have some: an inbox
/// and an outbox of their own, for services and a relay that [name](crate::Connections::schema) this schema.
#[must_use]
pub fn message_migrations_beside_others(schema: &SchemaName) -> String {
    schema.fill(&SCRIPT.replace("@beside@", "true"))
}

/// Runs [`message_migrations`]. The connection is in no transaction afterwards.
///
/// # Errors
/// The driver's error; nothing was changed.
pub async fn migrate_messages(
    client: &Client,
    schema: &SchemaName,
) -> Result<(), tokio_postgres::Error> {
    let migrated = client.batch_execute(&message_migrations(schema)).await;
    if migrated.is_err() {
        // The script stopped within its transaction. If this fails too, the connection is lost.
        let _ = client.batch_execute("ROLLBACK").await;
    }
    migrated
}

/// Schemas of the database with the tables: first those in which the search path would find them. The name is in two
/// parts, because [`in_schema`] qualifies it otherwise.
const SCHEMAS: &str = "SELECT n.nspname::text, (n.nspname = ANY (current_schemas(false)))::text
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE c.relname = 'hapax' || '_messages_migrations' AND c.relkind IN ('r', 'p') AND c.relpersistence <> 't'
    ORDER BY array_position(current_schemas(false), n.nspname), n.nspname";

/// Returns the schemas of the database that have the tables of messages. A program without a configured
/// schema uses the tables only if exactly one schema has them: rows in a second one, which was created by
/// mistake, would neither be published nor known as handled.
///
/// # Errors
/// The error of the connection or the server.
pub async fn message_schemas(
    connections: impl Into<StatementConnections>,
) -> Result<Vec<String>, ConnectCause> {
    let rows = connections.into().run(None, SCHEMAS, &[]).await?;
    Ok(rows.into_iter().filter_map(name).map(|(name, _)| name).collect())
}

fn name(row: SqlRow) -> Option<(String, bool)> {
    let [name, is_in_path] = <[SqlValue; 2]>::try_from(row).ok()?;
    Some((name.text()?, is_in_path.text()? == "true"))
}

/// Rejects a search path whose first set of tables is in another schema than `schema`: a handler that names none
/// would write to an outbox that no relay publishes. Without `schema` rejects several sets. Warns of sets elsewhere.
pub(crate) async fn check_one_set(
    connection: &mut dyn Executor,
    schema: Option<&SchemaName>,
) -> Result<(), StatementError> {
    let rows = connection.run(SCHEMAS, &[]).await?;
    let (found, others): (Vec<_>, Vec<_>) =
        rows.into_iter().filter_map(name).partition(|(_, is_in_path)| *is_in_path);
    let names = |sets: &[(String, bool)]| {
        sets.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>().join(", ")
    };
    if let Some(schema) = schema {
        let other = found.first().filter(|(name, _)| name != schema.as_str());
        return other.map_or(Ok(()), |(name, _)| {
            let text = format!(
                "expected a search path whose first tables of messages are in the schema {}, or that has none, \
                 found those of {name} first: messages that a handler writes there are not published; run ALTER \
                 ROLE … SET search_path = … with {} first, or drop the other tables once their rows are moved",
                schema.as_str(),
                schema.quoted()
            );
            Err(StatementError::Lost(text.into()))
        });
    }
    if found.len() > 1 {
        return Err(several("in the search path", &names(&found)));
    }
    if !found.is_empty() && !others.is_empty() {
        tracing::warn!(
            used = names(&found),
            others = names(&others),
            "tables of messages exist in other schemas too, which this process does not use"
        );
    }
    Ok(())
}

/// Where tables are found by their unqualified names.
const PATH: &str = "in the search path";

fn several(place: &str, names: &str) -> StatementError {
    let text = format!(
        "expected one set of tables {place}, found them in the schemas {names}: name one by `Connections::schema` \
         (and in `put_messages`), and drop the other once its rows are moved"
    );
    StatementError::Lost(text.into())
}

/// Returns the only schema of the search path that has the tables, or else the only one of the database; `None` if
/// there is none. Rejects several, of which the search path would decide.
pub(crate) async fn only_schema(
    connection: &mut dyn Executor,
) -> Result<Option<SchemaName>, StatementError> {
    let rows = connection.run(SCHEMAS, &[]).await?;
    let all: Vec<_> = rows.into_iter().filter_map(name).collect();
    let of_path = all.iter().filter(|(_, is_in_path)| *is_in_path);
    let of_path: Vec<_> = of_path.map(|(name, _)| name.as_str()).collect();
    let (place, found) = match of_path.is_empty() {
        false => (PATH, of_path),
        true => ("in the database", all.iter().map(|(name, _)| name.as_str()).collect()),
    };
    match found[..] {
        [] => Ok(None),
        [name] => match SchemaName::new(name) {
            Ok(name) => Ok(Some(name)),
            // The statement finds it without its name.
            Err(_) if place == PATH => Ok(None),
            Err(error) => Err(StatementError::Lost(error.into())),
        },
        _ => Err(several(place, &found.join(", "))),
    }
}

/// Returns a statement of this crate with the schema of its tables and functions, if there is one. Each name that
/// begins with `hapax_` is one of them.
pub(crate) fn in_schema<'a>(schema: Option<&SchemaName>, statement: &'a str) -> Cow<'a, str> {
    match schema {
        Some(schema) if statement.contains("hapax_") => {
            statement.replace("hapax_", &format!("{}.hapax_", schema.quoted())).into()
        }
        _ => statement.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_script_names_its_schema_and_needs_no_escape() {
        let script = message_migrations(&SchemaName::new("Or ders").unwrap());
        assert!(script.contains("SET LOCAL search_path = \"Or ders\", pg_temp;"));
        let code = script.lines().map(|line| line.split("--").next().unwrap_or_default());
        let code: Vec<_> = code.collect();
        assert!(code.iter().all(|line| !line.contains("@schema") && !line.contains("@name")));
        assert!(code.iter().all(|line| !line.contains('\\') && !line.contains("FROM CURRENT")));
    }

    #[test]
    fn a_statement_names_the_schema_of_each_object() {
        let schema = SchemaName::new("s").unwrap();
        let text =
            "SELECT 'hapax', f.x FROM hapax_f($1) f, hapax_t WHERE to_regclass('hapax_t') IS NULL";
        let named = in_schema(Some(&schema), text);
        assert_eq!(
            named,
            "SELECT 'hapax', f.x FROM \"s\".hapax_f($1) f, \"s\".hapax_t WHERE to_regclass('\"s\".hapax_t') IS NULL"
        );
        assert_eq!(in_schema(None, text), text);
    }
}
