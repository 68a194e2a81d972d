-- One set of tables in a database: a second one would be empty, and operations would execute again.
DO $schema$
DECLARE
    others text := (
        SELECT string_agg(quote_ident(n.nspname), ', ' ORDER BY n.nspname)
        FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
        WHERE c.relname = 'hapax_migrations' AND c.relkind IN ('r', 'p') AND c.relpersistence <> 't'
            AND n.nspname <> '@name@'
    );
BEGIN
    IF others IS NOT NULL AND NOT @beside@ AND to_regclass('@schema@.hapax_migrations') IS NULL THEN
        RAISE EXCEPTION 'expected the tables of a store in the schema @name@ or in none, found them in %', others
            USING ERRCODE = '55000',
                HINT = 'Run the SQL of hapax sql --part store --schema NAME, with the name of that schema; for a store of its own, add --new-schema.';
    END IF;
    IF others IS NOT NULL THEN
        RAISE WARNING 'tables of a store are also in the schema %: their records are not those of the schema @name@', others;
    END IF;
    -- CREATE SCHEMA IF NOT EXISTS requires the privilege for one that exists, too.
    IF to_regnamespace('@schema@') IS NULL THEN
        CREATE SCHEMA @schema@;
    END IF;
END
$schema$;
