-- Records, one row for each key.
--
-- Only the primary key and sweep_at are indexed, and what claims, renewals and completions write
-- leaves both alone: so an update needs no new index entries (HOT), as long as the page has room,
-- which is what the fill factor is for.
CREATE TABLE IF NOT EXISTS hapax_cells (
    -- Microseconds since 1970, by this server's clock.
    sweep_at    bigint,           -- when the sweep looks at it, never later than due_at; null: never
    due_at      bigint,           -- from when on it may be removed; null: never
    keep_until  bigint,           -- from when on it counts as absent; null: never
    lease_until bigint NOT NULL,
    fence       bigint NOT NULL CHECK (fence >= 0),
    key         bytea NOT NULL PRIMARY KEY CHECK (octet_length(key) = 32),
    tag         bytea NOT NULL CHECK (octet_length(tag) = 16),
    state       text NOT NULL CHECK (state IN ('in-flight', 'unknown', 'done', 'released')),
    sealed      bytea NOT NULL,
    CHECK ((keep_until IS NULL) = (due_at IS NULL)),
    CHECK (due_at >= keep_until)
) WITH (
    fillfactor = 70,
    -- A day of records is replaced every day: clean up after a twentieth of it, not a fifth.
    autovacuum_vacuum_scale_factor = 0.05,
    autovacuum_analyze_scale_factor = 0.05,
    autovacuum_vacuum_insert_scale_factor = 0.1
);

-- Sealed under a secret it does not compress; trying costs time.
ALTER TABLE hapax_cells ALTER COLUMN sealed SET STORAGE EXTERNAL;

CREATE INDEX IF NOT EXISTS hapax_cells_sweep ON hapax_cells (sweep_at);

-- Which secrets records were written under, by a hash that does not tell them.
CREATE TABLE IF NOT EXISTS hapax_secrets (
    name  bytea PRIMARY KEY,
    since timestamptz NOT NULL DEFAULT clock_timestamp()
);
