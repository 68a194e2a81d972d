//! The reference store passes the suite, and keeps its bounds.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use hapax_core::store::{Draft, Stamp, Swap, Swapped};
use hapax_core::{
    Clock, Fingerprint, FingerprintScheme, LeaseId, MemoryCapacity, MemoryStore, OnUnknown,
    OperationId, Outcome, Record, RecordState, Store, StoreError, Terms, WriteId,
};
use hapax_testkit::faults::{FaultyCounts, FaultyRates, FaultyStore};
use hapax_testkit::storm::Storm;
use hapax_testkit::suite::{ClockFixture, StoreFixture};
use hapax_testkit::{ManualClock, SeededEntropy};

hapax_testkit::store_suite!(super::memory::Memory::default());
hapax_testkit::inspect_suite!(super::memory::Memory::default());
hapax_testkit::clock_suite!(super::memory::Memory::default());
hapax_testkit::schedule_suite!(super::memory::Memory::default());

#[derive(Default)]
struct Memory(Arc<ManualClock>);

impl StoreFixture for Memory {
    type Store = MemoryStore;

    const REAPS_AUTOMATICALLY: bool = false;

    async fn open(&self) -> Arc<MemoryStore> {
        let clock: Arc<dyn Clock> = self.0.clone();
        Arc::new(MemoryStore::new(clock, MemoryCapacity::default()))
    }

    async fn pass(&self, _: &MemoryStore, by: Duration) {
        self.0.advance(by);
    }
}

impl ClockFixture for Memory {
    async fn step_back(&self, _: &MemoryStore, by: Duration) {
        let now = self.0.now().as_micros();
        self.0.set(hapax_core::Timestamp::from_micros(now - by.as_micros() as u64));
    }
}

fn claim(entropy: &SeededEntropy) -> Swap {
    let lease_id = LeaseId::fresh(entropy).unwrap();
    let lease = Duration::from_secs(1);
    let terms = Terms { lease, retention: lease, on_unknown: OnUnknown::Reexecute };
    let record = Record {
        scheme: FingerprintScheme::new("test").unwrap(),
        fingerprint: Fingerprint::from_bytes([0; 32]),
        lease_id,
        generation: lease_id,
        attempt: 1,
        terms,
        checkpoint: None,
        notes: hapax_core::Notes::default(),
        extensions: hapax_core::Extensions::default(),
        state: RecordState::InFlight,
    };
    let mut key = [0; 32];
    hapax_core::Entropy::fill(entropy, &mut key).unwrap();
    let draft = Draft { record, stamp: Stamp::NextFence, lease, keep: Some(lease) };
    let write_id = WriteId::fresh(entropy).unwrap();
    Swap { id: OperationId::from_bytes(key), expected: None, write_id, draft }
}

fn completion(entropy: &SeededEntropy, claim: &Swap, bytes: usize) -> Swap {
    let mut draft = claim.draft.clone();
    draft.record.state = RecordState::Done(Outcome::new("test", vec![0; bytes]));
    draft.stamp = Stamp::Keep;
    Swap {
        expected: Some(claim.write_id),
        write_id: WriteId::fresh(entropy).unwrap(),
        draft,
        ..claim.clone()
    }
}

async fn expect_stored(store: &MemoryStore, swap: &Swap) -> bool {
    match store.swap(swap.clone()).await {
        Ok(Swapped::Stored(_)) => true,
        Err(StoreError::Unavailable(_)) => false,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_full_store_rejects_new_keys_until_old_ones_are_reaped() {
    let clock = Arc::new(ManualClock::default());
    let capacity = MemoryCapacity { records: 3, bytes: 1 << 20 };
    let store = MemoryStore::new(clock.clone(), capacity);
    let entropy = SeededEntropy::new(1);
    let claims: Vec<_> = (0..4).map(|_| claim(&entropy)).collect();
    for claim in &claims[..3] {
        assert!(expect_stored(&store, claim).await);
    }
    assert!(!expect_stored(&store, &claims[3]).await);
    assert!(expect_stored(&store, &completion(&entropy, &claims[0], 10)).await);

    // Expired is not gone: nothing is forgotten before it is reaped.
    clock.advance(Duration::from_secs(1));
    assert!(!expect_stored(&store, &claims[3]).await);
    clock.advance(Duration::from_secs(1));
    let reaped = store.reap(NonZeroU32::new(10).unwrap()).await.unwrap();
    assert_eq!((reaped.removed, reaped.more, store.len()), (3, false, 0));
    assert!(expect_stored(&store, &claims[3]).await);
}

#[tokio::test]
async fn executions_in_progress_are_recorded_when_new_keys_are_rejected() {
    let capacity = MemoryCapacity { records: 1_000_000, bytes: 100_000 };
    let store = MemoryStore::new(Arc::new(ManualClock::default()), capacity);
    let entropy = SeededEntropy::new(1);
    let mut held = Vec::new();
    loop {
        let claim = claim(&entropy);
        if !expect_stored(&store, &claim).await {
            break;
        }
        held.push(claim);
    }
    assert!(held.len() > 50, "only {} records in 100,000 bytes", held.len());
    let big = completion(&entropy, &held[0], 12_000);
    assert!(expect_stored(&store, &big).await, "the last eighth is for what is in progress");
    assert!(!expect_stored(&store, &completion(&entropy, &held[1], 12_000)).await);
    assert!(expect_stored(&store, &completion(&entropy, &held[1], 0)).await);

    // What shrinks gives its bytes back.
    let mut released = held[0].clone();
    released.expected = Some(big.write_id);
    released.write_id = WriteId::fresh(&entropy).unwrap();
    released.draft.record.state = RecordState::Released;
    assert!(expect_stored(&store, &released).await);
    assert!(expect_stored(&store, &completion(&entropy, &held[2], 10_000)).await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn replies_over_a_faulty_network_are_linearizable() {
    let store = Arc::new(FaultyStore::new(Arc::new(MemoryStore::default()), 17));
    store.set(FaultyRates {
        unavailable: 20,
        ambiguous_lost: 20,
        ambiguous_applied: 20,
        ambiguous_late: 20,
        delay: 100,
        delay_at_most: Duration::from_millis(2),
    });
    let storm = Storm { pause: Duration::ZERO, ..Storm::of(10_000, 17) };
    let told = storm.run(&[Arc::clone(&store)]).await;
    let FaultyCounts { unavailable, lost, applied, late, delays } = store.counts();
    assert!([unavailable, lost, applied, late, delays].iter().all(|times| *times > 50), "{told:?}");
    assert!(told.ambiguous > 100 && told.stored > 500, "{told:?}");
}
