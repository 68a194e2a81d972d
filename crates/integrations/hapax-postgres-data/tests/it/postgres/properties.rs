//! Histories of any calls, on tables of any names, against models in memory.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::ops::Range;

use hapax_postgres_data::{
    AppendResult, EventLog, IdScope, IdentifiedUpdate, InsertOrFetch, InsertOrFetchBuilder,
    Inserted, TableName, UpdateLog, UpdateResult, VersionedRow, VersionedRows,
};
use hapax_testkit::servers::PostgresServer;
use proptest::collection::{btree_set, vec};
use proptest::prelude::{Just, Strategy, any, prop_oneof};
use proptest::sample::{Index, select};
use proptest::test_runner::{Config, TestRunner};
use serde_json::{Map, Value, json};
use tokio_postgres::Client;

use super::support::client;

/// Words of the statements themselves, words of SQL, and what could end quotes.
const NAMES: [&str; 20] = [
    "g",
    "t",
    "n",
    "v",
    "f",
    "h",
    "o",
    "item",
    "given",
    "firsts",
    "position",
    "version",
    "select",
    "Order",
    "a\"b",
    "\"",
    "x\"; DROP TABLE y; --",
    "\\",
    "$1",
    "ж 'é'",
];

fn name() -> impl Strategy<Value = String> {
    prop_oneof![select(&NAMES[..]).prop_map(String::from), "[^\0]{1,15}"]
}

/// Distinct ones, shuffled.
fn names(many: Range<usize>) -> impl Strategy<Value = Vec<String>> {
    btree_set(name(), many).prop_map(Vec::from_iter).prop_shuffle()
}

fn quoted(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

/// How often each outcome was told.
#[derive(Default)]
struct Tally(RefCell<BTreeMap<String, u32>>);

impl Tally {
    fn count(&self, told: &(impl Debug + ?Sized)) {
        let told = format!("{told:?}");
        let kind = told.split(|c: char| !c.is_alphanumeric()).next().unwrap_or_default();
        *self.0.borrow_mut().entry(kind.into()).or_default() += 1;
    }

    /// A history that never gets there checks nothing.
    fn all_of<const N: usize>(&self, kinds: [&str; N]) {
        let counts = self.0.borrow();
        for kind in kinds {
            assert!(counts.get(kind).is_some_and(|count| *count > 5), "{kind}: {counts:?}");
        }
    }
}

/// Runs `case` for many of `strategy`, each with a schema of its own name.
fn check<S>(cases: u32, strategy: S, case: impl AsyncFn(&Client, &str, S::Value))
where
    S: Strategy,
{
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let server = runtime.block_on(PostgresServer::start());
    let client = runtime.block_on(client(&server));
    let config = Config { cases, failure_persistence: None, ..Config::default() };
    let strategy = (name(), strategy);
    let run = TestRunner::new(config).run(&strategy, |(schema, given)| {
        runtime.block_on(async {
            let (name, start) = (quoted(&schema), "SET client_min_messages = error");
            let anew =
                format!("{start}; DROP SCHEMA IF EXISTS {name} CASCADE; CREATE SCHEMA {name}");
            client.batch_execute(&anew).await.unwrap();
            case(&client, &schema, given).await;
            client.batch_execute(&format!("DROP SCHEMA {name} CASCADE")).await.unwrap();
        });
        Ok(())
    });
    run.unwrap();
}

/// A type, and values of it: those with the same number are the same to it.
type Kind = (&'static str, fn() -> Vec<(Value, u8)>);

const KINDS: [Kind; 8] = [
    ("text", || vec![(json!("a"), 0), (json!("A"), 1), (json!("a "), 2), (json!("'\\\"é"), 3)]),
    ("bigint", || vec![(json!(1), 0), (json!("1"), 0), (json!(i64::MAX), 1), (json!(-1), 2)]),
    ("numeric", || vec![(json!(1), 0), (json!("1.00"), 0), (json!(1.5), 1), (json!("1e40"), 2)]),
    ("numeric(8, 2)", || vec![(json!("1.005"), 0), (json!(1.01), 0), (json!(1), 1)]),
    ("jsonb", || {
        let (one, same) = (json!({"a": 1, "b": [2]}), json!({"b": [2.0], "a": 1}));
        vec![(one, 0), (same, 0), (json!({"a": 1}), 1), (json!("null"), 2)]
    }),
    ("timestamptz", || {
        let (one, same) = (json!("2026-01-01T00:00:00Z"), json!("2026-01-01 02:00:00+02"));
        vec![(one, 0), (same, 0), (json!("2026-01-01T00:00:00.000001Z"), 1)]
    }),
    ("bytea", || vec![(json!("\\x00ff"), 0), (json!("\\x00FF"), 0), (json!("\\x"), 1)]),
    ("uuid", || {
        let low = "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11";
        vec![(json!(low), 0), (json!(low.to_uppercase()), 0), (json!(low.replace('a', "b")), 1)]
    }),
];

#[test]
fn insert_or_fetch_behaves_like_a_map() {
    let columns = names(2..6).prop_flat_map(|names| {
        let many = names.len();
        (Just(names), vec(select(&KINDS[..]), many), 1..many, name())
    });
    // Values by number; whether null, where that may be.
    let item = vec((any::<Index>(), any::<u8>()), 6);
    let history = vec(vec(item, 0..6), 1..8);
    check(
        60,
        (columns, history),
        async |client, schema, ((names, kinds, keys, table), history)| {
            let typed = names.iter().zip(&kinds).map(|(name, (kind, _))| quoted(name) + " " + kind);
            let unique = names[..keys].iter().map(|name| quoted(name)).rev();
            let create = format!(
                "CREATE TABLE {}.{} ({}, UNIQUE ({}))",
                quoted(schema),
                quoted(&table),
                Vec::from_iter(typed).join(", "),
                Vec::from_iter(unique).join(", ")
            );
            client.batch_execute(&create).await.unwrap();
            let layout = InsertOrFetch::into_table(TableName::in_schema(schema, &table));
            let layout = names[..keys].iter().fold(layout, InsertOrFetchBuilder::key);
            let layout = names[keys..].iter().fold(layout, InsertOrFetchBuilder::field);
            let layout = layout.build().unwrap();

            let mut model: BTreeMap<Vec<u8>, Vec<u8>> = BTreeMap::new();
            for batch in history {
                let (mut items, mut expected) = (Vec::new(), Vec::new());
                for picks in batch {
                    let (mut item, mut classes) = (Map::new(), Vec::new());
                    for (at, (name, (_, values))) in names.iter().zip(&kinds).enumerate() {
                        let (pick, null) = &picks[at];
                        let (value, class) = if at >= keys && *null < 40 {
                            (Value::Null, u8::MAX)
                        } else {
                            pick.get(&values()).clone()
                        };
                        item.insert(name.clone(), value);
                        classes.push(class);
                    }
                    items.push(item);
                    let fields = classes.split_off(keys);
                    expected.push(match model.get(&classes) {
                        None => {
                            model.insert(classes, fields);
                            None
                        }
                        Some(there) => {
                            let differ = (0..fields.len()).find(|at| fields[*at] != there[*at]);
                            Some(differ.map(|at| names[keys + at].clone()))
                        }
                    });
                }
                let told: Vec<Inserted<Value>> = layout.insert_all(client, &items).await.unwrap();
                let told: Vec<_> = told
                    .into_iter()
                    .map(|told| match told {
                        Inserted::Created(_) => None,
                        Inserted::Exists(_) => Some(None),
                        Inserted::ExistsWithDifferent { field, .. } => Some(Some(field)),
                    })
                    .collect();
                assert_eq!(told, expected, "{items:?}");
            }
            let count = format!("SELECT count(*) FROM {}.{}", quoted(schema), quoted(&table));
            let rows: i64 = client.query_one(&count, &[]).await.unwrap().get(0);
            assert_eq!(rows, model.len() as i64);
        },
    );
}

/// An event by its id and body.
type Event = (u8, u8);

/// What an append is to be told, said another way than the product says it.
fn appended(
    streams: &mut BTreeMap<u8, Vec<Event>>,
    ids: IdScope,
    (stream, expected, events): &(u8, usize, Vec<Event>),
) -> Result<AppendResult, ()> {
    if events.iter().map(|(id, _)| id).collect::<BTreeSet<_>>().len() < events.len() {
        return Err(());
    }
    let mine = streams.entry(*stream).or_default().clone();
    if ids == IdScope::UniqueInTable {
        for (index, (id, _)) in events.iter().enumerate() {
            for (other, there) in streams.iter().filter(|(other, _)| *other != stream) {
                if let Some(at) = there.iter().position(|(taken, _)| taken == id) {
                    let (stream, position) = (other.to_string(), at as u64 + 1);
                    return Ok(AppendResult::SameIdInOtherStream { index, stream, position });
                }
            }
        }
    }
    let at = |id: u8| mine.iter().position(|(there, _)| *there == id);
    for (index, (id, body)) in events.iter().enumerate() {
        if let Some(at) = at(*id).filter(|at| mine[*at].1 != *body) {
            let (position, field) = (at as u64 + 1, "body".into());
            return Ok(AppendResult::SameIdDifferentBody { index, position, field });
        }
    }
    let (current, end) = (mine.len() as u64, (expected + events.len()) as u64);
    if !events.is_empty() {
        let windows = mine.windows(events.len());
        if let Some(first) = windows.into_iter().position(|window| window == &events[..]) {
            let first = first as u64 + 1;
            return Ok(AppendResult::AlreadyAppended {
                positions: first..first + events.len() as u64,
            });
        }
        let positions: Vec<_> =
            events.iter().map(|(id, _)| at(*id).map(|at| at as u64 + 1)).collect();
        if positions.iter().any(Option::is_some) {
            return Ok(AppendResult::PartialOverlap { positions, current });
        }
    }
    Ok(if mine.len() < *expected {
        AppendResult::Gap { current }
    } else if mine.len() > *expected {
        AppendResult::Conflict { current }
    } else {
        streams.entry(*stream).or_default().extend(events);
        AppendResult::Appended { positions: *expected as u64 + 1..end + 1 }
    })
}

#[test]
fn append_behaves_like_a_list() {
    let ids = select(&[IdScope::UniqueInTable, IdScope::UniqueInStream][..]);
    let event = (0_u8..12, 0_u8..8).prop_map(|(id, body)| (id, u8::from(body == 0)));
    // Most of them expect what is there.
    let call =
        (0_u8..3, prop_oneof![6 => Just(None), 1 => (0_usize..6).prop_map(Some)], vec(event, 0..4));
    let layout = (names(4..5), name(), ids);
    let tally = Tally::default();
    check(60, (layout, vec(call, 1..40)), async |client, schema, ((names, table, ids), calls)| {
        let [stream, sequence, id, other] = &names[..] else { panic!("{names:?}") };
        // The field is named, and compared, as `body`.
        let body = if names.contains(&"body".to_owned()) { other } else { "body" };
        let identity = match ids {
            IdScope::UniqueInTable => quoted(id),
            IdScope::UniqueInStream => format!("{}, {}", quoted(stream), quoted(id)),
        };
        let create = format!(
            "CREATE TABLE {}.{} ({} int, {} bigint, {} smallint, {} jsonb, UNIQUE ({identity}),
            UNIQUE ({}, {}))",
            quoted(schema),
            quoted(&table),
            quoted(stream),
            quoted(sequence),
            quoted(id),
            quoted(body),
            quoted(sequence),
            quoted(stream)
        );
        client.batch_execute(&create).await.unwrap();
        let log = EventLog::on_table(TableName::in_schema(schema, &table));
        let log = log.stream(stream).sequence(sequence).id(id, ids).field(body).build().unwrap();
        let mut model = BTreeMap::new();
        for (to, expected, events) in calls {
            let there = model.get(&to).map_or(0, Vec::len);
            let call = (to, expected.unwrap_or(there), events);
            let rows: Vec<Value> = call
                .2
                .iter()
                .map(|(of, what)| {
                    Value::from_iter([(id.clone(), json!(of)), (body.to_owned(), json!(what))])
                })
                .collect();
            let told = log.append(client, &to.to_string(), call.1 as u64, &rows).await;
            let (told, expected) = (told.map_err(|_| ()), appended(&mut model, ids, &call));
            match &told {
                Ok(told) => tally.count(told),
                Err(()) => tally.count(&"Twice"),
            }
            assert_eq!(told, expected, "{call:?}");
        }
        for (stream, events) in model {
            let read = log.read::<Value>(client, &stream.to_string(), 0, 1_000).await.unwrap();
            let read = read.into_iter().map(|recorded| {
                let number = |name: &str| recorded.event[name].as_u64().unwrap() as u8;
                (recorded.position as usize, (number(id), number(body)))
            });
            assert!(read.eq(events.into_iter().enumerate().map(|(at, event)| (at + 1, event))));
        }
    });
    tally.all_of(["Appended", "AlreadyAppended", "Conflict", "Gap", "PartialOverlap"]);
    tally.all_of(["SameIdDifferentBody", "SameIdInOtherStream"]);
}

#[test]
fn updates_behave_like_versioned_entries_of_a_map() {
    // Row, whether the version is right, value, operation.
    let call =
        (0_u8..4, any::<bool>(), any::<i16>(), prop_oneof![Just(None), (0_u8..9).prop_map(Some)]);
    let layout = (names(6..7), name(), name());
    let tally = Tally::default();
    check(40, (layout, vec(call, 1..40)), async |client, schema, ((names, table, done), calls)| {
        let [key, version, field, operation, target, made] = &names[..] else {
            panic!("{names:?}")
        };
        let done = if done == table { format!("{done}.") } else { done };
        let create = format!(
            "CREATE TABLE {schema}.{table} ({} numeric PRIMARY KEY, {} int NOT NULL, {} smallint);
            INSERT INTO {schema}.{table} VALUES (0, 0, 0), (1.0, 1, 1), (2.00, 2, 2);
            CREATE TABLE {schema}.{} ({} int PRIMARY KEY, {} text, {} bigint)",
            quoted(key),
            quoted(version),
            quoted(field),
            quoted(&done),
            quoted(operation),
            quoted(target),
            quoted(made),
            schema = quoted(schema),
            table = quoted(&table),
        );
        client.batch_execute(&create).await.unwrap();
        let rows = VersionedRows::in_table(TableName::in_schema(schema, &table));
        let rows = rows.key(key).version(version).field(field).build().unwrap();
        let operations = UpdateLog::in_table(TableName::in_schema(schema, &done));
        let operations =
            operations.operation(operation).target(target).version(made).of(rows).unwrap();

        let mut model: BTreeMap<u8, (u64, i16)> =
            (0..3).map(|row| (row, (row.into(), row.into()))).collect();
        let mut applied: BTreeMap<u8, (u8, u64)> = BTreeMap::new();
        for (of, right, value, id) in calls {
            let there = model.get(&of).copied();
            let expected = there.map_or(0, |(version, _)| version) + u64::from(!right);
            let item = Value::from_iter([(key.clone(), json!(of)), (field.clone(), json!(value))]);
            let current = there.map(|(version, value)| {
                // As the server writes a numeric that it was given with decimals.
                let decimals: Value =
                    serde_json::from_str(["0", "1.0", "2.00"][usize::from(of)]).unwrap();
                let row =
                    Value::from_iter([(key.clone(), decimals), (field.clone(), json!(value))]);
                VersionedRow { version, row }
            });
            let earlier = id.and_then(|id| applied.get(&id).copied());
            let mut update = || {
                let (version, there) = model.get_mut(&of).unwrap();
                (*version, *there) = (*version + 1, value);
                if let Some(id) = id {
                    applied.insert(id, (of, *version));
                }
                *version
            };
            let Some(id) = id else {
                let told = operations.rows().update(client, expected, &item).await.unwrap();
                tally.count(&told);
                assert_eq!(
                    told,
                    match current {
                        None => UpdateResult::NotFound,
                        Some(current) if current.version != expected =>
                            UpdateResult::Conflict { current },
                        Some(_) => UpdateResult::Updated { version: update() },
                    }
                );
                continue;
            };
            let told = operations.update(client, &id.to_string(), expected, &item).await;
            tally.count(told.as_ref().map_or(&"Reused" as &dyn Debug, |told| told));
            match (earlier, current) {
                (Some((row, version)), _) if row == of => {
                    assert_eq!(told.unwrap(), IdentifiedUpdate::AlreadyApplied { version });
                }
                (Some(_), _) => assert!(told.is_err(), "{told:?}"),
                (None, None) => assert_eq!(told.unwrap(), IdentifiedUpdate::NotFound),
                (None, Some(current)) if current.version != expected => {
                    assert_eq!(told.unwrap(), IdentifiedUpdate::Conflict { current });
                }
                (None, Some(_)) => {
                    assert_eq!(told.unwrap(), IdentifiedUpdate::Applied { version: update() });
                }
            }
        }
    });
    tally.all_of(["Updated", "Applied", "AlreadyApplied", "NotFound", "Conflict"]);
}
