//! Insert-or-fetch.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use hapax_postgres_data::{BatchLimits, Column, DataError, InsertOrFetch, Inserted, TableName};
use hapax_testkit::SeededEntropy;
use hapax_testkit::servers::{PostgresServer, PostgresServerOptions};
use serde_json::{Value, json};
use tokio::task::JoinSet;
use tokio_postgres::types::{ToSql, Type};

use super::support::{are_waiting, client, deadlocks, on_one_server, quick_at_deadlocks, until};

pub(crate) const ORDERS: &str = "CREATE SCHEMA shop; CREATE TABLE shop.orders (
    id bigserial, customer text, cart bigint, amount numeric(12, 2) NOT NULL, note jsonb,
    reference text UNIQUE, PRIMARY KEY (id), UNIQUE (cart, customer))";

pub(crate) fn orders() -> InsertOrFetch {
    InsertOrFetch::into_table(TableName::in_schema("shop", "orders"))
        .key("customer")
        .key("cart")
        .field("amount")
        .field("note")
        .also_read("id")
        .build()
        .unwrap()
}

pub(crate) fn order(cart: u64, amount: &str) -> Value {
    json!({"customer": "c", "cart": cart, "amount": amount, "note": {"a": 1, "b": [2.0]}})
}

/// What was told, in short.
fn told(outcomes: &[Inserted<Value>]) -> Vec<&str> {
    let short = |outcome: &Inserted<Value>| match outcome {
        Inserted::Created(_) => "created",
        Inserted::Exists(_) => "exists",
        Inserted::ExistsWithDifferent { field, .. } if field == "amount" => "amount",
        Inserted::ExistsWithDifferent { field, .. } if field == "note" => "note",
        other => panic!("{other:?}"),
    };
    outcomes.iter().map(short).collect()
}

on_one_server! {
    every_outcome_of_an_insert:
    the_first_insert_creates_and_later_ones_return_the_row,
    another_unique_constraint_is_named_and_the_same_row_is_not,
    a_row_deleted_during_the_call_is_inserted_again,
    a_table_that_does_not_fit_is_rejected_before_any_write,
    null_keys_and_triggers_that_change_keys_are_errors,
}

async fn the_first_insert_creates_and_later_ones_return_the_row(server: &PostgresServer) {
    server.sql("postgres", ORDERS).await;
    let (orders, client) = (orders(), client(server).await);
    let first: Inserted<Value> = orders.insert(&client, &order(1, "10.50")).await.unwrap();
    let there = json!({"customer": "c", "cart": 1, "amount": 10.5, "note": {"a": 1, "b": [2.0]},
        "id": 1});
    assert_eq!(first, Inserted::Created(there.clone()));
    // Equal by type: 10.5 and 10.50; keys of jsonb in another order, 2 and 2.0.
    let same = json!({"amount": 10.5, "note": {"b": [2], "a": 1.0}, "cart": "1", "customer": "c"});
    assert_eq!(orders.insert(&client, &same).await.unwrap(), Inserted::Exists(there.clone()));
    // The first field that differs, in the order of the layout.
    for (field, item) in [
        ("amount", json!({"customer": "c", "cart": 1, "amount": 11, "note": null})),
        ("note", json!({"customer": "c", "cart": 1, "amount": 10.5, "note": null})),
    ] {
        let other = orders.insert(&client, &item).await.unwrap();
        let row = there.clone();
        assert_eq!(other, Inserted::ExistsWithDifferent { field: field.into(), row });
    }
    // In a batch: its copies too, and in its order.
    let items = [order(3, "1"), order(2, "1"), order(3, "1"), order(1, "7"), order(2, "2")];
    let outcomes: Vec<Inserted<Value>> = orders.insert_all(&client, &items).await.unwrap();
    assert_eq!(told(&outcomes), ["created", "created", "exists", "amount", "amount"]);
    let none: Vec<Inserted<Value>> = orders.insert_all(&client, &[] as &[Value]).await.unwrap();
    assert_eq!(none, []);
    assert_eq!(server.sql("postgres", "SELECT count(*) FROM shop.orders").await, "3");
}

/// 200 calls, each key four times, in batches of different sizes and in any order; one of each
/// key's four is another order.
async fn flood(server: &PostgresServer, batch: usize, seed: u64) {
    const KEYS: u64 = 50;
    let dice = SeededEntropy::new(seed);
    let mut items: Vec<Value> =
        (0..4 * KEYS).map(|at| order(at % KEYS, if at < KEYS { "2" } else { "1" })).collect();
    for at in (1..items.len()).rev() {
        items.swap(at, dice.below(at as u64 + 1) as usize);
    }
    let orders = Arc::new(orders());
    let barrier = Arc::new(tokio::sync::Barrier::new(items.len() / batch));
    let mut callers = JoinSet::new();
    for items in items.chunks(batch).map(<[Value]>::to_vec) {
        let (orders, barrier) = (orders.clone(), barrier.clone());
        let mut client = client(server).await;
        callers.spawn(async move {
            barrier.wait().await;
            let outcomes: Vec<Inserted<Value>> = if items[0]["cart"].as_u64() < Some(25) {
                orders.insert_all(&client, &items).await.unwrap()
            } else {
                let transaction = client.transaction().await.unwrap();
                let outcomes = orders.insert_all(&transaction, &items).await.unwrap();
                transaction.commit().await.unwrap();
                outcomes
            };
            items.into_iter().zip(outcomes).collect::<Vec<_>>()
        });
    }
    let told: Vec<_> = callers.join_all().await.into_iter().flatten().collect();
    assert_eq!(told.len() as u64, 4 * KEYS);
    for cart in 0..KEYS {
        let of: Vec<_> = told.iter().filter(|(item, _)| item["cart"] == cart).collect();
        let created: Vec<_> =
            of.iter().filter(|(_, told)| matches!(told, Inserted::Created(_))).collect();
        let [(first, Inserted::Created(row))] = created[..] else { panic!("{cart}: {of:?}") };
        for (item, told) in of {
            match told {
                Inserted::Created(_) => {}
                Inserted::Exists(there) => {
                    assert_eq!((item, there), (first, row));
                }
                Inserted::ExistsWithDifferent { field, row: there } => {
                    assert_ne!(item["amount"], first["amount"]);
                    assert_eq!((&field[..], there), ("amount", row));
                }
            }
        }
    }
    assert_eq!(server.sql("postgres", "SELECT count(*) FROM shop.orders").await, "50");
    assert_eq!(deadlocks(server), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn two_hundred_concurrent_inserts_of_fifty_keys_create_fifty_rows() {
    let options = PostgresServerOptions::new().set("max_connections", "220");
    let server = PostgresServer::start_with(options).await;
    server.sql("postgres", ORDERS).await;
    flood(&server, 1, 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn batches_in_any_order_do_not_deadlock() {
    let server = quick_at_deadlocks().await;
    server.sql("postgres", ORDERS).await;
    for seed in 2..4 {
        flood(&server, 25, seed).await;
        server.sql("postgres", "DELETE FROM shop.orders").await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn batches_without_the_order_of_keys_deadlock() {
    let server = quick_at_deadlocks().await;
    server.sql("postgres", ORDERS).await;
    let orders = orders();
    let sorted = orders.sql()[0].1.to_owned();
    // By name, and not as the layout has them: so two layouts of a table agree.
    let order_by = "ORDER BY (f.item).\"cart\", (f.item).\"customer\"";
    assert!(sorted.contains(order_by));
    let as_given = sorted.replace(order_by, "ORDER BY f.n");
    for (statement, expected) in [(sorted, 0), (as_given, 1)] {
        // Both batches stop at the middle key. Unsorted, each has the other's last by then.
        let mut holder = client(&server).await;
        let holding = holder.transaction().await.unwrap();
        let _: Inserted<Value> = orders.insert(&holding, &order(2, "1")).await.unwrap();
        let mut batches = JoinSet::new();
        for carts in [[1, 2, 3], [3, 2, 1]] {
            let (client, statement) = (client(&server).await, statement.clone());
            batches.spawn(async move {
                let items = Value::from_iter(carts.map(|cart| order(cart, "1"))).to_string();
                let typed: [(&(dyn ToSql + Sync), Type); 1] = [(&items, Type::TEXT)];
                client.query_typed(&statement, &typed).await.map(|rows| rows.len())
            });
        }
        are_waiting(&server, 2).await;
        holding.rollback().await.unwrap();
        let told = batches.join_all().await;
        assert_eq!(deadlocks(&server), expected, "{told:?}");
        server.sql("postgres", "DELETE FROM shop.orders").await;
    }
}

async fn another_unique_constraint_is_named_and_the_same_row_is_not(server: &PostgresServer) {
    server.sql("postgres", ORDERS).await;
    let referenced = InsertOrFetch::into_table(TableName::in_schema("shop", "orders"))
        .key("customer")
        .key("cart")
        .field("amount")
        .field("reference")
        .build()
        .unwrap();
    let item =
        |cart, of: &str| json!({"customer": "c", "cart": cart, "amount": 1, "reference": of});
    let mut client = client(server).await;
    let both = [item(1, "r-1"), item(2, "r-1")];
    let refused = referenced.insert_all::<_, Value>(&client, &both).await;
    let Err(DataError::UniqueViolation { item: Some(1), constraint, .. }) = refused else {
        panic!("{refused:?}")
    };
    assert_eq!(constraint, "orders_reference_key");
    let again: Inserted<Value> = referenced.insert(&client, &both[0]).await.unwrap();
    assert!(matches!(again, Inserted::Exists(_)), "{again:?}");
    // In a transaction, which is over then.
    let transaction = client.transaction().await.unwrap();
    let three = [item(1, "r-1"), item(3, "r-3"), item(2, "r-1"), item(4, "r-1")];
    let refused = referenced.insert_all::<_, Value>(&transaction, &three).await;
    assert!(
        matches!(refused, Err(DataError::UniqueViolation { item: Some(2), .. })),
        "{refused:?}"
    );
    transaction.rollback().await.unwrap();
    // Without the items that are told, one after the other, the rest is there.
    let refused = referenced.insert_all::<_, Value>(&client, &three).await;
    assert!(matches!(refused, Err(DataError::UniqueViolation { item: Some(2), .. })));
    let three = [item(1, "r-1"), item(3, "r-3"), item(4, "r-1")];
    let refused = referenced.insert_all::<_, Value>(&client, &three).await;
    assert!(matches!(refused, Err(DataError::UniqueViolation { item: Some(2), .. })));
    let told: Vec<Inserted<Value>> = referenced.insert_all(&client, &three[..2]).await.unwrap();
    assert_eq!(self::told(&told), ["exists", "exists"]);

    // The same row from everywhere at once: whichever constraint sees it first, it exists. The one
    // on `reference` is the older one, and is looked at first.
    let referenced = Arc::new(referenced);
    for round in 10..14 {
        let mut callers = JoinSet::new();
        for _ in 0..16 {
            let (referenced, item) = (referenced.clone(), item(round, &format!("r-{round}")));
            let mut client = super::support::client(server).await;
            callers.spawn(async move {
                let transaction = client.transaction().await.unwrap();
                let told: Inserted<Value> = referenced.insert(&transaction, &item).await.unwrap();
                transaction.commit().await.unwrap();
                matches!(told, Inserted::Created(_))
            });
        }
        let created = callers.join_all().await.into_iter().filter(|created| *created).count();
        assert_eq!(created, 1);
    }
}

async fn a_row_deleted_during_the_call_is_inserted_again(server: &PostgresServer) {
    server.sql("postgres", ORDERS).await;
    let (orders, client, mut other) = (orders(), client(server).await, client(server).await);
    // Inserted and deleted in one transaction: whoever waited for that creates it.
    let transaction = other.transaction().await.unwrap();
    let _: Inserted<Value> = orders.insert(&transaction, &order(1, "1")).await.unwrap();
    let waiting = tokio::spawn({
        let orders = self::orders();
        async move { orders.insert::<_, Value>(client, &order(1, "1")).await.unwrap() }
    });
    are_waiting(server, 1).await;
    transaction.batch_execute("DELETE FROM shop.orders").await.unwrap();
    transaction.commit().await.unwrap();
    let told = waiting.await.unwrap();
    assert!(matches!(told, Inserted::Created(_)), "{told:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn concurrent_deletes_do_not_make_inserts_fail() {
    let server = PostgresServer::start().await;
    server.sql("postgres", ORDERS).await;
    let (deleter, enough) = (client(&server).await, Arc::new(AtomicBool::default()));
    let deleting = tokio::spawn({
        let enough = enough.clone();
        async move {
            let mut deleted = 0;
            while !enough.load(Ordering::Relaxed) {
                deleted += deleter.execute("DELETE FROM shop.orders", &[]).await.unwrap();
            }
            deleted
        }
    });
    let mut callers = JoinSet::new();
    for _ in 0..8 {
        let client = client(&server).await;
        callers.spawn(async move {
            let limits = BatchLimits { rounds: 100, ..BatchLimits::default() };
            let orders = InsertOrFetch::into_table(TableName::in_schema("shop", "orders"))
                .key("customer")
                .key("cart")
                .field("amount")
                .field("note")
                .limits(limits)
                .build()
                .unwrap();
            let mut created = 0;
            for _ in 0..50 {
                let told: Inserted<Value> = orders.insert(&client, &order(1, "1")).await.unwrap();
                created += u64::from(matches!(told, Inserted::Created(_)));
            }
            created
        });
    }
    let created: u64 = callers.join_all().await.into_iter().sum();
    enough.store(true, Ordering::Relaxed);
    let deleted = deleting.await.unwrap();
    assert!(deleted > 10, "{deleted} of 400: nothing was deleted");
    // Each row that was told is one that was there.
    let left = server.sql("postgres", "SELECT count(*) FROM shop.orders").await;
    assert_eq!(created, deleted + left.parse::<u64>().unwrap());
}

async fn a_table_that_does_not_fit_is_rejected_before_any_write(server: &PostgresServer) {
    let tables = "CREATE TABLE loose (k text, a int);
        CREATE TABLE partial (k text, a int); CREATE UNIQUE INDEX ON partial (k) WHERE a > 0;
        CREATE TABLE wide (k text, a int, UNIQUE (k, a));
        CREATE TABLE late (k text UNIQUE DEFERRABLE, a int);
        CREATE TABLE unequal (k text UNIQUE, a json)";
    server.sql("postgres", tables).await;
    let client = client(server).await;
    let layout = |table: &str| {
        InsertOrFetch::into_table(TableName::new(table)).key("k").field("a").build().unwrap()
    };
    for table in ["loose", "partial", "wide"] {
        let refused = layout(table).insert::<_, Value>(&client, &json!({"k": "x", "a": 1})).await;
        let Err(DataError::NoUniqueConstraint { .. }) = refused else { panic!("{refused:?}") };
        let text = refused.unwrap_err().to_string();
        assert!(
            text.starts_with(&format!("\"{table}\" needs a unique constraint on exactly (\"k\")"))
        );
    }
    for (table, code) in [("late", "55000"), ("unequal", "42883"), ("missing", "42704")] {
        let refused = layout(table).insert::<_, Value>(&client, &json!({"k": "x", "a": 1})).await;
        let Err(DataError::Rejected(server)) = refused else { panic!("{table}: {refused:?}") };
        assert_eq!(server.code, code);
    }
    let missing = InsertOrFetch::into_table(TableName::new("loose")).key("k").field("b").build();
    let Err(DataError::Rejected(refused)) = missing.unwrap().verify(&client).await else {
        panic!()
    };
    assert_eq!(refused.code, "42703");
    for table in ["loose", "partial", "wide", "late", "unequal"] {
        assert_eq!(server.sql("postgres", &format!("SELECT count(*) FROM {table}")).await, "0");
    }
    // A type without equality can be compared as text.
    let as_text = InsertOrFetch::into_table(TableName::new("unequal"))
        .key("k")
        .field(Column::new("a").compare_as_text())
        .build()
        .unwrap();
    let told: Inserted<Value> =
        as_text.insert(&client, &json!({"k": "x", "a": [1]})).await.unwrap();
    assert!(matches!(told, Inserted::Created(_)), "{told:?}");
    let told: Inserted<Value> =
        as_text.insert(&client, &json!({"k": "x", "a": [1]})).await.unwrap();
    assert!(matches!(told, Inserted::Exists(_)), "{told:?}");
}

async fn null_keys_and_triggers_that_change_keys_are_errors(server: &PostgresServer) {
    let tables = "CREATE TABLE changed (k text UNIQUE, a int);
        CREATE FUNCTION change() RETURNS trigger LANGUAGE plpgsql
        AS 'BEGIN NEW.k := upper(NEW.k); RETURN NEW; END';
        CREATE TRIGGER changing BEFORE INSERT ON changed FOR EACH ROW EXECUTE FUNCTION change()";
    server.sql("postgres", tables).await;
    let mut client = client(server).await;
    let layout =
        InsertOrFetch::into_table(TableName::new("changed")).key("k").field("a").build().unwrap();
    let refused = layout.insert::<_, Value>(&client, &json!({"k": null, "a": 1})).await;
    assert!(matches!(refused, Err(DataError::Item { index: 0, .. })), "{refused:?}");
    let transaction = client.transaction().await.unwrap();
    let refused = layout.insert::<_, Value>(&transaction, &json!({"k": "x", "a": 1})).await;
    assert!(matches!(refused, Err(DataError::OtherRows)), "{refused:?}");
}

/// An item that loses against its own copy, and then exists, is not the one to be named.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_violation_of_another_constraint_names_the_right_item() {
    let server = quick_at_deadlocks().await;
    // The caller pauses before it inserts its first item alone; another that inserts the same does so
    // after it has entered the constraint that comes first, and before its key.
    let tables = "CREATE TABLE t (k int NOT NULL, u text NOT NULL);
        CREATE UNIQUE INDEX t_u ON t (u);
        CREATE SEQUENCE fired;
        CREATE FUNCTION pause(k int) RETURNS int IMMUTABLE LANGUAGE plpgsql AS $$ BEGIN
            IF k = 1 AND current_setting('app.role', true) = 'other' THEN
                PERFORM pg_advisory_xact_lock(2);
            END IF;
            RETURN k;
        END $$;
        CREATE INDEX t_mid ON t (pause(k));
        CREATE UNIQUE INDEX t_k ON t (k);
        CREATE FUNCTION hold() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
            IF NEW.k = 1 AND current_setting('app.role', true) = 'caller' AND nextval('fired') = 2
            THEN
                PERFORM pg_advisory_xact_lock(1);
            END IF;
            RETURN NEW;
        END $$;
        CREATE TRIGGER hold BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION hold();
        INSERT INTO t VALUES (9, 'a'), (8, 'b')";
    server.sql("postgres", tables).await;
    let (caller, other) = (client(&server).await, client(&server).await);
    caller.batch_execute("SET app.role = 'caller'").await.unwrap();
    other.batch_execute("SET app.role = 'other'").await.unwrap();
    let control = client(&server).await;
    control.batch_execute("SELECT pg_advisory_lock(1), pg_advisory_lock(2)").await.unwrap();
    let layout =
        InsertOrFetch::into_table(TableName::new("t")).key("k").field("u").build().unwrap();
    let calling = tokio::spawn(async move {
        let items = [json!({"k": 1, "u": "a"}), json!({"k": 2, "u": "b"})];
        layout.insert_all::<_, Value>(&caller, &items).await
    });
    are_waiting(&server, 1).await;
    control.batch_execute("DELETE FROM t WHERE k = 9").await.unwrap();
    let inserting = tokio::spawn(async move {
        other.batch_execute("INSERT INTO t VALUES (1, 'a')").await.unwrap();
    });
    are_waiting(&server, 2).await;
    control.batch_execute("SELECT pg_advisory_unlock(1)").await.unwrap();
    let met = "SELECT count(*) = 1 FROM pg_stat_activity WHERE wait_event = 'transactionid'";
    until(&server, met).await;
    control.batch_execute("SELECT pg_advisory_unlock(2)").await.unwrap();
    inserting.await.unwrap();
    let told = calling.await.unwrap();
    assert!(matches!(told, Err(DataError::UniqueViolation { item: Some(1), .. })), "{told:?}");
}
