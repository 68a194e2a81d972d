//! Every statement of the store, as text. Swaps are a function on the server, in `migrations`.

use tokio_postgres::types::Type;

use crate::schema::quoted;

/// Microseconds since 1970. `now()` would be the start of the transaction.
const NOW: &str = "(extract(epoch FROM clock_timestamp()) * 1000000)::int8";

/// The statements.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Verb {
    /// Swaps of distinct keys.
    Swap,
    /// Swaps if the tables have the expected identity; else writes nothing and returns no rows.
    SwapKnown,
    /// Loads the records of some keys.
    Load,
    /// Loads records in the order of their keys.
    Page,
    /// Finds the undecided records, or all, in some blocks of the table, in no order.
    Blocks,
    /// Removes expired records.
    Reap,
    /// Inserts, postpones and removes entries of the schedule with distinct keys.
    ScheduleWrite,
    /// The same if the tables have the expected identity; else writes nothing and returns no rows.
    ScheduleWriteKnown,
    /// Loads entries that are due.
    ScheduleDue,
    /// Loads entries in the order of their keys.
    ScheduleEntries,
    /// Counts the entries of each queue.
    ScheduleQueues,
}

/// All of them, those of the schedule last: tables of version 2 do not have it.
pub(crate) const VERBS: [Verb; 11] = [
    Verb::Swap,
    Verb::SwapKnown,
    Verb::Load,
    Verb::Page,
    Verb::Blocks,
    Verb::Reap,
    Verb::ScheduleWrite,
    Verb::ScheduleWriteKnown,
    Verb::ScheduleDue,
    Verb::ScheduleEntries,
    Verb::ScheduleQueues,
];

impl Verb {
    /// Returns whether what it reads decides about an execution or a replay.
    pub(crate) const fn decides(self) -> bool {
        matches!(self, Self::Swap | Self::SwapKnown | Self::Load)
    }

    /// Returns whether it needs the schedule.
    pub(crate) const fn is_of_schedule(self) -> bool {
        matches!(
            self,
            Self::ScheduleWrite
                | Self::ScheduleWriteKnown
                | Self::ScheduleDue
                | Self::ScheduleEntries
                | Self::ScheduleQueues
        )
    }
}

/// The texts of the statements, for one schema.
#[derive(Debug)]
pub(crate) struct Statements {
    texts: [String; VERBS.len()],
    /// A swap within a caller's transaction.
    pub(crate) swap_in: String,
    /// A swap as the last statement before COMMIT. It fails if the transaction is not the one that
    /// was begun with [`MARK`].
    pub(crate) swap_marked: String,
    /// An insertion into the schedule within a caller's transaction.
    pub(crate) schedule_in: String,
}

/// Marks a transaction until it ends: the setting ends with it.
pub(crate) const MARK: &str = "SET LOCAL hapax.transaction = 'begun'";

/// Whether the session is in a transaction that was marked; null or false.
const MARKED: &str = "current_setting('hapax.transaction', true) = 'begun'";

/// Returns a statement that fails, with [`NOT_MARKED`], if the transaction is not the one that was
/// begun with [`MARK`].
pub(crate) fn check_mark() -> String {
    format!("SELECT 1 / (CASE WHEN {MARKED} THEN 1 ELSE 0 END)")
}

/// `division_by_zero`.
pub(crate) const NOT_MARKED: &str = "22012";

impl Statements {
    pub(crate) fn new(schema: Option<&str>, allow_lost_writes: bool) -> Self {
        let cells = qualified(schema, "hapax_cells");
        let secrets = qualified(schema, "hapax_secrets");
        let schedule = qualified(schema, "hapax_schedule");
        let swap = qualified(schema, "hapax_swap_1");
        let write = qualified(schema, "hapax_schedule_write_1");
        let texts = VERBS.map(|verb| match verb {
            Verb::Swap => call(&swap, types(verb).len()),
            Verb::SwapKnown => call_known(&swap, types(verb).len(), &secrets),
            Verb::Load => load(&cells),
            Verb::Page => page(&cells),
            Verb::Blocks => blocks(&cells),
            Verb::Reap => reap(&cells),
            Verb::ScheduleWrite => call(&write, types(verb).len()),
            Verb::ScheduleWriteKnown => call_known(&write, types(verb).len(), &secrets),
            Verb::ScheduleDue => schedule_due(&qualified(schema, "hapax_schedule_due_1")),
            Verb::ScheduleEntries => schedule_entries(&schedule),
            Verb::ScheduleQueues => schedule_queues(&schedule),
        });
        let function = qualified(schema, "hapax_swap_in_1");
        let swap_in = call(&function, SWAP_IN_TYPES.len());
        let swap_marked = swap_marked(&function, allow_lost_writes);
        let function = qualified(schema, "hapax_schedule_insert_in_1");
        let schedule_in = call(&function, SCHEDULE_IN_TYPES.len());
        Self { texts, swap_in, swap_marked, schedule_in }
    }

    pub(crate) fn text(&self, verb: Verb) -> &str {
        &self.texts[verb as usize]
    }
}

/// Returns the name of a table or function, qualified if there is a schema.
pub(crate) fn qualified(schema: Option<&str>, name: &str) -> String {
    match schema {
        Some(schema) => format!("{}.{name}", quoted(schema)),
        None => name.to_owned(),
    }
}

/// Returns the types of a statement's parameters.
pub(crate) const fn types(verb: Verb) -> &'static [Type] {
    match verb {
        Verb::Swap => SWAP_KNOWN_TYPES.split_at(11).0,
        Verb::SwapKnown => &SWAP_KNOWN_TYPES,
        Verb::Load => &[Type::BYTEA_ARRAY],
        Verb::Page => &[Type::BYTEA, Type::INT8],
        Verb::Blocks => &[Type::INT8, Type::INT8, Type::BOOL, Type::INT8],
        Verb::Reap => &[Type::INT8],
        Verb::ScheduleWrite => SCHEDULE_KNOWN_TYPES.split_at(8).0,
        Verb::ScheduleWriteKnown => &SCHEDULE_KNOWN_TYPES,
        Verb::ScheduleDue => &[Type::TEXT_ARRAY, Type::INT8],
        Verb::ScheduleEntries => &[Type::BYTEA, Type::BYTEA, Type::INT8],
        Verb::ScheduleQueues => &[],
    }
}

/// Columns: key, write id, state, sealed record, lease, retention, grace, hint, expected write id,
/// whether a new fence is issued. Then: whether to wait for locks, and the identity of the tables.
const SWAP_KNOWN_TYPES: [Type; 12] = [
    Type::BYTEA_ARRAY,
    Type::BYTEA_ARRAY,
    Type::TEXT_ARRAY,
    Type::BYTEA_ARRAY,
    Type::INT8_ARRAY,
    Type::INT8_ARRAY,
    Type::INT8_ARRAY,
    Type::INT8_ARRAY,
    Type::BYTEA_ARRAY,
    Type::BOOL_ARRAY,
    Type::BOOL,
    Type::TEXT,
];

/// The types without the last two.
pub(crate) const SWAP_IN_TYPES: &[Type] = SWAP_KNOWN_TYPES.split_at(10).0;

/// Columns: kind, operation id, entry id, queue, sealed note, time from now, expected time. Then as
/// for swaps.
const SCHEDULE_KNOWN_TYPES: [Type; 9] = [
    Type::TEXT_ARRAY,
    Type::BYTEA_ARRAY,
    Type::BYTEA_ARRAY,
    Type::TEXT_ARRAY,
    Type::BYTEA_ARRAY,
    Type::INT8_ARRAY,
    Type::INT8_ARRAY,
    Type::BOOL,
    Type::TEXT,
];

/// Operation id, entry id, queue, sealed note, time from now, identity of the tables.
pub(crate) const SCHEDULE_IN_TYPES: [Type; 6] =
    [Type::BYTEA, Type::BYTEA, Type::TEXT, Type::BYTEA, Type::INT8, Type::TEXT];

// Swap, load and page return: now, whether this statement wrote the row, key, and the row: tag,
// fence, lease_until, keep_until, state, sealed. All columns of the row are null if there is none,
// and the last three where they are not requested.

fn call(function: &str, parameters: usize) -> String {
    let parameters: Vec<_> = (1..=parameters).map(|number| format!("${number}")).collect();
    format!("SELECT * FROM {function}({})", parameters.join(", "))
}

/// Returns a call whose last parameter is the identity of the tables, and is not passed on.
fn call_known(function: &str, parameters: usize, secrets: &str) -> String {
    let passed = parameters - 1;
    let before: String = (1..passed).map(|number| format!("${number}, ")).collect();
    // The function is called once per row of the subquery: without a row not at all.
    format!(
        "SELECT s.* FROM (SELECT identity IS NOT NULL AS known FROM {secrets} \
         WHERE identity = ${parameters} LIMIT 1) it, \
         LATERAL {function}({before}${passed} AND it.known) s"
    )
}

fn swap_marked(function: &str, allow_lost_writes: bool) -> String {
    // For COMMIT, as in `crate::link`, whatever the settings of role and database.
    let durable = match allow_lost_writes {
        true => "",
        false => {
            ", CASE WHEN current_setting('synchronous_commit') NOT IN ('on', 'remote_apply') \
             THEN set_config('synchronous_commit', 'on', true) END"
        }
    };
    // If the expected write id is absent, the function writes nothing and fails.
    format!(
        "SELECT seen_at, its_fence, its_lease, set_config('statement_timeout', '0', true){durable} \
         FROM {function}($1, $2, $3, $4, $5, $6, $7, $8, CASE WHEN {MARKED} THEN $9 END, $10)"
    )
}

fn load(cells: &str) -> String {
    // One row per key, in any order.
    format!(
        "SELECT {NOW}, false, w.key, c.tag, c.fence, c.lease_until, c.keep_until, c.state, c.sealed
FROM unnest($1) AS w (key)
LEFT JOIN LATERAL (SELECT * FROM {cells} c WHERE c.key = w.key LIMIT 1) c ON true"
    )
}

/// Sealed bytes after which a page, or a load of a walk, ends early.
pub(crate) const PAGE_BYTES: u32 = 8 << 20;

fn page(cells: &str) -> String {
    // If there are no records, one row without a key, for the time. The last column is the number
    // of rows before those beyond the limit of bytes were left out.
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

/// Length up to which a walk reads a sealed record with its row. Longer ones may be stored outside of it (from
/// about 1,850 bytes on), so that a block has many.
const INLINE_BYTES: u32 = 1800;

fn blocks(cells: &str) -> String {
    // Blocks from $1 to below $2: a TID range scan, which servers before 14 do not have. The undecided
    // records if $3, else those whose fence was issued at most $4 ago; without $4 all.
    // Columns: as of a page, without long records; the file and the number of blocks of the table, and
    // the length of the record. If none is found, one row with nulls in those of the record.
    format!(
        "SELECT {NOW}, false, c.key, c.tag, c.fence, c.lease_until, c.keep_until, c.state,
    CASE WHEN octet_length(c.sealed) <= {INLINE_BYTES} THEN c.sealed END,
    t.file, t.blocks, octet_length(c.sealed)
FROM (
    SELECT pg_relation_filenode('{regclass}'::regclass)::int8 AS file,
        pg_relation_size('{regclass}'::regclass) / current_setting('block_size')::int8 AS blocks
) t
LEFT JOIN {cells} c ON c.ctid >= format('(%s,0)', $1)::tid
    AND c.ctid < format('(%s,0)', $2)::tid
    AND CASE WHEN $3
        THEN c.state = 'unknown' OR (c.state = 'in-flight' AND c.lease_until <= {NOW})
        ELSE $4 IS NULL OR c.fence >= {NOW} - $4
    END",
        regclass = cells.replace('\'', "''")
    )
}

/// Time by which a record may expire after its sweep without a new entry, in microseconds: most
/// records expire a little later than estimated, because their execution took some time.
const SOON: u32 = 10_000_000;

fn reap(cells: &str) -> String {
    // Expired rows are removed. Rows that expire much later, or never, are entered anew, so that
    // the sweep does not read them every time. Rows locked by another transaction are being
    // written, so they have not expired.
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

// The statements that load entries return: now, a count, the time of the next entry, and the entry:
// operation id, entry id, queue, time, note. All columns of the entry are null if there is none.

fn schedule_due(function: &str) -> String {
    format!("SELECT * FROM {function}($1, $2, {PAGE_BYTES})")
}

fn schedule_entries(schedule: &str) -> String {
    // As a page of records: the count includes the entries beyond the limit of bytes.
    format!(
        "SELECT {NOW}, p.rows, NULL::int8, p.operation, p.id, p.queue, p.due_at, p.note
FROM (SELECT 1) one
LEFT JOIN (
    SELECT s.*, count(*) OVER () AS rows,
        sum(octet_length(s.note)) OVER (ORDER BY s.operation, s.id) - octet_length(s.note) AS before
    FROM (
        SELECT * FROM {schedule} s WHERE (s.operation, s.id) > ($1, $2)
        ORDER BY s.operation, s.id LIMIT $3
    ) s
) p ON p.before < {PAGE_BYTES}
ORDER BY p.operation, p.id"
    )
}

fn schedule_queues(schedule: &str) -> String {
    format!(
        "SELECT {NOW}, s.queue, count(*), min(s.due_at) FROM {schedule} s GROUP BY s.queue
ORDER BY s.queue"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_statement_is_complete_and_qualified_by_its_schema() {
        let statements = Statements::new(Some("o'\"x"), false);
        let texts = VERBS.map(|verb| (statements.text(verb), types(verb).len()));
        let in_transactions = [
            (&statements.swap_in[..], SWAP_IN_TYPES.len()),
            (&statements.swap_marked[..], SWAP_IN_TYPES.len()),
            (&statements.schedule_in[..], SCHEDULE_IN_TYPES.len()),
        ];
        for (text, parameters) in texts.into_iter().chain(in_transactions) {
            assert!(text.contains("\"o'\"\"x\".hapax_"), "{text}");
            assert!(!text.contains(['{', '}']), "{text}");
            assert!(parameters == 0 || text.contains(&format!("${parameters}")), "{text}");
            assert!(!text.contains(&format!("${}", parameters + 1)), "{text}");
        }
    }
}
