ALTER TABLE hapax_secrets
    -- Distinguishes these tables from others, and from themselves before they were emptied.
    ADD COLUMN IF NOT EXISTS identity text,
    -- An operator confirmed that these tables replace others.
    ADD COLUMN IF NOT EXISTS confirmed boolean NOT NULL DEFAULT false;

-- Emptied tables have another identity.
CREATE OR REPLACE FUNCTION hapax_emptied() RETURNS trigger LANGUAGE plpgsql
SET search_path = @schema@, pg_temp
AS $$
BEGIN
    UPDATE hapax_secrets SET identity = NULL, confirmed = false;
    RETURN NULL;
END
$$;

DO $$
BEGIN
    IF NOT EXISTS (
        SELECT FROM pg_trigger
        WHERE tgname = 'hapax_emptied' AND tgrelid = 'hapax_cells'::regclass
    ) THEN
        CREATE TRIGGER hapax_emptied AFTER TRUNCATE ON hapax_cells
            FOR EACH STATEMENT EXECUTE FUNCTION hapax_emptied();
    END IF;
END
$$;
