//! Parked and done sagas that are written through the interfaces of the store: copies of one that was
//! parked, and of one that has ended.

use std::collections::HashMap;
use std::future::pending;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hapax_core::store::{Draft, Stamp, Swap, Swapped};
use hapax_core::{
    Entropy, EntryId, Idempotency, LeaseId, OperationId, Record, Scope, Store, StoreError,
    SystemEntropy, WriteId,
};
use hapax_saga::log::Log;
use hapax_saga::{Saga, Sagas, StepContext, StepError};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use crate::Outcome;

/// Callers that insert at one time.
const CALLERS: u64 = 256;

/// Sleep of the template, which each copy has in its log. The copies end it earlier.
const SLEEP: u64 = 86_400_000;

/// The begins of steps.
#[derive(Debug, Default)]
pub(crate) struct Begun {
    /// By the key of the step: the begin of its first call, and the number of calls.
    calls: Mutex<HashMap<String, (Instant, u32)>>,
    running: AtomicUsize,
    most: AtomicUsize,
}

impl Begun {
    fn call(&self, key: &str) {
        let mut calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
        calls.entry(key.to_owned()).or_insert((Instant::now(), 0)).1 += 1;
    }

    /// Returns the begins so far, in order, and whether each step was called once.
    pub(crate) fn read(&self) -> (Vec<Instant>, bool) {
        let calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
        let mut begins: Vec<_> = calls.values().map(|call| call.0).collect();
        begins.sort_unstable();
        (begins, calls.values().all(|call| call.1 == 1))
    }

    /// Returns the greatest number of steps that ran at one time.
    pub(crate) fn most(&self) -> usize {
        self.most.load(Ordering::Relaxed)
    }
}

/// A saga that sleeps, for the milliseconds of its input, and then calls a step.
pub(crate) type Nap = Saga<u64, (), String>;

pub(crate) fn nap(begun: &Arc<Begun>) -> Outcome<Nap> {
    let mut saga = Saga::define("nap", 1, Arc::clone(begun));
    let step = saga.again("begin", async |at: StepContext<Arc<Begun>>, _: u64| {
        let running = at.running.fetch_add(1, Ordering::Relaxed) + 1;
        at.most.fetch_max(running, Ordering::Relaxed);
        at.call(at.key().as_str());
        // Others may begin meanwhile.
        tokio::task::yield_now().await;
        at.running.fetch_sub(1, Ordering::Relaxed);
        Ok::<_, StepError<String>>(())
    });
    let step = step.no_undo();
    Ok(saga.flow(move |op, millis: u64| async move {
        op.sleep("nap", Duration::from_millis(millis)).await;
        op.run(step, millis).await
    })?)
}

/// Writes copies.
#[derive(Clone)]
pub(crate) struct Population {
    store: Arc<dyn Store>,
    sagas: Sagas,
    nap: Nap,
    parked: Record,
    log: Log,
    done: Record,
}

impl Population {
    /// Runs the two templates.
    pub(crate) async fn new(store: Arc<dyn Store>) -> Outcome<Self> {
        let nap = nap(&Arc::default())?;
        let engine = Idempotency::builder(Arc::clone(&store)).namespace("").build()?;
        let sagas = Sagas::builder(engine).register(&nap).build()?;
        let driving = sagas.clone();
        let driver = tokio::spawn(async move { driving.run(pending(), Duration::ZERO).await });
        let done = sagas.start(&nap, &Scope::shared(), &"done".parse()?, &0).await?;
        done.outcome().await?;
        let done = load(&store, &done.id()).await?;
        let started = sagas.start(&nap, &Scope::shared(), &"parked".parse()?, &SLEEP).await?;
        let (parked, log) = loop {
            let record = load(&store, &started.id()).await?;
            let log = record.checkpoint.as_ref().and_then(|log| Log::decode(log).ok());
            match log.filter(|log| log.parked.is_some()) {
                Some(log) => break (record, log),
                None => sleep(Duration::from_millis(10)).await,
            }
        };
        driver.abort();
        Ok(Self { store, sagas, nap, parked, log, done })
    }

    /// Inserts `count` parked sagas; `due_in` returns when each is due, by its number.
    pub(crate) async fn park(
        &self,
        name: &'static str,
        count: u64,
        due_in: impl Fn(u64) -> Duration + Clone + Send + Sync + 'static,
    ) -> Outcome<()> {
        let each = move |this: Self, number| {
            let due_in = due_in(number);
            async move { this.park_one(&format!("{name}-{number}"), due_in).await }
        };
        self.fill(count, each).await
    }

    async fn park_one(&self, name: &str, due_in: Duration) -> Outcome<()> {
        let mut entry = self.sagas.entry(&self.nap, &Scope::shared(), &name.parse()?, &SLEEP)?;
        entry.key.id = EntryId::fresh(&SystemEntropy)?;
        entry.due_in = due_in;
        let mut log = self.log.clone();
        log.entry = *entry.key.id.as_bytes();
        let now = self.store.load(&entry.key.operation).await?.now;
        let until = now.after(due_in).into();
        for step in log.steps.iter_mut().filter(|step| step.outcome.is_none()) {
            step.forward.retry_at = Some(until);
        }
        if let Some(parked) = &mut log.parked {
            parked.until = until;
        }
        let record = Record { checkpoint: Some(log.encode()?), ..self.parked.clone() };
        self.write(entry.key.operation, record, due_in).await?;
        let schedule = self.store.capabilities().schedule;
        let none = || StoreError::unavailable("expected a store with a schedule");
        Ok(schedule.ok_or_else(none)?.insert(entry).await?)
    }

    /// Inserts `count` records of sagas that are done.
    pub(crate) async fn end(&self, count: u64) -> Outcome<()> {
        let each = |this: Self, _| async move {
            let mut id = [0; 32];
            SystemEntropy.fill(&mut id)?;
            this.write(OperationId::from_bytes(id), this.done.clone(), Duration::ZERO).await
        };
        self.fill(count, each).await
    }

    async fn fill<F>(&self, count: u64, each: impl Fn(Self, u64) -> F) -> Outcome<()>
    where
        F: Future<Output = Outcome<()>> + Send + 'static,
    {
        let mut callers = JoinSet::new();
        for number in 0..count {
            if number >= CALLERS
                && let Some(ended) = callers.join_next().await
            {
                ended??;
            }
            callers.spawn(each(self.clone(), number));
        }
        while let Some(ended) = callers.join_next().await {
            ended??;
        }
        Ok(())
    }

    async fn write(&self, id: OperationId, record: Record, lease: Duration) -> Outcome<()> {
        let lease_id = LeaseId::fresh(&SystemEntropy)?;
        let keep = Some(Duration::from_secs(30 * 86_400));
        let record = Record { lease_id, generation: lease_id, ..record };
        let draft = Draft { record, stamp: Stamp::NextFence, lease, keep };
        let write_id = WriteId::fresh(&SystemEntropy)?;
        match self.store.swap(Swap { id, expected: None, write_id, draft }).await? {
            Swapped::Stored(_) => Ok(()),
            Swapped::Conflict(_) => Err("expected no record, found one".into()),
        }
    }
}

async fn load(store: &Arc<dyn Store>, id: &OperationId) -> Outcome<Record> {
    let stored = store.load(id).await?.stored.ok_or("expected a record, found none")?;
    Ok(stored.record)
}
