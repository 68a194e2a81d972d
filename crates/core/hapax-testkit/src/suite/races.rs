//! Rules of concurrent callers.

use std::collections::HashSet;
use std::future::poll_fn;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use hapax_core::store::{Draft, Snapshot, Stamp, Swap, Swapped};
use hapax_core::{OperationId, Outcome, Record, RecordState, Store, WriteId};
use tokio::sync::Barrier;
use tokio::task::JoinSet;

use super::bench::{LEASE, LONG, load, send};
use super::{Bench, StoreFixture};
use crate::SeededEntropy;
use crate::history::Recorder;

/// Number of concurrent callers.
const CALLERS: usize = 16;

/// Sends all swaps at the same moment, each from a separate task.
async fn at_once<S: Store>(store: &Arc<S>, swaps: &[Swap]) -> Vec<Swapped> {
    let barrier = Arc::new(Barrier::new(swaps.len()));
    let mut tasks = JoinSet::new();
    for (at, swap) in swaps.iter().cloned().enumerate() {
        let (store, barrier) = (Arc::clone(store), Arc::clone(&barrier));
        tasks.spawn(async move {
            barrier.wait().await;
            (at, send(&*store, &swap).await)
        });
    }
    let mut answers = tasks.join_all().await;
    answers.sort_by_key(|(at, _)| *at);
    answers.into_iter().map(|(_, answer)| answer).collect()
}

/// Returns the index of the only swap that was stored; all others must have found it.
fn only_winner(swaps: &[Swap], answers: &[Swapped]) -> usize {
    let stored = |at: &usize| matches!(answers[*at], Swapped::Stored(_));
    let winners: Vec<_> = (0..swaps.len()).filter(stored).collect();
    assert_eq!(winners.len(), 1, "stored: {winners:?} of {}", swaps.len());
    for answer in answers {
        if let Swapped::Conflict(seen) = answer {
            let write_id = seen.stored.as_ref().map(|stored| stored.write_id);
            assert_eq!(write_id, Some(swaps[winners[0]].write_id), "a loser found another write");
        }
    }
    winners[0]
}

/// If many claims of one key are sent at once, exactly one is stored, and the others find it.
pub async fn one_of_many_claims_is_stored<F: StoreFixture>(fixture: &F) {
    let bench = Bench::open(fixture).await;
    for _ in 0..20 {
        let key = bench.key();
        let swaps: Vec<_> = (0..CALLERS).map(|_| bench.swap(key, None, bench.draft())).collect();
        let winner = only_winner(&swaps, &at_once(&bench.store, &swaps).await);
        assert_eq!(bench.record(&key).await.record, swaps[winner].draft.record);
    }
}

/// If many swaps expect one write id, such as a completion and a takeover, exactly one is stored.
pub async fn one_of_many_swaps_on_one_write_id_is_stored<F: StoreFixture>(fixture: &F) {
    let bench = Bench::open(fixture).await;
    for _ in 0..20 {
        let draft = bench.draft();
        let (key, stored) = bench.put(draft.clone()).await;
        let mut swaps: Vec<_> =
            (1..CALLERS).map(|_| bench.swap(key, Some(stored.write_id), bench.draft())).collect();
        swaps.push(bench.swap(key, Some(stored.write_id), bench.done(&draft, b"yes")));
        let winner = only_winner(&swaps, &at_once(&bench.store, &swaps).await);
        let found = bench.record(&key).await;
        assert_eq!(found.record, swaps[winner].draft.record);
        assert_eq!(found.fence > stored.fence, winner < CALLERS - 1, "{found:?} after {stored:?}");
    }
}

/// If callers add to what they found until it is stored, no addition is lost.
pub async fn no_write_is_lost<F: StoreFixture>(fixture: &F) {
    const EACH: usize = 10;
    let bench = Bench::open(fixture).await;
    let (key, _) = bench.put(bench.draft()).await;
    let mut tasks = JoinSet::new();
    for _ in 0..CALLERS {
        let store = Arc::clone(&bench.store);
        let entropy = SeededEntropy::new(bench.below(u64::MAX));
        tasks.spawn(async move {
            for _ in 0..EACH {
                add(&*store, key, WriteId::fresh(&entropy).unwrap()).await;
            }
        });
    }
    tasks.join_all().await;
    let found = bench.record(&key).await.record.checkpoint.expect("additions");
    let distinct: HashSet<_> = found.chunks(16).collect();
    assert_eq!((distinct.len(), found.len() / 16), (EACH * CALLERS, EACH * CALLERS));
}

/// Adds `write_id` to those in the checkpoint. It is there already if a copy of the swap was
/// stored, its reply was lost, and others were stored since.
async fn add(store: &dyn Store, key: OperationId, write_id: WriteId) {
    let mut seen = load(store, &key).await;
    loop {
        let stored = seen.stored.expect("no caller removes it");
        let mut added = stored.record.checkpoint.clone().unwrap_or_default().to_vec();
        if added.chunks(16).any(|one| one == write_id.as_bytes()) {
            return;
        }
        added.extend_from_slice(write_id.as_bytes());
        let record = Record { checkpoint: Some(added.into()), ..stored.record };
        let draft = Draft { record, stamp: Stamp::Keep, lease: LEASE, keep: Some(LONG) };
        match send(store, &Swap { id: key, expected: Some(stored.write_id), write_id, draft }).await
        {
            Swapped::Stored(_) => return,
            Swapped::Conflict(found) => seen = found,
        }
    }
}

/// A swap whose future is dropped at any point is stored whole, or not at all, or later; sent again
/// it is stored.
pub async fn a_dropped_swap_is_applied_completely_or_not_at_all<F: StoreFixture>(fixture: &F) {
    let bench = Bench::open(fixture).await;
    for polls in 0..24 {
        let draft = bench.draft();
        let (key, stored) = bench.put(draft.clone()).await;
        let swap = bench.swap(key, Some(stored.write_id), bench.done(&draft, &bench.bytes(70_000)));
        let mut sent = bench.store.swap(swap.clone());
        for _ in 0..polls {
            let ready = poll_fn(|context| Poll::Ready(sent.as_mut().poll(context).is_ready()));
            if ready.await {
                break;
            }
            tokio::time::sleep(Duration::from_micros(200)).await;
        }
        drop(sent);
        let found = bench.record(&key).await;
        let whole = found.write_id == swap.write_id && found.record == swap.draft.record;
        assert!(found == stored || whole, "torn after {polls} polls: {found:?}");
        bench.stored(&swap).await;
        assert_eq!(bench.record(&key).await.record, swap.draft.record);
    }
}

/// A record that is renewed while it is reaped is either present or absent, and the renewal returns
/// which.
pub async fn reaping_never_removes_a_renewed_record<F: StoreFixture>(fixture: &F) {
    const KEEP: Duration = Duration::from_millis(30);
    let bench = Bench::open(fixture).await;
    let mut records = Vec::new();
    for _ in 0..40 {
        let mut draft = Draft { keep: Some(KEEP), ..bench.draft() };
        draft.record.terms.lease = Duration::ZERO;
        records.push(bench.put_unseen(draft).await);
    }
    bench.pass(KEEP).await;
    let reaping = {
        let store = Arc::clone(&bench.store);
        tokio::spawn(async move {
            for _ in 0..40 {
                // A failed call is repeated by the next round.
                let _ = store.reap(NonZeroU32::MIN).await;
                tokio::task::yield_now().await;
            }
        })
    };
    for (key, write_id) in records.iter().rev() {
        let swap = bench.swap(*key, Some(*write_id), bench.draft());
        match bench.send(&swap).await {
            Swapped::Stored(_) => assert_eq!(bench.record(key).await.write_id, swap.write_id),
            Swapped::Conflict(seen) => {
                assert_eq!(seen.stored, None, "neither as it was nor gone");
                assert_eq!(bench.load(key).await.stored, None);
            }
        }
    }
    reaping.await.expect("reaping ends");
}

/// Replies to concurrent callers are possible for a sequence of calls.
pub async fn histories_are_linearizable<F: StoreFixture>(fixture: &F) {
    const ROUNDS: usize = 20;
    let bench = Bench::open(fixture).await;
    let recorder = Arc::new(Recorder::default());
    for _ in 0..ROUNDS {
        let key = bench.key();
        let mut tasks = JoinSet::new();
        for _ in 0..6 {
            let caller = Caller {
                store: Arc::clone(&bench.store),
                recorder: Arc::clone(&recorder),
                entropy: SeededEntropy::new(bench.below(u64::MAX)),
                draft: bench.draft(),
            };
            tasks.spawn(async move { caller.run(key).await });
        }
        tasks.join_all().await;
    }
    if let Err(violation) = recorder.check() {
        panic!("{violation}");
    }
}

struct Caller<S> {
    store: Arc<S>,
    recorder: Arc<Recorder>,
    entropy: SeededEntropy,
    draft: Draft,
}

impl<S: Store> Caller<S> {
    /// Executes ten operations on what it last found; each swap leaves a record that contains its
    /// write id.
    async fn run(&self, key: OperationId) {
        let mut last = None;
        for _ in 0..10 {
            let called = self.recorder.called();
            if self.entropy.below(4) == 0 {
                if let Ok(seen) = self.store.load(&key).await {
                    self.recorder.loaded(called, key, &seen);
                    last = named(&seen);
                }
                continue;
            }
            let write_id = WriteId::fresh(&self.entropy).unwrap();
            let mut draft = self.draft.clone();
            let name = Outcome::new("tag", write_id.as_bytes().to_vec());
            draft.record.state = RecordState::Done(name);
            let swap = Swap { id: key, expected: last, write_id, draft };
            let answer = self.store.swap(swap.clone()).await;
            self.recorder.swapped(called, &swap, &answer);
            match answer {
                Ok(Swapped::Stored(_)) => last = Some(write_id),
                Ok(Swapped::Conflict(seen)) => last = named(&seen),
                // Sent once only: it may happen at any time from now on.
                Err(_) => {}
            }
        }
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
