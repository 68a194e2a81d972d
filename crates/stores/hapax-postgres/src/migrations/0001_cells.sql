-- Records, one row for each operation id (`key`), with its write id (`tag`).
--
-- Only the primary key and sweep_at are indexed, and claims, renewals and completions change
-- neither: an update needs no new index entries (HOT) while the page has room, for which the fill
-- factor provides. A finished record is about twice as long as a claim.
CREATE TABLE IF NOT EXISTS hapax_cells (
    -- Microseconds since 1970, by this server's clock.
    sweep_at    bigint,           -- time at which reaping reads it, at most due_at; null: never
    due_at      bigint,           -- time from which it may be removed; null: never
    keep_until  bigint,           -- time from which it counts as absent; null: never
    lease_until bigint NOT NULL,
    fence       bigint NOT NULL CHECK (fence >= 0),
    key         bytea NOT NULL PRIMARY KEY CHECK (octet_length(key) = 32),
    tag         bytea NOT NULL CHECK (octet_length(tag) = 16),
    state       text NOT NULL CHECK (state IN ('in-flight', 'unknown', 'done', 'released')),
    sealed      bytea NOT NULL,
    CHECK ((keep_until IS NULL) = (due_at IS NULL)),
    CHECK (due_at >= keep_until)
) WITH (
    fillfactor = 50,
    -- The records of a day are replaced each day: vacuum after a twentieth of them, not a fifth.
    autovacuum_vacuum_scale_factor = 0.05,
    autovacuum_analyze_scale_factor = 0.05,
    autovacuum_vacuum_insert_scale_factor = 0.1
);

-- Sealed records do not compress; the attempt takes time.
ALTER TABLE hapax_cells ALTER COLUMN sealed SET STORAGE EXTERNAL;

CREATE INDEX IF NOT EXISTS hapax_cells_sweep ON hapax_cells (sweep_at);

-- Hash of the secret that names records, which does not reveal it: one row.
CREATE TABLE IF NOT EXISTS hapax_secrets (
    name  bytea PRIMARY KEY,
    since timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- Swaps distinct keys. Returns a row for each swap that was written; if others were not, also a row
-- for each key with the present record. A function, because a session plans its statements once,
-- without prepared statements that a pooler would have to support.
--
-- 1. It only compares the write id; null expects no row.
-- 2. Each statement in it sees what was committed before that statement. After an insert that
--    conflicts with another session's, the last statement therefore reads the other row.
-- 3. The time is read by clock_timestamp() just before each statement; now() is the beginning of
--    the transaction. A patient update has its lock by then. An insert that waits for another one
--    of the same key has the time from before the wait, so that its lease is shorter by the wait,
--    which lock_timeout bounds.
-- 4. Locked rows are skipped unless the caller is patient, which is for a swap that is alone in its
--    transaction. An insert is not attempted if a row is visible: it would wait for the session
--    that updates it. It waits for a session that inserts the same key; all insert in order of key.
-- 5. Rows are found by the index, whatever the statistics were when a session planned this: those of
--    a new table would lead to a scan of all rows with each swap, until autovacuum analyzes it.
CREATE OR REPLACE FUNCTION hapax_swap_1(
    keys bytea[], tags bytea[], states text[], seals bytea[], leases bigint[], keeps bigint[],
    graces bigint[], hints bigint[], expected bytea[], next_fences boolean[], patient boolean
) RETURNS TABLE (
    seen_at bigint, is_written boolean, its_key bytea, its_tag bytea, its_fence bigint,
    its_lease bigint, its_keep bigint, its_state text, its_seal bytea
) LANGUAGE plpgsql
SET search_path = @schema@, pg_temp
SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
AS $$
DECLARE
    moment bigint;
    done integer;
    missing integer := cardinality(keys);
BEGIN
    IF array_position(expected, NULL) IS NOT NULL THEN
        moment := date_part('epoch', clock_timestamp()) * 1000000;
        RETURN QUERY
        WITH wanted AS (
            SELECT *
            FROM unnest(keys, tags, states, seals, leases, keeps, graces, hints, expected)
                AS w (key, tag, state, sealed, lease, keep, grace, hint, old)
            WHERE w.old IS NULL
        ), written AS (
            -- A record that is kept for ever is read when it would be due if it were completed
            -- now: its completion then does not change the index.
            INSERT INTO hapax_cells AS c (
                key, tag, state, sealed, fence, lease_until, keep_until, due_at, sweep_at
            )
            SELECT w.key, w.tag, w.state, w.sealed, moment, moment + w.lease, moment + w.keep,
                moment + w.keep + w.grace, moment + coalesce(w.keep + w.grace, w.hint)
            FROM wanted w
            WHERE NOT EXISTS (SELECT FROM hapax_cells k WHERE k.key = w.key)
            ORDER BY w.key
            ON CONFLICT DO NOTHING
            RETURNING c.key, c.tag, c.fence, c.lease_until
        )
        SELECT moment, true, i.key, i.tag, i.fence, i.lease_until, NULL::bigint, NULL::text,
            NULL::bytea
        FROM written i;
        GET DIAGNOSTICS done = ROW_COUNT;
        missing := missing - done;
    END IF;
    IF missing > 0 THEN
        IF patient THEN
            PERFORM 1 FROM unnest(keys, expected) AS w (key, old)
            JOIN hapax_cells k ON k.key = w.key AND k.tag = w.old FOR UPDATE OF k;
        END IF;
        moment := date_part('epoch', clock_timestamp()) * 1000000;
        RETURN QUERY
        WITH wanted AS (
            SELECT *
            FROM unnest(keys, tags, states, seals, leases, keeps, graces, expected, next_fences)
                AS w (key, tag, state, sealed, lease, keep, grace, old, next_fence)
            WHERE w.old IS NOT NULL
        ), locked AS MATERIALIZED (
            SELECT w.* FROM wanted w
            CROSS JOIN LATERAL (
                SELECT FROM hapax_cells k WHERE k.key = w.key AND k.tag = w.old
                FOR UPDATE SKIP LOCKED
            ) k
        ), written AS (
            -- `least` ignores nulls: for a record that is kept for ever sweep_at stays.
            UPDATE hapax_cells c SET
                tag = w.tag,
                state = w.state,
                sealed = w.sealed,
                fence = CASE WHEN w.next_fence THEN greatest(moment, c.fence + 1)
                    ELSE c.fence END,
                lease_until = moment + w.lease,
                keep_until = moment + w.keep,
                due_at = moment + w.keep + w.grace,
                sweep_at = least(c.sweep_at, moment + w.keep + w.grace)
            FROM locked w
            WHERE c.key = w.key AND c.tag = w.old
            RETURNING c.key, c.tag, c.fence, c.lease_until
        )
        SELECT moment, true, u.key, u.tag, u.fence, u.lease_until, NULL::bigint, NULL::text,
            NULL::bytea
        FROM written u;
        GET DIAGNOSTICS done = ROW_COUNT;
        missing := missing - done;
    END IF;
    IF missing > 0 THEN
        -- Of a record that the swap wrote, or that it expected and skipped, the caller needs only the
        -- write id.
        moment := date_part('epoch', clock_timestamp()) * 1000000;
        RETURN QUERY
        SELECT moment, false, w.key, c.tag, c.fence, c.lease_until, c.keep_until, c.state,
            CASE WHEN c.tag <> w.tag AND c.tag IS DISTINCT FROM w.old THEN c.sealed END
        FROM unnest(keys, tags, expected) AS w (key, tag, old)
        LEFT JOIN LATERAL (SELECT * FROM hapax_cells k WHERE k.key = w.key LIMIT 1) c ON true;
    END IF;
END
$$;

-- Swaps one key within a transaction of the caller: it writes one row as part of that transaction, or
-- fails, and the transaction with it. It expects a row, and inserts none.
--
-- A caller could roll back to a savepoint afterwards. In a transaction of the store it cannot: only
-- COMMIT follows.
CREATE OR REPLACE FUNCTION hapax_swap_in_1(
    keys bytea[], tags bytea[], states text[], seals bytea[], leases bigint[], keeps bigint[],
    graces bigint[], hints bigint[], expected bytea[], next_fences boolean[]
) RETURNS TABLE (seen_at bigint, its_fence bigint, its_lease bigint)
LANGUAGE plpgsql
SET search_path = @schema@, pg_temp
AS $$
DECLARE
    was_written boolean;
    writer xid;
BEGIN
    IF expected IS NULL OR array_position(expected, NULL) IS NOT NULL THEN
        RAISE EXCEPTION 'not in the transaction that was begun' USING ERRCODE = 'HX003';
    END IF;
    SELECT s.seen_at, s.is_written, s.its_fence, s.its_lease
    INTO seen_at, was_written, its_fence, its_lease
    FROM hapax_swap_1(keys, tags, states, seals, leases, keeps, graces, hints, expected,
        next_fences, true) s;
    IF was_written IS NOT TRUE THEN
        RAISE EXCEPTION 'the record is not as expected' USING ERRCODE = 'HX001';
    END IF;
    SELECT c.xmin INTO writer FROM hapax_cells c WHERE c.key = keys[1];
    IF writer <> pg_current_xact_id()::xid
        AND current_setting('hapax.transaction', true) IS DISTINCT FROM 'begun'
    THEN
        RAISE EXCEPTION 'a record is not written within a savepoint' USING ERRCODE = 'HX002';
    END IF;
    RETURN NEXT;
END
$$;
