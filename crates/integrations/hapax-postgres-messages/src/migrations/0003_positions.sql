DO $tables$
BEGIN
IF EXISTS (SELECT FROM hapax_messages_migrations WHERE version = 3) THEN
    RETURN;
END IF;

-- Positions of the partitions of a log such as Kafka's. They advance in the transactions that write the
-- effects of records, so that a record is handled once however often it is delivered.
CREATE SEQUENCE IF NOT EXISTS hapax_position_fences;
CREATE TABLE IF NOT EXISTS hapax_positions (
    consumer       text NOT NULL,
    topic          text NOT NULL,
    partition      integer NOT NULL,
    next_offset    bigint NOT NULL,   -- of the next record to handle
    handled_millis bigint,            -- timestamp of the last record that was handled
    fence          bigint NOT NULL,   -- fencing token of the owner, of hapax_position_fences
    changed_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (consumer, topic, partition)
) WITH (
    -- Each transaction writes a new version of a row, which stays on its page.
    fillfactor = 20
);

END
$tables$;

-- Rejects a position that cannot be kept.
CREATE OR REPLACE FUNCTION hapax_check_position(
    consumer text, topic text, partition integer, next_offset bigint
) RETURNS void
LANGUAGE plpgsql IMMUTABLE
SET search_path = @schema@, pg_temp
AS $$
BEGIN
    PERFORM hapax_check_consumer(consumer);
    PERFORM hapax_check_text('a topic', topic);
    IF partition IS NULL OR partition < 0 OR next_offset IS NULL OR next_offset < 0 THEN
        RAISE EXCEPTION 'expected a partition and an offset of at least 0, found % and %: pass such numbers',
            coalesce(partition::text, 'null'), coalesce(next_offset::text, 'null')
            USING ERRCODE = '22023';
    END IF;
END
$$;

-- Acquires a partition for a new owner, whose fencing token no other owner has, in a transaction of its own.
-- Waits for a transaction of the previous owner; after 5 s the error is 55P03: call again.
-- `first_offset` is the position of a partition that has none (`is_new`). The owner reads the partition
-- from `next_offset` on. If the timestamp of the record before it is not `handled_millis`, the topic was
-- created again.
CREATE OR REPLACE FUNCTION hapax_position_acquire(
    consumer text, topic text, partition integer, first_offset bigint
) RETURNS TABLE (next_offset bigint, handled_millis bigint, fence bigint, is_new boolean)
LANGUAGE plpgsql
SET search_path = @schema@, pg_temp
SET lock_timeout = '5s'
AS $$
#variable_conflict use_column
BEGIN
    PERFORM hapax_check_position(consumer, topic, partition, first_offset);
    -- The owner reads from the position on, and commits it to the broker.
    PERFORM hapax_commit_durably();
    RETURN QUERY
    INSERT INTO hapax_positions AS p (consumer, topic, partition, next_offset, fence)
    VALUES (consumer, topic, partition, first_offset, nextval('hapax_position_fences'))
    ON CONFLICT ON CONSTRAINT hapax_positions_pkey DO UPDATE
        SET fence = EXCLUDED.fence, changed_at = clock_timestamp()
    RETURNING p.next_offset, p.handled_millis, p.fence, p.xmax = 0;
END
$$;

-- Advances the position of a partition in the transaction of the caller, which writes the effects of the
-- records from `from_offset` up to, and without, `to_offset`. `millis` is the timestamp of the last of them.
-- Call it first. Returns:
--   'advanced'  write the effects, and commit
--   'done'      the records were handled in an earlier transaction, whose COMMIT had no reply: commit
--               without effects
--   'fenced'    another owner has acquired the partition, or the position is another one: roll back, and
--               acquire the partition again if it is still assigned to this process
-- Error 55P03: an earlier transaction with the position is still open: hold the records.
CREATE OR REPLACE FUNCTION hapax_position_advance(
    consumer text, topic text, partition integer, fence bigint, from_offset bigint, to_offset bigint,
    millis bigint
) RETURNS text
LANGUAGE plpgsql
SET search_path = @schema@, pg_temp
SET lock_timeout = '500ms'
AS $$
#variable_conflict use_column
BEGIN
    PERFORM hapax_check_position(consumer, topic, partition, from_offset);
    IF fence IS NULL OR to_offset IS NULL OR to_offset <= from_offset THEN
        RAISE EXCEPTION 'expected a fencing token, and to_offset above from_offset, found %, % and %: pass such numbers',
            coalesce(fence::text, 'null'), coalesce(to_offset::text, 'null'), from_offset
            USING ERRCODE = '22023';
    END IF;
    PERFORM hapax_commit_durably();
    UPDATE hapax_positions p
    SET next_offset = to_offset, handled_millis = millis, changed_at = clock_timestamp()
    WHERE p.consumer = hapax_position_advance.consumer AND p.topic = hapax_position_advance.topic
        AND p.partition = hapax_position_advance.partition
        AND p.fence = hapax_position_advance.fence AND p.next_offset = from_offset;
    IF FOUND THEN
        RETURN 'advanced';
    END IF;
    -- A statement of its own: it sees what was committed while the update waited.
    IF EXISTS (
        SELECT FROM hapax_positions p
        WHERE p.consumer = hapax_position_advance.consumer AND p.topic = hapax_position_advance.topic
            AND p.partition = hapax_position_advance.partition
            AND p.fence = hapax_position_advance.fence AND p.next_offset >= to_offset
    ) THEN
        -- A transaction without a write would wait for no synchronous standby.
        PERFORM pg_logical_emit_message(true, 'hapax', '');
        RETURN 'done';
    END IF;
    RETURN 'fenced';
END
$$;

-- Sets the position of a partition, for an operator: `next_offset` is that of the next record to handle.
-- The owner is fenced, acquires the partition again and continues there. Records that are passed are not
-- handled; if the new position is an earlier one, the records from it on are handled again, unless the
-- consumer keeps ids. Returns whether the partition had a position.
CREATE OR REPLACE FUNCTION hapax_position_set(
    consumer text, topic text, partition integer, next_offset bigint
) RETURNS boolean
LANGUAGE plpgsql
SET search_path = @schema@, pg_temp
SET lock_timeout = '5s'
AS $$
#variable_conflict use_column
DECLARE
    existed boolean;
BEGIN
    PERFORM hapax_check_position(consumer, topic, partition, next_offset);
    INSERT INTO hapax_positions AS p (consumer, topic, partition, next_offset, fence)
    VALUES (consumer, topic, partition, next_offset, nextval('hapax_position_fences'))
    ON CONFLICT ON CONSTRAINT hapax_positions_pkey DO UPDATE SET
        next_offset = EXCLUDED.next_offset, handled_millis = NULL, fence = EXCLUDED.fence,
        changed_at = clock_timestamp()
    RETURNING p.xmax <> 0 INTO existed;
    RETURN existed;
END
$$;

-- Returns for each message of a consumer whether a dead letter excludes that it is handled, by a code:
--   n  none
--   d  it is a duplicate: its own dead letter exists and it was not redriven from it, or it was redriven
--      from one that does not exist any more, or from that of an earlier message of the call
--   b  a dead letter with its order key is in front of it
-- `order_keys` are null for messages without an order, `dead_letter_ids` are those that the messages have
-- or would have, and `redriven` has a letter for each, `r` for one that was redriven from it. Returns null
-- if the consumer has no dead letter and nothing was redriven: then none excludes any.
CREATE OR REPLACE FUNCTION hapax_dead_letter_states(
    consumer text, order_keys text[], dead_letter_ids bytea[], redriven text
) RETURNS text
LANGUAGE plpgsql
SET search_path = @schema@, pg_temp
AS $$
#variable_conflict use_column
BEGIN
    IF strpos(redriven, 'r') = 0 AND NOT EXISTS (
        SELECT FROM hapax_dead_letters d WHERE d.consumer = hapax_dead_letter_states.consumer
    ) THEN
        RETURN NULL;
    END IF;
    RETURN (
        SELECT string_agg(CASE
            WHEN (own.id IS NULL) = g.is_redriven OR g.is_redriven AND g.nth > 1 THEN 'd'
            WHEN EXISTS (
                SELECT FROM hapax_dead_letters d
                WHERE d.consumer = hapax_dead_letter_states.consumer AND d.order_key = g.order_key
                    AND (own.id IS NULL OR d.number < own.number)
            ) THEN 'b'
            ELSE 'n'
        END, '' ORDER BY g.at)
        FROM (
            SELECT u.order_key, u.id, u.at, r.letter = 'r' AS is_redriven,
                row_number() OVER (PARTITION BY u.id, r.letter ORDER BY u.at) AS nth
            FROM unnest(order_keys, dead_letter_ids) WITH ORDINALITY AS u (order_key, id, at)
            CROSS JOIN LATERAL substr(redriven, u.at::integer, 1) AS r (letter)
        ) g
        LEFT JOIN hapax_dead_letters own
            ON own.id = g.id AND own.consumer = hapax_dead_letter_states.consumer
    );
END
$$;
