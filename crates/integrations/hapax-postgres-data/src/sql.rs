//! Parts of statements.
//!
//! No value is ever part of a text, and every name in it is quoted. Callers' columns are only named
//! with what they belong to in front of it, so that none of them can be taken for one of ours.

use crate::layout::{Column, TableName, quoted};

/// A common table expression that writes an empty message to the write-ahead log once (`pg_logical_emit_message`), so
/// that the COMMIT of its transaction waits for the synchronous standbys as that of a new row does. Otherwise it would not
/// wait: it has written nothing. It is for a result that is an earlier row, whose own COMMIT may have been cancelled while
/// it waited, or which a crash has made visible: a failover loses such a row.
pub(crate) const WAL_WRITE: &str = "wal_write AS MATERIALIZED (
    SELECT pg_logical_emit_message(TRUE, 'hapax', '')::text AS place
)";

/// A column that executes [`WAL_WRITE`].
pub(crate) const WRITE_WAL: &str = "(SELECT w.place FROM wal_write AS w)";

/// The items of parameter `$1`, each with its number from 1, as rows of the table's type.
pub(crate) fn given(table: &TableName) -> String {
    format!(
        "given AS MATERIALIZED (
    SELECT e.n, json_populate_record(NULL::{table}, e.item) AS item
    FROM json_array_elements($1::json) WITH ORDINALITY AS e (item, n)
)"
    )
}

/// A parameter that is one JSON object, as a row of the table's type.
pub(crate) fn record(name: &str, table: &TableName, parameter: u8) -> String {
    format!(
        "{name} AS MATERIALIZED (
    SELECT json_populate_record(NULL::{table}, ${parameter}::json) AS item
)"
    )
}

/// `"a", "b"`
pub(crate) fn names<'a>(columns: impl IntoIterator<Item = &'a Column>) -> String {
    join(columns, ", ", |column| quoted(&column.name))
}

/// `t."a", t."b"`
pub(crate) fn list<'a>(of: &str, columns: impl IntoIterator<Item = &'a Column>) -> String {
    join(columns, ", ", |column| column.of(of))
}

/// `t."a" = (g.item)."a" AND …`
pub(crate) fn equal<'a>(
    one: &str,
    other: &str,
    columns: impl IntoIterator<Item = &'a Column>,
) -> String {
    join(columns, " AND ", |column| format!("{} = {}", column.of(one), column.of(other)))
}

/// Columns of a row as JSON text, for the caller.
pub(crate) fn json<'a>(of: &str, columns: impl IntoIterator<Item = &'a Column>) -> String {
    let columns = join(columns, ", ", |column| column.read_of(of));
    // With `.*`, or a column named v would be meant.
    format!("(SELECT row_to_json(v.*) FROM (SELECT {columns}) AS v)::text")
}

/// The members of parameter `$1`, one JSON object, that are `columns`, as they were given: read by
/// the columns' types they are the same values again, whatever the session's settings, by which
/// the server would write floating-point numbers and ranges.
pub(crate) fn members<'a>(columns: impl IntoIterator<Item = &'a Column>) -> String {
    let member = |column: &Column| format!("{0}, $1::json -> {0}", literal(&column.name));
    format!("json_build_object({})", join(columns, ", ", member))
}

/// A string, in which a backslash is a character like others, whatever
/// `standard_conforming_strings`.
pub(crate) fn literal(text: &str) -> String {
    format!("E'{}'", text.replace('\'', "''").replace('\\', "\\\\"))
}

/// Which of `columns` is the first in which two rows differ, by number from 0, as text; or null.
pub(crate) fn first_difference<'a>(
    one: &str,
    other: &str,
    columns: impl IntoIterator<Item = &'a Column>,
) -> String {
    let mut text = String::from("CASE");
    for (number, column) in columns.into_iter().enumerate() {
        text += &format!("\n        WHEN {} THEN '{number}'", column.differs(one, other));
    }
    if text == "CASE" { "NULL::text".into() } else { text + "\n    END" }
}

fn join<'a>(
    columns: impl IntoIterator<Item = &'a Column>,
    between: &str,
    part: impl Fn(&Column) -> String,
) -> String {
    columns.into_iter().map(part).collect::<Vec<_>>().join(between)
}
