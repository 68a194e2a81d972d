//! The statements of an event log.

use super::{EventLogBuilder, IdScope};
use crate::layout::Column;
use crate::sql;
use crate::verified::Check;

#[derive(Debug)]
pub(super) struct Statements {
    pub(super) append: String,
    pub(super) insist: String,
    pub(super) look: String,
    pub(super) version: String,
    pub(super) read: String,
}

impl Statements {
    /// The statements, and what to check before the first append.
    pub(super) fn new(layout: &EventLogBuilder) -> (Self, Vec<Check>) {
        let EventLogBuilder { table, stream, sequence, id, ids, .. } = layout;
        let place = vec![stream, sequence];
        let identity = match ids {
            IdScope::UniqueInTable => vec![id],
            IdScope::UniqueInStream => vec![stream, id],
        };
        let on = |key: &[&Column]| format!(" ({})", sql::names(key.iter().copied()));
        let (insist, by_id) = (append(layout, &on(&place)), append(layout, &on(&identity)));
        let look = look(layout);
        let check = |text: &str, key: &[&Column]| {
            let parameters = ["[]", "{}", "0"].into_iter().take(if text == look { 2 } else { 3 });
            Check::plan(text, parameters, table, key.iter().copied())
        };
        let mut checks = vec![
            check(&insist, &place),
            check(&by_id, &identity),
            check(&look, &place),
            Check::as_columns_do(table, place.iter().copied()),
            Check::as_columns_do(table, identity.iter().copied()),
        ];
        checks.extend(Check::no_json_as_text(table, columns(layout)));
        let append = append(layout, "");
        let (version, read) = (version(layout), read(layout));
        (Self { append, insist, look, version, read }, checks)
    }
}

/// Every column, in the order in which they are inserted.
fn columns(layout: &EventLogBuilder) -> impl Iterator<Item = &Column> {
    [&layout.stream, &layout.sequence].into_iter().chain(own(layout))
}

/// Those that an event brings.
fn own(layout: &EventLogBuilder) -> impl Iterator<Item = &Column> {
    [&layout.id].into_iter().chain(&layout.fields)
}

/// The columns by which an event of the table is one of the call's, besides the id.
fn same_event(layout: &EventLogBuilder) -> String {
    let EventLogBuilder { stream, id, ids, .. } = layout;
    let mut same = sql::equal("t", "(g.item)", [id]);
    if *ids == IdScope::UniqueInStream {
        same += " AND ";
        same += &sql::equal("t", "(h.item)", [stream]);
    }
    same
}

/// The stream's last position.
fn last(layout: &EventLogBuilder) -> String {
    let EventLogBuilder { table, stream, sequence, .. } = layout;
    let (sequence, same) = (sequence.of("t"), sql::equal("t", "(h.item)", [stream]));
    format!("(SELECT coalesce(max({sequence}), 0) FROM {table} AS t WHERE {same})")
}

/// Answers with one row, or none where nothing was appended.
fn append(layout: &EventLogBuilder, target: &str) -> String {
    let EventLogBuilder { table, stream, sequence, id, .. } = layout;
    let (given, head) = (sql::given(table), sql::record("head", table, 2));
    let (names, brought) = (sql::names(columns(layout)), sql::list("(g.item)", own(layout)));
    let (to, id) = (stream.of("(h.item)"), id.of("(g.item)"));
    let (last, same, position) = (last(layout), same_event(layout), sequence.of("t"));
    format!(
        "WITH {given}, {head}, first AS (
    INSERT INTO {table} AS t ({names})
    SELECT {to}, l.position + 1, {brought}
    FROM head AS h CROSS JOIN given AS g CROSS JOIN LATERAL (SELECT {last} AS position) AS l
    WHERE g.n = 1
        AND l.position = $3::bigint
        AND NOT EXISTS (SELECT FROM given AS g JOIN {table} AS t ON {same})
        AND (SELECT count(*) = count(DISTINCT {id}) FROM given AS g)
    ON CONFLICT{target} DO NOTHING
    RETURNING {position} AS position
), rest AS (
    INSERT INTO {table} ({names})
    SELECT {to}, f.position + g.n - 1, {brought}
    FROM first AS f, head AS h, given AS g
    WHERE g.n > 1
    ORDER BY g.n
)
SELECT f.position::text FROM first AS f"
    )
}

/// Answers for each event with: the stream's version, the event's number, which one of those with
/// its id it is, and, if it is there, its position, its stream if that is another, and in which
/// field it differs first.
fn look(layout: &EventLogBuilder) -> String {
    let EventLogBuilder { table, stream, sequence, id, fields, .. } = layout;
    let (given, head) = (sql::given(table), sql::record("head", table, 2));
    let (last, same, position) = (last(layout), same_event(layout), sequence.of("t"));
    let (id, at, to) = (id.of("(g.item)"), stream.of("t"), stream.of("(h.item)"));
    let differs = sql::first_difference("t", "(g.item)", fields);
    let (wal_write, write_wal) = (sql::WAL_WRITE, sql::WRITE_WAL);
    format!(
        "WITH {given}, {head}, {wal_write}
SELECT {last}::text,
    g.n::text,
    (row_number() OVER (PARTITION BY {id} ORDER BY g.n))::text,
    {position}::text,
    CASE WHEN {at} <> {to} THEN {at}::text END,
    CASE WHEN {position} IS NOT NULL THEN {differs} END,
    CASE WHEN {position} IS NOT NULL THEN {write_wal} END
FROM head AS h CROSS JOIN given AS g LEFT JOIN {table} AS t ON {same}
ORDER BY g.n"
    )
}

fn version(layout: &EventLogBuilder) -> String {
    let (head, last) = (sql::record("head", &layout.table, 1), last(layout));
    format!(
        "WITH {head}
SELECT {last}::text
FROM head AS h"
    )
}

fn read(layout: &EventLogBuilder) -> String {
    let EventLogBuilder { table, stream, sequence, .. } = layout;
    let head = sql::record("head", table, 1);
    let position = sequence.of("t");
    let (same, row) = (sql::equal("t", "(h.item)", [stream]), sql::json("t", own(layout)));
    format!(
        "WITH {head}
SELECT {position}::text, {row}
FROM head AS h JOIN {table} AS t ON {same} AND {position} > $2::bigint
ORDER BY {position}
LIMIT $3::bigint"
    )
}
