-- Writes one message whose payload is a text, such as JSON, as its UTF-8 bytes: see
-- hapax_outbox_put_all. Returns its message id. Cast json and jsonb to text. It is no overload of
-- hapax_outbox_put: PostgreSQL would prefer that overload for literals that are meant as bytea.
CREATE OR REPLACE FUNCTION hapax_outbox_put_text(
    destination text, payload text, order_key text DEFAULT NULL, message_id text DEFAULT NULL,
    headers jsonb DEFAULT NULL
) RETURNS text
LANGUAGE sql
SET search_path = @schema@, pg_temp
AS $$
    SELECT hapax_outbox_put(destination, convert_to(payload, 'UTF8'), order_key, message_id, headers)
$$;
