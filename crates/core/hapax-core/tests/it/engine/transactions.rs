//! Work in transactions, of a database in memory that does as it is told.

mod leases;

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hapax_core::machine::{DefiniteVerdict, Resolve};
use hapax_core::store::{BoxFuture, Stamped, Swap, Swapped};
use hapax_core::transaction::{
    AnyTransactions, Execution, ExecutionEnd, ExecutionResult, LostRace, OperationError,
    TakeTxError, TransactError, TransactResult, TransactionBackend, Transactions, Tx, TxError,
    TxOptions, TxOptionsError,
};
use hapax_core::{Claim, FinishError, LeaseHandle, OnUnknown, Scope, Store};
use tokio::time::sleep;

use super::faults::{Mode, Unreliable};
use super::{World, claim, key, outcome, own, policy, reexecute, replayed};

/// What becomes of a COMMIT.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Fate {
    Commits,
    LosesRace,
    Fails,
    /// It commits, and says nothing.
    CommitsSilently,
    /// It does not, and says nothing.
    FailsSilently,
    /// It never ends.
    Hangs,
}

use Fate::{Commits, CommitsSilently, Fails, FailsSilently, Hangs, LosesRace};

#[derive(Debug)]
struct Database {
    store: Arc<Unreliable>,
    fates: Mutex<VecDeque<Fate>>,
    lines: Mutex<Vec<u32>>,
}

#[derive(Debug, Default)]
struct Writes {
    lines: Vec<u32>,
    swap: Option<Swap>,
}

impl Database {
    fn new(world: &World, fates: impl IntoIterator<Item = Fate>) -> Arc<Self> {
        // By a way of its own, which has no faults.
        let store = Arc::new(world.store.elsewhere());
        let fates = Mutex::new(fates.into_iter().collect());
        Arc::new(Self { store, fates, lines: Mutex::default() })
    }

    fn lines(&self) -> Vec<u32> {
        self.lines.lock().unwrap().clone()
    }

    async fn apply(&self, tx: Writes) {
        let swapped = self.store.swap(tx.swap.expect("the last statement")).await.unwrap();
        assert!(matches!(swapped, Swapped::Stored(_)), "{swapped:?}");
        self.lines.lock().unwrap().extend(tx.lines);
    }
}

impl Transactions for Database {
    type Tx = Writes;

    fn connect(&self) -> BoxFuture<'_, Result<Writes, TxError>> {
        Box::pin(async { Ok(Writes::default()) })
    }

    fn begin<'a>(&'a self, _: &'a mut Writes) -> BoxFuture<'a, Result<(), TxError>> {
        Box::pin(async { Ok(()) })
    }

    fn swap_in<'a>(
        &'a self,
        tx: &'a mut Writes,
        swap: Swap,
    ) -> BoxFuture<'a, Result<Swapped, TxError>> {
        Box::pin(async move {
            let seen = self.store.load(&swap.id).await.unwrap();
            if seen.stored.as_ref().map(|stored| stored.write_id) != swap.expected {
                return Ok(Swapped::Conflict(seen));
            }
            let now = seen.now;
            let fence = seen.stored.unwrap().fence;
            tx.swap = Some(swap);
            Ok(Swapped::Stored(Stamped { now, fence, lease_until: now }))
        })
    }

    fn commit(&self, tx: Writes) -> BoxFuture<'_, Result<(), TxError>> {
        Box::pin(async move {
            let fate = self.fates.lock().unwrap().pop_front().unwrap_or(Commits);
            match fate {
                Commits => self.apply(tx).await,
                LosesRace => return Err(TxError::conflict("lost")),
                Fails => return Err(TxError::failed("refused")),
                CommitsSilently => {
                    self.apply(tx).await;
                    return Err(TxError::unknown("silence"));
                }
                FailsSilently => return Err(TxError::unknown("silence")),
                Hangs => std::future::pending().await,
            }
            Ok(())
        })
    }

    fn rollback(&self, _: Writes) -> BoxFuture<'_, Result<(), TxError>> {
        Box::pin(async { Ok(()) })
    }

    fn is_conflict(&self, _: &(dyn std::error::Error + 'static)) -> bool {
        false
    }
}

fn done() -> ExecutionEnd {
    ExecutionEnd::Complete { outcome: outcome("yes"), retention: None }
}

/// Writes a line for each run, numbered.
fn numbered(ending: ExecutionEnd) -> impl FnMut(Tx<Writes>, LeaseHandle) -> Run + Send + 'static {
    let mut run = 0;
    move |mut tx, _| {
        run += 1;
        tx.lines.push(run);
        std::future::ready((ending.clone(), run))
    }
}

type Run = std::future::Ready<(ExecutionEnd, u32)>;

/// Of COMMITs: what it comes to, after how many runs, and whether the last one's line is there.
type Case = (&'static [Fate], fn(&ExecutionResult) -> bool, u32, bool);

#[tokio::test(start_paused = true)]
async fn a_commit_with_or_without_a_reply_has_its_result() {
    let cases: [Case; 8] = [
        (&[Commits], |ended| matches!(ended, ExecutionResult::Recorded(Some(_))), 1, true),
        (&[CommitsSilently], |ended| matches!(ended, ExecutionResult::Recorded(Some(_))), 1, true),
        (
            &[LosesRace, Commits],
            |ended| matches!(ended, ExecutionResult::Recorded(Some(_))),
            2,
            true,
        ),
        (
            &[FailsSilently, Commits],
            |ended| matches!(ended, ExecutionResult::Recorded(Some(_))),
            2,
            true,
        ),
        (
            &[Hangs, CommitsSilently],
            |ended| matches!(ended, ExecutionResult::Recorded(Some(_))),
            2,
            true,
        ),
        (&[LosesRace; 4], |ended| matches!(ended, ExecutionResult::Exhausted), 4, false),
        (&[FailsSilently; 4], |ended| matches!(ended, ExecutionResult::Exhausted), 4, false),
        (&[Fails], |ended| matches!(ended, ExecutionResult::RolledBack(_)), 1, false),
    ];
    for (fates, is_expected, runs, written) in cases {
        let world = World::new();
        let process = world.process();
        let database = Database::new(&world, fates.iter().copied());
        let lease = own(&process, &policy(OnUnknown::Block)).await;
        let backend = TransactionBackend::new(Arc::clone(&database));
        let TransactResult::Ended(ended, ran) = lease.transact(&backend, numbered(done())).await
        else {
            panic!("{fates:?}");
        };
        assert!(is_expected(&ended), "{fates:?}: {ended:?}");
        assert_eq!(ran, runs, "{fates:?}");
        if written {
            assert_eq!(database.lines(), [runs], "{fates:?}");
            assert_eq!(replayed(&process).await, outcome("yes"));
        } else {
            assert_eq!(database.lines(), [0; 0], "{fates:?}");
            // It did not happen: the next one executes.
            assert_eq!(own(&process, &reexecute()).await.attempt(), 2, "{fates:?}");
        }
    }
}

/// The store is away when it is to be asked what became of a COMMIT.
#[tokio::test(start_paused = true)]
async fn while_the_result_of_a_commit_is_unknown_the_operation_does_not_run_again() {
    for fate in [CommitsSilently, FailsSilently] {
        let world = World::new();
        let process = world.process();
        let database = Database::new(&world, [fate]);
        let lease = own(&process, &reexecute()).await;
        let backend = TransactionBackend::new(Arc::clone(&database));
        let store = Arc::clone(&world.store);
        let mut work = numbered(done());
        let going = move |tx, handle| {
            store.set(Mode::Unavailable);
            work(tx, handle)
        };
        let ran = lease.transact(&backend, going).await;
        assert!(matches!(ran, TransactResult::Ended(ExecutionResult::Unknown, 1)), "{ran:?}");
        world.store.set(Mode::Healthy);
        if fate == CommitsSilently {
            assert_eq!(replayed(&process).await, outcome("yes"));
            assert_eq!(database.lines(), [1]);
        } else {
            let copy = claim(&process, "a", &reexecute()).await;
            assert!(matches!(copy, Claim::InFlight { .. }), "{copy:?}");
            sleep(reexecute().terms.lease).await;
            assert_eq!(own(&process, &reexecute()).await.attempt(), 2);
            assert_eq!(database.lines(), [0; 0]);
        }
    }
}

/// While a COMMIT is in doubt, an operator decides.
#[tokio::test(start_paused = true)]
async fn a_decision_while_a_commit_is_unresolved_decides_its_result() {
    for (resolution, expected) in [
        (DefiniteVerdict::Happened(outcome("theirs")), Some(FinishError::Lost)),
        // The record of that life is gone: it may have said that it happened, before.
        (DefiniteVerdict::DidNotHappen, None),
    ] {
        let world = World::new();
        let process = world.process();
        let database = Database::new(&world, [FailsSilently]);
        let lease = own(&process, &reexecute()).await;
        let resolve = Resolve {
            expected: lease.fence(),
            force: true,
            forget: false,
            resolution,
            note: None,
            restart: false,
        };
        let backend = TransactionBackend::new(Arc::clone(&database));
        let store = Arc::clone(&world.store);
        let mut work = numbered(done());
        let going = move |tx, handle| {
            store.set(Mode::Unavailable);
            work(tx, handle)
        };
        let running = tokio::spawn(async move { lease.transact(&backend, going).await });
        sleep(Duration::from_secs(1)).await;
        let operator = world.elsewhere().process();
        let id = process.operation_id(&Scope::shared(), &key());
        operator.resolve(id, resolve).await.unwrap();
        world.store.set(Mode::Healthy);
        match (running.await.unwrap(), expected) {
            (TransactResult::Ended(ExecutionResult::Failed(how), _), Some(expected)) => {
                assert_eq!(how, expected)
            }
            (TransactResult::Ended(ExecutionResult::Unknown, _), None) => {}
            other => panic!("{other:?}"),
        }
        assert_eq!(database.lines(), [0; 0]);
    }
}

#[tokio::test(start_paused = true)]
async fn a_lease_is_renewed_before_its_transaction_and_not_within() {
    let world = World::new();
    let process = world.process();
    let database = Database::new(&world, []);
    let lease = own(&process, &reexecute()).await;
    assert_eq!(world.store.swaps(), 1);
    let backend = TransactionBackend::new(database);
    let (store, timeout) = (Arc::clone(&world.store), reexecute().terms.lease);
    let work = move |tx: Tx<Writes>, lease: LeaseHandle| {
        let store = Arc::clone(&store);
        async move {
            assert_eq!(store.swaps(), 2);
            sleep(timeout - Duration::from_millis(1)).await;
            // A recovery point would be another tag as well.
            let saved = lease.save("half".into()).await;
            assert_eq!(saved, Err(FinishError::InTransaction));
            assert_eq!(store.swaps(), 2);
            drop(tx);
            (done(), ())
        }
    };
    let ran = lease.transact(&backend, work).await;
    assert!(matches!(ran, TransactResult::Ended(ExecutionResult::Recorded(_), ())), "{ran:?}");
}

#[tokio::test(start_paused = true)]
async fn a_transaction_is_taken_once_at_a_time_and_only_during_its_run() {
    let world = World::new();
    let process = world.process();
    let database = Database::new(&world, [Commits]);
    let lease = own(&process, &reexecute()).await;
    let backend = TransactionBackend::new(Arc::clone(&database));
    let execution = Execution::in_transactions(lease, backend.any());
    let run = execution.begin_run().unwrap();
    let mut tx = run.take::<Writes>().await.unwrap();
    assert!(matches!(run.take::<Writes>().await, Err(TakeTxError::Taken)));
    tx.lines.push(7);
    drop(tx);
    assert!(matches!(run.take::<u8>().await, Err(TakeTxError::OtherType)));
    drop(run.take::<Writes>().await.unwrap());
    let late = run.clone();
    let ended = execution.end(Some(run), done()).await;
    assert!(matches!(ended, ExecutionResult::Recorded(_)), "{ended:?}");
    assert!(matches!(late.take::<Writes>().await, Err(TakeTxError::Ended)));
    assert_eq!(database.lines(), [7]);
}

/// The first type that is asked for is wrong: nothing was begun, and the run goes on without.
#[tokio::test(start_paused = true)]
async fn a_transaction_of_another_type_is_not_begun() {
    let world = World::new();
    let process = world.process();
    let lease = own(&process, &reexecute()).await;
    let execution =
        Execution::in_transactions(lease, TransactionBackend::new(Database::new(&world, [])).any());
    let run = execution.begin_run().unwrap();
    assert!(matches!(run.take::<u8>().await, Err(TakeTxError::OtherType)));
    drop(run.take::<Writes>().await.unwrap());
    let ended = execution.end(Some(run), ExecutionEnd::Release).await;
    assert!(matches!(ended, ExecutionResult::Recorded(None)), "{ended:?}");
}

#[tokio::test(start_paused = true)]
async fn transaction_options_out_of_range_are_rejected() {
    let good = TxOptions::default();
    assert_eq!(good.check(), Ok(()));
    for (terms, error) in [
        (TxOptions { begin: Duration::ZERO, ..good }, TxOptionsError::Begin),
        (TxOptions { commit_check: Duration::MAX, ..good }, TxOptionsError::CommitCheck),
    ] {
        assert_eq!(terms.check(), Err(error));
        // Whoever did not look hears it before anything runs.
        let world = World::new();
        let process = world.process();
        let lease = own(&process, &reexecute()).await;
        let backend = TransactionBackend { database: Database::new(&world, []), terms };
        let ran = lease.transact(&backend, numbered(done())).await;
        assert!(
            matches!(ran, TransactResult::NotBegun(TakeTxError::Terms(said)) if said == error),
            "{ran:?}"
        );
    }
}

/// A function that was called without transactions before, with the same key and request.
#[tokio::test(start_paused = true)]
async fn an_outcome_of_another_format_is_rejected_by_transact() {
    let world = World::new();
    let process = world.process();
    let kept: Result<Result<u32, u32>, ()> = Ok(Ok(1));
    let scope = Scope::shared();
    process.at_least_once(&(&scope, key(), 17), move || std::future::ready(kept)).await.unwrap();
    let backend = TransactionBackend::new(Database::new(&world, []));
    let policy = reexecute();
    let work = |_: Tx<Writes>, _| async { Ok::<u32, OperationError<u32>>(2) };
    let answer = process.transact(&backend, (&scope, &key()), &17, &policy, work).await;
    assert!(matches!(answer, Err(TransactError::OtherFormat { .. })), "{answer:?}");
}

#[derive(Debug, thiserror::Error)]
enum WorkError {
    #[error(transparent)]
    Stale(#[from] LostRace),
    #[error("in the middle of it")]
    Middle(#[source] LostRace),
}

#[test]
fn a_lost_race_is_found_among_the_sources_of_an_error() {
    let world = |error: &(dyn std::error::Error + 'static)| {
        let clock = Arc::new(hapax_core::SystemClock);
        let memory =
            Arc::new(hapax_core::MemoryStore::new(clock, hapax_core::MemoryCapacity::default()));
        let store = Arc::new(Unreliable::new(memory));
        let database = Database { store, fates: Mutex::default(), lines: Mutex::default() };
        database.any_is_conflict(error)
    };
    assert!(world(&LostRace));
    assert!(world(&WorkError::from(LostRace)));
    assert!(world(&WorkError::Middle(LostRace)));
    assert!(!world(&std::io::Error::other("something else")));
}

#[tokio::test(start_paused = true)]
async fn a_drain_finishes_a_transaction_that_is_not_polled() {
    let world = World::new();
    let process = world.process();
    let database = Database::new(&world, [Commits]);
    let backend = TransactionBackend::new(Arc::clone(&database));
    let (scope, k, p) = (Scope::shared(), key(), reexecute());
    let mut call =
        std::pin::pin!(process.transact(&backend, (&scope, &k), &1, &p, |tx, _| async move {
            sleep(Duration::from_secs(1)).await;
            drop(tx);
            Ok::<u32, OperationError<u32>>(1)
        }));
    tokio::select! {
        biased;
        _ = &mut call => unreachable!(),
        () = sleep(Duration::from_millis(100)) => {} // a signal to shut down
    }
    let drained = tokio::time::timeout(Duration::from_secs(3600), process.drain()).await;
    assert!(drained.is_ok(), "it drains for ever");
    assert!(call.await.is_ok());
}
