-- Inbox, outbox, sequences and dead letters. A program in any language calls the functions within
-- its own transactions; it does not write the tables.

-- Once: IF NOT EXISTS alone locks what exists, and callers queue behind a lock that waits. So a
-- script that is run again changes functions only.
DO $tables$
BEGIN
IF EXISTS (SELECT FROM hapax_messages_migrations WHERE version = 1) THEN
    RETURN;
END IF;

-- Ids of messages that a consumer has handled. A row and its index entry take about 120 bytes: so
-- consumer and id are one hash, and the digest of the payload is cut to 128 bits.
CREATE TABLE IF NOT EXISTS hapax_inbox (
    id         uuid PRIMARY KEY,      -- hapax_scoped_hash(consumer, id)
    digest     uuid,                  -- hapax_payload_digest; null: not compared
    expires_at timestamptz NOT NULL,  -- time from which hapax_inbox_purge removes it
    consumer   integer NOT NULL,      -- hash of the name, for statistics only
    parked     boolean NOT NULL DEFAULT false  -- by hapax_inbox_park: it was not handled
);
-- Times are whole seconds, so that the index keeps most of them once for many rows. In a BRIN index a
-- range would keep the time of its first row for ever: each purge would read the table.
CREATE INDEX IF NOT EXISTS hapax_inbox_expires ON hapax_inbox (expires_at);

-- Attempts of messages that were not handled at the first attempt, in batch mode.
CREATE TABLE IF NOT EXISTS hapax_attempts (
    id         uuid PRIMARY KEY,      -- as in hapax_inbox
    attempts   integer NOT NULL,
    ended      integer NOT NULL DEFAULT 0,  -- number of the last attempt whose failure was noted
    error      text,                  -- of that one
    first_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    expires_at timestamptz NOT NULL
);
CREATE INDEX IF NOT EXISTS hapax_attempts_expires ON hapax_attempts (expires_at);

-- Messages that are not handled until an operator decides. A header without a name, the last one, is the native
-- form of the message: what the form of its broker has and the message has not.
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
    parked_at     timestamptz NOT NULL DEFAULT clock_timestamp(),   -- the last time
    -- Position of an outbox row, to which a redrive returns it.
    outbox_shard  smallint,
    outbox_id     bigint,
    -- Number of redrives that began; the number is part of the id for the broker's deduplication.
    redrives      integer NOT NULL DEFAULT 0,
    -- Order in which dead letters were first stored. A clock may be set back, and two of its times equal.
    number        bigint GENERATED ALWAYS AS IDENTITY
);
CREATE INDEX IF NOT EXISTS hapax_dead_letters_parked ON hapax_dead_letters (consumer, number);
CREATE INDEX IF NOT EXISTS hapax_dead_letters_key ON hapax_dead_letters (consumer, order_key)
    WHERE order_key IS NOT NULL;

-- Decisions of operators about dead letters.
CREATE TABLE IF NOT EXISTS hapax_dead_letter_decisions (
    at             timestamptz NOT NULL DEFAULT clock_timestamp(),
    operator       text NOT NULL,
    reason         text NOT NULL,     -- of the operator
    decision       text NOT NULL,     -- redrive, drop
    dead_letter_id bytea NOT NULL,
    consumer       text NOT NULL,
    message_id     text,
    parked_as      text NOT NULL      -- the reason of the dead letter
);

-- Messages to publish. Rows are deleted once they are published.
CREATE SEQUENCE IF NOT EXISTS hapax_outbox_ids;
CREATE TABLE IF NOT EXISTS hapax_outbox (
    shard       smallint NOT NULL,    -- 0 to 31: of the order key, else of the id
    id          bigint NOT NULL,      -- of hapax_outbox_ids
    message_id  text NOT NULL,
    destination text NOT NULL,
    order_key   text,
    headers     jsonb NOT NULL,       -- names, each with a text or an array of texts
    payload     bytea NOT NULL,
    created_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (shard, id)
) WITH (
    -- Each row is deleted soon: vacuum after some thousands, not after a share of the table.
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_threshold = 10000
);

-- Number that changes when rows may have appeared below the floors of relays: a relay that reads
-- another number than before reads from id 0 again. Relays of one outbox share the leases of its shards
-- by its identity, and those of another one have others. A copy of the database has the same identity:
-- if its relays use the same store, set another one there.
CREATE TABLE IF NOT EXISTS hapax_outbox_epoch (
    is_one   boolean PRIMARY KEY DEFAULT true CHECK (is_one),
    epoch    bigint NOT NULL,
    identity uuid NOT NULL DEFAULT gen_random_uuid()
);
INSERT INTO hapax_outbox_epoch (epoch) VALUES (1) ON CONFLICT DO NOTHING;

-- Aggregates of numbered messages, each with the last number that was applied.
CREATE TABLE IF NOT EXISTS hapax_sequences (
    id        uuid PRIMARY KEY,       -- hapax_scoped_hash(consumer, aggregate)
    applied   bigint NOT NULL,
    waiting   integer NOT NULL,       -- rows of hapax_sequence_messages
    gap_since timestamptz,            -- while messages wait
    consumer  text NOT NULL,
    aggregate text NOT NULL
);
CREATE INDEX IF NOT EXISTS hapax_sequences_gaps ON hapax_sequences (consumer, gap_since)
    WHERE gap_since IS NOT NULL;

-- Aggregates with a gap: the number that is missing, since when, and the number of messages that wait.
CREATE OR REPLACE VIEW hapax_sequence_gaps AS
SELECT s.consumer, s.aggregate, s.applied + 1 AS missing, s.gap_since, s.waiting
FROM hapax_sequences s WHERE s.gap_since IS NOT NULL;

-- Messages that wait for those before them.
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

-- Returns the hash of a consumer's name and of a message id or an aggregate, by which rows are
-- found. A consumer's name has no zero byte.
CREATE OR REPLACE FUNCTION hapax_scoped_hash(consumer text, id text) RETURNS uuid
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT pg_catalog.encode(pg_catalog.substr(pg_catalog.sha256(
        pg_catalog.convert_to(consumer, 'UTF8')
            OPERATOR(pg_catalog.||) pg_catalog.decode('00', 'hex')
            OPERATOR(pg_catalog.||) pg_catalog.convert_to(id, 'UTF8')
    ), 1, 16), 'hex')::pg_catalog.uuid
$$;

-- Returns the digest by which payloads are compared.
CREATE OR REPLACE FUNCTION hapax_payload_digest(fingerprint bytea) RETURNS uuid
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE AS $$
    SELECT pg_catalog.encode(pg_catalog.substr(pg_catalog.sha256(fingerprint), 1, 16), 'hex')::pg_catalog.uuid
$$;

-- Rejects the name of a consumer that cannot be kept.
CREATE OR REPLACE FUNCTION hapax_check_consumer(consumer text) RETURNS void
LANGUAGE plpgsql IMMUTABLE
SET search_path = @schema@, pg_temp
AS $$
BEGIN
    IF consumer IS NULL OR octet_length(consumer) NOT BETWEEN 1 AND 255 THEN
        RAISE EXCEPTION 'expected a consumer name of 1 to 255 bytes, found %: choose another one',
            coalesce(octet_length(consumer)::text, 'null')
            USING ERRCODE = '22023';
    END IF;
END
$$;

-- Rejects an id, a name or another text that cannot be kept; `what` names it.
CREATE OR REPLACE FUNCTION hapax_check_text(what text, value text) RETURNS void
LANGUAGE plpgsql IMMUTABLE
SET search_path = @schema@, pg_temp
AS $$
BEGIN
    IF value IS NULL OR octet_length(value) NOT BETWEEN 1 AND 1024 THEN
        RAISE EXCEPTION 'expected % of 1 to 1024 bytes, found %: shorten it, for example by a hash', what,
            coalesce(octet_length(value)::text, 'null')
            USING ERRCODE = '22023';
    END IF;
END
$$;

-- Rejects a time for which nothing is kept, or for which no server keeps it.
CREATE OR REPLACE FUNCTION hapax_check_retention(retention interval) RETURNS void
LANGUAGE plpgsql IMMUTABLE
SET search_path = @schema@, pg_temp
AS $$
BEGIN
    IF retention IS NULL OR retention NOT BETWEEN interval '1 second' AND interval '36500 days' THEN
        RAISE EXCEPTION 'expected a retention of 1 second to 100 years, found %: set another one',
            coalesce(retention::text, 'null')
            USING ERRCODE = '22023';
    END IF;
END
$$;

-- Returns the number of a shard of the outbox, and rejects others.
CREATE OR REPLACE FUNCTION hapax_check_shard(shard bigint) RETURNS smallint
LANGUAGE plpgsql IMMUTABLE COST 1
SET search_path = @schema@, pg_temp
AS $$
BEGIN
    IF shard IS NULL OR shard NOT BETWEEN 0 AND 31 THEN
        RAISE EXCEPTION 'expected a shard of 0 to 31, found %: pass one of these', coalesce(shard::text, 'null')
            USING ERRCODE = '22023';
    END IF;
    RETURN shard;
END
$$;

-- Makes the COMMIT of this transaction wait until it is durable, and on the synchronous standbys, whatever
-- the role's default is: what follows from a result, an acknowledgement, must not be earlier.
CREATE OR REPLACE FUNCTION hapax_commit_durably() RETURNS void
LANGUAGE plpgsql VOLATILE
SET search_path = @schema@, pg_temp
AS $$
BEGIN
    PERFORM set_config('synchronous_commit', 'on', true)
    WHERE current_setting('synchronous_commit') <> 'remote_apply';
END
$$;

-- Records messages of `consumer` as handled, in the transaction of the caller, which writes the
-- effects of those that are new. Returns for each of `ids`, by its position from 1 (`item`):
--   'new'        this call has inserted it: handle the message
--   'duplicate'  the message was handled or parked before, or the id occurs earlier in `ids`
--   'mismatch'   the id has another fingerprint: store a dead letter, without hapax_inbox_park
-- `fingerprints` has the payload of each, or a digest of it; null: payloads are not compared. Ids are
-- inserted in one order, so that two callers do not deadlock.
--
-- Errors: 55P03: another transaction that is still open has inserted one of them: hold the messages.
-- 40001 and 40P01: run the transaction again; with 40001 the id of a duplicate may have expired
-- meanwhile. 22023: an id is null, empty or over 1024 bytes, there is not one fingerprint for each, the name
-- of the consumer is empty or over 255 bytes, or the retention is not 1 second to 100 years.
CREATE OR REPLACE FUNCTION hapax_inbox(
    consumer text, ids text[], fingerprints bytea[] DEFAULT NULL,
    retention interval DEFAULT '30 days'
) RETURNS TABLE (item integer, state text)
LANGUAGE plpgsql
SET search_path = @schema@, pg_temp
AS $$
DECLARE
    keys uuid[];
    digests uuid[];
    wrong bigint;
BEGIN
    IF cardinality(fingerprints) <> cardinality(ids) THEN
        RAISE EXCEPTION 'expected a fingerprint for each of % ids, found %: pass one element for each message', cardinality(ids),
            cardinality(fingerprints)
            USING ERRCODE = '22023';
    END IF;
    SELECT array_agg(hapax_scoped_hash(consumer, g.id)), array_agg(hapax_payload_digest(g.fingerprint)),
        count(*) FILTER (WHERE g.id IS NULL OR octet_length(g.id) NOT BETWEEN 1 AND 1024)
    INTO keys, digests, wrong
    FROM unnest(ids, fingerprints) AS g (id, fingerprint);
    IF wrong > 0 THEN
        RAISE EXCEPTION 'expected ids of 1 to 1024 bytes, found % others: pass one of these for each message', wrong
            USING ERRCODE = '22023';
    END IF;
    RETURN QUERY
    SELECT s.at::integer,
        CASE s.code WHEN 'n' THEN 'new' WHEN 'd' THEN 'duplicate' ELSE 'mismatch' END
    FROM unnest(string_to_array(hapax_inbox_insert(consumer, keys, digests, retention), NULL))
        WITH ORDINALITY AS s (code, at)
    ORDER BY s.at;
END
$$;

-- Inserts ids as hapax_inbox does, for a program that computes the hashes itself: `keys` are
-- hapax_scoped_hash of the ids, `digests` hapax_payload_digest of the fingerprints or null. Returns
-- a code for each: n, d or m, for new, duplicate or mismatch. Null for no keys. Rows are found by
-- the index, whatever the statistics were when a session planned this: those of a new table would
-- lead to a scan of all rows.
CREATE OR REPLACE FUNCTION hapax_inbox_insert(
    consumer text, keys uuid[], digests uuid[], retention interval
) RETURNS text
LANGUAGE plpgsql
SET search_path = @schema@, pg_temp
SET lock_timeout = '500ms'
SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
AS $$
#variable_conflict use_column
DECLARE
    wanted integer := cardinality(keys);
    expiry timestamptz;
    inserted uuid[];
    states text;
BEGIN
    PERFORM hapax_check_consumer(consumer);
    PERFORM hapax_check_retention(retention);
    -- Rounded up.
    expiry := date_trunc('second', clock_timestamp() + retention + interval '999999 us');
    WITH given AS (
        SELECT DISTINCT ON (g.key) g.key, g.digest
        FROM unnest(keys, digests) WITH ORDINALITY AS g (key, digest, at)
        ORDER BY g.key, g.at
    ), written AS (
        INSERT INTO hapax_inbox AS i (id, digest, expires_at, consumer)
        SELECT g.key, g.digest, expiry, hashtext(hapax_inbox_insert.consumer)
        FROM given g ORDER BY g.key
        ON CONFLICT DO NOTHING
        RETURNING i.id
    )
    SELECT array_agg(w.id) INTO inserted FROM written w;
    -- A transaction without a write would wait for no synchronous standby: an id that a crash of the
    -- server made visible may be on none, and a failover loses it.
    PERFORM hapax_commit_durably();
    IF inserted IS NULL THEN
        PERFORM pg_logical_emit_message(true, 'hapax', '');
    END IF;
    IF cardinality(inserted) = wanted THEN
        RETURN repeat('n', wanted);
    END IF;
    -- A statement of its own: it sees what was committed while the insert waited.
    SELECT string_agg(CASE
        WHEN i.digest <> g.digest THEN 'm'
        WHEN g.key = ANY (inserted) AND g.nth = 1 THEN 'n'
        ELSE 'd'
    END, '' ORDER BY g.at)
    INTO states
    FROM (
        SELECT u.key, u.digest, u.at, row_number() OVER (PARTITION BY u.key ORDER BY u.at) AS nth
        FROM unnest(keys, digests) WITH ORDINALITY AS u (key, digest, at)
    ) g
    JOIN hapax_inbox i ON i.id = g.key;
    IF coalesce(length(states), 0) <> wanted THEN
        RAISE EXCEPTION 'the id of a duplicate expired meanwhile: run the transaction again'
            USING ERRCODE = '40001';
    END IF;
    RETURN states;
END
$$;

-- Sets a timeout of this transaction, unless a shorter one is set. Returns it.
CREATE OR REPLACE FUNCTION hapax_limit_timeout(setting text, max_ms bigint) RETURNS text
LANGUAGE plpgsql VOLATILE
SET search_path = @schema@, pg_temp
AS $$
BEGIN
    IF current_setting(setting)::interval BETWEEN interval '1 ms' AND max_ms * interval '1 ms' THEN
        RETURN current_setting(setting);
    END IF;
    -- The server stores it as a positive number of 32 bits.
    RETURN set_config(setting, least(max_ms, 2147483647)::text, true);
END
$$;

-- Marks the id of a message that is 'new' in this transaction as parked: the caller stores its dead
-- letter in the same transaction, and does not handle it. Deletes its attempts. Returns false if
-- hapax_inbox has not inserted the id. hapax_dead_letter_redrive deletes the id, so that the message
-- is new again.
CREATE OR REPLACE FUNCTION hapax_inbox_park(consumer text, id text) RETURNS boolean
LANGUAGE plpgsql
SET search_path = @schema@, pg_temp
AS $$
#variable_conflict use_column
DECLARE
    key uuid := hapax_scoped_hash(consumer, id);
BEGIN
    PERFORM hapax_check_consumer(consumer);
    PERFORM hapax_check_text('an id', id);
    DELETE FROM hapax_attempts a WHERE a.id = key;
    UPDATE hapax_inbox i SET parked = true WHERE i.id = key;
    RETURN FOUND;
END
$$;

-- Removes up to `max_rows` ids whose retention has ended, and up to `max_rows` expired rows of
-- hapax_attempts, those of all consumers. Returns the number of rows removed; 0: nothing is left to
-- remove. Several programs may call it at a time: each leaves out the rows of the others. Rows are
-- found by the index, as in hapax_inbox_insert.
CREATE OR REPLACE FUNCTION hapax_inbox_purge(max_rows integer DEFAULT 10000) RETURNS bigint
LANGUAGE plpgsql
SET search_path = @schema@, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $$
#variable_conflict use_column
DECLARE
    -- An index is not searched by the result of a volatile function.
    moment timestamptz := clock_timestamp();
    removed bigint;
    further bigint;
BEGIN
    DELETE FROM hapax_inbox WHERE ctid = ANY (ARRAY(
        SELECT i.ctid FROM hapax_inbox i WHERE i.expires_at <= moment
        LIMIT max_rows FOR UPDATE SKIP LOCKED
    ));
    GET DIAGNOSTICS removed = ROW_COUNT;
    DELETE FROM hapax_attempts WHERE ctid = ANY (ARRAY(
        SELECT a.ctid FROM hapax_attempts a WHERE a.expires_at <= moment
        LIMIT max_rows FOR UPDATE SKIP LOCKED
    ));
    GET DIAGNOSTICS further = ROW_COUNT;
    RETURN removed + further;
END
$$;

-- Counts an attempt of a message that was delivered before, in a transaction of its own, before the
-- handler begins. Returns its number, and the number of consecutive attempts before it of which
-- hapax_inbox_failed has noted no failure: in each the process may have ended (crashes). The first
-- attempt is not counted in the table, so the first call returns 2, and one crash unless a failure was
-- noted. Returns 0 and 0 if the message was handled or parked. With error 55P03, another transaction
-- that is still open has inserted it, nothing is counted: no handler would begin.
CREATE OR REPLACE FUNCTION hapax_inbox_attempt(
    consumer text, id text, retention interval DEFAULT '30 days',
    OUT attempt integer, OUT crashes integer
)
LANGUAGE plpgsql
SET search_path = @schema@, pg_temp
SET lock_timeout = '500ms'
AS $$
#variable_conflict use_column
DECLARE
    key uuid := hapax_scoped_hash(consumer, id);
BEGIN
    PERFORM hapax_check_consumer(consumer);
    PERFORM hapax_check_text('an id', id);
    PERFORM hapax_check_retention(retention);
    -- Inserted and rolled back: an open transaction with the id is noticed only thus.
    BEGIN
        INSERT INTO hapax_inbox (id, expires_at, consumer) VALUES (key, clock_timestamp(), 0)
        ON CONFLICT DO NOTHING;
        IF NOT FOUND THEN
            -- As in hapax_inbox: the message is acknowledged after this.
            PERFORM hapax_commit_durably();
            PERFORM pg_logical_emit_message(true, 'hapax', '');
            attempt := 0;
            crashes := 0;
            RETURN;
        END IF;
        RAISE EXCEPTION 'the id is free' USING ERRCODE = 'HX001';
    EXCEPTION WHEN SQLSTATE 'HX001' THEN
        NULL;
    END;
    INSERT INTO hapax_attempts AS a (id, attempts, expires_at)
    VALUES (key, 2, clock_timestamp() + retention)
    ON CONFLICT ON CONSTRAINT hapax_attempts_pkey DO UPDATE
        SET attempts = a.attempts + 1, expires_at = EXCLUDED.expires_at
    RETURNING a.attempts, a.attempts - 1 - a.ended INTO attempt, crashes;
END
$$;

-- Notes that the last attempt has ended, with its error, in a transaction of its own. Returns the
-- number of attempts.
CREATE OR REPLACE FUNCTION hapax_inbox_failed(
    consumer text, id text, error text, retention interval DEFAULT '30 days'
) RETURNS integer
LANGUAGE plpgsql
SET search_path = @schema@, pg_temp
SET lock_timeout = '500ms'
AS $$
#variable_conflict use_column
DECLARE
    made integer;
BEGIN
    PERFORM hapax_check_consumer(consumer);
    PERFORM hapax_check_text('an id', id);
    PERFORM hapax_check_retention(retention);
    INSERT INTO hapax_attempts AS a (id, attempts, ended, error, expires_at)
    VALUES (hapax_scoped_hash(consumer, id), 1, 1, error, clock_timestamp() + retention)
    ON CONFLICT ON CONSTRAINT hapax_attempts_pkey DO UPDATE
        SET ended = a.attempts, error = EXCLUDED.error, expires_at = EXCLUDED.expires_at
    RETURNING a.attempts INTO made;
    RETURN made;
END
$$;

-- Deletes the id and the attempts of a message, also of one that was handled: it is handled again once
-- it is delivered again. Returns whether the id existed.
CREATE OR REPLACE FUNCTION hapax_inbox_release(consumer text, id text) RETURNS boolean
LANGUAGE plpgsql
SET search_path = @schema@, pg_temp
AS $$
#variable_conflict use_column
DECLARE
    key uuid := hapax_scoped_hash(consumer, id);
    removed bigint;
BEGIN
    PERFORM hapax_check_consumer(consumer);
    PERFORM hapax_check_text('an id', id);
    DELETE FROM hapax_attempts a WHERE a.id = key;
    DELETE FROM hapax_inbox i WHERE i.id = key;
    GET DIAGNOSTICS removed = ROW_COUNT;
    RETURN removed > 0;
END
$$;

-- Stores a dead letter. `id` has 32 bytes and is the same each time that the message is parked, such
-- as a hash of consumer and message id. If it is stored already, only reason, attempts, error, last_at
-- and parked_at are replaced. Returns whether it is new.
CREATE OR REPLACE FUNCTION hapax_dead_letter_put(
    id bytea, consumer text, message_id text, origin text, reason text, attempts integer,
    error text, order_key text, header_names text[], header_values bytea[], payload bytea,
    first_at timestamptz, last_at timestamptz
) RETURNS boolean
LANGUAGE plpgsql
SET search_path = @schema@, pg_temp
AS $$
#variable_conflict use_column
DECLARE
    stored boolean;
BEGIN
    PERFORM hapax_check_consumer(consumer);
    IF id IS NULL OR octet_length(id) <> 32 THEN
        RAISE EXCEPTION 'expected an id of 32 bytes, found %: pass a hash, such as sha256',
            coalesce(octet_length(id)::text, 'null')
            USING ERRCODE = '22023';
    END IF;
    IF attempts IS NULL OR attempts < 0 THEN
        RAISE EXCEPTION 'expected a number of attempts from 0, found %: pass one of these', coalesce(attempts::text, 'null')
            USING ERRCODE = '22023';
    END IF;
    IF cardinality(header_names) IS DISTINCT FROM cardinality(header_values) THEN
        RAISE EXCEPTION 'expected a value for each of % names of headers, found %: pass one for each name',
            coalesce(cardinality(header_names)::text, 'null'), coalesce(cardinality(header_values)::text, 'null')
            USING ERRCODE = '22023';
    END IF;
    IF octet_length(order_key) > 1024 THEN
        RAISE EXCEPTION 'expected an order key of at most 1024 bytes, found %: store a hash of it, and compare hashes', octet_length(order_key)
            USING ERRCODE = '22023';
    END IF;
    -- The message is acknowledged after this.
    PERFORM hapax_commit_durably();
    INSERT INTO hapax_dead_letters AS d (
        id, consumer, message_id, origin, reason, attempts, error, order_key, header_names,
        header_values, payload, first_at, last_at
    ) VALUES (
        id, consumer, message_id, origin, reason, attempts, error, order_key, header_names,
        header_values, payload, first_at, last_at
    ) ON CONFLICT ON CONSTRAINT hapax_dead_letters_pkey DO UPDATE SET
        reason = EXCLUDED.reason, attempts = EXCLUDED.attempts, error = EXCLUDED.error,
        last_at = EXCLUDED.last_at, parked_at = clock_timestamp()
    RETURNING d.xmax = 0 INTO stored;
    RETURN stored;
END
$$;

-- Begins to redrive a dead letter: stores the decision and, for a consumer in batch mode, deletes the
-- id of the message from hapax_inbox if it is parked there. The caller then publishes the message. The
-- id of a message that was handled stays. Returns the number of the redrive, from 1, or null if the
-- dead letter does not exist.
--
-- Error 22023: the reason is 'mismatch'. The id belongs to another message, which would be handled
-- again in its stead.
CREATE OR REPLACE FUNCTION hapax_dead_letter_redrive(dead_letter_id bytea, operator text, reason text)
RETURNS integer
LANGUAGE plpgsql
SET search_path = @schema@, pg_temp
AS $$
DECLARE
    row hapax_dead_letters;
BEGIN
    -- The message, which was read before, is published after this.
    PERFORM hapax_commit_durably();
    UPDATE hapax_dead_letters d SET redrives = d.redrives + 1 WHERE d.id = dead_letter_id
    RETURNING * INTO row;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    IF row.reason = 'mismatch' THEN
        RAISE EXCEPTION 'expected a dead letter whose message has its own id, found a mismatch: publish the message under another id, and drop the dead letter'
            USING ERRCODE = '22023';
    END IF;
    DELETE FROM hapax_inbox i
    WHERE i.id = hapax_scoped_hash(row.consumer, row.message_id) AND i.parked;
    INSERT INTO hapax_dead_letter_decisions (
        operator, reason, decision, dead_letter_id, consumer, message_id, parked_as
    ) VALUES (
        operator, reason, 'redrive', dead_letter_id, row.consumer, row.message_id, row.reason
    );
    RETURN row.redrives;
END
$$;

-- Deletes the dead letter from which a message was redriven, in the transaction that has inserted the
-- message by hapax_inbox, also as a duplicate: the message has the id of the dead letter in its header
-- hapax-redrive, in hexadecimal digits. Returns whether it is deleted: the dead letter of a message that
-- is parked, or not in hapax_inbox, stays.
CREATE OR REPLACE FUNCTION hapax_dead_letter_remove(dead_letter_id bytea) RETURNS boolean
LANGUAGE plpgsql
SET search_path = @schema@, pg_temp
AS $$
BEGIN
    DELETE FROM hapax_dead_letters d WHERE d.id = dead_letter_id AND EXISTS (
        SELECT FROM hapax_inbox i
        WHERE i.id = hapax_scoped_hash(d.consumer, d.message_id) AND NOT i.parked
    );
    RETURN FOUND;
END
$$;

-- Deletes a dead letter whose message is not to be handled. Returns whether the dead letter existed.
CREATE OR REPLACE FUNCTION hapax_dead_letter_drop(dead_letter_id bytea, operator text, reason text)
RETURNS boolean
LANGUAGE plpgsql
SET search_path = @schema@, pg_temp
AS $$
DECLARE
    row hapax_dead_letters;
BEGIN
    DELETE FROM hapax_dead_letters d WHERE d.id = dead_letter_id RETURNING * INTO row;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    INSERT INTO hapax_dead_letter_decisions (
        operator, reason, decision, dead_letter_id, consumer, message_id, parked_as
    ) VALUES (
        operator, reason, 'drop', dead_letter_id, row.consumer, row.message_id, row.reason
    );
    RETURN true;
END
$$;

-- Returns the shard of an order key.
CREATE OR REPLACE FUNCTION hapax_outbox_shard(order_key text) RETURNS smallint
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE AS $$
    SELECT (pg_catalog.get_byte(pg_catalog.sha256(pg_catalog.convert_to(order_key, 'UTF8')), 0)
        OPERATOR(pg_catalog.%) 32)::pg_catalog.int2
$$;

-- Writes messages to publish, in the transaction of the caller. Returns the message id of each, by
-- its position in the arrays (`item`, from 1).
--
-- Messages with an order key are published in the order of hapax_outbox.id, which ascends in the
-- order of the arrays. So that this is also the order in which transactions commit, the writers of
-- one key are serialized: the function takes one of 1024 locks, by the hash of the key, until the
-- transaction ends. Messages of one transaction are therefore
-- best written by one call, shortly before COMMIT; two calls may deadlock with another transaction
-- (40P01: run it again). Messages without an order key take no lock.
--
-- A destination has at most 1024 bytes. A relay publishes to no destination that is reserved by its broker,
-- such as a subject of NATS that begins with $: the message becomes a dead letter.
--
-- A message id of null becomes a random one. Headers are objects of texts; a header with several
-- values has an array of texts.
--
-- A payload is bytea. PostgreSQL reads a literal, or a parameter without a type, as the text form of
-- bytea, in which a backslash begins an escape: JSON would be changed or rejected. Convert a text by
-- convert_to(…, 'UTF8').
CREATE OR REPLACE FUNCTION hapax_outbox_put_all(
    destinations text[], payloads bytea[], order_keys text[] DEFAULT NULL,
    message_ids text[] DEFAULT NULL, headers jsonb[] DEFAULT NULL
) RETURNS TABLE (item integer, message_id text)
LANGUAGE plpgsql
SET search_path = @schema@, pg_temp
AS $$
#variable_conflict use_column
DECLARE
    wanted integer := cardinality(destinations);
BEGIN
    IF wanted IS NULL OR cardinality(payloads) IS DISTINCT FROM wanted OR cardinality(order_keys) <> wanted
        OR cardinality(message_ids) <> wanted OR cardinality(headers) <> wanted
    THEN
        RAISE EXCEPTION 'expected arrays of equal length in all parameters, found others: pass one element for each message'
            USING ERRCODE = '22023';
    END IF;
    IF EXISTS (
        SELECT FROM unnest(destinations, payloads, order_keys, message_ids, headers)
            AS g (destination, payload, order_key, message_id, headers)
        WHERE g.destination IS NULL OR octet_length(g.destination) > 1024 OR g.payload IS NULL
            OR octet_length(g.order_key) NOT BETWEEN 1 AND 1024
            OR octet_length(g.message_id) NOT BETWEEN 1 AND 1024
            OR jsonb_typeof(g.headers) <> 'object'
            -- In this mode of paths the elements of an array are tested one by one.
            OR jsonb_path_exists(g.headers, 'lax $.* ? (@.type() != "string")')
    ) THEN
        RAISE EXCEPTION 'expected for each message a destination of at most 1024 bytes, a payload, null or 1 to 1024 bytes as order key and as id, and as headers an object of texts and arrays of texts, found a message without one of them'
            USING ERRCODE = '22023', HINT = 'Cast the values of headers to text. Shorten an order key, for example by a hash, or the destination.';
    END IF;
    -- A relay recognizes open writers by this lock, which is taken before an id is allocated.
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

-- Writes one message: see hapax_outbox_put_all. Returns its id. The payload is bytea: for JSON or
-- another text call hapax_outbox_put_text.
CREATE OR REPLACE FUNCTION hapax_outbox_put(
    destination text, payload bytea, order_key text DEFAULT NULL, message_id text DEFAULT NULL,
    headers jsonb DEFAULT NULL
) RETURNS text
LANGUAGE sql
SET search_path = @schema@, pg_temp
AS $$
    SELECT p.message_id
    FROM hapax_outbox_put_all(ARRAY[destination], ARRAY[payload], ARRAY[order_key],
        ARRAY[message_id], ARRAY[headers]) p
$$;

-- Returns messages to publish, for a relay: shard by shard in the order of `shards`, those with an id
-- above the shard's floor, in the order of ids. Returns at most `max_messages`, and none after the
-- headers and payloads of the messages before it have `max_bytes` bytes. Leaves out messages whose order
-- key has a dead letter or is in `skipped`, and those in `known_shards` and `known_ids`. The first row
-- has the epoch only.
CREATE OR REPLACE FUNCTION hapax_outbox_poll(
    shards bigint[], floors bigint[], known_shards bigint[], known_ids bigint[], skipped text[],
    max_messages bigint, max_bytes bigint
) RETURNS TABLE (
    epoch bigint, shard bigint, id bigint, message_id text, destination text, order_key text,
    headers text, payload bytea, age_ms bigint
)
LANGUAGE sql STABLE
SET search_path = @schema@, pg_temp
AS $$
    SELECT e.epoch, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL FROM hapax_outbox_epoch e
    UNION ALL (
        SELECT NULL, m.shard, m.id, m.message_id, m.destination, m.order_key, m.headers, m.payload,
            (extract(epoch FROM clock_timestamp() - m.created_at) * 1000)::bigint
        FROM (
            -- The length of a payload is known without reading it.
            SELECT l.*, sum(octet_length(l.headers) + octet_length(l.payload)) OVER (
                ORDER BY l.nr, l.id ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
            ) AS bytes_before
            FROM (
                SELECT f.nr, f.shard, o.id, o.message_id, o.destination, o.order_key,
                    o.headers::text AS headers, o.payload, o.created_at
                FROM unnest(shards, floors) WITH ORDINALITY AS f (shard, floor, nr)
                CROSS JOIN LATERAL (
                    SELECT o.* FROM hapax_outbox o
                    WHERE o.shard = hapax_check_shard(f.shard) AND o.id > f.floor
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
                    ORDER BY o.id LIMIT max_messages
                ) o
                LIMIT max_messages
            ) l
        ) m
        WHERE coalesce(m.bytes_before, 0) < max_bytes
        ORDER BY m.nr, m.id
    )
$$;

-- Deletes messages that were published.
CREATE OR REPLACE FUNCTION hapax_outbox_remove(shards bigint[], ids bigint[]) RETURNS void
LANGUAGE sql
SET search_path = @schema@, pg_temp
AS $$
    DELETE FROM hapax_outbox o USING unnest(shards, ids) AS g (shard, id)
    WHERE o.shard = hapax_check_shard(g.shard) AND o.id = g.id
$$;

-- Returns the last allocated id, and the open transactions that may have allocated one, for
-- a relay: once all of them have ended, no message with such an id is still to appear.
CREATE OR REPLACE FUNCTION hapax_outbox_writers() RETURNS TABLE (last_id bigint, writers text[])
LANGUAGE plpgsql VOLATILE
SET search_path = @schema@, pg_temp
AS $$
#variable_conflict use_column
BEGIN
    -- Read first: a transaction that allocates a larger id afterwards does not matter.
    SELECT CASE WHEN s.is_called THEN s.last_value ELSE 0 END INTO last_id FROM hapax_outbox_ids s;
    -- PREPARE TRANSACTION changes the name of a transaction, so all prepared ones get one name.
    SELECT coalesce(
        array_agg(DISTINCT CASE WHEN l.pid IS NULL THEN 'prepared' ELSE l.virtualtransaction END), '{}'
    ) INTO writers
    FROM pg_locks l
    WHERE l.relation = 'hapax_outbox'::regclass AND l.mode = 'RowExclusiveLock'
        AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database());
    RETURN NEXT;
END
$$;

-- Returns the id of the first message above the floor of each shard, if there is one, for a relay.
CREATE OR REPLACE FUNCTION hapax_outbox_first_above(shards bigint[], floors bigint[])
RETURNS TABLE (shard bigint, id bigint)
LANGUAGE sql STABLE
SET search_path = @schema@, pg_temp
AS $$
    SELECT f.shard, o.id FROM unnest(shards, floors) AS f (shard, floor)
    CROSS JOIN LATERAL (
        SELECT o.id FROM hapax_outbox o WHERE o.shard = hapax_check_shard(f.shard) AND o.id > f.floor
        ORDER BY o.id LIMIT 1
    ) o
$$;

-- Returns the headers of a message one by one, in the order of their names.
CREATE OR REPLACE FUNCTION hapax_outbox_headers(headers jsonb) RETURNS TABLE (name text, value text)
LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$
    SELECT h.key, v.value FROM pg_catalog.jsonb_each(headers) AS h (key, value)
    CROSS JOIN LATERAL pg_catalog.jsonb_array_elements_text(
        CASE WHEN pg_catalog.jsonb_typeof(h.value) OPERATOR(pg_catalog.=) 'array' THEN h.value
            ELSE pg_catalog.jsonb_build_array(h.value) END
    ) WITH ORDINALITY AS v (value, at)
    ORDER BY h.key, v.at
$$;

-- Moves a message that cannot be published to the dead letters. Later ones with its order key wait.
CREATE OR REPLACE FUNCTION hapax_outbox_park(
    dead_letter_id bytea, outbox_shard bigint, outbox_id bigint, error text, attempts integer
) RETURNS boolean
LANGUAGE plpgsql
SET search_path = @schema@, pg_temp
AS $$
#variable_conflict use_column
DECLARE
    row hapax_outbox;
BEGIN
    DELETE FROM hapax_outbox o WHERE o.shard = hapax_check_shard(outbox_shard) AND o.id = outbox_id
    RETURNING * INTO row;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    INSERT INTO hapax_dead_letters (
        id, consumer, message_id, origin, reason, attempts, error, order_key, header_names,
        header_values, payload, first_at, last_at, outbox_shard, outbox_id
    ) VALUES (
        dead_letter_id, 'hapax-outbox', row.message_id, row.destination, 'unpublishable', attempts, error,
        row.order_key,
        ARRAY(SELECT h.name FROM hapax_outbox_headers(row.headers) h),
        ARRAY(SELECT convert_to(h.value, 'UTF8') FROM hapax_outbox_headers(row.headers) h),
        row.payload, row.created_at, clock_timestamp(), row.shard, row.id
    ) ON CONFLICT DO NOTHING;
    IF NOT FOUND AND NOT EXISTS (
        SELECT FROM hapax_dead_letters d WHERE d.id = dead_letter_id AND d.message_id = row.message_id
    ) THEN
        RAISE EXCEPTION 'expected no dead letter of another message under this id, found one'
            USING ERRCODE = '23505';
    END IF;
    RETURN true;
END
$$;

-- Moves a dead letter of the outbox back to its position, before the messages with its order key
-- that wait.
CREATE OR REPLACE FUNCTION hapax_outbox_redrive(dead_letter_id bytea) RETURNS boolean
LANGUAGE plpgsql
SET search_path = @schema@, pg_temp
AS $$
#variable_conflict use_column
DECLARE
    row hapax_dead_letters;
BEGIN
    DELETE FROM hapax_dead_letters d WHERE d.id = dead_letter_id AND d.outbox_id IS NOT NULL
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
    -- Ids are allocated again after hapax_outbox_ids was reset, or left out of a logical
    -- replication.
    IF NOT FOUND AND NOT EXISTS (
        SELECT FROM hapax_outbox o
        WHERE o.shard = row.outbox_shard AND o.id = row.outbox_id AND o.message_id = row.message_id
    ) THEN
        RAISE EXCEPTION 'expected no other message at the position of the dead letter, shard % and id %, found one',
            row.outbox_shard, row.outbox_id
            USING ERRCODE = '23505',
                HINT = 'Set the sequence hapax_outbox_ids above all ids, and redrive the dead letter once that message is published.';
    END IF;
    -- Relays read below their floors again, by the same snapshot that shows the row.
    UPDATE hapax_outbox_epoch SET epoch = epoch + 1;
    RETURN true;
END
$$;

-- Returns the age in ms of the oldest message that is not published, 0 without one, the number of
-- messages, counted up to `max_messages`, and the number of blocked order keys: those with a dead letter. Ids
-- are allocated when messages are written, so that the oldest message of a shard has its least id.
CREATE OR REPLACE FUNCTION hapax_outbox_lag(max_messages bigint DEFAULT 10000)
RETURNS TABLE (oldest_ms bigint, messages bigint, blocked_keys bigint)
LANGUAGE sql VOLATILE
SET search_path = @schema@, pg_temp
AS $$
    SELECT
        coalesce((extract(epoch FROM clock_timestamp() - min(f.created_at)) * 1000)::bigint, 0),
        (SELECT count(*) FROM (SELECT FROM hapax_outbox LIMIT max_messages) o),
        (SELECT count(DISTINCT d.order_key) FROM hapax_dead_letters d
            WHERE d.consumer = 'hapax-outbox')
    FROM generate_series(0, 31) AS s (shard)
    CROSS JOIN LATERAL (
        SELECT o.created_at FROM hapax_outbox o WHERE o.shard = s.shard::smallint
        ORDER BY o.id LIMIT 1
    ) f
$$;

-- Rejects limits of a gap that are not valid.
CREATE OR REPLACE FUNCTION hapax_check_gap(max_wait interval, over_limit text) RETURNS void
LANGUAGE plpgsql IMMUTABLE
SET search_path = @schema@, pg_temp
AS $$
BEGIN
    IF over_limit IS NULL OR over_limit NOT IN ('fetch', 'dead-letter', 'accept') THEN
        RAISE EXCEPTION 'expected over_limit fetch, dead-letter or accept, found %: pass one of these', coalesce(over_limit, 'null')
            USING ERRCODE = '22023';
    END IF;
    IF max_wait IS NULL OR max_wait NOT BETWEEN interval '0' AND interval '36500 days' THEN
        RAISE EXCEPTION 'expected max_wait of 0 to 100 years, found %: pass one of these', coalesce(max_wait::text, 'null')
            USING ERRCODE = '22023';
    END IF;
END
$$;

-- Applies the message `number`, from 1, of an aggregate in the transaction of the caller, or stores
-- it after a gap. Returns the step that the caller takes:
--   'apply'        handle it in this transaction; then call hapax_sequence_next
--   'duplicate'    acknowledge it: it was applied, or waits
--   'wait'         acknowledge it: it was stored after a gap, and waits
--   'dead-letter'  store a dead letter: the gap before it exceeds a limit
--   'fetch'        fetch the messages from `first` to `last`, and do not acknowledge this one
--   'skip'         the gap was skipped up to a message that waits: call hapax_sequence_next until it
--                  returns nothing, then call this function again
-- After 'apply' the number counts as applied once the transaction commits. `over_limit` decides
-- about a message after a gap if `max_waiting` messages wait or the gap is older than
-- `max_wait`: 'fetch', 'dead-letter' or 'accept', which skips the gap. Calls for other messages of the
-- aggregate wait until the transaction ends; after 500 ms they fail with 55P03: hold their messages.
-- Error 22023: `number` is not 1 to 2^63 - 2, `max_waiting` is negative, `max_wait` is not 0 to 100 years,
-- `over_limit` is another text, or a name or id is empty or too long.
CREATE OR REPLACE FUNCTION hapax_sequence(
    consumer text, aggregate text, number bigint, message_id text, headers jsonb, payload bytea,
    max_waiting integer, max_wait interval, over_limit text
) RETURNS TABLE (step text, first bigint, last bigint)
LANGUAGE plpgsql
SET search_path = @schema@, pg_temp
SET lock_timeout = '500ms'
AS $$
#variable_conflict use_column
DECLARE
    key uuid := hapax_scoped_hash(consumer, aggregate);
    seen hapax_sequences;
    lowest bigint;
    moment timestamptz;
BEGIN
    PERFORM hapax_check_consumer(consumer);
    PERFORM hapax_check_text('an aggregate', aggregate);
    PERFORM hapax_check_text('a message id', message_id);
    PERFORM hapax_check_gap(max_wait, over_limit);
    IF number IS NULL OR number NOT BETWEEN 1 AND 9223372036854775806 THEN
        RAISE EXCEPTION 'expected a number of 1 to 9223372036854775806, found %: pass one of these', coalesce(number::text, 'null')
            USING ERRCODE = '22023';
    END IF;
    IF max_waiting IS NULL OR max_waiting < 0 THEN
        RAISE EXCEPTION 'expected max_waiting of at least 0, found %: pass one of these', coalesce(max_waiting::text, 'null')
            USING ERRCODE = '22023';
    END IF;
    -- The message is acknowledged after this.
    PERFORM hapax_commit_durably();
    INSERT INTO hapax_sequences (id, applied, waiting, consumer, aggregate)
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
                gap_since = CASE WHEN s.waiting > 0 THEN clock_timestamp() END
            WHERE s.id = key;
            step := 'apply';
            EXIT;
        ELSIF seen.waiting < max_waiting
            AND moment < coalesce(seen.gap_since, moment) + max_wait
        THEN
            INSERT INTO hapax_sequence_messages AS m (id, number, message_id, headers, payload)
            VALUES (key, hapax_sequence.number, hapax_sequence.message_id,
                coalesce(hapax_sequence.headers, '{}'), hapax_sequence.payload);
            UPDATE hapax_sequences s SET waiting = s.waiting + 1,
                gap_since = coalesce(s.gap_since, clock_timestamp())
            WHERE s.id = key;
            step := 'wait';
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
        -- A message that waits may be the first one after the gap.
        IF lowest < number THEN
            step := 'skip';
            EXIT;
        END IF;
    END LOOP;
    RETURN NEXT;
END
$$;

-- Removes the message of an aggregate that waits and is next, and returns it with the step that the
-- caller takes in this transaction, before it calls again:
--   'apply'        handle it; it counts as applied once the transaction commits
--   'duplicate'    nothing: its number was applied before
--   'dead-letter'  store a dead letter: the gap before it is older than `max_wait`
--   'fetch'        only `number` is set, the first that is missing; no message was removed. Fetch the
--                  missing messages, and do not call again
-- Returns no row if no message waits, or if the gap is younger than `max_wait`.
CREATE OR REPLACE FUNCTION hapax_sequence_next(
    consumer text, aggregate text, max_wait interval, over_limit text
) RETURNS TABLE (step text, number bigint, message_id text, headers jsonb, payload bytea)
LANGUAGE plpgsql
SET search_path = @schema@, pg_temp
SET lock_timeout = '500ms'
AS $$
#variable_conflict use_column
DECLARE
    key uuid := hapax_scoped_hash(consumer, aggregate);
    seen hapax_sequences;
    lowest hapax_sequence_messages;
BEGIN
    PERFORM hapax_check_consumer(consumer);
    PERFORM hapax_check_text('an aggregate', aggregate);
    PERFORM hapax_check_gap(max_wait, over_limit);
    PERFORM hapax_commit_durably();
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
        waiting = s.waiting - 1,
        applied = CASE WHEN step = 'apply' THEN lowest.number ELSE s.applied END,
        gap_since = CASE
            WHEN s.waiting = 1 THEN NULL
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
