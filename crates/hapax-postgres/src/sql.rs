//! Every statement of the store, as text.
//!
//! 1. A statement that writes also answers for those that it did not write, from its own snapshot.
//!    What it says about a key was true at one moment between call and answer, and where it can say
//!    nothing (somebody else's write became visible in between) it says nothing: the caller asks
//!    again.
//! 2. The time is `clock_timestamp()`, read after any wait for a lock; `now()` is the time at which
//!    the transaction began.
//! 3. Nothing waits for a row that somebody else is writing, except where a swap is alone in its
//!    transaction and so keeps nobody waiting. Inserts are not even tried where a row is visible:
//!    `ON CONFLICT DO NOTHING` would wait for whoever is updating it.

use tokio_postgres::types::Type;

use crate::schema::quoted;

/// Microseconds since 1970.
const NOW: &str = "(extract(epoch FROM clock_timestamp()) * 1000000)::int8";

/// Which statement.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Verb {
    /// Swaps that expect nothing.
    Insert,
    /// Swaps that expect a tag; rows that are locked are left out.
    Update,
    /// A swap that expects a tag; waits for the row.
    UpdateAlone,
    /// What some cells hold.
    Load,
    /// Cells in order of key.
    Page,
    /// Removes what is due.
    Reap,
}

pub(crate) const VERBS: [Verb; 6] =
    [Verb::Insert, Verb::Update, Verb::UpdateAlone, Verb::Load, Verb::Page, Verb::Reap];

/// The statements, for one schema.
#[derive(Debug)]
pub(crate) struct Statements {
    texts: [String; VERBS.len()],
    /// [`Verb::UpdateAlone`] for a transaction of a caller's: it fails, and with it the
    /// transaction, unless it writes exactly one row, outside of any savepoint.
    pub(crate) update_in: String,
}

impl Statements {
    pub(crate) fn new(schema: Option<&str>) -> Self {
        let cells = table(schema, "hapax_cells");
        let texts = VERBS.map(|verb| match verb {
            Verb::Insert => insert(&cells),
            Verb::Update => update(&cells, "FOR UPDATE SKIP LOCKED", ANSWERS),
            Verb::UpdateAlone => update(&cells, "FOR UPDATE", ANSWERS),
            Verb::Load => load(&cells),
            Verb::Page => page(&cells),
            Verb::Reap => reap(&cells),
        });
        Self { texts, update_in: update(&cells, "FOR UPDATE", ONE_ROW) }
    }

    pub(crate) fn text(&self, verb: Verb) -> &str {
        &self.texts[verb as usize]
    }
}

/// A table of ours, qualified where there is a schema.
pub(crate) fn table(schema: Option<&str>, name: &str) -> String {
    match schema {
        Some(schema) => format!("{}.{name}", quoted(schema)),
        None => name.to_owned(),
    }
}

/// Types of a statement's parameters.
pub(crate) const fn types(verb: Verb) -> &'static [Type] {
    match verb {
        Verb::Insert => &INSERT_TYPES,
        Verb::Update | Verb::UpdateAlone => &UPDATE_TYPES,
        Verb::Load => &[Type::BYTEA_ARRAY],
        Verb::Page => &[Type::BYTEA, Type::INT8],
        Verb::Reap => &[Type::INT8],
    }
}

/// key, tag, state, sealed, lease, keep, grace, hint
const INSERT_TYPES: [Type; 8] = [
    Type::BYTEA_ARRAY,
    Type::BYTEA_ARRAY,
    Type::TEXT_ARRAY,
    Type::BYTEA_ARRAY,
    Type::INT8_ARRAY,
    Type::INT8_ARRAY,
    Type::INT8_ARRAY,
    Type::INT8_ARRAY,
];

/// key, tag, state, sealed, lease, keep, grace, expected, whether a new fence is issued
pub(crate) const UPDATE_TYPES: [Type; 9] = [
    Type::BYTEA_ARRAY,
    Type::BYTEA_ARRAY,
    Type::TEXT_ARRAY,
    Type::BYTEA_ARRAY,
    Type::INT8_ARRAY,
    Type::INT8_ARRAY,
    Type::INT8_ARRAY,
    Type::BYTEA_ARRAY,
    Type::BOOL_ARRAY,
];

// Both answer with: now, whether it was written by this statement, key, and what is there: tag,
// fence, lease_until, keep_until, state, sealed; all of these null where nothing is there. The last
// three only of rows that are neither as expected nor as wanted, for nobody asks for the others.

fn insert(cells: &str) -> String {
    // sweep_at of what is kept for ever is when it would be due had it been done at once: its
    // completion then leaves the index alone.
    format!(
        "WITH wanted AS MATERIALIZED (
    SELECT * FROM unnest($1, $2, $3, $4, $5, $6, $7, $8)
        AS w (key, tag, state, sealed, lease, keep, grace, hint)
), seen AS MATERIALIZED (
    SELECT w.key, c.tag, c.fence, c.lease_until, c.keep_until, c.state,
        CASE WHEN c.tag <> w.tag THEN c.sealed END AS sealed
    FROM wanted w
    CROSS JOIN LATERAL (SELECT * FROM {cells} c WHERE c.key = w.key LIMIT 1) c
), clock AS MATERIALIZED (
    SELECT {NOW} AS now
), written AS (
    INSERT INTO {cells}
        (key, tag, state, sealed, fence, lease_until, keep_until, due_at, sweep_at)
    SELECT w.key, w.tag, w.state, w.sealed, k.now, k.now + w.lease, k.now + w.keep,
        k.now + w.keep + w.grace, k.now + coalesce(w.keep + w.grace, w.hint)
    FROM wanted w CROSS JOIN clock k
    WHERE NOT EXISTS (SELECT FROM seen s WHERE s.key = w.key)
    ORDER BY w.key
    ON CONFLICT (key) DO NOTHING
    RETURNING key, tag, fence, lease_until
)
SELECT {NOW}, true, key, tag, fence, lease_until, NULL::int8, NULL::text, NULL::bytea FROM written
UNION ALL
SELECT {NOW}, false, key, tag, fence, lease_until, keep_until, state, sealed FROM seen"
    )
}

fn update(cells: &str, lock: &str, answers: &str) -> String {
    // `least` takes no notice of nulls: kept for ever, it leaves sweep_at where it is.
    let answers = answers.replace("{cells}", cells).replace("{now}", NOW);
    format!(
        "WITH wanted AS MATERIALIZED (
    SELECT * FROM unnest($1, $2, $3, $4, $5, $6, $7, $8, $9)
        AS w (key, tag, state, sealed, lease, keep, grace, expected, next)
), locked AS MATERIALIZED (
    SELECT w.*, c.fence AS last
    FROM wanted w
    CROSS JOIN LATERAL (
        SELECT fence FROM {cells} c WHERE c.key = w.key AND c.tag = w.expected {lock}
    ) c
), stamped AS MATERIALIZED (
    SELECT l.*, {NOW} AS now FROM locked l
), written AS (
    UPDATE {cells} c SET
        tag = s.tag,
        state = s.state,
        sealed = s.sealed,
        fence = CASE WHEN s.next THEN greatest(s.now, s.last + 1) ELSE s.last END,
        lease_until = s.now + s.lease,
        keep_until = s.now + s.keep,
        due_at = s.now + s.keep + s.grace,
        sweep_at = least(c.sweep_at, s.now + s.keep + s.grace)
    FROM stamped s
    WHERE c.key = s.key AND c.tag = s.expected
    RETURNING c.key, c.tag, c.fence, c.lease_until, c.xmin AS writer
)
{answers}"
    )
}

const ANSWERS: &str = "\
SELECT {now}, true, key, tag, fence, lease_until, NULL::int8, NULL::text, NULL::bytea FROM written
UNION ALL
SELECT {now}, false, w.key, c.tag, c.fence, c.lease_until, c.keep_until, c.state,
    CASE WHEN c.tag <> w.tag AND c.tag <> w.expected THEN c.sealed END
FROM wanted w
LEFT JOIN LATERAL (SELECT * FROM {cells} c WHERE c.key = w.key LIMIT 1) c ON true
WHERE NOT EXISTS (SELECT FROM written x WHERE x.key = w.key)";

// Plain SQL fails only by computing what cannot be computed, and which of these it was tells why:
// division by zero (22012) where no row was written, the logarithm of zero (2201E) where the
// writer is a subtransaction, which means that there is a savepoint.
const ONE_ROW: &str = "\
SELECT {now}, 1 / g.rows = 1, w.key, w.tag, w.fence, w.lease_until, NULL::int8, NULL::text,
    ln(CASE WHEN w.writer <> pg_current_xact_id()::xid THEN 0 ELSE 1 END)::text::bytea
FROM (SELECT count(*) AS rows FROM written) g
LEFT JOIN written w ON true";

fn load(cells: &str) -> String {
    // As many rows as keys, in any order.
    format!(
        "SELECT {NOW}, false, w.key, c.tag, c.fence, c.lease_until, c.keep_until, c.state, c.sealed
FROM unnest($1) AS w (key)
LEFT JOIN LATERAL (SELECT * FROM {cells} c WHERE c.key = w.key LIMIT 1) c ON true"
    )
}

/// Sealed bytes after which a page ends early.
const PAGE_BYTES: u32 = 8 << 20;

fn page(cells: &str) -> String {
    // One row, without a key, where there are none: it tells the time. The last column says how
    // many rows there were before those past the limit of bytes were left out.
    format!(
        "SELECT {NOW}, false, p.key, p.tag, p.fence, p.lease_until, p.keep_until, p.state,
    p.sealed, p.rows
FROM (SELECT 1) one
LEFT JOIN (
    SELECT c.*, count(*) OVER () AS rows,
        sum(octet_length(c.sealed)) OVER (ORDER BY c.key) - octet_length(c.sealed) AS before
    FROM (SELECT * FROM {cells} c WHERE c.key > $1 ORDER BY c.key LIMIT $2) c
) p ON p.before < {PAGE_BYTES}
ORDER BY p.key"
    )
}

/// How far ahead of the sweep a record may be due without being entered anew, in microseconds:
/// most records become due a little after they were expected to, because their work took a while.
const SOON: u32 = 10_000_000;

fn reap(cells: &str) -> String {
    // What is due is removed; what is due much later, or never, is entered anew, so that the sweep
    // does not meet it every time. What somebody else has locked is being written: not due.
    format!(
        "WITH clock AS MATERIALIZED (
    SELECT {NOW} AS now
), ripe AS MATERIALIZED (
    SELECT c.key, c.due_at FROM {cells} c
    WHERE c.sweep_at <= (SELECT now FROM clock)
        AND (c.due_at IS NULL OR c.due_at <= (SELECT now FROM clock)
            OR c.due_at > (SELECT now + {SOON} FROM clock))
    ORDER BY c.sweep_at
    LIMIT $1
    FOR UPDATE SKIP LOCKED
), removed AS (
    DELETE FROM {cells} c
    WHERE c.key = ANY (ARRAY(
        SELECT r.key FROM ripe r WHERE r.due_at <= (SELECT now FROM clock)
    ))
    RETURNING 1
), moved AS (
    UPDATE {cells} c SET sweep_at = c.due_at
    WHERE c.key = ANY (ARRAY(
        SELECT r.key FROM ripe r
        WHERE r.due_at IS NULL OR r.due_at > (SELECT now FROM clock)
    ))
    RETURNING 1
)
SELECT (SELECT count(*) FROM removed), (SELECT count(*) FROM moved)"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_statement_is_filled_in_and_names_the_table_in_its_schema() {
        let statements = Statements::new(Some("o'\"x"));
        for verb in VERBS {
            let text = statements.text(verb);
            assert!(text.contains("\"o'\"\"x\".hapax_cells"), "{text}");
            assert!(!text.contains(['{', '}']), "{text}");
            let parameters = types(verb).len();
            assert!(text.contains(&format!("${parameters}")), "{text}");
            assert!(!text.contains(&format!("${}", parameters + 1)), "{text}");
        }
        assert!(!statements.update_in.contains(['{', '}']));
    }
}
