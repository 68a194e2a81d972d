//! The functions, as a program in any language calls them.

use hapax_postgres_messages::{SchemaName, message_migrations};
use hapax_testkit::servers::{PostgresServer, PostgresServerOptions};

use super::server;

#[tokio::test]
async fn the_migrations_may_be_run_again() {
    let server = server().await;
    server.sql("postgres", &hapax_postgres_messages::message_migrations(&Default::default())).await;
    let version = "SELECT max(version) FROM hapax_messages_migrations";
    assert_eq!(server.sql("postgres", version).await, "4");
}

#[tokio::test]
async fn a_text_is_written_to_the_outbox_byte_for_byte() {
    let server = server().await;
    let client = super::pool(&server).get().await.unwrap();
    let texts =
        [r#"{"path": "C:\temp", "name": "say \"hi\"", "hex": "\x41"}"#, r"\x4142", "ü 漢", ""];
    for text in texts {
        // As a literal, and as a parameter whose type the driver takes from the function.
        let quoted = text.replace('\'', "''");
        let put = format!("SELECT hapax_outbox_put_text('orders', '{quoted}', 'k', 'literal')");
        client.query_one(&put, &[]).await.unwrap();
        let put = "SELECT hapax_outbox_put_text('orders', $1, message_id => 'parameter')";
        client.query_one(put, &[&text]).await.unwrap();
        let payloads = "SELECT payload FROM hapax_outbox";
        for row in client.query(payloads, &[]).await.unwrap() {
            assert_eq!(row.get::<_, &[u8]>(0), text.as_bytes());
        }
        assert_eq!(client.execute("DELETE FROM hapax_outbox", &[]).await.unwrap(), 2);
    }
    let json =
        "SELECT hapax_outbox_put_text('orders', json_build_object('path', 'C:\\temp')::text)";
    client.query_one(json, &[]).await.unwrap();
    let row = client.query_one("SELECT payload FROM hapax_outbox", &[]).await.unwrap();
    assert_eq!(row.get::<_, &[u8]>(0), br#"{"path" : "C:\\temp"}"#);
    // PostgreSQL reads a literal as the text form of bytea.
    let put = r#"SELECT hapax_outbox_put('orders', '{"path": "C:\\temp"}', message_id => 'bytes')"#;
    client.query_one(put, &[]).await.unwrap();
    let row = "SELECT payload FROM hapax_outbox WHERE message_id = 'bytes'";
    let row = client.query_one(row, &[]).await.unwrap();
    assert_eq!(row.get::<_, &[u8]>(0), br#"{"path": "C:\temp"}"#);
}

#[tokio::test]
async fn migrations_that_are_run_again_neither_wait_for_a_handler_nor_stop_others() {
    let server = server().await;
    let mut connection = super::pool(&server).get().await.unwrap();
    let open = connection.transaction().await.unwrap();
    for used in [
        "SELECT state FROM hapax_inbox('orders', ARRAY['a'])",
        "SELECT hapax_inbox_failed('orders', 'b', 'no')",
        "SELECT hapax_outbox_put('orders', 'x', 'k')",
        "SELECT * FROM hapax_sequence_gaps",
        "DELETE FROM hapax_dead_letters",
    ] {
        open.query(used, &[]).await.unwrap();
    }
    server.sql("postgres", &hapax_postgres_messages::message_migrations(&Default::default())).await;
    open.commit().await.unwrap();
}

#[tokio::test]
async fn after_migrations_that_fail_the_connection_is_in_no_transaction() {
    let server = server().await;
    let client = super::pool(&server).get().await.unwrap();
    let other = SchemaName::new("elsewhere").unwrap();
    hapax_postgres_messages::migrate_messages(&client, &other).await.unwrap_err();
    hapax_postgres_messages::migrate_messages(&client, &Default::default()).await.unwrap();
}

#[tokio::test]
async fn hapax_inbox_returns_new_duplicate_or_mismatch() {
    let server = server().await;
    let enter = |ids: &str, digests: &str| {
        format!(
            "SELECT item, state FROM hapax_inbox('orders', ARRAY[{ids}], ARRAY[{digests}]::bytea[])"
        )
    };
    let all = r"'\x01', '\x01', '\x02', null";
    let entered = server.sql("postgres", &enter("'b', 'a', 'b', 'c'", all)).await;
    assert_eq!(entered, "1|new\n2|new\n3|mismatch\n4|new");
    let again =
        server.sql("postgres", &enter("'b', 'a', 'c', 'd'", r"'\x01', '\x02', '\x03', null")).await;
    assert_eq!(again, "1|duplicate\n2|mismatch\n3|duplicate\n4|new");
    let other = "SELECT state FROM hapax_inbox('invoices', ARRAY['a'])";
    assert_eq!(server.sql("postgres", other).await, "new");
    for (ids, code) in [("''", "22023"), ("null::text", "22023"), ("repeat('x', 1025)", "22023")] {
        let failed = server.try_sql("postgres", &enter(ids, "null")).await.unwrap_err();
        assert!(failed.contains("expected ids of 1 to 1024 bytes"), "{code}: {failed}");
    }
}

#[tokio::test]
async fn duplicates_are_found_by_the_index_of_a_table_that_was_empty() {
    // The statistics stay those of an empty table.
    let options = PostgresServerOptions::new().set("autovacuum", "off");
    let server = PostgresServer::start_with(options).await;
    server.sql("postgres", &message_migrations(&Default::default())).await;
    let sql = |text: &'static str| server.sql("postgres", text);
    let scans = "SELECT seq_scan FROM pg_stat_user_tables WHERE relname = 'hapax_inbox'";
    let before = sql(scans).await;
    // One session, which plans for the table as it was in the beginning.
    sql("SELECT hapax_inbox('orders', ARRAY['a', 'a']);
        SELECT count(*) FROM hapax_inbox('orders', ARRAY(SELECT n::text FROM generate_series(1, 5000) n));
        SELECT count(*) FROM generate_series(1, 20), hapax_inbox('orders', ARRAY['a', 'b'])")
    .await;
    assert_eq!(sql(scans).await, before);
}

#[tokio::test]
async fn attempts_are_counted_from_the_second_on_and_end_with_the_message() {
    let server = server().await;
    let sql = async |text: &str| server.sql("postgres", text).await;
    let attempt = async |id: &str| {
        let text = format!("SELECT attempt, crashes FROM hapax_inbox_attempt('orders', '{id}')");
        sql(&text).await
    };
    // Each in which no failure is noted may be one in which the process ended.
    assert_eq!(attempt("a").await, "2|1");
    assert_eq!(attempt("a").await, "3|2");
    assert_eq!(sql("SELECT hapax_inbox_failed('orders', 'a', 'no')").await, "3");
    assert_eq!(attempt("a").await, "4|0");
    assert_eq!(attempt("a").await, "5|1");
    assert_eq!(sql("SELECT hapax_inbox_failed('orders', 'b', 'no')").await, "1");
    assert_eq!(attempt("b").await, "2|0");
    sql("SELECT hapax_inbox('orders', ARRAY['a'])").await;
    assert_eq!(attempt("a").await, "0|0");
    assert_eq!(sql("SELECT hapax_inbox_release('orders', 'a')").await, "t");
    assert_eq!(sql("SELECT state FROM hapax_inbox('orders', ARRAY['a'])").await, "new");
}

#[tokio::test]
async fn expired_ids_are_purged_in_batches_by_the_index() {
    // The statistics stay those of an empty table.
    let options = PostgresServerOptions::new().set("autovacuum", "off");
    let server = PostgresServer::start_with(options).await;
    server.sql("postgres", &message_migrations(&Default::default())).await;
    let sql = async |text: &str| server.sql("postgres", text).await;
    let ids = "(SELECT array_agg(n::text) FROM generate_series(1, 250) n)";
    sql(&format!("SELECT count(*) FROM hapax_inbox('orders', {ids})")).await;
    sql("SELECT hapax_inbox_failed('orders', 'a', 'no')").await;
    for table in ["hapax_inbox", "hapax_attempts"] {
        sql(&format!("UPDATE {table} SET expires_at = clock_timestamp() - interval '1 s'")).await;
    }
    sql("SELECT hapax_inbox('orders', ARRAY['kept'])").await;
    let scans = "SELECT sum(seq_scan) FROM pg_stat_user_tables \
                 WHERE relname IN ('hapax_inbox', 'hapax_attempts')";
    let before = sql(scans).await;
    assert_eq!(sql("SELECT hapax_inbox_purge(100)").await, "101");
    assert_eq!(sql("SELECT hapax_inbox_purge(1000)").await, "150");
    assert_eq!(sql("SELECT hapax_inbox_purge()").await, "0");
    assert_eq!(sql(scans).await, before);
    assert_eq!(sql("SELECT count(*) FROM hapax_inbox").await, "1");
}

#[tokio::test]
async fn an_id_expires_at_a_whole_second_after_its_retention() {
    let server = server().await;
    server.sql("postgres", "SELECT hapax_inbox('orders', ARRAY['a'], NULL, '1 h')").await;
    let left = "SELECT extract(microseconds FROM expires_at)::bigint % 1000000,
        expires_at - clock_timestamp() BETWEEN '59 min' AND '1 h 1 s' FROM hapax_inbox";
    assert_eq!(server.sql("postgres", left).await, "0|t");
}

#[tokio::test]
async fn a_message_whose_headers_or_keys_are_not_valid_is_not_written() {
    let server = server().await;
    for (count, headers) in
        ["{}", r#"{"a": "1"}"#, r#"{"a": ["1", "2"], "b": []}"#].iter().enumerate()
    {
        let put = format!("SELECT hapax_outbox_put_text('orders', 'x', headers => '{headers}')");
        server.sql("postgres", &put).await;
        let rows = server.sql("postgres", "SELECT count(*) FROM hapax_outbox").await;
        assert_eq!(rows, (count + 1).to_string());
    }
    for headers in [
        "[]",
        "17",
        r#"{"a": 1e400}"#,
        r#"{"a": null}"#,
        r#"{"a": {"b": "c"}}"#,
        r#"{"a": [["1"]]}"#,
        r#"{"a": ["1", 2]}"#,
    ] {
        let put = format!("SELECT hapax_outbox_put_text('orders', 'x', headers => '{headers}')");
        let failed = server.try_sql("postgres", &put).await.unwrap_err();
        assert!(failed.contains("an object of texts and arrays of texts"), "{headers}: {failed}");
    }
    let put = "SELECT hapax_outbox_put_text('orders', 'x', repeat('k', 1025))";
    let failed = server.try_sql("postgres", put).await.unwrap_err();
    assert!(failed.contains("1 to 1024 bytes as order key"), "{failed}");
    assert!(failed.contains("Shorten an order key"), "{failed}");
}

#[tokio::test]
async fn an_outbox_row_is_polled_until_it_is_done() {
    let server = server().await;
    let sql = async |text: &str| server.sql("postgres", text).await;
    let put = r#"SELECT hapax_outbox_put('orders', '\x00ff', 'k', 'm-1', '{"a": "b"}')"#;
    assert_eq!(sql(put).await, "m-1");
    assert_eq!(sql("SELECT length(hapax_outbox_put('orders', '\\x01'))").await, "36");
    let shards = "(SELECT array_agg(n::bigint) FROM generate_series(0, 31) n)";
    let floors = "(SELECT array_agg(0::bigint) FROM generate_series(0, 31) n)";
    let poll = format!(
        "SELECT epoch, id, destination, order_key, headers, payload \
         FROM hapax_outbox_poll({shards}, {floors}, '{{}}', '{{}}', '{{}}', 10, 1000) \
         ORDER BY id NULLS FIRST"
    );
    let polled = sql(&poll).await;
    assert_eq!(polled, "1|||||\n|1|orders|k|{\"a\": \"b\"}|\\x00ff\n|2|orders||{}|\\x01");
    sql("SELECT hapax_outbox_remove(array_agg(shard::bigint), array_agg(id)) FROM hapax_outbox WHERE id = 2").await;
    assert_eq!(sql("SELECT messages FROM hapax_outbox_lag()").await, "1");
    let park = "SELECT hapax_outbox_park(sha256('x'), shard, id, 'too large', 1) FROM hapax_outbox";
    assert_eq!(sql(park).await, "t");
    sql(put).await;
    assert_eq!(sql(&poll).await, "1|||||", "the rest of the key waits");
    assert_eq!(sql("SELECT blocked_keys FROM hapax_outbox_lag()").await, "1");
    assert_eq!(sql("SELECT hapax_outbox_redrive(sha256('x'))").await, "t");
    let polled = sql(&poll).await;
    assert!(polled.starts_with("2|||||\n|1|orders|k|{\"a\": \"b\"}|\\x00ff\n|3|"), "{polled}");
}

#[tokio::test]
async fn a_poll_leaves_out_known_messages_and_ends_at_its_bytes() {
    let server = server().await;
    let sql = async |text: &str| server.sql("postgres", text).await;
    // A header object has 2 bytes.
    sql(
        "SELECT hapax_outbox_put('orders', repeat('x', 98)::bytea, 'k') FROM generate_series(1, 6)",
    )
    .await;
    let poll = async |known: &str, max: u32, bytes: u32| {
        let poll = format!(
            "SELECT string_agg(p.id::text, ' ') FROM hapax_outbox_poll( \
             ARRAY[hapax_outbox_shard('k')], '{{0}}', \
             array_fill(hapax_outbox_shard('k')::bigint, ARRAY[cardinality('{known}'::bigint[])]), \
             '{known}', '{{}}', {max}, {bytes}) p"
        );
        server.sql("postgres", &poll).await
    };
    assert_eq!(poll("{}", 10, 1000).await, "1 2 3 4 5 6");
    assert_eq!(poll("{1,2,4}", 10, 1000).await, "3 5 6");
    assert_eq!(poll("{1,2,4}", 2, 1000).await, "3 5");
    assert_eq!(poll("{1}", 10, 301).await, "2 3 4 5");
    assert_eq!(poll("{1}", 10, 300).await, "2 3 4");
    assert_eq!(poll("{1}", 10, 1).await, "2");
}

#[tokio::test]
async fn a_letter_whose_place_another_message_has_stays() {
    let server = server().await;
    let sql = async |text: &str| server.sql("postgres", text).await;
    sql("SELECT hapax_outbox_put('orders', 'first', 'k', 'm-1')").await;
    sql("SELECT hapax_outbox_park(sha256('x'), shard, id, 'too large', 1) FROM hapax_outbox").await;
    // As after an upgrade by logical replication, which copies no sequence.
    sql("SELECT setval('hapax_outbox_ids', 1, false)").await;
    sql("SELECT hapax_outbox_put('orders', 'second', 'k', 'm-2')").await;
    let redrive = "SELECT hapax_outbox_redrive(sha256('x'))";
    let failed = server.try_sql("postgres", redrive).await.unwrap_err();
    assert!(failed.contains("expected no other message at the position"), "{failed}");
    assert!(failed.contains("Set the sequence"), "{failed}");
    let park = "SELECT hapax_outbox_park(sha256('x'), shard, id, 'too large', 1) FROM hapax_outbox";
    let failed = server.try_sql("postgres", park).await.unwrap_err();
    assert!(failed.contains("expected no dead letter of another message"), "{failed}");
    assert_eq!(sql("SELECT message_id FROM hapax_dead_letters").await, "m-1");
    assert_eq!(sql("SELECT message_id FROM hapax_outbox").await, "m-2");
    sql("SELECT hapax_outbox_remove(array_agg(shard::bigint), array_agg(id)) FROM hapax_outbox")
        .await;
    assert_eq!(sql(redrive).await, "t");
    assert_eq!(sql("SELECT message_id FROM hapax_outbox").await, "m-1");
}

#[tokio::test]
async fn headers_with_several_values_survive_a_redrive() {
    let server = server().await;
    let sql = async |text: &str| server.sql("postgres", text).await;
    let headers = r#"{"a": ["1", "2"], "b": "3"}"#;
    sql(&format!("SELECT hapax_outbox_put('orders', 'x', 'k', 'm-1', '{headers}')")).await;
    sql("SELECT hapax_outbox_park(sha256('x'), shard, id, 'too large', 1) FROM hapax_outbox").await;
    let dead_letter = "SELECT header_names, header_values FROM hapax_dead_letters";
    assert_eq!(sql(dead_letter).await, r#"{a,a,b}|{"\\x31","\\x32","\\x33"}"#);
    assert_eq!(sql("SELECT hapax_outbox_redrive(sha256('x'))").await, "t");
    assert_eq!(sql("SELECT headers FROM hapax_outbox").await, headers);
}

#[tokio::test]
async fn the_lag_is_that_of_the_oldest_message_wherever_its_row_is() {
    let server = server().await;
    let sql = async |text: &str| server.sql("postgres", text).await;
    sql("SELECT hapax_outbox_put('orders', 'x') FROM generate_series(1, 5)").await;
    // An update moves the row behind the others.
    sql("UPDATE hapax_outbox SET created_at = created_at - interval '1 h' WHERE id = 1").await;
    let lag = "SELECT oldest_ms BETWEEN 3600000 AND 3700000, messages FROM hapax_outbox_lag(1)";
    assert_eq!(sql(lag).await, "t|1");
    sql("DELETE FROM hapax_outbox").await;
    assert_eq!(sql("SELECT * FROM hapax_outbox_lag()").await, "0|0|0");
}

#[tokio::test]
async fn a_sequence_is_applied_in_order_and_once() {
    let server = server().await;
    let arrive = async |number: u32| {
        let text = format!(
            "SELECT step, first, last FROM hapax_sequence('orders', 'cart-1', {number}, 'm', \
             NULL, '\\x0{number}', 10, '1 h', 'dead-letter')"
        );
        server.sql("postgres", &text).await
    };
    let next = "SELECT step, number, payload FROM hapax_sequence_next('orders', 'cart-1', '1 h', 'dead-letter')";
    assert_eq!(arrive(1).await, "apply||");
    assert_eq!(arrive(3).await, "wait||");
    assert_eq!(arrive(3).await, "duplicate||");
    assert_eq!(server.sql("postgres", next).await, "");
    assert_eq!(arrive(2).await, "apply||");
    assert_eq!(server.sql("postgres", next).await, r"apply|3|\x03");
    assert_eq!(server.sql("postgres", next).await, "");
    assert_eq!(arrive(2).await, "duplicate||");
    assert_eq!(arrive(1).await, "duplicate||");
}
