//! The rate of sagas beside as many bare swaps.

use std::future::pending;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use hapax_core::store::{Draft, Stamp, Swap, Swapped};
use hapax_core::{
    Entropy, Fingerprint, FingerprintScheme, Idempotency, LeaseId, Notes, OnUnknown, OperationId,
    Outcome as Stored, Record, RecordState, Scope, Store, SystemEntropy, Terms, WriteId,
};
use hapax_saga::{Saga, Sagas, StepContext, StepError};
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::counted::Counted;
use crate::place::Place;
use crate::{Outcome, mark};

const CALLERS: u64 = 64;

const STEPS: u32 = 5;

/// Writes of a saga: claim, entry, a save for each step, completion, removal of the entry.
const WRITES: u64 = STEPS as u64 + 4;

/// About the size of a step in the log, in bytes.
const STEP: usize = 250;

/// The least ratio of the rates.
const TARGET: f64 = 0.6;

/// Number of the next saga or record: names are never repeated.
static NEXT: AtomicU64 = AtomicU64::new(0);

fn five() -> Outcome<Saga<u32, u32, String>> {
    let mut saga = Saga::define("five", 1, ());
    let step =
        saga.again("step", async |_: StepContext<()>, n: u32| Ok::<_, StepError<String>>(n + 1));
    let step = step.no_undo();
    Ok(saga.flow(move |op, mut n: u32| async move {
        for nth in 0..STEPS {
            n = op.run(step.nth(nth), n).await?;
        }
        Ok(n)
    })?)
}

pub(crate) async fn measure(place: &Place, rounds: u64, seconds: u64) -> Outcome<()> {
    let counted = Counted::new(place.open().await?);
    let engine = Idempotency::builder(Arc::clone(&counted)).namespace("").build()?;
    let saga = five()?;
    let sagas = Sagas::builder(engine).register(&saga).build()?;
    let driving = sagas.clone();
    let driver = tokio::spawn(async move { driving.run(pending(), Duration::ZERO).await });

    println!(
        "{}: {CALLERS} callers, sagas of {STEPS} steps and as many swaps a second",
        place.name
    );
    let span = Duration::from_secs(seconds);
    let mut ratios = Vec::new();
    // The first round, which is not counted, fills caches.
    for round in 0..=rounds {
        let run = || one_saga(sagas.clone(), saga.clone());
        let (of_sagas, ended) = drive(span, run).await?;
        let calls = counted.take();
        let store: Arc<dyn Store> = counted.clone();
        let (of_swaps, _) = drive(span, || swaps(Arc::clone(&store))).await?;
        counted.take();
        let ratio = of_sagas / of_swaps;
        let each = |count: u64| count as f64 / ended.max(1) as f64;
        println!(
            "  {} sagas/s {of_sagas:7.0}   {WRITES} swaps/s {of_swaps:7.0}   ratio {ratio:.2}   a saga: \
             {:.1} swaps, {:.1} changes and {:.1} polls of the schedule, {:.1} loads",
            if round == 0 { "warm-up:" } else { "" },
            each(calls.swaps),
            each(calls.changes),
            each(calls.polls),
            each(calls.loads),
        );
        if each(calls.writes()) > WRITES as f64 + 0.5 {
            return Err(format!("expected {WRITES} writes of a saga, found more").into());
        }
        if round > 0 {
            ratios.push(ratio);
        }
    }
    driver.abort();
    ratios.sort_by(f64::total_cmp);
    let median = ratios[ratios.len() / 2];
    println!("  median of the ratios {median:.2}, target {TARGET}{}", mark(median >= TARGET));
    Ok(())
}

/// Lets callers repeat `run` for a time. Returns the rate, and how many runs ended.
async fn drive<F>(span: Duration, run: impl Fn() -> F) -> Outcome<(f64, u64)>
where
    F: Future<Output = Outcome<()>> + Send + 'static,
{
    let begin = Instant::now();
    let (mut callers, mut ended) = (JoinSet::new(), 0);
    for _ in 0..CALLERS {
        callers.spawn(run());
    }
    while let Some(run_ended) = callers.join_next().await {
        run_ended??;
        ended += 1;
        if begin.elapsed() < span {
            callers.spawn(run());
        }
    }
    Ok((ended as f64 / begin.elapsed().as_secs_f64(), ended))
}

async fn one_saga(sagas: Sagas, saga: Saga<u32, u32, String>) -> Outcome<()> {
    let key = format!("saga-{}", NEXT.fetch_add(1, Ordering::Relaxed)).parse()?;
    let started = sagas.start(&saga, &Scope::shared(), &key, &0).await?;
    match started.outcome().await {
        Ok(STEPS) => Ok(()),
        other => Err(format!("expected {STEPS}, found {other:?}").into()),
    }
}

/// Swaps one new record as often as a saga writes, with contents of about the same size.
async fn swaps(store: Arc<dyn Store>) -> Outcome<()> {
    let mut id = [0; 32];
    SystemEntropy.fill(&mut id)?;
    let lease_id = LeaseId::fresh(&SystemEntropy)?;
    let (lease, retention) = (Duration::from_secs(30), Duration::from_secs(86_400));
    let mut record = Record {
        scheme: FingerprintScheme::new("saga/1")?,
        fingerprint: Fingerprint::from_bytes(id),
        lease_id,
        generation: lease_id,
        attempt: 1,
        terms: Terms { lease, retention, on_unknown: OnUnknown::Reexecute },
        checkpoint: None,
        notes: Notes::default(),
        extensions: hapax_core::Extensions::default(),
        state: RecordState::InFlight,
    };
    let mut expected = None;
    for write in 0..WRITES {
        let steps = usize::try_from(write.min(u64::from(STEPS)))?;
        record.checkpoint = (steps > 0).then(|| Bytes::from(vec![b's'; steps * STEP]));
        if write + 1 == WRITES {
            record.checkpoint = None;
            record.state = RecordState::Done(Stored::new("saga/1", vec![b's'; STEP]));
        }
        let stamp = if write == 0 { Stamp::NextFence } else { Stamp::Keep };
        let draft = Draft { record: record.clone(), stamp, lease, keep: Some(retention) };
        let write_id = WriteId::fresh(&SystemEntropy)?;
        let swap = Swap { id: OperationId::from_bytes(id), expected, write_id, draft };
        if !matches!(store.swap(swap).await?, Swapped::Stored(_)) {
            return Err("expected a stored swap of a new record, found a conflict".into());
        }
        expected = Some(write_id);
    }
    Ok(())
}
