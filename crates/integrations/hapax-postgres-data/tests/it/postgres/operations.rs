//! One id, one change of one row; and what is left as it is.

use std::cell::Cell;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use deadpool_postgres::{Manager, Pool};
use hapax_postgres_data::{
    Column, DataError, IdentifiedUpdate, Pooled, Retried, Retry, RetryError, TableName, UpdateId,
    UpdateLog, VersionedRows,
};
use hapax_testkit::faults::FaultProxy;
use hapax_testkit::servers::PostgresServer;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use serde_json::{Value, json};
use tokio::time::Instant;
use tokio_postgres::{Error, NoTls};

use super::support::{are_waiting, client, connect, on_one_server, until};
use super::versioned::{COUNTERS, counter, increment, key, operations, times};

pub(super) const DONE: &str =
    "CREATE TABLE done (operation text PRIMARY KEY, target text NOT NULL, version bigint NOT NULL)";

pub(super) fn of(table: TableName, key: impl Into<Column>, fields: &[&str]) -> UpdateLog {
    let rows = VersionedRows::in_table(table).key(key);
    let rows = fields.iter().fold(rows, |rows, field| rows.field(*field));
    UpdateLog::in_table(TableName::new("done")).of(rows.build().unwrap()).unwrap()
}

fn count_up(mut row: Value) -> Result<Value, String> {
    row["n"] = Value::from(row["n"].as_u64().unwrap() + 1);
    Ok(row)
}

on_one_server! {
    an_operation_and_its_id:
    an_operation_id_belongs_to_one_row_of_one_table,
    an_operation_id_belongs_to_one_request,
    unchanged_fields_are_not_written,
    the_stored_key_does_not_depend_on_session_settings,
}

async fn an_operation_id_belongs_to_one_row_of_one_table(server: &PostgresServer) {
    let tables = "CREATE SCHEMA a; CREATE SCHEMA b;
        CREATE TABLE a.accounts (id int PRIMARY KEY, n int, version bigint NOT NULL);
        CREATE TABLE b.accounts (LIKE a.accounts INCLUDING ALL);
        CREATE TABLE a.savings (LIKE a.accounts INCLUDING ALL);
        CREATE TABLE a.names (id text PRIMARY KEY, n int, version bigint NOT NULL);
        CREATE TABLE a.ledgers (name text PRIMARY KEY, n int, version bigint NOT NULL);
        INSERT INTO a.accounts VALUES (1, 0, 0); INSERT INTO b.accounts VALUES (1, 0, 0);
        INSERT INTO a.savings VALUES (1, 0, 0); INSERT INTO a.names VALUES ('x', 0, 0);
        INSERT INTO a.ledgers VALUES ('x', 0, 0)";
    server.sql("postgres", &format!("{tables}; {DONE}")).await;
    let client = client(server).await;
    client.batch_execute("SET search_path = a, public").await.unwrap();
    let one = json!({"id": 1, "n": 7});
    let accounts = of(TableName::new("accounts"), "id", &["n"]);
    let told: IdentifiedUpdate<Value> = accounts.update(&client, "t-1", 0, &one).await.unwrap();
    assert_eq!(told, IdentifiedUpdate::Applied { version: 1 });
    let name = json!({"id": "x", "n": 7});
    let told: IdentifiedUpdate<Value> =
        of(TableName::new("names"), "id", &["n"]).update(&client, "t-2", 0, &name).await.unwrap();
    assert_eq!(told, IdentifiedUpdate::Applied { version: 1 });
    // The same table by another name of it.
    let same = of(TableName::in_schema("a", "accounts"), "id", &["n"]);
    let told: IdentifiedUpdate<Value> = same.update(&client, "t-1", 1, &one).await.unwrap();
    assert_eq!(told, IdentifiedUpdate::AlreadyApplied { version: 1 });
    // Others: of the same key, of no such column, of a column that does not hold the other's key.
    let ledger = json!({"name": "x", "n": 7});
    for (table, key, id, item) in [
        (TableName::new("savings"), "id", "t-1", &one),
        (TableName::in_schema("b", "accounts"), "id", "t-1", &one),
        (TableName::new("ledgers"), "name", "t-1", &ledger),
        (TableName::new("accounts"), "id", "t-2", &one),
        (TableName::new("names"), "id", "t-1", &name),
    ] {
        let reused = of(table, key, &["n"]).update::<_, Value>(&client, id, 0, item).await;
        assert!(matches!(reused, Err(DataError::OperationReused(_))), "{reused:?}");
    }
    // A schema that the path leads to is another one than before.
    client.batch_execute("SET search_path = b, public").await.unwrap();
    let reused = accounts.update::<_, Value>(&client, "t-1", 0, &one).await;
    assert!(matches!(reused, Err(DataError::OperationReused(_))), "{reused:?}");
    let told: IdentifiedUpdate<Value> = accounts.update(&client, "t-3", 0, &one).await.unwrap();
    assert_eq!(told, IdentifiedUpdate::Applied { version: 1 });
    let written = "SELECT (SELECT n FROM a.accounts), (SELECT n FROM b.accounts),
        (SELECT n FROM a.savings), (SELECT n FROM a.names), (SELECT n FROM a.ledgers)";
    assert_eq!(server.sql("postgres", written).await, "7|7|0|7|0");
}

async fn an_operation_id_belongs_to_one_request(server: &PostgresServer) {
    server.sql("postgres", COUNTERS).await;
    let (operations, url) = (operations(), server.url("postgres"));
    let here = client(server).await;
    let asked = |cents: u64| UpdateId::from("o").for_request(&json!({"add": cents})).unwrap();
    let told: IdentifiedUpdate<Value> =
        operations.update(&here, asked(1), 0, &counter("a", 1)).await.unwrap();
    assert_eq!(told, IdentifiedUpdate::Applied { version: 1 });
    // With whatever the row is to be, by now.
    let told: IdentifiedUpdate<Value> =
        operations.update(&here, asked(1), 1, &counter("a", 2)).await.unwrap();
    assert_eq!(told, IdentifiedUpdate::AlreadyApplied { version: 1 });
    for other in [asked(2), "o".into()] {
        let reused = operations.update::<_, Value>(&here, other.clone(), 1, &counter("a", 2)).await;
        assert!(matches!(reused, Err(DataError::OperationReused(id)) if id == "o"));
        let reused =
            operations.retrying(|| connect(&url), &times(2), other, &key(), increment).await;
        let Err(RetryError::Data { source: DataError::OperationReused(_), outcome_unknown: false }) =
            reused
        else {
            panic!("{reused:?}")
        };
    }
    let told = operations.retrying(|| connect(&url), &times(2), asked(1), &key(), increment).await;
    assert_eq!(told.unwrap(), Retried::AlreadyApplied { version: 1 });
}

async fn unchanged_fields_are_not_written(server: &PostgresServer) {
    let tables =
        "CREATE TABLE kept (id numeric PRIMARY KEY, n int NOT NULL, x float8, cents numeric(30, 2),
            doc jsonb, version bigint NOT NULL);
        INSERT INTO kept SELECT i, 0, random() * 1e6 * power(10, i % 20), 12345678901234567.89,
            '{\"a\": 123456789012345678.25}', 0 FROM generate_series(1, 40) AS i;
        INSERT INTO kept VALUES (123456789012345678901, 0, 0, 0, '1.10', 0),
            (123456789012345680000, 0, 0, 0, '1.10', 0);
        CREATE TABLE before AS SELECT * FROM kept";
    server.sql("postgres", &format!("{tables}; {DONE}")).await;
    let url = server.url("postgres");
    let kept = of(TableName::new("kept"), "id", &["n", "x", "cents", "doc"]);
    for id in (1..=40).map(Value::from).chain(["123456789012345678901".into()]) {
        let (operation, key) = (id.to_string(), json!({"id": id}));
        let told =
            kept.retrying(|| connect(&url), &times(1), operation, &key, count_up).await.unwrap();
        assert!(matches!(told, Retried::Applied { version: 1, .. }), "{told:?}");
    }
    // Nothing is changed: that is an update, too.
    let all = |row: Value| Ok::<_, String>(row);
    let told = kept.retrying(|| connect(&url), &times(1), "o", &json!({"id": 7}), all).await;
    assert!(matches!(told, Ok(Retried::Applied { version: 2, .. })), "{told:?}");
    let differ = "SELECT count(*) FROM kept AS k JOIN before AS b USING (id)
        WHERE (k.x, k.cents, k.doc::text) IS DISTINCT FROM (b.x, b.cents, b.doc::text)";
    assert_eq!(server.sql("postgres", differ).await, "0");
    let counted = "SELECT n, count(*), min(id) FROM kept GROUP BY n ORDER BY n";
    assert_eq!(server.sql("postgres", counted).await, "0|1|123456789012345680000\n1|41|1");
    let target = "SELECT target::json -> 'key' ->> 'id' FROM done WHERE operation LIKE '\"%'";
    assert_eq!(server.sql("postgres", target).await, "123456789012345678901");

    // A document that is changed, by who keeps every digit.
    #[derive(Serialize, Deserialize)]
    struct Kept {
        id: u64,
        doc: Box<RawValue>,
    }
    let exact = of(TableName::new("kept"), "id", &["doc"]);
    let longer = |mut row: Kept| {
        let doc = format!("[{}]", row.doc.get());
        row.doc = RawValue::from_string(doc).map_err(|error| error.to_string())?;
        Ok::<_, String>(row)
    };
    let told = exact.retrying(|| connect(&url), &times(1), "d", &json!({"id": 7}), longer).await;
    assert!(matches!(told, Ok(Retried::Applied { version: 3, .. })));
    let doc = server.sql("postgres", "SELECT doc FROM kept WHERE id = 7").await;
    assert_eq!(doc, "[{\"a\": 123456789012345678.25}]");
}

async fn the_stored_key_does_not_depend_on_session_settings(server: &PostgresServer) {
    let tables = "CREATE TABLE days (day date PRIMARY KEY, n int, version bigint NOT NULL);
        INSERT INTO days VALUES ('2026-02-01', 0, 0), ('2026-01-02', 0, 0)";
    server.sql("postgres", &format!("{tables}; {DONE}")).await;
    let client = client(server).await;
    let days = of(TableName::new("days"), Column::new("day").read_as_text(), &["n"]);
    let (first, second) =
        (json!({"day": "2026-02-01", "n": 1}), json!({"day": "2026-01-02", "n": 1}));
    client.batch_execute("SET datestyle = 'SQL, DMY'").await.unwrap();
    let told: IdentifiedUpdate<Value> = days.update(&client, "o", 0, &first).await.unwrap();
    assert_eq!(told, IdentifiedUpdate::Applied { version: 1 });
    client.batch_execute("SET datestyle = 'ISO, MDY'").await.unwrap();
    let told: IdentifiedUpdate<Value> = days.update(&client, "o", 0, &first).await.unwrap();
    assert_eq!(told, IdentifiedUpdate::AlreadyApplied { version: 1 });
    let reused = days.update::<_, Value>(&client, "o", 0, &second).await;
    assert!(matches!(reused, Err(DataError::OperationReused(_))), "{reused:?}");
}

on_one_server! {
    retries_and_their_limits:
    every_retry_error_states_whether_the_outcome_is_unknown,
    an_update_that_times_out_returns_its_connection,
    temporary_errors_are_retried,
    a_trigger_that_nulls_the_version_leaves_the_outcome_unknown,
    an_id_used_concurrently_for_another_row_is_reported,
    a_pool_may_wrap_its_connections_and_limits_may_be_any,
}

async fn every_retry_error_states_whether_the_outcome_is_unknown(server: &PostgresServer) {
    server.sql("postgres", COUNTERS).await;
    let proxy = FaultProxy::before(server.address(), 1).await.unwrap();
    let url = format!("postgres://postgres@{}/postgres", proxy.address());
    let (operations, mut holder) = (operations(), client(server).await);
    operations.verify(&holder).await.unwrap();
    for (round, declines) in [(0, false), (1, true)] {
        let holding = holder.transaction().await.unwrap();
        holding.batch_execute("SELECT * FROM counters FOR UPDATE").await.unwrap();
        let calls = Cell::new(0);
        let change = |row: Value| {
            calls.set(calls.get() + 1);
            if declines && calls.get() > 1 { Err("no".to_owned()) } else { increment(row) }
        };
        let connecting = async || {
            let client = connect(&url).await?;
            if calls.get() > 0 {
                client.batch_execute("SET default_transaction_read_only = on").await?;
            }
            Ok::<_, Error>(client)
        };
        // The first attempt arrives, and waits; who sent it hears no more of it.
        let (id, key, retry) = (round.to_string(), key(), times(5));
        let (told, ()) =
            tokio::join!(operations.retrying(connecting, &retry, &*id, &key, change), async {
                are_waiting(server, 1).await;
                proxy.cut();
            });
        let error = told.unwrap_err();
        assert!(error.outcome_unknown(), "{error:?}");
        match error {
            RetryError::Data { source: DataError::Rejected(refused), .. } if !declines => {
                assert_eq!(refused.code, "25006");
            }
            RetryError::Declined { source, .. } if declines => assert_eq!(source, "no"),
            other => panic!("{other:?}"),
        }
        // And rightly so.
        holding.commit().await.unwrap();
        let made = format!(
            "SELECT (value, version) = ({0}, {0}) FROM counters WHERE name = 'a'",
            round + 1
        );
        until(server, &made).await;
        let told = operations.retrying(|| connect(&url), &retry, id, &key, increment).await;
        assert_eq!(told.unwrap(), Retried::AlreadyApplied { version: round + 1 });
    }
}

/// What was carried out is in doubt for whoever is not told its version.
async fn a_trigger_that_nulls_the_version_leaves_the_outcome_unknown(server: &PostgresServer) {
    let tables = "CREATE TABLE f (id int PRIMARY KEY, n int, version bigint);
        INSERT INTO f VALUES (1, 0, 0);
        CREATE FUNCTION take() RETURNS trigger LANGUAGE plpgsql AS
            'BEGIN NEW.version := NULL; RETURN NEW; END';
        CREATE TRIGGER take BEFORE UPDATE ON f FOR EACH ROW EXECUTE FUNCTION take();
        CREATE TABLE done (operation text PRIMARY KEY, target text NOT NULL, version bigint)";
    server.sql("postgres", tables).await;
    let (operations, url) = (of(TableName::new("f"), "id", &["n"]), server.url("postgres"));
    let (retry, id) = (times(3), json!({"id": 1}));
    let told = operations.retrying(|| connect(&url), &retry, "o", &id, count_up).await;
    let Err(RetryError::Data { outcome_unknown: true, source: DataError::NoVersion(_) }) = told
    else {
        panic!("{told:?}")
    };
    assert_eq!(server.sql("postgres", "SELECT n FROM f").await, "1");
}

async fn an_update_that_times_out_returns_its_connection(server: &PostgresServer) {
    server.sql("postgres", COUNTERS).await;
    let (operations, url) = (operations(), server.url("postgres"));
    let mut holder = client(server).await;
    let holding = holder.transaction().await.unwrap();
    holding.batch_execute("SELECT * FROM counters FOR UPDATE").await.unwrap();
    let short = times(5).deadline(Duration::from_millis(200));
    for n in 0..4 {
        let id = n.to_string();
        let told = operations.retrying(|| connect(&url), &short, id, &key(), increment).await;
        assert!(matches!(told, Err(RetryError::GaveUp { .. })), "{told:?}");
    }
    // While the row is still locked.
    until(server, "SELECT count(*) = 0 FROM pg_stat_activity WHERE wait_event_type = 'Lock'").await;
    holding.commit().await.unwrap();
    let nothing = "SELECT value, (SELECT count(*) FROM done) FROM counters WHERE name = 'a'";
    assert_eq!(server.sql("postgres", nothing).await, "0|0");
}

async fn temporary_errors_are_retried(server: &PostgresServer) {
    server.sql("postgres", COUNTERS).await;
    let (operations, url) = (operations(), server.url("postgres"));
    let mut holder = client(server).await;
    // A limit of the session's own is kept, and one of the statement's.
    for (n, (limit, code)) in
        [("lock_timeout = '50ms'", "55P03"), ("statement_timeout = 200", "57014")]
            .into_iter()
            .enumerate()
    {
        let holding = holder.transaction().await.unwrap();
        holding.batch_execute("SELECT * FROM counters FOR UPDATE").await.unwrap();
        let connecting = async || {
            let client = connect(&url).await?;
            client.batch_execute(&format!("SET {limit}")).await?;
            Ok::<_, Error>(client)
        };
        let patient = times(2).deadline(Duration::from_secs(600));
        let (id, began) = (n.to_string(), Instant::now());
        let told = operations.retrying(connecting, &patient, &*id, &key(), increment).await;
        let Err(RetryError::GaveUp { attempts: 2, outcome_unknown: false, source: Some(source) }) =
            told
        else {
            panic!("{told:?}")
        };
        // Not what is left until the deadline.
        assert!(began.elapsed() < Duration::from_secs(60), "{:?}", began.elapsed());
        let source = source.downcast::<DataError>().unwrap();
        let DataError::Rejected(refused) = *source else { panic!("{source:?}") };
        assert_eq!(refused.code, code);
        // Given free in between.
        let (often, key) = (times(100), key());
        let (told, ()) =
            tokio::join!(operations.retrying(connecting, &often, &*id, &key, increment), async {
                are_waiting(server, 1).await;
                holding.commit().await.unwrap();
            });
        assert!(matches!(told, Ok(Retried::Applied { .. })), "{told:?}");
    }
}

async fn an_id_used_concurrently_for_another_row_is_reported(server: &PostgresServer) {
    server.sql("postgres", COUNTERS).await;
    server.sql("postgres", "ALTER TABLE counters ADD CONSTRAINT one UNIQUE (value)").await;
    let (operations, url) = (Arc::new(operations()), server.url("postgres"));
    let mut holder = client(server).await;
    let holding = holder.transaction().await.unwrap();
    let _: IdentifiedUpdate<Value> =
        operations.update(&holding, "x", 0, &counter("a", 7)).await.unwrap();
    let other = json!({"name": "b", "part": 1});
    // In its only attempt.
    let retry = times(1);
    let (told, ()) = tokio::join!(
        operations.retrying(|| connect(&url), &retry, "x", &other, increment),
        async {
            are_waiting(server, 1).await;
            holding.commit().await.unwrap();
        }
    );
    let Err(RetryError::Data { outcome_unknown: false, source: DataError::OperationReused(_) }) =
        told
    else {
        panic!("{told:?}")
    };
    // Another constraint is no matter of ids.
    let same = |mut row: Value| {
        row["value"] = 7.into();
        Ok::<_, String>(row)
    };
    let told = operations.retrying(|| connect(&url), &times(5), "y", &other, same).await;
    let Err(RetryError::Data { source: DataError::UniqueViolation { constraint, .. }, .. }) = told
    else {
        panic!("{told:?}")
    };
    assert_eq!(constraint, "one");
}

async fn a_pool_may_wrap_its_connections_and_limits_may_be_any(server: &PostgresServer) {
    server.sql("postgres", COUNTERS).await;
    let config = server.url("postgres").parse().unwrap();
    let pool = Pool::builder(Manager::new(config, NoTls)).max_size(2).build().unwrap();
    let operations = operations();
    let connecting = async || pool.get().await.map(|object| Pooled::new(object, |object| object));
    let retry = Retry::default()
        .attempts(NonZeroU32::MAX)
        .pauses(Duration::ZERO, Duration::MAX)
        .deadline(Duration::MAX);
    let told = operations.retrying(connecting, &retry, "o", &key(), increment).await;
    assert_eq!(told.unwrap(), Retried::Applied { version: 1, row: counter("a", 1) });
    let told: IdentifiedUpdate<Value> =
        operations.update(connecting().await.unwrap(), "p", 1, &counter("a", 2)).await.unwrap();
    assert_eq!(told, IdentifiedUpdate::Applied { version: 2 });
}
