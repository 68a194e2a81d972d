//! Sessions that are set to write and to quote in their own way: an id is that of its row all the same.

use std::cell::Cell;

use hapax_postgres_data::{DataError, IdentifiedUpdate, Retried, Retry, TableName};
use hapax_testkit::faults::FaultProxy;
use hapax_testkit::servers::PostgresServer;
use serde_json::{Value, json};

use super::operations::{DONE, of};
use super::support::{are_waiting, client, connect, on_one_server, until};

on_one_server! {
    settings_of_sessions:
    an_operation_id_is_found_under_any_session_settings,
    an_executed_update_is_found_after_a_lost_reply,
    an_id_with_an_unreadable_target_is_reused,
}

async fn an_operation_id_is_found_under_any_session_settings(server: &PostgresServer) {
    let range = "[2026-02-01,2026-02-05)";
    let cases = [
        ("float8", json!(0.300_000_000_000_000_04), "extra_float_digits = 0"),
        ("daterange", json!(range), "datestyle = 'SQL, DMY'"),
        ("timestamptz", json!("2026-02-01T10:00:00Z"), "timezone = 'Asia/Kathmandu'"),
        ("interval", json!("1 day 02:00:00"), "intervalstyle = 'sql_standard'"),
        ("bytea", json!("\\x00ff"), "bytea_output = 'escape'"),
        ("int", json!(1), "quote_all_identifiers = on"),
        ("text", json!("a\\b'c"), "standard_conforming_strings = off"),
    ];
    server.sql("postgres", DONE).await;
    for (n, (kind, key, setting)) in cases.into_iter().enumerate() {
        let table = format!("f{n}");
        let made =
            format!("CREATE TABLE {table} (id {kind} PRIMARY KEY, n int, version bigint NOT NULL)");
        server.sql("postgres", &made).await;
        let (plain, set) = (client(server).await, client(server).await);
        let insert = format!(
            "INSERT INTO {table} SELECT id, 0, 0
             FROM json_populate_record(NULL::{table}, $1::text::json)"
        );
        plain.execute(&insert, &[&json!({"id": key}).to_string()]).await.unwrap();
        set.batch_execute(&format!("SET {setting}")).await.unwrap();
        let (operations, item) =
            (of(TableName::new(table), "id", &["n"]), json!({"id": key, "n": 1}));
        for (round, one, other) in [(0, &plain, &set), (1, &set, &plain)] {
            let id = format!("{n}-{round}");
            let told: IdentifiedUpdate<Value> =
                operations.update(one, &*id, round, &item).await.unwrap();
            assert_eq!(told, IdentifiedUpdate::Applied { version: round + 1 }, "{setting}");
            for here in [one, other] {
                let told = operations.update::<_, Value>(here, &*id, round + 1, &item).await;
                let expected = IdentifiedUpdate::AlreadyApplied { version: round + 1 };
                assert_eq!(told.unwrap(), expected, "{setting}");
            }
        }
    }
}

async fn an_executed_update_is_found_after_a_lost_reply(server: &PostgresServer) {
    let tables = "CREATE TABLE f (id float8 PRIMARY KEY, n int, version bigint NOT NULL);
        INSERT INTO f VALUES (0.30000000000000004, 0, 0)";
    server.sql("postgres", &format!("{tables}; {DONE}")).await;
    let proxy = FaultProxy::before(server.address(), 1).await.unwrap();
    let url = format!("postgres://postgres@{}/postgres", proxy.address());
    let (operations, mut holder) = (of(TableName::new("f"), "id", &["n"]), client(server).await);
    let holding = holder.transaction().await.unwrap();
    holding.batch_execute("SELECT * FROM f FOR UPDATE").await.unwrap();
    let connects = Cell::new(0);
    let connecting = async || {
        connects.set(connects.get() + 1);
        if connects.get() > 1 {
            until(server, "SELECT n = 1 FROM f").await;
        }
        let client = connect(&url).await?;
        client.batch_execute("SET extra_float_digits = 0").await?;
        Ok::<_, tokio_postgres::Error>(client)
    };
    let change = |mut row: Value| {
        row["n"] = 1.into();
        Ok::<_, String>(row)
    };
    let (retry, id) = (Retry::default(), json!({"id": 0.300_000_000_000_000_04}));
    let (told, ()) =
        tokio::join!(operations.retrying(connecting, &retry, "o", &id, change), async {
            are_waiting(server, 1).await;
            proxy.cut();
            holding.commit().await.unwrap();
        });
    assert!(matches!(told, Ok(Retried::AlreadyApplied { version: 1 })), "{told:?}");
}

/// Rows that somebody else has put there.
async fn an_id_with_an_unreadable_target_is_reused(server: &PostgresServer) {
    let tables = "CREATE TABLE f (id int PRIMARY KEY, n int, version bigint NOT NULL);
        INSERT INTO f VALUES (1, 0, 0);
        CREATE TABLE done (operation text PRIMARY KEY, target text, version bigint);
        INSERT INTO done VALUES ('o', NULL, 7), ('p', '{\"id\": 1}', 7), ('q', NULL, NULL)";
    server.sql("postgres", tables).await;
    let (here, operations) = (client(server).await, of(TableName::new("f"), "id", &["n"]));
    for id in ["o", "p", "q"] {
        let told = operations.update::<_, Value>(&here, id, 0, &json!({"id": 1, "n": 1})).await;
        assert!(matches!(told, Err(DataError::OperationReused(_))), "{id}: {told:?}");
    }
    assert_eq!(server.sql("postgres", "SELECT n FROM f").await, "0");
}
