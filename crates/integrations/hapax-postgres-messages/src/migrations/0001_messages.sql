-- Inbox, outbox, sequences and dead letters. A program in any language calls the functions within its
-- own transactions; it does not write the tables.

-- Once: IF NOT EXISTS alone locks what exists, and callers queue behind a lock that waits. So a script
-- that is run again changes functions only.
DO $tables$
BEGIN
IF EXISTS (SELECT FROM hapax_messages_migrations WHERE version = 1) THEN
    RETURN;
END IF;

-- Ids of messages that a consumer has handled. A row and its index entry take about 120 bytes: so
-- consumer and id are one hash, and the digest of the payload is cut to 128 bits.
CREATE TABLE IF NOT EXISTS hapax_inbox (
    id         uuid PRIMARY KEY,      -- hapax_message_id(consumer, id)
    digest     uuid,                  -- hapax_payload_digest; null: not compared
    expires_at timestamptz NOT NULL,  -- time from which hapax_inbox_purge removes it
    consumer   integer NOT NULL,      -- hash of the name, for statistics only
    parked     boolean NOT NULL DEFAULT false  -- by hapax_inbox_park: it was not handled
);
CREATE INDEX IF NOT EXISTS hapax_inbox_expires ON hapax_inbox
    USING brin (expires_at) WITH (pages_per_range = 32, autosummarize = on);

-- Attempts of messages that were not handled at the first attempt, in the direct mode.
CREATE TABLE IF NOT EXISTS hapax_attempts (
    id         uuid PRIMARY KEY,      -- as in hapax_inbox
    attempts   integer NOT NULL,
    error      text,
    first_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    expires_at timestamptz NOT NULL
);
CREATE INDEX IF NOT EXISTS hapax_attempts_expires ON hapax_attempts (expires_at);

-- Messages that are not handled until an operator decides.
CREATE TABLE IF NOT EXISTS hapax_dead_letters (
    id            bytea PRIMARY KEY CHECK (octet_length(id) = 32),
    consumer      text NOT NULL,
    message_id    text,               -- null: the message has no valid id
    origin        text NOT NULL,
    reason        text NOT NULL,
    attempts      integer NOT NULL,
    error         text NOT NULL,
    order_key     text,
    header_names  text[] NOT NULL,
    header_values bytea[] NOT NULL,
    payload       bytea NOT NULL,
    first_at      timestamptz NOT NULL,
    last_at       timestamptz NOT NULL,
    parked_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    -- Place of an outbox row, to which a redrive returns it.
    outbox_shard  smallint,
    outbox_id     bigint,
    -- Number of redrives that began; the number is part of the id for the broker's deduplication.
    redrives      integer NOT NULL DEFAULT 0
);
CREATE INDEX IF NOT EXISTS hapax_dead_letters_parked ON hapax_dead_letters (consumer, parked_at);
CREATE INDEX IF NOT EXISTS hapax_dead_letters_key ON hapax_dead_letters (consumer, order_key)
    WHERE order_key IS NOT NULL;

-- Decisions of operators about dead letters.
CREATE TABLE IF NOT EXISTS hapax_dead_letter_decisions (
    at         timestamptz NOT NULL DEFAULT clock_timestamp(),
    who        text NOT NULL,
    why        text NOT NULL,
    action     text NOT NULL,         -- redrive, redriven, drop
    letter     bytea NOT NULL,
    consumer   text NOT NULL,
    message_id text,
    reason     text NOT NULL
);

-- Messages to publish. Rows are deleted once they are published.
CREATE SEQUENCE IF NOT EXISTS hapax_outbox_ids;
CREATE TABLE IF NOT EXISTS hapax_outbox (
    shard       smallint NOT NULL,    -- 0 to 31: of the order key, else of the id
    id          bigint NOT NULL,      -- of hapax_outbox_ids
    message_id  text NOT NULL,
    destination text NOT NULL,
    order_key   text,
    headers     jsonb NOT NULL,       -- names and texts
    payload     bytea NOT NULL,
    created_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (shard, id)
) WITH (
    -- Each row is deleted soon: vacuum after some thousands, not after a share of the table.
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_threshold = 10000
);

-- A relay that reads another number here than before forgets from which id on it reads.
CREATE TABLE IF NOT EXISTS hapax_outbox_epoch (
    is_one boolean PRIMARY KEY DEFAULT true CHECK (is_one),
    epoch  bigint NOT NULL
);
INSERT INTO hapax_outbox_epoch (epoch) VALUES (1) ON CONFLICT DO NOTHING;

-- The last number of each aggregate that was applied.
CREATE TABLE IF NOT EXISTS hapax_sequences (
    id        uuid PRIMARY KEY,       -- hapax_message_id(consumer, aggregate)
    applied   bigint NOT NULL,
    parked    integer NOT NULL,       -- rows of hapax_sequence_messages
    gap_since timestamptz,            -- while messages are parked
    consumer  text NOT NULL,
    aggregate text NOT NULL
);
CREATE INDEX IF NOT EXISTS hapax_sequences_gaps ON hapax_sequences (consumer, gap_since)
    WHERE gap_since IS NOT NULL;

-- Aggregates with a gap: the number that is missing, since when, and the messages behind it.
CREATE OR REPLACE VIEW hapax_sequence_gaps AS
SELECT s.consumer, s.aggregate, s.applied + 1 AS missing, s.gap_since, s.parked
FROM hapax_sequences s WHERE s.gap_since IS NOT NULL;

-- Messages that are parked behind a gap.
CREATE TABLE IF NOT EXISTS hapax_sequence_messages (
    id         uuid NOT NULL,         -- as in hapax_sequences
    number     bigint NOT NULL,
    message_id text NOT NULL,
    headers    jsonb NOT NULL,
    payload    bytea NOT NULL,
    PRIMARY KEY (id, number)
);

END
$tables$;

-- Returns the hash that names a message of a consumer. A name has no zero byte.
CREATE OR REPLACE FUNCTION hapax_message_id(consumer text, id text) RETURNS uuid
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT encode(substring(sha256(
        convert_to(consumer, 'UTF8') || '\x00'::bytea || convert_to(id, 'UTF8')
    ) FROM 1 FOR 16), 'hex')::uuid
$$;

-- Returns the digest by which payloads are compared.
CREATE OR REPLACE FUNCTION hapax_payload_digest(fingerprint bytea) RETURNS uuid
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE AS $$
    SELECT encode(substring(sha256(fingerprint) FROM 1 FOR 16), 'hex')::uuid
$$;

-- Enters messages of `consumer` as handled, in the transaction of the caller, which writes the
-- effects of those that are new. Returns for each of `ids`, by its position from 1:
--   'new'        no transaction that committed has entered it: handle it
--   'duplicate'  it was handled or parked
--   'conflict'   it was handled or parked with another fingerprint
-- `fingerprints` are the payloads, or digests of them; null compares none. Ids are entered in one
-- order, so that two callers do not deadlock.
--
-- Errors: 55P03, another transaction that is still open has entered one of them: hold the messages.
-- 40001 and 40P01: run the transaction again; with 40001 the id of a duplicate may have expired
-- meanwhile. 22023: an id is null, empty or over 1024 bytes.
CREATE OR REPLACE FUNCTION hapax_inbox(
    consumer text, ids text[], fingerprints bytea[] DEFAULT NULL,
    retention interval DEFAULT '30 days'
) RETURNS TABLE (item integer, state text)
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET lock_timeout = '500ms'
SET plan_cache_mode = force_generic_plan
AS $$
#variable_conflict use_column
DECLARE
    wanted integer := cardinality(ids);
    keys uuid[];
    digests uuid[];
    wrong bigint;
    entered uuid[];
    found bigint;
BEGIN
    IF cardinality(fingerprints) <> wanted THEN
        RAISE EXCEPTION 'expected a fingerprint for each of % ids, found %', wanted,
            cardinality(fingerprints)
            USING ERRCODE = '22023';
    END IF;
    SELECT array_agg(hapax_message_id(consumer, g.id)), array_agg(hapax_payload_digest(g.fingerprint)),
        count(*) FILTER (WHERE g.id IS NULL OR octet_length(g.id) NOT BETWEEN 1 AND 1024)
    INTO keys, digests, wrong
    FROM unnest(ids, fingerprints) AS g (id, fingerprint);
    IF wrong > 0 THEN
        RAISE EXCEPTION 'expected ids of 1 to 1024 bytes, found another one' USING ERRCODE = '22023';
    END IF;
    WITH given AS (
        SELECT DISTINCT ON (g.key) g.key, g.digest
        FROM unnest(keys, digests) WITH ORDINALITY AS g (key, digest, at)
        ORDER BY g.key, g.at
    ), written AS (
        INSERT INTO hapax_inbox AS i (id, digest, expires_at, consumer)
        SELECT g.key, g.digest, clock_timestamp() + retention, hashtext(hapax_inbox.consumer)
        FROM given g ORDER BY g.key
        ON CONFLICT DO NOTHING
        RETURNING i.id
    )
    SELECT array_agg(w.id) INTO entered FROM written w;
    -- What follows from the states, an acknowledgement, must not be earlier than their durability,
    -- whatever the role's default is. A transaction without a write would wait for no synchronous
    -- standby: an id that a crash of the server made visible may be on none, and a failover loses it.
    PERFORM set_config('synchronous_commit', 'on', true)
    WHERE current_setting('synchronous_commit') <> 'remote_apply';
    IF entered IS NULL THEN
        PERFORM pg_logical_emit_message(true, 'hapax', '');
    END IF;
    IF cardinality(entered) = wanted THEN
        RETURN QUERY SELECT n, 'new' FROM generate_series(1, wanted) AS s (n);
        RETURN;
    END IF;
    -- A statement of its own: it sees what was committed while the insert waited.
    RETURN QUERY
    SELECT g.at::integer, CASE
        WHEN i.digest <> g.digest THEN 'conflict'
        WHEN g.key = ANY (entered) AND row_number() OVER (PARTITION BY g.key ORDER BY g.at) = 1
            THEN 'new'
        ELSE 'duplicate'
    END
    FROM unnest(keys, digests) WITH ORDINALITY AS g (key, digest, at)
    JOIN hapax_inbox i ON i.id = g.key
    ORDER BY g.at;
    GET DIAGNOSTICS found = ROW_COUNT;
    IF found <> wanted THEN
        RAISE EXCEPTION 'the id of a duplicate expired meanwhile: run the transaction again'
            USING ERRCODE = '40001';
    END IF;
END
$$;

-- Notes that a message which is 'new' in this transaction is parked and not handled: the caller stores
-- its dead letter in the same transaction. Only the redrive of a letter forgets it.
CREATE OR REPLACE FUNCTION hapax_inbox_park(consumer text, id text) RETURNS boolean
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    key uuid := hapax_message_id(consumer, id);
BEGIN
    DELETE FROM hapax_attempts a WHERE a.id = key;
    UPDATE hapax_inbox i SET parked = true WHERE i.id = key;
    RETURN FOUND;
END
$$;

-- Removes up to `most` ids whose retention has ended. Returns their number.
CREATE OR REPLACE FUNCTION hapax_inbox_purge(most integer DEFAULT 10000) RETURNS bigint
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    removed bigint;
    further bigint;
BEGIN
    DELETE FROM hapax_inbox WHERE ctid = ANY (ARRAY(
        SELECT i.ctid FROM hapax_inbox i WHERE i.expires_at <= clock_timestamp()
        LIMIT most FOR UPDATE SKIP LOCKED
    ));
    GET DIAGNOSTICS removed = ROW_COUNT;
    DELETE FROM hapax_attempts WHERE ctid = ANY (ARRAY(
        SELECT a.ctid FROM hapax_attempts a WHERE a.expires_at <= clock_timestamp()
        LIMIT most FOR UPDATE SKIP LOCKED
    ));
    GET DIAGNOSTICS further = ROW_COUNT;
    RETURN removed + further;
END
$$;

-- Counts an attempt of a message that was delivered before, in a transaction of its own, before the
-- handler begins. The first attempt is not counted in the table, so the first call returns 2.
-- Returns 0 if the message was handled or parked. With error 55P03, another transaction that is still
-- open has entered it, nothing is counted: no handler would begin.
CREATE OR REPLACE FUNCTION hapax_inbox_attempt(
    consumer text, id text, retention interval DEFAULT '30 days'
) RETURNS integer
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET lock_timeout = '500ms'
AS $$
#variable_conflict use_column
DECLARE
    key uuid := hapax_message_id(consumer, id);
    made integer;
BEGIN
    -- Entered and rolled back: an open transaction with the id is noticed only thus.
    BEGIN
        INSERT INTO hapax_inbox (id, expires_at, consumer) VALUES (key, clock_timestamp(), 0)
        ON CONFLICT DO NOTHING;
        IF NOT FOUND THEN
            -- As in hapax_inbox: the message is acknowledged after this.
            PERFORM set_config('synchronous_commit', 'on', true)
            WHERE current_setting('synchronous_commit') <> 'remote_apply';
            PERFORM pg_logical_emit_message(true, 'hapax', '');
            RETURN 0;
        END IF;
        RAISE EXCEPTION 'the id is free' USING ERRCODE = 'HX001';
    EXCEPTION WHEN SQLSTATE 'HX001' THEN
        NULL;
    END;
    INSERT INTO hapax_attempts AS a (id, attempts, expires_at)
    VALUES (key, 2, clock_timestamp() + retention)
    ON CONFLICT ON CONSTRAINT hapax_attempts_pkey DO UPDATE
        SET attempts = a.attempts + 1, expires_at = EXCLUDED.expires_at
    RETURNING a.attempts INTO made;
    RETURN made;
END
$$;

-- Notes the error of an attempt, in a transaction of its own. Returns the number of attempts.
CREATE OR REPLACE FUNCTION hapax_inbox_failed(
    consumer text, id text, error text, retention interval DEFAULT '30 days'
) RETURNS integer
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET lock_timeout = '500ms'
AS $$
#variable_conflict use_column
DECLARE
    made integer;
BEGIN
    INSERT INTO hapax_attempts AS a (id, attempts, error, expires_at)
    VALUES (hapax_message_id(consumer, id), 1, error, clock_timestamp() + retention)
    ON CONFLICT ON CONSTRAINT hapax_attempts_pkey DO UPDATE
        SET error = EXCLUDED.error, expires_at = EXCLUDED.expires_at
    RETURNING a.attempts INTO made;
    RETURN made;
END
$$;

-- Forgets that a message was handled, so that it is handled again once it is delivered again.
CREATE OR REPLACE FUNCTION hapax_inbox_release(consumer text, id text) RETURNS boolean
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    key uuid := hapax_message_id(consumer, id);
    removed bigint;
BEGIN
    DELETE FROM hapax_attempts a WHERE a.id = key;
    DELETE FROM hapax_inbox i WHERE i.id = key;
    GET DIAGNOSTICS removed = ROW_COUNT;
    RETURN removed > 0;
END
$$;

-- Stores a dead letter; one with the same id is stored once, with its last error. Returns whether it
-- is new.
CREATE OR REPLACE FUNCTION hapax_dead_letter_put(
    id bytea, consumer text, message_id text, origin text, reason text, attempts integer,
    error text, order_key text, header_names text[], header_values bytea[], payload bytea,
    first_at timestamptz, last_at timestamptz
) RETURNS boolean
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    stored boolean;
BEGIN
    -- The message is acknowledged after this.
    PERFORM set_config('synchronous_commit', 'on', true)
    WHERE current_setting('synchronous_commit') <> 'remote_apply';
    INSERT INTO hapax_dead_letters AS d (
        id, consumer, message_id, origin, reason, attempts, error, order_key, header_names,
        header_values, payload, first_at, last_at
    ) VALUES (
        id, consumer, message_id, origin, reason, attempts, error, order_key, header_names,
        header_values, payload, first_at, last_at
    ) ON CONFLICT ON CONSTRAINT hapax_dead_letters_pkey DO UPDATE SET
        reason = EXCLUDED.reason, attempts = EXCLUDED.attempts, error = EXCLUDED.error,
        last_at = EXCLUDED.last_at
    RETURNING d.xmax = 0 INTO stored;
    RETURN stored;
END
$$;

-- Begins to redrive a letter: the consumer forgets that it parked the message, in the direct mode. A
-- message that was handled is not forgotten: its copy is a duplicate. Returns the number of the
-- redrive, or null if there is no such letter.
--
-- Error 22023: the letter is in conflict. Its id belongs to another message, which would be handled
-- again in its stead.
CREATE OR REPLACE FUNCTION hapax_dead_letter_redrive(letter bytea, who text, why text)
RETURNS integer
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
DECLARE
    row hapax_dead_letters;
BEGIN
    UPDATE hapax_dead_letters d SET redrives = d.redrives + 1 WHERE d.id = letter
    RETURNING * INTO row;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    IF row.reason = 'conflict' THEN
        RAISE EXCEPTION 'expected a letter whose message has its own id, found one in conflict: publish it under another id, and drop the letter'
            USING ERRCODE = '22023';
    END IF;
    DELETE FROM hapax_inbox i
    WHERE i.id = hapax_message_id(row.consumer, row.message_id) AND i.parked;
    INSERT INTO hapax_dead_letter_decisions (who, why, action, letter, consumer, message_id, reason)
    VALUES (who, why, 'redrive', letter, row.consumer, row.message_id, row.reason);
    RETURN row.redrives;
END
$$;

-- Removes a letter: 'redriven' after its message was published, 'drop' without that. Returns whether
-- there was one.
CREATE OR REPLACE FUNCTION hapax_dead_letter_remove(letter bytea, action text, who text, why text)
RETURNS boolean
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
DECLARE
    row hapax_dead_letters;
BEGIN
    DELETE FROM hapax_dead_letters d WHERE d.id = letter RETURNING * INTO row;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    INSERT INTO hapax_dead_letter_decisions (who, why, action, letter, consumer, message_id, reason)
    VALUES (who, why, action, letter, row.consumer, row.message_id, row.reason);
    RETURN true;
END
$$;

-- Returns the shard of an order key.
CREATE OR REPLACE FUNCTION hapax_outbox_shard(order_key text) RETURNS smallint
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE AS $$
    SELECT (get_byte(sha256(convert_to(order_key, 'UTF8')), 0) % 32)::smallint
$$;

-- Writes messages to publish, in the transaction of the caller. Returns their ids in the order of
-- the arguments, each ascending.
--
-- Messages with an order key are published in the order of their ids. So that this is the order in
-- which their transactions commit, the writers of one key take turns: the function locks the key,
-- by one of 1024 locks, until the transaction ends. Messages of one transaction are therefore best
-- written by one call, shortly before COMMIT; two calls may deadlock with another transaction
-- (40P01: run it again). Messages without an order key take no lock.
--
-- A message id of null becomes a random one. Headers are objects of texts; a header with several values
-- has an array of texts.
CREATE OR REPLACE FUNCTION hapax_outbox_put_all(
    destinations text[], payloads bytea[], order_keys text[] DEFAULT NULL,
    message_ids text[] DEFAULT NULL, headers jsonb[] DEFAULT NULL
) RETURNS TABLE (item integer, message_id text)
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    wanted integer := cardinality(destinations);
BEGIN
    IF cardinality(payloads) <> wanted OR cardinality(order_keys) <> wanted
        OR cardinality(message_ids) <> wanted OR cardinality(headers) <> wanted
    THEN
        RAISE EXCEPTION 'expected arrays of one length' USING ERRCODE = '22023';
    END IF;
    IF EXISTS (
        SELECT FROM unnest(destinations, payloads, order_keys, message_ids, headers)
            AS g (destination, payload, order_key, message_id, headers)
        WHERE g.destination IS NULL OR g.payload IS NULL
            OR octet_length(g.order_key) NOT BETWEEN 1 AND 1024
            OR octet_length(g.message_id) NOT BETWEEN 1 AND 1024
            OR jsonb_typeof(g.headers) <> 'object'
    ) THEN
        RAISE EXCEPTION 'expected a destination, a payload, an order key and an id of 1 to 1024 bytes, and headers that are an object'
            USING ERRCODE = '22023';
    END IF;
    -- A relay recognizes open writers by this lock, which is taken before an id is drawn.
    LOCK TABLE hapax_outbox IN ROW EXCLUSIVE MODE;
    PERFORM pg_advisory_xact_lock(1752199264, s.stripe) FROM (
        SELECT DISTINCT (('x' || left(encode(sha256(convert_to(k.order_key, 'UTF8')), 'hex'), 8))
            ::bit(32)::bigint % 1024)::integer AS stripe
        FROM unnest(order_keys) AS k (order_key) WHERE k.order_key IS NOT NULL
        ORDER BY stripe OFFSET 0
    ) s;
    RETURN QUERY
    WITH given AS (
        SELECT g.at, g.destination, g.payload, g.order_key,
            coalesce(g.message_id, gen_random_uuid()::text) AS message_id,
            coalesce(g.headers, '{}') AS headers
        FROM unnest(destinations, payloads, order_keys, message_ids, headers) WITH ORDINALITY
            AS g (destination, payload, order_key, message_id, headers, at)
        ORDER BY g.at OFFSET 0
    ), drawn AS MATERIALIZED (
        SELECT nextval('hapax_outbox_ids') AS id, g.* FROM given g
    ), written AS (
        INSERT INTO hapax_outbox (shard, id, message_id, destination, order_key, headers, payload)
        SELECT coalesce(hapax_outbox_shard(d.order_key), (d.id % 32)::smallint), d.id, d.message_id,
            d.destination, d.order_key, d.headers, d.payload
        FROM drawn d
    )
    SELECT d.at::integer, d.message_id FROM drawn d ORDER BY d.at;
END
$$;

-- Writes one message: see hapax_outbox_put_all. Returns its id.
CREATE OR REPLACE FUNCTION hapax_outbox_put(
    destination text, payload bytea, order_key text DEFAULT NULL, message_id text DEFAULT NULL,
    headers jsonb DEFAULT NULL
) RETURNS text
LANGUAGE sql
SET search_path FROM CURRENT
AS $$
    SELECT p.message_id
    FROM hapax_outbox_put_all(ARRAY[destination], ARRAY[payload], ARRAY[order_key],
        ARRAY[message_id], ARRAY[headers]) p
$$;

-- Returns messages to publish, for a relay: of each shard those with an id above its floor, in the
-- order of ids, up to `most` in all, and none after those before it have `bytes` of headers and
-- payload. Messages whose order key has a dead letter, or is in `skipped`, wait; those in
-- `known_shards` and `known_ids` are left out. The first row has the epoch only.
CREATE OR REPLACE FUNCTION hapax_outbox_poll(
    shards bigint[], floors bigint[], known_shards bigint[], known_ids bigint[], skipped text[],
    most bigint, bytes bigint
) RETURNS TABLE (
    epoch bigint, shard bigint, id bigint, message_id text, destination text, order_key text,
    headers text, payload bytea, age_ms bigint
)
LANGUAGE sql STABLE
SET search_path FROM CURRENT
AS $$
    SELECT e.epoch, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL FROM hapax_outbox_epoch e
    UNION ALL (
        SELECT NULL, m.shard, m.id, m.message_id, m.destination, m.order_key, m.headers, m.payload,
            (extract(epoch FROM clock_timestamp() - m.created_at) * 1000)::bigint
        FROM (
            -- The length of a payload is known without reading it.
            SELECT l.*, sum(octet_length(l.headers) + octet_length(l.payload)) OVER (
                ORDER BY l.turn, l.id ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
            ) AS bytes_before
            FROM (
                SELECT f.turn, f.shard, o.id, o.message_id, o.destination, o.order_key,
                    o.headers::text AS headers, o.payload, o.created_at
                FROM unnest(shards, floors) WITH ORDINALITY AS f (shard, floor, turn)
                CROSS JOIN LATERAL (
                    SELECT o.* FROM hapax_outbox o
                    WHERE o.shard = f.shard::smallint AND o.id > f.floor
                        -- Not a join, so that the rows are read in the order of the index.
                        AND (o.shard::bigint, o.id) NOT IN (
                            SELECT k.shard, k.id FROM unnest(known_shards, known_ids) AS k (shard, id)
                        )
                        AND (o.order_key IS NULL OR (
                            o.order_key <> ALL (skipped)
                            AND NOT EXISTS (
                                SELECT FROM hapax_dead_letters d
                                WHERE d.consumer = 'hapax-outbox' AND d.order_key = o.order_key
                            )
                        ))
                    ORDER BY o.id LIMIT most
                ) o
                LIMIT most
            ) l
        ) m
        WHERE coalesce(m.bytes_before, 0) < bytes
        ORDER BY m.turn, m.id
    )
$$;

-- Deletes messages that were published.
CREATE OR REPLACE FUNCTION hapax_outbox_done(shards bigint[], ids bigint[]) RETURNS void
LANGUAGE sql
SET search_path FROM CURRENT
AS $$
    DELETE FROM hapax_outbox o USING unnest(shards, ids) AS g (shard, id)
    WHERE o.shard = g.shard::smallint AND o.id = g.id
$$;

-- Returns the last id that was drawn, and the transactions that may have drawn one and are open, for
-- a relay: once all of them have ended, no message with such an id is still to appear.
CREATE OR REPLACE FUNCTION hapax_outbox_writers() RETURNS TABLE (last_id bigint, writers text[])
LANGUAGE plpgsql VOLATILE
SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
BEGIN
    -- Read first: a transaction that draws a larger id afterwards does not matter.
    SELECT CASE WHEN s.is_called THEN s.last_value ELSE 0 END INTO last_id FROM hapax_outbox_ids s;
    -- A prepared transaction has another name than before, so all of them have one.
    SELECT coalesce(
        array_agg(DISTINCT CASE WHEN l.pid IS NULL THEN 'prepared' ELSE l.virtualtransaction END), '{}'
    ) INTO writers
    FROM pg_locks l
    WHERE l.relation = 'hapax_outbox'::regclass AND l.mode = 'RowExclusiveLock'
        AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database());
    RETURN NEXT;
END
$$;

-- Returns the least id above the floor of each shard that has a message, for a relay.
CREATE OR REPLACE FUNCTION hapax_outbox_least(shards bigint[], floors bigint[])
RETURNS TABLE (shard bigint, id bigint)
LANGUAGE sql STABLE
SET search_path FROM CURRENT
AS $$
    SELECT f.shard, o.id FROM unnest(shards, floors) AS f (shard, floor)
    CROSS JOIN LATERAL (
        SELECT o.id FROM hapax_outbox o WHERE o.shard = f.shard::smallint AND o.id > f.floor
        ORDER BY o.id LIMIT 1
    ) o
$$;

-- Returns the headers of a message one by one, in the order of their names.
CREATE OR REPLACE FUNCTION hapax_outbox_headers(headers jsonb) RETURNS TABLE (name text, value text)
LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$
    SELECT h.key, v.value FROM jsonb_each(headers) AS h (key, value)
    CROSS JOIN LATERAL jsonb_array_elements_text(
        CASE jsonb_typeof(h.value) WHEN 'array' THEN h.value ELSE jsonb_build_array(h.value) END
    ) WITH ORDINALITY AS v (value, at)
    ORDER BY h.key, v.at
$$;

-- Moves a message that cannot be published to the dead letters. Later ones with its order key wait.
CREATE OR REPLACE FUNCTION hapax_outbox_park(
    letter bytea, its_shard bigint, its_id bigint, error text, attempts integer
) RETURNS boolean
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    row hapax_outbox;
BEGIN
    DELETE FROM hapax_outbox o WHERE o.shard = its_shard::smallint AND o.id = its_id
    RETURNING * INTO row;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    INSERT INTO hapax_dead_letters (
        id, consumer, message_id, origin, reason, attempts, error, order_key, header_names,
        header_values, payload, first_at, last_at, outbox_shard, outbox_id
    ) VALUES (
        letter, 'hapax-outbox', row.message_id, row.destination, 'unpublishable', attempts, error,
        row.order_key,
        ARRAY(SELECT h.name FROM hapax_outbox_headers(row.headers) h),
        ARRAY(SELECT convert_to(h.value, 'UTF8') FROM hapax_outbox_headers(row.headers) h),
        row.payload, row.created_at, clock_timestamp(), row.shard, row.id
    ) ON CONFLICT DO NOTHING;
    IF NOT FOUND AND NOT EXISTS (
        SELECT FROM hapax_dead_letters d WHERE d.id = letter AND d.message_id = row.message_id
    ) THEN
        RAISE EXCEPTION 'expected no letter of another message under this id, found one'
            USING ERRCODE = '23505';
    END IF;
    RETURN true;
END
$$;

-- Returns a message of the outbox from the dead letters to its place, before the messages with its
-- order key that wait.
CREATE OR REPLACE FUNCTION hapax_outbox_redrive(letter bytea) RETURNS boolean
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    row hapax_dead_letters;
BEGIN
    DELETE FROM hapax_dead_letters d WHERE d.id = letter AND d.outbox_id IS NOT NULL
    RETURNING * INTO row;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    INSERT INTO hapax_outbox (shard, id, message_id, destination, order_key, headers, payload, created_at)
    VALUES (row.outbox_shard, row.outbox_id, row.message_id, row.origin, row.order_key,
        (SELECT coalesce(jsonb_object_agg(g.name, g.value), '{}') FROM (
            SELECT h.name, CASE count(*)
                WHEN 1 THEN to_jsonb(min(convert_from(h.value, 'UTF8')))
                ELSE jsonb_agg(convert_from(h.value, 'UTF8') ORDER BY h.at)
            END AS value
            FROM unnest(row.header_names, row.header_values) WITH ORDINALITY AS h (name, value, at)
            GROUP BY h.name
        ) g),
        row.payload, row.first_at)
    ON CONFLICT DO NOTHING;
    -- Ids are drawn again after hapax_outbox_ids was reset, or left out of a logical replication.
    IF NOT FOUND AND NOT EXISTS (
        SELECT FROM hapax_outbox o
        WHERE o.shard = row.outbox_shard AND o.id = row.outbox_id AND o.message_id = row.message_id
    ) THEN
        RAISE EXCEPTION 'expected no other message at the place of the letter, shard % and id %, found one',
            row.outbox_shard, row.outbox_id
            USING ERRCODE = '23505',
                HINT = 'Set the sequence hapax_outbox_ids above all ids, and redrive the letter once that message is published.';
    END IF;
    -- Relays read below their floors again, by the same snapshot that shows the row.
    UPDATE hapax_outbox_epoch SET epoch = epoch + 1;
    RETURN true;
END
$$;

-- Returns the age of the oldest message that is not published, the messages that are counted up to
-- `most`, and the order keys that wait behind a dead letter. Ids are drawn when messages are written,
-- so that the oldest one of a shard has its least id.
CREATE OR REPLACE FUNCTION hapax_outbox_lag(most bigint DEFAULT 10000)
RETURNS TABLE (oldest_ms bigint, rows bigint, parked_keys bigint)
LANGUAGE sql VOLATILE
SET search_path FROM CURRENT
AS $$
    SELECT
        coalesce((extract(epoch FROM clock_timestamp() - min(f.created_at)) * 1000)::bigint, 0),
        (SELECT count(*) FROM (SELECT FROM hapax_outbox LIMIT most) o),
        (SELECT count(DISTINCT d.order_key) FROM hapax_dead_letters d
            WHERE d.consumer = 'hapax-outbox')
    FROM generate_series(0, 31) AS s (shard)
    CROSS JOIN LATERAL (
        SELECT o.created_at FROM hapax_outbox o WHERE o.shard = s.shard::smallint
        ORDER BY o.id LIMIT 1
    ) f
$$;

-- Decides about the message `number` of an aggregate, numbered from 1, in the transaction of the
-- caller. Returns a step:
--   'apply'        handle it in this transaction; then call hapax_sequence_next
--   'duplicate'    it was applied, or is parked: acknowledge it
--   'park'         it was stored: acknowledge it
--   'dead-letter'  the gap before it is over a limit
--   'fetch'        fetch the messages from `first` to `last`; do not acknowledge this one
--   'skip'         the gap was skipped, up to a parked message: call hapax_sequence_next until it
--                  returns nothing, then call this again
-- After 'apply' the number counts as applied once the transaction commits. `over_limit` decides
-- about a message behind a gap if `max_parked` messages are parked or the gap is older than
-- `max_wait`: 'fetch', 'dead-letter' or 'accept', which skips the gap. The other messages of the
-- aggregate wait until the transaction ends, for at most lock_timeout.
CREATE OR REPLACE FUNCTION hapax_sequence(
    consumer text, aggregate text, number bigint, message_id text, headers jsonb, payload bytea,
    max_parked integer, max_wait interval, over_limit text
) RETURNS TABLE (step text, first bigint, last bigint)
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET lock_timeout = '500ms'
AS $$
#variable_conflict use_column
DECLARE
    key uuid := hapax_message_id(consumer, aggregate);
    seen hapax_sequences;
    lowest bigint;
    moment timestamptz;
BEGIN
    IF number < 1 OR over_limit NOT IN ('fetch', 'dead-letter', 'accept') THEN
        RAISE EXCEPTION 'expected a number from 1, and a gap policy of fetch, dead-letter or accept'
            USING ERRCODE = '22023';
    END IF;
    INSERT INTO hapax_sequences (id, applied, parked, consumer, aggregate)
    VALUES (key, 0, 0, consumer, aggregate) ON CONFLICT ON CONSTRAINT hapax_sequences_pkey DO NOTHING;
    SELECT s.* INTO seen FROM hapax_sequences s WHERE s.id = key FOR UPDATE;
    moment := clock_timestamp();
    LOOP
        IF number <= seen.applied OR EXISTS (
            SELECT FROM hapax_sequence_messages m WHERE m.id = key AND m.number = hapax_sequence.number
        ) THEN
            step := 'duplicate';
            EXIT;
        ELSIF number = seen.applied + 1 THEN
            UPDATE hapax_sequences s SET applied = hapax_sequence.number,
                gap_since = CASE WHEN s.parked > 0 THEN clock_timestamp() END
            WHERE s.id = key;
            step := 'apply';
            EXIT;
        ELSIF seen.parked < max_parked
            AND moment < coalesce(seen.gap_since, moment) + max_wait
        THEN
            INSERT INTO hapax_sequence_messages AS m (id, number, message_id, headers, payload)
            VALUES (key, hapax_sequence.number, hapax_sequence.message_id,
                coalesce(hapax_sequence.headers, '{}'), hapax_sequence.payload);
            UPDATE hapax_sequences s SET parked = s.parked + 1,
                gap_since = coalesce(s.gap_since, clock_timestamp())
            WHERE s.id = key;
            step := 'park';
            EXIT;
        END IF;
        SELECT least(min(m.number), hapax_sequence.number) INTO lowest
        FROM hapax_sequence_messages m WHERE m.id = key;
        first := seen.applied + 1;
        last := lowest - 1;
        IF over_limit <> 'accept' THEN
            step := over_limit;
            EXIT;
        END IF;
        UPDATE hapax_sequences s SET applied = lowest - 1 WHERE s.id = key RETURNING s.* INTO seen;
        -- Of the messages behind the gap a parked one may come first.
        IF lowest < number THEN
            step := 'skip';
            EXIT;
        END IF;
    END LOOP;
    RETURN NEXT;
END
$$;

-- Returns the parked message of an aggregate that is next, and counts it as applied: handle it in
-- this transaction, and call again. No row: nothing is next, or the gap is not over its limit.
CREATE OR REPLACE FUNCTION hapax_sequence_next(
    consumer text, aggregate text, max_wait interval, over_limit text
) RETURNS TABLE (step text, number bigint, message_id text, headers jsonb, payload bytea)
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET lock_timeout = '500ms'
AS $$
#variable_conflict use_column
DECLARE
    key uuid := hapax_message_id(consumer, aggregate);
    seen hapax_sequences;
    lowest hapax_sequence_messages;
BEGIN
    SELECT s.* INTO seen FROM hapax_sequences s WHERE s.id = key FOR UPDATE;
    SELECT m.* INTO lowest FROM hapax_sequence_messages m WHERE m.id = key
    ORDER BY m.number LIMIT 1;
    IF lowest.id IS NULL THEN
        RETURN;
    END IF;
    IF lowest.number <= seen.applied THEN
        step := 'duplicate';
    ELSIF lowest.number = seen.applied + 1 THEN
        step := 'apply';
    ELSIF clock_timestamp() < seen.gap_since + max_wait THEN
        RETURN;
    ELSIF over_limit = 'accept' THEN
        step := 'apply';
    ELSIF over_limit = 'dead-letter' THEN
        step := 'dead-letter';
    ELSE
        step := 'fetch';
        number := seen.applied + 1;
        RETURN NEXT;
        RETURN;
    END IF;
    DELETE FROM hapax_sequence_messages m WHERE m.id = key AND m.number = lowest.number;
    UPDATE hapax_sequences s SET
        parked = s.parked - 1,
        applied = CASE WHEN step = 'apply' THEN lowest.number ELSE s.applied END,
        gap_since = CASE
            WHEN s.parked = 1 THEN NULL
            WHEN step = 'apply' THEN clock_timestamp()
            ELSE s.gap_since
        END
    WHERE s.id = key;
    number := lowest.number;
    message_id := lowest.message_id;
    headers := lowest.headers;
    payload := lowest.payload;
    RETURN NEXT;
END
$$;
