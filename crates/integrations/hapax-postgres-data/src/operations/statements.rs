//! The statements of operations.

use super::UpdateLogBuilder;
use crate::layout::{Column, TableName};
use crate::sql;
use crate::versioned::VersionedRows;

#[derive(Debug)]
pub(super) struct Statements {
    pub(super) update: String,
    pub(super) look: String,
}

/// No longer than so many milliseconds for each lock, or than the session's own limit: for this
/// statement, which is a transaction of its own, and before it has anything to wait for.
const BOUNDED: &str = ", bounded AS MATERIALIZED (
    SELECT set_config('lock_timeout', least($5::bigint, own.milliseconds)::text, TRUE)
    FROM (
        SELECT nullif(
            extract(epoch FROM current_setting('lock_timeout')::interval) * 1000, 0
        )::bigint AS milliseconds
    ) AS own
)";

impl Statements {
    pub(super) fn new(rows: &VersionedRows, layout: &UpdateLogBuilder) -> Self {
        let update = update(rows, layout, &rows.layout.fields, false);
        Self { update, look: look(rows, layout) }
    }
}

/// The table, whatever the `search_path` and however it was named; not quoted, which depends on
/// settings and versions.
fn identity(table: &TableName) -> String {
    let name = sql::literal(&table.to_string());
    let names = format!("pg_identify_object_as_address('pg_class'::regclass, {name}::regclass, 0)");
    format!("(SELECT array_to_json(i.object_names)::text FROM {names} AS i)")
}

/// Returns the statement of an update of `fields`. Its result is the new version, if there is one.
/// Parameters are the item, the expected version, the operation's id, and its request; if it is
/// `bounded`, milliseconds as well.
pub(super) fn update<'a>(
    rows: &'a VersionedRows,
    layout: &UpdateLogBuilder,
    fields: impl IntoIterator<Item = &'a Column>,
    bounded: bool,
) -> String {
    let UpdateLogBuilder { table, operation, target, version } = layout;
    let of = &rows.layout.table;
    let (given, asked) = (sql::record("given", of, 1), sql::record("asked", table, 3));
    let (limit, limited) = if bounded { (BOUNDED, ", bounded") } else { ("", "") };
    let update = rows.layout.update(fields, &format!(", asked AS a{limited}"));
    let (names, made) = (sql::names([operation, target, version]), rows.layout.version.of("t"));
    let (key, identity) = (sql::members(&rows.layout.key), identity(of));
    let (id, noted) = (operation.of("(a.item)"), sql::equal("o", "(a.item)", [operation]));
    format!(
        "WITH {given}, {asked}{limit}, updated AS (
{update}
    AND NOT EXISTS (SELECT FROM {table} AS o WHERE {noted})
RETURNING {made} AS version
), noted AS (
    INSERT INTO {table} ({names})
    SELECT {id},
        json_build_object('table', {identity}, 'key', {key}, 'asked', nullif($4, ''))::text,
        u.version
    FROM updated AS u, asked AS a
)
SELECT u.version::text FROM updated AS u"
    )
}

/// Answers with: the version that the operation made, if it was applied; whether to another row, or as
/// another request; and version and row, if there is one. Parameters are the item, the
/// operation's id, and what is asked.
fn look(rows: &VersionedRows, layout: &UpdateLogBuilder) -> String {
    let UpdateLogBuilder { table, operation, target, version } = layout;
    let (of, key) = (&rows.layout.table, &rows.layout.key);
    let (given, asked) = (sql::record("given", of, 1), sql::record("asked", table, 2));
    let (made, current, target) = (version.of("o"), rows.layout.version.of("t"), target.of("o"));
    let applied = format!("(json_populate_record(NULL::{of}, {target}::json -> 'key'))");
    let (same, identity) = (sql::equal(&applied, "(g.item)", key), identity(of));
    let row = sql::json("t", rows.layout.columns());
    let (noted, found) =
        (sql::equal("o", "(a.item)", [operation]), sql::equal("t", "(g.item)", key));
    let (there, nothing) = (key[0].of("t"), operation.of("o"));
    let (wal_write, write_wal) = (sql::WAL_WRITE, sql::WRITE_WAL);
    // The table goes first: the key of another may not be readable as one of this.
    format!(
        "WITH {given}, {asked}, {wal_write}
SELECT {made}::text,
    CASE
        WHEN {nothing} IS NULL THEN NULL
        WHEN {made} IS NULL THEN 'another'
        WHEN {target}::json ->> 'table' IS DISTINCT FROM {identity} THEN 'another'
        WHEN ({same}) IS NOT TRUE THEN 'another'
        WHEN {target}::json ->> 'asked' IS DISTINCT FROM nullif($3, '') THEN 'another'
    END,
    {current}::text,
    CASE WHEN {there} IS NOT NULL THEN {row} END,
    CASE WHEN {made} IS NOT NULL THEN {write_wal} END
FROM given AS g CROSS JOIN asked AS a
LEFT JOIN {table} AS o ON {noted}
LEFT JOIN {of} AS t ON {found}"
    )
}
