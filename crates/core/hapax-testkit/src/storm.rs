//! A load of many callers on few keys while a test disturbs the store. Afterwards a checker
//! verifies that the replies are linearizable.

#![allow(
    clippy::expect_used,
    clippy::missing_panics_doc,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a storm fails by panicking"
)]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use hapax_core::store::{Draft, Snapshot, Stamp, Swap, Swapped};
use hapax_core::{
    Fingerprint, FingerprintScheme, LeaseId, OnUnknown, OperationId, Outcome, Record, RecordState,
    Store, StoreError, Terms, WriteId,
};
use tokio::task::JoinSet;

use crate::SeededEntropy;
use crate::history::{MAX_OPERATIONS, Recorder};

/// Callers on one key at the same time.
const CALLERS: u64 = 5;

/// Operations of one caller on one key.
const EACH: usize = MAX_OPERATIONS / CALLERS as usize;

/// Size and seed of a storm.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Storm {
    /// Minimum of operations in all.
    pub operations: usize,
    /// Keys that have callers at the same time.
    pub keys_at_once: usize,
    /// Seed of the operations.
    pub seed: u64,
    /// Pause of a caller after an error, in which an unavailable store can recover.
    pub pause: Duration,
}

/// Counts of the replies.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct StormCounts {
    /// Swaps that were stored.
    pub stored: u64,
    /// Swaps that found another write id.
    pub conflicts: u64,
    /// Loads with a reply.
    pub loads: u64,
    /// Swaps of which it is unknown whether they happened.
    pub ambiguous: u64,
    /// Operations that did not happen.
    pub unavailable: u64,
}

impl Storm {
    /// Returns a storm on eight keys at a time, of `HAPAX_OPERATIONS` operations (a hundred
    /// thousand for a long run) or, by default, of `operations`.
    #[must_use]
    pub fn of(operations: usize, seed: u64) -> Self {
        let wanted = std::env::var("HAPAX_OPERATIONS").ok();
        let operations = wanted.map_or(operations, |number| number.parse().expect("a number"));
        Self { operations, keys_at_once: 8, seed, pause: Duration::from_millis(10) }
    }

    /// [Runs](Self::run) the storm, and again with the seeds that follow, until `enough` finds in
    /// the counts so far that the disturbance had its effect.
    pub async fn run_until<S: Store>(
        &self,
        stores: &[Arc<S>],
        enough: impl Fn(&StormCounts) -> bool,
    ) -> StormCounts {
        /// Limit of rounds: more would not help.
        const ROUNDS: usize = 200;
        let mut all = StormCounts::default();
        for seed in (self.seed..).take(ROUNDS) {
            let told = Self { seed, ..*self }.run(stores).await;
            all.stored += told.stored;
            all.conflicts += told.conflicts;
            all.loads += told.loads;
            all.ambiguous += told.ambiguous;
            all.unavailable += told.unavailable;
            if enough(&all) {
                return all;
            }
        }
        panic!("the harm does not bite: {all:?}")
    }

    /// Runs the storm over `stores`, which are several ways to the same records, and checks every
    /// history.
    ///
    /// Callers do what the engine does: they send an ambiguous swap again, unchanged.
    ///
    /// # Panics
    /// If a record is not what was written with its write id, or if the store cannot decode its own
    /// records.
    pub async fn run<S: Store>(&self, stores: &[Arc<S>]) -> StormCounts {
        let keys = self.operations.div_ceil(EACH * CALLERS as usize);
        let counts = Arc::new(Counts::default());
        let recorder = Arc::new(Recorder::default());
        let entropy = SeededEntropy::new(self.seed);
        let mut running = JoinSet::new();
        for _ in 0..keys {
            let key = OperationId::from_bytes(wide(&entropy));
            let callers: Vec<_> = (0..CALLERS)
                .map(|number| Caller {
                    store: Arc::clone(&stores[number as usize % stores.len()]),
                    recorder: Arc::clone(&recorder),
                    counts: Arc::clone(&counts),
                    entropy: SeededEntropy::new(entropy.next()),
                    pause: self.pause,
                })
                .collect();
            if running.len() >= self.keys_at_once {
                running.join_next().await.expect("it is not empty").expect("callers end");
            }
            running.spawn(async move {
                let mut tasks = JoinSet::new();
                for caller in callers {
                    tasks.spawn(async move { caller.run(key).await });
                }
                tasks.join_all().await;
            });
        }
        running.join_all().await;
        if let Err(violation) = recorder.check() {
            panic!("seed {}: {violation}", self.seed);
        }
        counts.counts()
    }
}

#[derive(Debug, Default)]
struct Counts([AtomicU64; 5]);

impl Counts {
    fn add(&self, which: usize) {
        self.0[which].fetch_add(1, Ordering::Relaxed);
    }

    fn counts(&self) -> StormCounts {
        let [stored, conflicts, loads, ambiguous, unavailable] =
            [0, 1, 2, 3, 4].map(|which: usize| self.0[which].load(Ordering::Relaxed));
        StormCounts { stored, conflicts, loads, ambiguous, unavailable }
    }
}

struct Caller<S> {
    store: Arc<S>,
    recorder: Arc<Recorder>,
    counts: Arc<Counts>,
    entropy: SeededEntropy,
    pause: Duration,
}

impl<S: Store> Caller<S> {
    async fn run(&self, key: OperationId) {
        let mut last = None;
        let mut again: Option<Swap> = None;
        for _ in 0..EACH {
            if again.is_none() && self.entropy.below(4) == 0 {
                if let Some(seen) = self.load(key).await {
                    last = seen;
                }
                continue;
            }
            // Sometimes expects no record, as every first swap of a claim does.
            let expected = if self.entropy.below(6) == 0 { None } else { last };
            let swap = again.take().unwrap_or_else(|| self.swap(key, expected));
            let called = self.recorder.called();
            let answer = self.store.swap(swap.clone()).await;
            self.recorder.swapped(called, &swap, &answer);
            match answer {
                Ok(Swapped::Stored(_)) => {
                    self.counts.add(0);
                    last = Some(swap.write_id);
                }
                Ok(Swapped::Conflict(seen)) => {
                    self.counts.add(1);
                    last = named(&seen);
                }
                Err(error) => {
                    let ambiguous = matches!(error, StoreError::Ambiguous(_));
                    self.failed(error, if ambiguous { 3 } else { 4 }).await;
                    again = ambiguous.then_some(swap);
                }
            }
        }
    }

    async fn load(&self, key: OperationId) -> Option<Option<WriteId>> {
        let called = self.recorder.called();
        match self.store.load(&key).await {
            Ok(seen) => {
                self.recorder.loaded(called, key, &seen);
                self.counts.add(2);
                Some(named(&seen))
            }
            Err(error) => {
                self.failed(error, 4).await;
                None
            }
        }
    }

    async fn failed(&self, error: StoreError, which: usize) {
        assert!(!matches!(error, StoreError::Corrupt(_)), "cannot read its own: {error:?}");
        self.counts.add(which);
        tokio::time::sleep(self.pause).await;
    }

    /// Returns a swap that leaves a record which contains its own write id.
    fn swap(&self, key: OperationId, expected: Option<WriteId>) -> Swap {
        let write_id = WriteId::fresh(&self.entropy).expect("it never fails");
        let lease_id = LeaseId::fresh(&self.entropy).expect("it never fails");
        let day = Duration::from_secs(24 * 60 * 60);
        let record = Record {
            scheme: FingerprintScheme::new("storm/1").expect("it is short"),
            fingerprint: Fingerprint::from_bytes([7; 32]),
            lease_id,
            generation: lease_id,
            attempt: 1,
            terms: Terms { lease: day, retention: day, on_unknown: OnUnknown::Block },
            checkpoint: None,
            notes: hapax_core::Notes::default(),
            extensions: hapax_core::Extensions::default(),
            state: RecordState::Done(Outcome::new("tag", write_id.as_bytes().to_vec())),
        };
        let draft = Draft { record, stamp: Stamp::NextFence, lease: day, keep: Some(day) };
        Swap { id: key, expected, write_id, draft }
    }
}

/// Returns the write id that was found, and checks that the record contains it too.
fn named(seen: &Snapshot) -> Option<WriteId> {
    let stored = seen.stored.as_ref()?;
    match &stored.record.state {
        RecordState::Done(outcome) => assert_eq!(**outcome.bytes(), stored.write_id.as_bytes()[..]),
        other => panic!("found a state that no caller wrote: {other:?}"),
    }
    Some(stored.write_id)
}

fn wide<const N: usize>(entropy: &SeededEntropy) -> [u8; N] {
    let mut bytes = [0; N];
    bytes.chunks_mut(8).for_each(|chunk| {
        chunk.copy_from_slice(&entropy.next().to_be_bytes()[..chunk.len()]);
    });
    bytes
}
