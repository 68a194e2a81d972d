//! Callers that keep a call without polling it, and runtimes that end.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use hapax_core::store::{BoxFuture, Capabilities, Reaped, Snapshot, Swap, Swapped};
use hapax_core::{
    Claim, ClaimError, Idempotency, MemoryCapacity, MemoryStore, OnUnknown, OperationId, Scope,
    Store, StoreError, SystemClock,
};
use tokio::sync::watch;

use super::{TestClock, Text, claim, key, policy, reexecute};

/// Delays each swap, or holds the reply back until the gate opens.
#[derive(Debug)]
struct Slow {
    memory: Arc<MemoryStore>,
    before: Duration,
    gate: watch::Sender<bool>,
    swaps: AtomicUsize,
}

impl Slow {
    fn new(memory: Arc<MemoryStore>, before: Duration, open: bool) -> Arc<Self> {
        Arc::new(Self {
            memory,
            before,
            gate: watch::Sender::new(open),
            swaps: AtomicUsize::new(0),
        })
    }
}

impl Store for Slow {
    fn swap(&self, swap: Swap) -> BoxFuture<'_, Result<Swapped, StoreError>> {
        Box::pin(async move {
            if !self.before.is_zero() {
                tokio::time::sleep(self.before).await;
            }
            let swapped = self.memory.swap(swap).await;
            self.swaps.fetch_add(1, Ordering::SeqCst);
            let _ = self.gate.subscribe().wait_for(|open| *open).await;
            swapped
        })
    }
    fn load<'a>(&'a self, id: &'a OperationId) -> BoxFuture<'a, Result<Snapshot, StoreError>> {
        self.memory.load(id)
    }
    fn reap(&self, limit: NonZeroU32) -> BoxFuture<'_, Result<Reaped, StoreError>> {
        self.memory.reap(limit)
    }
    fn capabilities(&self) -> Capabilities<'_> {
        self.memory.capabilities()
    }
}

fn memory() -> Arc<MemoryStore> {
    Arc::new(MemoryStore::new(Arc::new(SystemClock), MemoryCapacity::default()))
}

fn engine(store: Arc<impl Store>) -> Idempotency {
    Idempotency::builder(store).build().unwrap()
}

#[tokio::test(start_paused = true)]
async fn an_outcome_is_stored_though_its_caller_does_not_poll() {
    let clock = Arc::new(TestClock(tokio::time::Instant::now()));
    let memory = Arc::new(MemoryStore::new(clock, MemoryCapacity::default()));
    let slow = Slow::new(Arc::clone(&memory), Duration::from_millis(5), true);
    let (here, there) = (engine(slow), engine(memory));
    let effects = Arc::new(AtomicUsize::new(0));
    let call = |engine: Idempotency| {
        let effects = Arc::clone(&effects);
        async move {
            let k = (Scope::shared(), key(), 1);
            engine
                .at_least_once(&k, move || async move {
                    effects.fetch_add(1, Ordering::SeqCst);
                    Ok::<_, std::io::Error>(1)
                })
                .await
        }
    };
    let mut first = Box::pin(call(here));
    tokio::select! {
        biased;
        _ = &mut first => unreachable!(),
        // Between the return of the operation (6 ms) and its outcome (11 ms).
        () = tokio::time::sleep(Duration::from_millis(8)) => {}
    }
    assert_eq!(effects.load(Ordering::SeqCst), 1, "it has returned");
    tokio::time::sleep(Duration::from_secs(60)).await;
    let second = call(there).await;
    assert!(second.is_ok_and(|it| it.replayed) && first.await.is_ok_and(|it| !it.replayed));
    assert_eq!(effects.load(Ordering::SeqCst), 1);
}

#[test]
fn a_claim_is_released_after_the_runtime_of_its_caller_has_ended() {
    let outer = tokio::runtime::Runtime::new().unwrap();
    let memory = memory();
    let slow = Slow::new(Arc::clone(&memory), Duration::ZERO, false);
    let process = outer.block_on(async { engine(Arc::clone(&slow)) });
    let block = policy(OnUnknown::Block);
    let inner = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    inner.block_on(async {
        let process = process.clone();
        tokio::spawn(async move { claim(&process, "a", &block).await });
        tokio::time::sleep(Duration::from_millis(50)).await;
    });
    assert_eq!(slow.swaps.load(Ordering::SeqCst), 1, "the claim is in the store");
    drop(inner);
    slow.gate.send_replace(true);
    outer.block_on(async {
        let _ = tokio::time::timeout(Duration::from_secs(3), process.drain()).await;
        let other = engine(memory);
        let claimed = claim(&other, "a", &block).await;
        assert!(matches!(claimed, Claim::Execute(_)), "left behind: {claimed:?}");
    });
}

#[test]
fn an_operation_continues_after_the_runtime_of_its_caller_has_ended() {
    let outer = tokio::runtime::Runtime::new().unwrap();
    let process = outer.block_on(async { engine(memory()) });
    let inner = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let call = |process: Idempotency| async move {
        let k = (Scope::shared(), key(), 1);
        process
            .at_most_once(&k, || async {
                tokio::time::sleep(Duration::from_millis(300)).await;
                Ok::<_, std::io::Error>(1)
            })
            .await
    };
    inner.block_on(async {
        tokio::spawn(call(process.clone()));
        tokio::time::sleep(Duration::from_millis(50)).await;
    });
    drop(inner);
    outer.block_on(async {
        process.drain().await;
        let again = call(process.clone()).await;
        assert!(again.as_ref().is_ok_and(|it| it.replayed), "{again:?}");
    });
}

#[test]
fn an_engine_whose_runtime_has_ended_claims_nothing() {
    let memory = memory();
    let dead = tokio::runtime::Runtime::new().unwrap();
    let process = dead.block_on(async { engine(Arc::clone(&memory)) });
    drop(dead);
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        let policy = reexecute();
        let claimed = process.claim(&Scope::shared(), &key(), &Text("a"), &policy).await;
        assert!(matches!(claimed, Err(ClaimError::Shutdown)), "{claimed:?}");
    });
}

#[test]
fn a_drain_waits_for_the_release_of_an_undelivered_claim() {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let mut missed = 0;
    const ROUNDS: usize = 2_000;
    for _ in 0..ROUNDS {
        let memory = memory();
        let slow = Slow::new(Arc::clone(&memory), Duration::ZERO, false);
        let process = runtime.block_on(async { engine(Arc::clone(&slow)) });
        let scope = Scope::shared();
        let (k, p) = (key(), policy(OnUnknown::Block));
        let id = process.operation_id(&scope, &k);
        {
            let _guard = runtime.enter();
            let mut claiming = Box::pin(process.claim(&scope, &k, &Text("a"), &p));
            let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
            assert!(claiming.as_mut().poll(&mut cx).is_pending());
        }
        slow.gate.send_replace(true);
        loop {
            let mut drain = Box::pin(process.drain());
            let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
            if drain.as_mut().poll(&mut cx).is_ready() {
                break;
            }
            std::hint::spin_loop();
        }
        let mut load = Box::pin(memory.load(&id));
        let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
        let std::task::Poll::Ready(Ok(seen)) = load.as_mut().poll(&mut cx) else { panic!() };
        let state = seen.stored.map(|it| it.record.state);
        if matches!(state, Some(hapax_core::RecordState::InFlight)) {
            missed += 1;
        }
    }
    assert_eq!(missed, 0, "drained {missed} of {ROUNDS} times with a claim that is not released");
}

#[tokio::test(start_paused = true)]
async fn a_claim_is_not_executed_after_its_lease_has_lapsed() {
    let clock = Arc::new(TestClock(tokio::time::Instant::now()));
    let memory = Arc::new(MemoryStore::new(clock, MemoryCapacity::default()));
    let slow = Slow::new(Arc::clone(&memory), Duration::ZERO, false);
    let (here, there) = (engine(Arc::clone(&slow)), engine(memory));
    let effects = Arc::new(AtomicUsize::new(0));
    let call = |engine: Idempotency| {
        let effects = Arc::clone(&effects);
        async move {
            let k = (Scope::shared(), key(), 1);
            engine
                .at_least_once(&k, move || async move {
                    effects.fetch_add(1, Ordering::SeqCst);
                    Ok::<_, std::io::Error>(1)
                })
                .await
        }
    };
    let mut first = Box::pin(call(here));
    tokio::select! {
        biased;
        _ = &mut first => unreachable!(),
        () = tokio::time::sleep(Duration::from_millis(8)) => {}
    }
    slow.gate.send_replace(true);
    tokio::time::sleep(Duration::from_secs(60)).await;
    let second = call(there).await;
    assert!(second.is_ok_and(|it| !it.replayed));
    assert!(first.await.is_err(), "it executed under a lease that had lapsed");
    assert_eq!(effects.load(Ordering::SeqCst), 1);
}

#[tokio::test(start_paused = true)]
async fn a_drain_finishes_a_call_that_is_not_polled() {
    let clock = Arc::new(TestClock(tokio::time::Instant::now()));
    let memory = Arc::new(MemoryStore::new(clock, MemoryCapacity::default()));
    let (here, there) = (engine(Arc::clone(&memory)), engine(memory));
    let k = (Scope::shared(), key(), 1);
    let mut call = std::pin::pin!(here.at_most_once(&k, || async {
        tokio::time::sleep(Duration::from_secs(1)).await;
        Ok::<_, std::io::Error>(1)
    }));
    tokio::select! {
        biased;
        _ = &mut call => unreachable!(),
        () = tokio::time::sleep(Duration::from_millis(100)) => {} // a signal to shut down
    }
    let drained = tokio::time::timeout(Duration::from_secs(3600), here.drain()).await;
    let again = there.at_most_once(&k, || async { Ok::<_, std::io::Error>(2) }).await;
    assert!(drained.is_ok());
    assert!(again.is_ok_and(|it| it.replayed));
    assert!(call.await.is_ok_and(|it| it.value == 1 && !it.replayed));
}

#[tokio::test(start_paused = true)]
async fn a_reply_that_is_later_than_its_lease_gives_none() {
    let clock = Arc::new(TestClock(tokio::time::Instant::now()));
    let memory = Arc::new(MemoryStore::new(clock, MemoryCapacity::default()));
    let slow = Slow::new(Arc::clone(&memory), Duration::ZERO, false);
    let (here, there) = (engine(Arc::clone(&slow)), engine(memory));
    let mut policy = reexecute();
    policy.terms.lease = Duration::from_millis(500);
    let first = tokio::spawn({
        let (here, policy) = (here.clone(), policy);
        async move { here.claim(&Scope::shared(), &key(), &Text("a"), &policy).await }
    });
    tokio::time::sleep(Duration::from_millis(700)).await;
    let second = claim(&there, "a", &policy).await;
    assert!(matches!(second, Claim::Execute(_)), "{second:?}");
    slow.gate.send_replace(true);
    let first = first.await.unwrap();
    assert!(!matches!(first, Ok(Claim::Execute(_))), "two leases at once: {first:?} {second:?}");
}

/// The whole runtime stands still for longer than the lease, while the reply waits in the socket.
#[tokio::test(start_paused = true)]
async fn a_claim_is_not_accepted_after_a_blocked_runtime() {
    let clock = Arc::new(TestClock(tokio::time::Instant::now()));
    let memory = Arc::new(MemoryStore::new(clock, MemoryCapacity::default()));
    let slow = Slow::new(Arc::clone(&memory), Duration::ZERO, false);
    let (here, there) = (engine(Arc::clone(&slow)), engine(memory));
    let (scope, k, policy) = (Scope::shared(), key(), reexecute());
    let mut first = Box::pin(here.claim(&scope, &k, &Text("a"), &policy));
    tokio::select! {
        biased;
        _ = &mut first => unreachable!(),
        () = tokio::time::sleep(Duration::from_millis(8)) => {}
    }
    slow.gate.send_replace(true);
    // Nothing of this runtime runs between these two lines.
    let mut jump = Box::pin(tokio::time::advance(Duration::from_secs(60)));
    let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
    let _ = std::future::Future::poll(jump.as_mut(), &mut cx);
    let mut other = Box::pin(there.claim(&scope, &k, &Text("a"), &policy));
    let second = loop {
        if let std::task::Poll::Ready(it) = std::future::Future::poll(other.as_mut(), &mut cx) {
            break it;
        }
    };
    assert!(matches!(second, Ok(Claim::Execute(_))), "{second:?}");
    let first = first.await;
    assert!(!matches!(first, Ok(Claim::Execute(_))), "two leases at once: {first:?} {second:?}");
}

#[tokio::test(start_paused = true)]
async fn a_drain_finishes_a_call_that_parks_after_it_began() {
    let clock = Arc::new(TestClock(tokio::time::Instant::now()));
    let memory = Arc::new(MemoryStore::new(clock, MemoryCapacity::default()));
    let slow = Slow::new(Arc::clone(&memory), Duration::ZERO, false);
    let here = engine(Arc::clone(&slow));
    let k = (Scope::shared(), key(), 1);
    let mut call = std::pin::pin!(here.at_most_once(&k, || async {
        tokio::time::sleep(Duration::from_secs(1)).await;
        Ok::<_, std::io::Error>(1)
    }));
    let mut drain = std::pin::pin!(here.drain());
    tokio::select! {
        biased;
        _ = &mut call => unreachable!(),
        _ = &mut drain => unreachable!(),
        () = tokio::time::sleep(Duration::from_millis(100)) => {}
    }
    slow.gate.send_replace(true);
    tokio::select! {
        biased;
        _ = &mut call => unreachable!(),
        () = tokio::time::sleep(Duration::from_millis(100)) => {} // the operation executes
    }
    let before = tokio::time::Instant::now();
    let drained = tokio::time::timeout(Duration::from_secs(3600), drain).await;
    assert!(drained.is_ok());
    assert!(before.elapsed() < Duration::from_secs(3), "drained after {:?}", before.elapsed());
}
