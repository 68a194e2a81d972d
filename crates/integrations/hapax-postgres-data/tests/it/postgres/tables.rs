//! Tables of every kind: what fits, what is refused, and what triggers do.

use std::sync::Arc;

use hapax_postgres_data::{
    AppendResult, BatchLimits, Column, DataError, EventLog, IdScope, IdentifiedUpdate,
    InsertOrFetch, Inserted, LayoutError, StoredEvent, TableName, UpdateLog, UpdateResult,
    VersionedRows,
};
use hapax_testkit::servers::PostgresServer;
use serde_json::{Value, json};

use super::events::{EVENTS, event, log};
use super::insert::{ORDERS, order};
use super::support::{are_waiting, client, deadlocks, on_one_server};
use super::versioned::{COUNTERS, counter, counters};

on_one_server! {
    tables_of_every_kind:
    json_is_not_read_as_text_where_it_is_written_too,
    a_unique_index_with_another_collation_is_rejected,
    insert_triggers_run_for_inserted_rows_only,
    two_layouts_of_a_table_do_not_deadlock,
    versions_outside_the_columns_range_are_never_present,
    two_rounds_suffice_to_name_the_violated_constraint,
}

async fn json_is_not_read_as_text_where_it_is_written_too(server: &PostgresServer) {
    let tables = "CREATE DOMAIN inner_doc AS jsonb; CREATE DOMAIN doc AS inner_doc;
        CREATE TABLE docs (id int PRIMARY KEY, stream text, sequence bigint, a json, b jsonb, c doc,
            d int[], version bigint NOT NULL DEFAULT 0, UNIQUE (stream, sequence))";
    server.sql("postgres", tables).await;
    let client = client(server).await;
    let table = || TableName::new("docs");
    for column in ["a", "b", "c"] {
        let text = Column::new(column).read_as_text();
        let rows = || VersionedRows::in_table(table()).key("id").field(text.clone());
        let ids = UpdateLog::in_table(table()).operation("id").target("stream");
        let told = [
            rows().build().unwrap().verify(&client).await,
            ids.of(rows().build().unwrap()).unwrap().verify(&client).await,
            InsertOrFetch::into_table(table())
                .key("id")
                .field(text.clone().compare_as_text())
                .build()
                .unwrap()
                .verify(&client)
                .await,
            EventLog::on_table(table())
                .field(text.clone().compare_as_text())
                .build()
                .unwrap()
                .verify(&client)
                .await,
        ];
        for told in told {
            let Err(DataError::JsonAsText { column: of, .. }) = told else { panic!("{told:?}") };
            assert_eq!(of, column);
        }
    }
    // Read alone, it may be; and what is no JSON is written as it is read.
    let orders = InsertOrFetch::into_table(table())
        .key("id")
        .field(Column::new("d").read_as_text())
        .also_read(Column::new("b").read_as_text())
        .build()
        .unwrap();
    let item = json!({"id": 1, "d": "{1,2}"});
    let told: Inserted<Value> = orders.insert(&client, &item).await.unwrap();
    assert_eq!(told, Inserted::Created(json!({"id": 1, "d": "{1,2}", "b": null})));
}

async fn a_unique_index_with_another_collation_is_rejected(server: &PostgresServer) {
    let tables = "CREATE COLLATION loose
            (provider = icu, locale = 'und-u-ks-level2', deterministic = false);
        CREATE TABLE a (email text, n int, version int); CREATE UNIQUE INDEX ON a (email COLLATE loose);
        CREATE TABLE b (LIKE a); CREATE UNIQUE INDEX ON b (email COLLATE loose);
        CREATE UNIQUE INDEX ON b (email);
        CREATE TABLE c (email text COLLATE loose, n int, version int);
        CREATE UNIQUE INDEX ON c (email COLLATE \"C\");
        CREATE TABLE d (LIKE a); CREATE UNIQUE INDEX ON d (email COLLATE \"POSIX\");
        CREATE TABLE e (LIKE c); CREATE UNIQUE INDEX ON e (email)";
    server.sql("postgres", tables).await;
    let client = client(server).await;
    for (table, inserts, updates) in [
        ("a", false, false),
        ("b", false, true),
        ("c", false, false),
        ("d", true, true),
        ("e", true, true),
    ] {
        let orders = InsertOrFetch::into_table(TableName::new(table))
            .key("email")
            .field("n")
            .build()
            .unwrap();
        let rows =
            VersionedRows::in_table(TableName::new(table)).key("email").field("n").build().unwrap();
        for (told, fits) in
            [(orders.verify(&client).await, inserts), (rows.verify(&client).await, updates)]
        {
            assert_eq!(told.is_ok(), fits, "{table}: {told:?}");
            assert!(fits || matches!(told, Err(DataError::NoUniqueConstraint { .. })));
        }
    }
}

async fn insert_triggers_run_for_inserted_rows_only(server: &PostgresServer) {
    let triggers = "CREATE TABLE people (k int PRIMARY KEY, email text, low text, n serial);
        CREATE TABLE fired (n int);
        CREATE FUNCTION low() RETURNS trigger LANGUAGE plpgsql AS
            'BEGIN NEW.low := lower(NEW.email); INSERT INTO fired VALUES (1); RETURN NEW; END';
        CREATE TRIGGER low BEFORE INSERT ON people FOR EACH ROW EXECUTE FUNCTION low();
        CREATE FUNCTION stamp() RETURNS trigger LANGUAGE plpgsql AS
            'BEGIN NEW.at := ''2026-01-01''; INSERT INTO fired VALUES (1); RETURN NEW; END';
        CREATE TRIGGER stamp BEFORE INSERT ON events FOR EACH ROW EXECUTE FUNCTION stamp();
        CREATE FUNCTION more() RETURNS trigger LANGUAGE plpgsql AS
            'BEGIN NEW.more := OLD.more + 1; RETURN NEW; END';
        CREATE TRIGGER more BEFORE UPDATE ON counters FOR EACH ROW EXECUTE FUNCTION more()";
    server.sql("postgres", &format!("{EVENTS}; {COUNTERS}; {triggers}")).await;
    let client = client(server).await;
    let people = InsertOrFetch::into_table(TableName::new("people"))
        .key("k")
        .field("email")
        .also_read("low")
        .also_read("n")
        .build()
        .unwrap();
    let item = |k: u64| json!({"k": k, "email": "A@b"});
    let row = |k: u64, n: u64| json!({"k": k, "email": "A@b", "low": "a@b", "n": n});
    let told: Inserted<Value> = people.insert(&client, &item(1)).await.unwrap();
    assert_eq!(told, Inserted::Created(row(1, 1)));
    // The same again wakes nothing, and takes no number.
    for _ in 0..3 {
        let told: Inserted<Value> = people.insert(&client, &item(1)).await.unwrap();
        assert_eq!(told, Inserted::Exists(row(1, 1)));
    }
    let told: Vec<Inserted<Value>> = people.insert_all(&client, &[item(1), item(2)]).await.unwrap();
    assert_eq!(told, [Inserted::Exists(row(1, 1)), Inserted::Created(row(2, 2))]);
    let log = log(IdScope::UniqueInTable);
    for _ in 0..3 {
        log.append(&client, "s", 0, &[event("a")]).await.unwrap();
    }
    let again = log.append(&client, "s", 0, &[event("a")]).await.unwrap();
    assert_eq!(again, AppendResult::AlreadyAppended { positions: 1..2 });
    assert_eq!(server.sql("postgres", "SELECT count(*) FROM fired").await, "3");
    // What no layout names is the trigger's.
    let operations = UpdateLog::in_table(TableName::new("done")).of(counters()).unwrap();
    for told in
        [IdentifiedUpdate::Applied { version: 1 }, IdentifiedUpdate::AlreadyApplied { version: 1 }]
    {
        let item = counter("a", 1);
        assert_eq!(operations.update::<_, Value>(&client, "o", 0, &item).await.unwrap(), told);
    }
    let more = "SELECT more FROM counters WHERE name = 'a'";
    assert_eq!(server.sql("postgres", more).await, "8");
}

async fn two_layouts_of_a_table_do_not_deadlock(server: &PostgresServer) {
    server.sql("postgres", ORDERS).await;
    let layout = |one: &str, other: &str| {
        let table = TableName::in_schema("shop", "orders");
        Arc::new(
            InsertOrFetch::into_table(table).key(one).key(other).field("amount").build().unwrap(),
        )
    };
    let item = |customer: &str, cart: u64| json!({"customer": customer, "cart": cart, "amount": 1});
    let items = [item("a", 3), item("b", 2), item("c", 1)];
    // Both batches stop at the middle key, whichever way they go.
    let mut holder = client(server).await;
    let holding = holder.transaction().await.unwrap();
    let layouts = [layout("customer", "cart"), layout("cart", "customer")];
    let _: Inserted<Value> = layouts[0].insert(&holding, &items[1]).await.unwrap();
    let batches = layouts.map(|layout| {
        let (client, items) = (client(server), items.clone());
        async move {
            let mut client = client.await;
            let transaction = client.transaction().await.unwrap();
            let told: Vec<Inserted<Value>> = layout.insert_all(&transaction, &items).await.unwrap();
            transaction.commit().await.unwrap();
            told.iter().filter(|told| matches!(told, Inserted::Created(_))).count()
        }
    });
    let [one, other] = batches;
    let (one, other, ()) = tokio::join!(one, other, async {
        are_waiting(server, 2).await;
        holding.rollback().await.unwrap();
    });
    assert_eq!((one.min(other), one.max(other)), (0, 3));
    assert_eq!(deadlocks(server), 0);
}

async fn versions_outside_the_columns_range_are_never_present(server: &PostgresServer) {
    let tables = "CREATE TABLE e (stream text, sequence int, id text PRIMARY KEY,
            UNIQUE (stream, sequence));
        CREATE TABLE r (id int PRIMARY KEY, n int, version int);
        INSERT INTO r VALUES (1, 0, NULL), (2, 0, -1), (3, 0, 2147483646)";
    server.sql("postgres", tables).await;
    let client = client(server).await;
    let log = EventLog::on_table(TableName::new("e")).build().unwrap();
    let one = [json!({"id": "a"})];
    let gap = log.append(&client, "s", 1 << 40, &one).await.unwrap();
    assert_eq!(gap, AppendResult::Gap { current: 0 });
    log.append(&client, "s", 0, &one).await.unwrap();
    let again = log.append(&client, "s", 1 << 40, &one).await.unwrap();
    assert_eq!(again, AppendResult::AlreadyAppended { positions: 1..2 });
    for after in [1, 1 << 40, u64::MAX] {
        let none: Vec<StoredEvent<Value>> = log.read(&client, "s", after, 1).await.unwrap();
        assert_eq!(none, []);
    }
    let rows = VersionedRows::in_table(TableName::new("r")).key("id").field("n").build().unwrap();
    let item = |id: u64| json!({"id": id, "n": 1});
    let told: UpdateResult<Value> = rows.update(&client, 1 << 40, &item(3)).await.unwrap();
    assert!(matches!(told, UpdateResult::Conflict { .. }), "{told:?}");
    let told: UpdateResult<Value> = rows.update(&client, 2_147_483_646, &item(3)).await.unwrap();
    assert_eq!(told, UpdateResult::Updated { version: 2_147_483_647 });
    let told = rows.update::<_, Value>(&client, 2_147_483_647, &item(3)).await;
    assert!(matches!(told, Err(DataError::Rejected(refused)) if refused.code == "22003"));
    for (id, version) in [(1, None), (2, Some("-1".to_owned()))] {
        let told = rows.update::<_, Value>(&client, 0, &item(id)).await;
        let Err(DataError::NoVersion(found)) = told else { panic!("{told:?}") };
        assert_eq!(found, version);
    }
}

async fn two_rounds_suffice_to_name_the_violated_constraint(server: &PostgresServer) {
    server.sql("postgres", ORDERS).await;
    server.sql("postgres", EVENTS).await;
    server.sql("postgres", "ALTER TABLE shop.orders ADD UNIQUE (amount)").await;
    server.sql("postgres", "ALTER TABLE events ADD UNIQUE (body)").await;
    let client = client(server).await;
    let orders = |rounds| {
        InsertOrFetch::into_table(TableName::in_schema("shop", "orders"))
            .key("customer")
            .key("cart")
            .field("amount")
            .field("note")
            .limits(BatchLimits { rounds, ..BatchLimits::default() })
            .build()
    };
    assert_eq!(orders(1).err(), Some(LayoutError::OneRound));
    let orders = orders(2).unwrap();
    let _: Inserted<Value> = orders.insert(&client, &order(1, "1")).await.unwrap();
    let refused = orders.insert::<_, Value>(&client, &order(2, "1")).await;
    assert!(matches!(refused, Err(DataError::UniqueViolation { item: Some(0), .. })));
    let limits = BatchLimits { rounds: 2, ..BatchLimits::default() };
    let log = EventLog::on_table(TableName::new("events")).field("body").limits(limits);
    let log = log.build().unwrap();
    log.append(&client, "s", 0, &[json!({"id": "a", "body": 1})]).await.unwrap();
    let refused = log.append(&client, "s", 1, &[json!({"id": "b", "body": 1})]).await;
    assert!(matches!(refused, Err(DataError::UniqueViolation { item: None, .. })));
}
