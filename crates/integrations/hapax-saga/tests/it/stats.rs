//! Counters of a process, the census of a store, and spans.

use std::io;
use std::num::NonZeroU32;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hapax_core::schedule::{EntryKey, NewEntry, QueueName};
use hapax_core::{EntryId, Idempotency, OperationId};
use hapax_saga::{DefinitionStats, FlowContext, Saga, SagaOperator, Sagas, StepStats};
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::fmt::format::FmtSpan;

use crate::shop::{Answer, Systems, cart, order};
use crate::world::{World, key, scope};

fn only(sagas: &Sagas) -> DefinitionStats {
    let mut definitions = sagas.stats().definitions;
    assert_eq!(definitions.len(), 1);
    definitions.remove(0)
}

fn step(stats: &DefinitionStats, name: &str) -> StepStats {
    *stats.steps.iter().find(|step| step.name == name).unwrap()
}

#[tokio::test(start_paused = true)]
async fn runs_and_tries_are_counted_by_definition_and_step() {
    let (world, systems) = (World::new(), Systems::default());
    systems.answer("charge", &[Answer::NotSent, Answer::Unknown, Answer::Reject]);
    systems.answer("free", &[Answer::Unknown]);
    let saga = order(&systems);
    let process = world.process(&saga);
    for name in ["undone", "done"] {
        let started = process.sagas.start(&saga, &scope(), &key(name), &cart()).await.unwrap();
        assert_eq!(started.outcome().await.is_ok(), name == "done");
    }
    let stats = only(&process.sagas);
    assert_eq!((stats.name, stats.version), ("place-order", 1));
    assert_eq!((stats.done, stats.undone, stats.running), (1, 1, 0));
    let charge = step(&stats, "charge");
    assert_eq!((charge.tries, charge.happened, charge.rejected), (4, 1, 1));
    assert_eq!((charge.not_sent, charge.unknown, charge.running), (1, 1, 0));
    let reserve = step(&stats, "reserve");
    assert_eq!((reserve.undo_tries, reserve.undo_failures), (2, 1));
}

#[tokio::test(start_paused = true)]
async fn a_running_saga_and_call_are_counted_until_they_end() {
    let (world, systems) = (World::new(), Systems::default());
    systems.answer("charge", &[Answer::Hang]);
    let saga = order(&systems);
    let process = world.process(&saga);
    process.sagas.start(&saga, &scope(), &key("k"), &cart()).await.unwrap();
    while step(&only(&process.sagas), "charge").running == 0 {
        tokio::task::yield_now().await;
    }
    let stats = only(&process.sagas);
    assert_eq!((stats.running, stats.runs, step(&stats, "reserve").running), (1, 1, 0));
}

#[tokio::test(start_paused = true)]
async fn the_census_counts_unfinished_sagas_by_step() {
    let (world, systems) = (World::new(), Systems::default());
    systems.answer("notify", &[Answer::Unknown, Answer::Unknown]);
    let saga = order(&systems);
    let process = world.process(&saga);
    for name in ["a", "b", "done"] {
        process.sagas.start(&saga, &scope(), &key(name), &cart()).await.unwrap();
        tokio::time::sleep(Duration::from_secs(60)).await;
    }
    let engine = Idempotency::builder(Arc::clone(&world.store)).build().unwrap();
    let operator = SagaOperator::new(engine);
    let census = operator.census(100).await.unwrap();
    assert!(census.is_complete);
    assert_eq!(census.queues[0].entries, 2);
    let [notify] = census.steps.as_slice() else { panic!("one step: {census:?}") };
    assert_eq!((notify.definition.as_str(), notify.version), ("place-order", 1));
    assert_eq!(notify.step.as_deref(), Some("notify"));
    assert_eq!((notify.running, notify.parked, notify.stuck, notify.tries), (0, 0, 2, 2));
    assert!(notify.oldest >= Duration::from_secs(180));
    let stats = only(&process.sagas);
    assert_eq!((stats.stuck, step(&stats, "notify").stuck), (2, 2));

    let part = operator.census(1).await.unwrap();
    assert_eq!((part.is_complete, part.steps[0].stuck), (false, 1));
}

#[tokio::test(start_paused = true)]
async fn a_census_passes_over_no_more_entries_of_other_namespaces_than_its_limit() {
    let (world, systems) = (World::new(), Systems::default());
    systems.answer("notify", &[Answer::Unknown, Answer::Unknown]);
    let saga = order(&systems);
    let process = world.process(&saga);
    process.sagas.start(&saga, &scope(), &key("a"), &cart()).await.unwrap();
    tokio::time::sleep(Duration::from_secs(60)).await;
    let engine = |name| Idempotency::builder(Arc::clone(&world.store)).namespace(name).build();
    let operator = SagaOperator::new(engine("").unwrap());
    // Behind the only saga of the namespace, and then before it.
    for (first, whole) in [(u8::MAX, [100, 1000]), (0, [601, 1000])] {
        for number in 0..600_u16 {
            let mut operation = [first; 32];
            operation[30..].copy_from_slice(&number.to_be_bytes());
            let key = EntryKey {
                operation: OperationId::from_bytes(operation),
                id: EntryId::from_bytes([0; 16]),
            };
            let queue = QueueName::new("saga:place-order:1").unwrap();
            let (due_in, note) = (Duration::from_secs(3600), Default::default());
            let entry = NewEntry { key, queue, due_in, note };
            engine("other").unwrap().schedule().unwrap().insert(entry).await.unwrap();
        }
        for limit in whole {
            let census = operator.census(limit).await.unwrap();
            assert!(census.is_complete && census.steps[0].stuck == 1, "{first} {limit} {census:?}");
        }
    }
    let part = operator.census(100).await.unwrap();
    assert!(!part.is_complete && part.steps.is_empty(), "{part:?}");
    assert_eq!(part.queues[0].entries, 1);
    let (mut listed, mut after, mut pages) = (Vec::new(), None, 0);
    loop {
        let (sagas, next) = operator.list(after, NonZeroU32::new(100).unwrap()).await.unwrap();
        (after, pages) = (next, pages + 1);
        listed.extend(sagas);
        if after.is_none() {
            break;
        }
    }
    assert_eq!((listed.len(), pages), (1, 13));
}

#[derive(Clone, Default)]
struct Text(Arc<Mutex<Vec<u8>>>);

impl io::Write for Text {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Text {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}

#[tokio::test(start_paused = true)]
async fn spans_name_saga_and_step_and_contain_no_key_scope_or_content() {
    let text = Text::default();
    let subscriber = tracing_subscriber::fmt()
        .with_ansi(false)
        .without_time()
        .with_span_events(FmtSpan::CLOSE)
        .with_writer(text.clone())
        .finish();
    let guard = tracing::subscriber::set_default(subscriber);
    let (world, systems) = (World::new(), Systems::default());
    let saga = order(&systems);
    let process = world.process(&saga);
    let secret = key("key-of-a-caller");
    let started = process.sagas.start(&saga, &scope(), &secret, &cart()).await.unwrap();
    started.outcome().await.unwrap();
    drop(guard);
    let log = String::from_utf8(text.0.lock().unwrap().clone()).unwrap();
    let id = started.id();
    for step in ["reserve", "charge", "notify"] {
        let line = log.lines().find(|line| line.contains(&format!("step=\"{step}\""))).unwrap();
        assert!(line.contains(&format!("operation={id}")), "{line}");
        assert!(line.contains("saga{name=\"place-order\" version=1"), "{line}");
        assert!(line.contains("function=\"step\"") && line.contains("try_number=1"), "{line}");
    }
    for content in ["key-of-a-caller", "c-1", "visa"] {
        assert!(!log.contains(content), "{content}: {log}");
    }
}

#[tokio::test(start_paused = true)]
async fn events_contain_no_error_of_a_step() {
    let text = Text::default();
    let subscriber = tracing_subscriber::fmt().with_writer(text.clone()).finish();
    let guard = tracing::subscriber::set_default(subscriber);
    let (world, systems) = (World::new(), Systems::default());
    systems.answer("notify", &[Answer::Unknown]);
    let saga = order(&systems);
    let process = world.process(&saga);
    process.sagas.start(&saga, &scope(), &key("k"), &cart()).await.unwrap();
    tokio::time::sleep(Duration::from_secs(60)).await;
    drop(guard);
    let log = String::from_utf8(text.0.lock().unwrap().clone()).unwrap();
    let line = log.lines().find(|line| line.contains("a saga is stuck")).expect(&log);
    assert!(line.contains("notify") && line.contains("unknown"), "{line}");
    // The error of the called system.
    assert!(!log.contains("connection reset"), "{log}");
}

#[tokio::test(start_paused = true)]
async fn a_flow_that_waits_for_something_else_than_a_step_is_counted() {
    let world = World::new();
    let saga = Saga::define("waits", 1, ());
    let flow = async |_: FlowContext, (): ()| std::future::pending::<Result<(), String>>().await;
    let saga = saga.flow(flow).unwrap();
    let process = world.process(&saga);
    process.sagas.start(&saga, &scope(), &key("k"), &()).await.unwrap();
    tokio::time::sleep(Duration::from_secs(59)).await;
    assert_eq!(only(&process.sagas).flow_waits, 0);
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(only(&process.sagas).flow_waits, 1);
}
