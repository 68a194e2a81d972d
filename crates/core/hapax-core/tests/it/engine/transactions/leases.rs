//! Leases around transactions: none lapses while its owner executes, and none is left behind.

use std::pin::pin;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::task::Poll;

use hapax_core::{Entropy, EntropyError, Idempotency};

use super::*;

/// Odd numbers in order, so that no pause of a rerun is zero.
#[derive(Debug, Default)]
struct OddNumbers(AtomicU64);

impl Entropy for OddNumbers {
    fn fill(&self, bytes: &mut [u8]) -> Result<(), EntropyError> {
        let number = 2 * self.0.fetch_add(1, Ordering::Relaxed) + 1;
        for chunk in bytes.chunks_mut(8) {
            chunk.copy_from_slice(&number.to_le_bytes()[..chunk.len()]);
        }
        Ok(())
    }
}

/// A database that connects at once the first time and slowly after that, and begins a transaction
/// if `begins`.
#[derive(Debug)]
struct Slow {
    database: Arc<Database>,
    begins: bool,
    connected: AtomicU32,
}

const CONNECT_TIME: Duration = Duration::from_secs(3);

/// Returns a policy whose lease is shorter than the wait for a connection.
fn short() -> hapax_core::Policy {
    let mut policy = reexecute();
    policy.terms.lease = Duration::from_secs(1);
    policy
}

impl Slow {
    fn within(database: &Arc<Database>, begins: bool) -> TransactionBackend<Self> {
        let database =
            Self { database: Arc::clone(database), begins, connected: AtomicU32::default() };
        TransactionBackend::new(Arc::new(database))
    }
}

impl Transactions for Slow {
    type Tx = Writes;

    fn connect(&self) -> BoxFuture<'_, Result<Writes, TxError>> {
        Box::pin(async {
            if self.connected.fetch_add(1, Ordering::Relaxed) > 0 {
                sleep(CONNECT_TIME).await;
            }
            self.database.connect().await
        })
    }

    fn begin<'a>(&'a self, _: &'a mut Writes) -> BoxFuture<'a, Result<(), TxError>> {
        Box::pin(async { self.begins.then_some(()).ok_or(TxError::failed("no")) })
    }

    fn swap_in<'a>(
        &'a self,
        tx: &'a mut Writes,
        swap: Swap,
    ) -> BoxFuture<'a, Result<Swapped, TxError>> {
        self.database.swap_in(tx, swap)
    }

    fn commit(&self, tx: Writes) -> BoxFuture<'_, Result<(), TxError>> {
        self.database.commit(tx)
    }

    fn rollback(&self, tx: Writes) -> BoxFuture<'_, Result<(), TxError>> {
        self.database.rollback(tx)
    }

    fn is_conflict(&self, error: &(dyn std::error::Error + 'static)) -> bool {
        self.database.is_conflict(error)
    }
}

/// The lease was renewed for a transaction that then did not begin.
#[tokio::test(start_paused = true)]
async fn a_run_without_a_transaction_keeps_its_lease() {
    let world = World::new();
    let process = world.process();
    let backend = Slow::within(&Database::new(&world, []), false).any();
    let execution = Execution::in_transactions(own(&process, &short()).await, backend);
    let run = execution.begin_run().unwrap();
    let other = world.process();
    let work = async {
        assert!(run.take::<Writes>().await.is_err());
        assert!(!run.is_taken());
        sleep(CONNECT_TIME).await;
        claim(&other, "a", &short()).await
    };
    let copy = execution.lease().keep_alive(work).await;
    assert!(matches!(copy, Claim::InFlight { .. }), "{copy:?}");
}

/// A process that crashes within a transaction blocks its key for the lease that the policy has, as
/// a crash outside of a transaction does.
#[tokio::test(start_paused = true)]
async fn after_a_crash_in_a_transaction_its_key_is_free_once_the_lease_of_the_policy_has_lapsed() {
    let world = World::new();
    let mut policy = reexecute();
    policy.terms.lease = Duration::from_secs(5);
    let lease = own(&world.process(), &policy).await;
    let backend = TransactionBackend::new(Database::new(&world, [])).any();
    let execution = Execution::in_transactions(lease, backend);
    let run = execution.begin_run().unwrap();
    // As after a crash: the transaction neither ends nor is its lease renewed.
    let _tx = run.take::<Writes>().await.unwrap();
    let other = world.elsewhere().process();
    let Claim::InFlight { remaining, .. } = claim(&other, "a", &policy).await else { panic!() };
    assert!(remaining <= policy.terms.lease, "{remaining:?}");
    sleep(policy.terms.lease).await;
    assert_eq!(own(&other, &policy).await.attempt(), 2);
}

#[tokio::test(start_paused = true)]
async fn the_lease_does_not_lapse_between_runs() {
    let world = World::new();
    let process = world.process();
    let backend = Slow::within(&Database::new(&world, [LosesRace]), true);
    let lease = own(&process, &short()).await;
    let running = tokio::spawn(async move { lease.transact(&backend, numbered(done())).await });
    sleep(CONNECT_TIME - Duration::from_secs(1)).await;
    let duplicate = claim(&world.process(), "a", &short()).await;
    assert!(matches!(duplicate, Claim::InFlight { .. }), "{duplicate:?}");
    let ran = running.await.unwrap();
    assert!(matches!(ran, TransactResult::Ended(ExecutionResult::Recorded(_), 2)), "{ran:?}");
}

/// The caller is dropped before the end of the run is known, or before it receives the end.
#[tokio::test(start_paused = true)]
async fn a_rerun_whose_caller_was_dropped_is_released() {
    for known in [false, true] {
        let world = World::new();
        let process = Idempotency::builder(Arc::clone(&world.store))
            .clock(world.clock.clone())
            .entropy(Arc::new(OddNumbers::default()))
            .build()
            .unwrap();
        let policy = policy(OnUnknown::Block);
        let execution = Execution::in_transactions(
            own(&process, &policy).await,
            TransactionBackend::new(Database::new(&world, [])).any(),
        );
        let run = execution.begin_run().unwrap();
        drop(run.take::<Writes>().await.unwrap());
        {
            let mut ending = pin!(execution.end(Some(run), ExecutionEnd::Rerun));
            let polled = std::future::poll_fn(|cx| Poll::Ready(ending.as_mut().poll(cx)));
            assert!(polled.await.is_pending());
            if known {
                sleep(Duration::from_secs(1)).await;
            }
        }
        process.drain().await;
        assert_eq!(own(&process, &policy).await.attempt(), 2, "known: {known}");
    }
}

/// A run that still has its transaction may yet write, so none of its ends is trusted.
#[tokio::test(start_paused = true)]
async fn a_run_that_keeps_its_transaction_leaves_the_outcome_unknown() {
    for ending in [
        done(),
        ExecutionEnd::Reject { outcome: outcome("no"), retention: None },
        ExecutionEnd::Release,
        ExecutionEnd::Rerun,
    ] {
        let world = World::new();
        let process = world.process();
        let policy = policy(OnUnknown::Block);
        let backend = TransactionBackend::new(Database::new(&world, [])).any();
        let execution = Execution::in_transactions(own(&process, &policy).await, backend);
        let run = execution.begin_run().unwrap();
        let kept = run.take::<Writes>().await.unwrap();
        let ended = execution.end(Some(run), ending.clone()).await;
        assert!(matches!(ended, ExecutionResult::Kept), "{ending:?}: {ended:?}");
        drop(kept);
        assert!(matches!(claim(&process, "a", &policy).await, Claim::Unknown { .. }), "{ending:?}");
    }
}
