//! The functions and the migrations mean the same whatever the settings of the database, role or session are.

use hapax_postgres_messages::message_migrations;
use hapax_testkit::servers::PostgresServer;

use super::server;

/// Settings with a value that is not the default, and that could change what SQL means.
const SETTINGS: [(&str, &str); 33] = [
    ("standard_conforming_strings", "off"),
    ("backslash_quote", "on"),
    ("escape_string_warning", "off"),
    ("search_path", "''"),
    ("search_path", "'pg_temp', 'pg_catalog'"),
    ("search_path", "'other', 'public'"),
    ("DateStyle", "'German, DMY'"),
    ("IntervalStyle", "sql_standard"),
    ("TimeZone", "'Pacific/Chatham'"),
    ("bytea_output", "escape"),
    ("extra_float_digits", "-15"),
    ("default_transaction_isolation", "serializable"),
    ("default_transaction_isolation", "'repeatable read'"),
    ("default_transaction_read_only", "on"),
    ("default_transaction_deferrable", "on"),
    ("check_function_bodies", "off"),
    ("quote_all_identifiers", "on"),
    ("plpgsql.variable_conflict", "use_variable"),
    ("plpgsql.variable_conflict", "use_column"),
    ("plpgsql.extra_errors", "'shadowed_variables,too_many_rows'"),
    ("row_security", "off"),
    ("lock_timeout", "'1s'"),
    ("array_nulls", "off"),
    ("transform_null_equals", "on"),
    ("default_tablespace", "pg_default"),
    ("default_toast_compression", "pglz"),
    ("client_min_messages", "error"),
    ("synchronous_commit", "off"),
    ("xmloption", "document"),
    ("lc_numeric", "'C'"),
    ("enable_indexscan", "off"),
    ("plan_cache_mode", "force_generic_plan"),
    ("session_replication_role", "replica"),
];

/// Calls of every function with another result than an error, and what they return. Names are qualified, since the
/// search path is one of the settings.
const CALLS: &str = r#"BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE NOT DEFERRABLE;
SELECT item, state FROM public.hapax_inbox('c', ARRAY['a', 'ü', 'a'], ARRAY[convert_to('x', 'UTF8'), NULL, convert_to('y', 'UTF8')], '1 day');
SELECT public.hapax_inbox_insert('c', ARRAY[public.hapax_scoped_hash('c', 'a')], ARRAY[public.hapax_payload_digest(convert_to('x', 'UTF8'))], '1 day');
SELECT public.hapax_scoped_hash('c', 'ü'), public.hapax_payload_digest(convert_to('x', 'UTF8'));
SELECT expires_at - clock_timestamp() BETWEEN '23 h 59 min' AND '24 h 2 s' FROM public.hapax_inbox LIMIT 1;
SELECT public.hapax_limit_timeout('statement_timeout', 60000), public.hapax_limit_timeout('statement_timeout', 90000);
SELECT public.hapax_inbox_park('c', 'a'), public.hapax_inbox_release('c', 'ü'), public.hapax_inbox_purge(10);
SELECT public.hapax_inbox_failed('c', 'm', 'no', '1 h');
SELECT attempt, crashes FROM public.hapax_inbox_attempt('c', 'm');
SELECT attempt, crashes FROM public.hapax_inbox_attempt('c', 'a');
SELECT public.hapax_dead_letter_put(sha256('l'), 'c', 'a', 'nats://o', 'rejected', 1, 'no', 'k', ARRAY['h'], ARRAY[decode('00ff', 'hex')], decode('005c', 'hex'), to_timestamp(1), to_timestamp(2));
SELECT public.hapax_dead_letter_states('c', ARRAY['k', NULL], ARRAY[sha256('n'), sha256('l')], '--');
SELECT public.hapax_dead_letter_states('d', ARRAY[NULL::text], ARRAY[NULL::bytea], '-') IS NULL;
SELECT public.hapax_dead_letter_redrive(sha256('l'), 'ann', 'fixed'), public.hapax_dead_letter_remove(sha256('l'));
SELECT public.hapax_dead_letter_drop(sha256('l'), 'ann', 'a test');
SELECT public.hapax_outbox_put_text('d', '{"path": "C:' || chr(92) || 'temp"}', 'k', 'm-1', '{"a": ["1", "2"], "b": "3"}');
SELECT item, message_id FROM public.hapax_outbox_put_all(ARRAY['d', 'e'], ARRAY[decode('005c', 'hex'), decode('', 'hex')], ARRAY['k', NULL], ARRAY['m-2', 'm-3']);
SELECT epoch, shard, id, message_id, destination, order_key, headers, encode(payload, 'hex'), age_ms >= 0
    FROM public.hapax_outbox_poll((SELECT array_agg(n::bigint) FROM generate_series(0, 31) n), array_fill(0::bigint, ARRAY[32]), '{}', '{}', '{}', 10, 10000) ORDER BY id NULLS FIRST;
SELECT last_id, cardinality(writers) FROM public.hapax_outbox_writers();
SELECT shard, id FROM public.hapax_outbox_first_above(ARRAY[public.hapax_outbox_shard('k')::bigint], ARRAY[0::bigint]);
SELECT name, value FROM public.hapax_outbox_headers('{"a": ["1", "2"], "b": "3"}');
SELECT public.hapax_outbox_park(sha256('o'), public.hapax_outbox_shard('k'), 1, 'too large', 1);
SELECT messages, blocked_keys FROM public.hapax_outbox_lag();
SELECT public.hapax_outbox_redrive(sha256('o'));
SELECT headers, encode(payload, 'hex') FROM public.hapax_outbox WHERE id = 1;
SELECT public.hapax_outbox_remove(array_agg(shard::bigint), array_agg(id)) IS NULL FROM public.hapax_outbox;
SELECT step, first, last FROM public.hapax_sequence('c', 'cart', 2, 's-2', NULL, decode('5c', 'hex'), 10, '1 h', 'fetch');
SELECT step, first, last FROM public.hapax_sequence('c', 'cart', 1, 's-1', NULL, decode('5c', 'hex'), 10, '1 h', 'fetch');
SELECT consumer, aggregate, missing, waiting FROM public.hapax_sequence_gaps;
SELECT step, number, message_id, headers, encode(payload, 'hex') FROM public.hapax_sequence_next('c', 'cart', '1 h', 'fetch');
SELECT next_offset, handled_millis, fence, is_new FROM public.hapax_position_acquire('c', 't', 0, 5);
SELECT public.hapax_position_advance('c', 't', 0, 1, 5, 9, 17), public.hapax_position_advance('c', 't', 0, 1, 5, 9, 17), public.hapax_position_advance('c', 't', 0, 2, 9, 10, 17);
SELECT public.hapax_position_set('c', 't', 0, 7);
SELECT count(*) FROM public.hapax_dead_letter_decisions;
COMMIT;
"#;

async fn results(server: &PostgresServer, database: &str, setting: Option<(&str, &str)>) -> String {
    server.create_database(database).await;
    server.sql(database, "CREATE SCHEMA other").await;
    if let Some((name, value)) = setting {
        server.sql("postgres", &format!("ALTER DATABASE {database} SET {name} = {value}")).await;
    }
    let script = message_migrations(&Default::default());
    for _ in 0..2 {
        server.sql(database, &script).await;
    }
    server.sql(database, CALLS).await
}

#[tokio::test]
async fn functions_and_migrations_mean_the_same_with_each_setting_of_a_database() {
    let server = server().await;
    let expected = results(&server, "usual", None).await;
    assert!(
        expected.contains("1|new\n2|new\n3|mismatch") && expected.contains("advanced|done|fenced")
    );
    for (number, (name, value)) in SETTINGS.into_iter().enumerate() {
        let found = results(&server, &format!("with_{number}"), Some((name, value))).await;
        assert_eq!(found, expected, "{name} = {value}");
    }
}

#[tokio::test]
async fn functions_have_a_literal_search_path_or_name_the_schema_of_all_that_they_use() {
    let server = server().await;
    let others = "SELECT proname FROM pg_proc WHERE proname LIKE 'hapax%'
        AND NOT coalesce('search_path=public, pg_temp' = ANY (proconfig), false) ORDER BY proname";
    // Inlined where they are used, so that they have no settings.
    let inlined =
        "hapax_outbox_headers\nhapax_outbox_shard\nhapax_payload_digest\nhapax_scoped_hash";
    assert_eq!(server.sql("postgres", others).await, inlined);
    // A caller whose own objects would be found before those of the server.
    let calls = "SELECT public.hapax_scoped_hash('c', 'm'), public.hapax_payload_digest('x'),
        public.hapax_outbox_shard('k'), (SELECT count(*) FROM public.hapax_outbox_headers('{\"a\": \"1\"}'))";
    let expected = server.sql("postgres", calls).await;
    let traps = "CREATE SCHEMA traps;
        CREATE FUNCTION traps.sha256(bytea) RETURNS bytea LANGUAGE sql AS $$ SELECT 'trap'::bytea $$;
        CREATE FUNCTION traps.encode(bytea, text) RETURNS text LANGUAGE sql AS $$ SELECT repeat('0', 32) $$;
        CREATE FUNCTION traps.jsonb_typeof(jsonb) RETURNS text LANGUAGE sql AS $$ SELECT 'trap' $$;
        CREATE FUNCTION traps.get_byte(bytea, integer) RETURNS integer LANGUAGE sql AS $$ SELECT 99 $$;
        SET search_path = traps, pg_catalog, public;";
    let found = server.sql("postgres", &format!("{traps} {calls}")).await;
    assert_eq!(found.lines().last().unwrap_or_default(), expected);
}
