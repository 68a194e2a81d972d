DO $tables$
BEGIN
IF EXISTS (SELECT FROM hapax_messages_migrations WHERE version = 4) THEN
    RETURN;
END IF;

-- A row that a service inserts without the functions: no relay would find another shard, and an id of another
-- length is none. NOT VALID: the rows that are there are not read. Writers queue behind a lock request that waits, for
-- a transaction that has the outbox open: it gives up soon, and the script fails and may be run again.
SET LOCAL lock_timeout = '500ms';
ALTER TABLE hapax_outbox ADD CONSTRAINT hapax_outbox_bounds CHECK (
    shard BETWEEN 0 AND 31 AND id > 0 AND octet_length(message_id) BETWEEN 1 AND 1024
) NOT VALID;
SET LOCAL lock_timeout = '5s';

END
$tables$;
