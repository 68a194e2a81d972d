-- The schedule, one row for each entry: an unfinished operation, and the time at which it is due.
CREATE TABLE IF NOT EXISTS hapax_schedule (
    due_at    bigint NOT NULL,    -- microseconds since 1970, by this server's clock
    operation bytea NOT NULL CHECK (octet_length(operation) = 32),
    id        bytea NOT NULL CHECK (octet_length(id) = 16),
    queue     text COLLATE "C" NOT NULL,
    note      bytea NOT NULL,
    PRIMARY KEY (operation, id)
) WITH (
    -- due_at is indexed, so no update can be HOT; free space in the pages would not help.
    fillfactor = 100,
    -- Entries leave the beginning of the index, where each poll reads: vacuum early.
    autovacuum_vacuum_scale_factor = 0.01,
    autovacuum_analyze_scale_factor = 0.05,
    autovacuum_vacuum_insert_scale_factor = 0.1
);

-- Sealed notes do not compress; the attempt takes time.
ALTER TABLE hapax_schedule ALTER COLUMN note SET STORAGE EXTERNAL;

CREATE INDEX IF NOT EXISTS hapax_schedule_due ON hapax_schedule (queue, due_at, operation, id);

-- The functions below force plans by the indexes (generic plan, no sequential scans, no hash or merge
-- joins): the table may grow from nothing to a million rows between two runs of ANALYZE, so the
-- planner's statistics are wrong.

-- Inserts, postpones and removes entries with distinct keys. Returns a row for each: whether it was
-- done; false if there is no such entry, or it is due at another time than the expected one (null
-- expects any); null if another transaction has locked it.
--
-- 1. An insert leaves an entry with its key as it is. It waits for a transaction that inserts or
--    removes the same key; all insert in order of key, and before they lock anything.
-- 2. Rows that another transaction has locked are skipped; with `patient` the function waits for them.
--    Only a transaction with a single change is called so: with more, two could wait for each other.
CREATE OR REPLACE FUNCTION hapax_schedule_write_1(
    kinds text[], operations bytea[], ids bytea[], queues text[], notes bytea[], delays bigint[],
    expected bigint[], patient boolean
) RETURNS TABLE (its_operation bytea, its_id bytea, is_done boolean) LANGUAGE plpgsql
SET search_path = @schema@, pg_temp
SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
AS $$
DECLARE
    moment bigint := date_part('epoch', clock_timestamp()) * 1000000;
BEGIN
    IF array_position(kinds, 'insert') IS NOT NULL THEN
        INSERT INTO hapax_schedule AS s (operation, id, queue, note, due_at)
        SELECT w.operation, w.id, w.queue, w.note, moment + w.delay
        FROM unnest(kinds, operations, ids, queues, notes, delays)
            AS w (kind, operation, id, queue, note, delay)
        WHERE w.kind = 'insert' AND NOT EXISTS (
            SELECT FROM hapax_schedule k WHERE k.operation = w.operation AND k.id = w.id
        )
        ORDER BY w.operation, w.id
        ON CONFLICT DO NOTHING;
        RETURN QUERY
        SELECT w.operation, w.id, true
        FROM unnest(kinds, operations, ids) AS w (kind, operation, id)
        WHERE w.kind = 'insert';
    END IF;
    IF array_position(kinds, 'postpone') IS NULL AND array_position(kinds, 'remove') IS NULL THEN
        RETURN;
    END IF;
    IF patient THEN
        PERFORM 1 FROM unnest(operations, ids) AS w (operation, id)
        JOIN hapax_schedule s ON s.operation = w.operation AND s.id = w.id FOR UPDATE OF s;
    END IF;
    moment := date_part('epoch', clock_timestamp()) * 1000000;
    RETURN QUERY
    WITH wanted AS MATERIALIZED (
        SELECT *
        FROM unnest(kinds, operations, ids, delays, expected)
            AS w (kind, operation, id, delay, due)
        WHERE w.kind <> 'insert'
    ), locked AS MATERIALIZED (
        SELECT w.* FROM wanted w
        CROSS JOIN LATERAL (
            SELECT FROM hapax_schedule s WHERE s.operation = w.operation AND s.id = w.id
            FOR UPDATE SKIP LOCKED
        ) s
    ), removed AS (
        DELETE FROM hapax_schedule s USING locked l
        WHERE l.kind = 'remove' AND s.operation = l.operation AND s.id = l.id
        RETURNING s.operation, s.id
    ), moved AS (
        UPDATE hapax_schedule s SET due_at = moment + l.delay FROM locked l
        WHERE l.kind = 'postpone' AND s.operation = l.operation AND s.id = l.id
            AND s.due_at = coalesce(l.due, s.due_at)
        RETURNING s.operation, s.id
    ), done AS (
        SELECT * FROM removed UNION ALL SELECT * FROM moved
    )
    SELECT w.operation, w.id, CASE
        WHEN EXISTS (SELECT FROM done d WHERE d.operation = w.operation AND d.id = w.id)
            THEN true
        WHEN EXISTS (SELECT FROM locked l WHERE l.operation = w.operation AND l.id = w.id)
            THEN false
        WHEN NOT EXISTS (
            SELECT FROM hapax_schedule s WHERE s.operation = w.operation AND s.id = w.id
        ) THEN false
    END
    FROM wanted w;
END
$$;

-- Returns the entries of distinct queues that are due, earliest first: at most `most`, and no further
-- one after `most_bytes` of notes. Each row also has the time, the number of entries that are due,
-- which is counted up to `most` + 1, and the time of the first one that is not; without entries there
-- is one row of these.
CREATE OR REPLACE FUNCTION hapax_schedule_due_1(queues text[], most bigint, most_bytes bigint)
RETURNS TABLE (
    seen_at bigint, due_count bigint, next_at bigint, its_operation bytea, its_id bytea,
    its_queue text, its_due bigint, its_note bytea
) LANGUAGE plpgsql
SET search_path = @schema@, pg_temp
SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
AS $$
DECLARE
    moment bigint := date_part('epoch', clock_timestamp()) * 1000000;
BEGIN
    RETURN QUERY
    WITH earliest AS MATERIALIZED (
        SELECT d.*
        FROM unnest(queues) AS w (queue)
        CROSS JOIN LATERAL (
            SELECT s.due_at, s.operation, s.id FROM hapax_schedule s
            WHERE s.queue = w.queue AND s.due_at <= moment
            ORDER BY s.due_at, s.operation, s.id
            LIMIT most + 1
        ) d
        ORDER BY d.due_at, d.operation, d.id
        LIMIT most + 1
    ), sized AS (
        SELECT s.*, row_number() OVER earlier AS number,
            sum(octet_length(s.note)) OVER earlier - octet_length(s.note) AS before
        FROM earliest e
        JOIN hapax_schedule s ON s.operation = e.operation AND s.id = e.id
        WINDOW earlier AS (ORDER BY s.due_at, s.operation, s.id)
    )
    SELECT moment, (SELECT count(*) FROM earliest), (
        SELECT min(l.due_at)
        FROM unnest(queues) AS w (queue)
        CROSS JOIN LATERAL (
            SELECT s.due_at FROM hapax_schedule s
            WHERE s.queue = w.queue AND s.due_at > moment
            ORDER BY s.due_at
            LIMIT 1
        ) l
    ), d.operation, d.id, d.queue, d.due_at, d.note
    FROM (SELECT 1) one
    LEFT JOIN sized d ON d.number <= most AND d.before < most_bytes
    ORDER BY d.due_at, d.operation, d.id;
END
$$;

-- Inserts one entry within a transaction of the caller, or fails, and the transaction with it. An entry
-- with its key stays as it is. The caller could roll back to a savepoint and commit the rest, so it is
-- not inserted within one. `known` is the identity of the tables, null for any.
CREATE OR REPLACE FUNCTION hapax_schedule_insert_in_1(
    new_operation bytea, new_id bytea, new_queue text, new_note bytea, delay bigint, known text
) RETURNS void LANGUAGE plpgsql
SET search_path = @schema@, pg_temp
AS $$
DECLARE
    moment bigint := date_part('epoch', clock_timestamp()) * 1000000;
    writer xid;
BEGIN
    IF known IS NOT NULL AND NOT EXISTS (SELECT FROM hapax_secrets WHERE identity = known) THEN
        RAISE EXCEPTION 'the tables are not those that were used before' USING ERRCODE = 'HX004';
    END IF;
    INSERT INTO hapax_schedule AS s (operation, id, queue, note, due_at)
    VALUES (new_operation, new_id, new_queue, new_note, moment + delay)
    ON CONFLICT DO NOTHING
    RETURNING s.xmin INTO writer;
    IF writer <> pg_current_xact_id()::xid THEN
        RAISE EXCEPTION 'expected a transaction without an open savepoint, found one: release it first' USING ERRCODE = 'HX002';
    END IF;
END
$$;
