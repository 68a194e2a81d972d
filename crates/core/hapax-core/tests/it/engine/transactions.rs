//! Operations in transactions, with a database in memory whose COMMITs end as a test sets.

mod leases;

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hapax_core::machine::{Resolution, Resolve};
use hapax_core::store::{BoxFuture, Stamped, Swap, Swapped};
use hapax_core::transaction::{
    AnyTransactions, LostRace, OperationError, TakeTxError, TransactError, TransactResult,
    TransactionBackend, TransactionEnd, TransactionResult, TransactionalLease, Transactions, Tx,
    TxError, TxOptions, TxOptionsError,
};
use hapax_core::{Claim, FinishError, LeaseHandle, OnUnknown, Scope, Store};
use tokio::time::sleep;

use super::faults::{Mode, Unreliable};
use super::{World, claim, key, outcome, own, policy, reexecute, replayed};

/// The end of a COMMIT.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Fate {
    Commits,
    LosesRace,
    Fails,
    /// It commits, and the reply is lost.
    CommitsUnanswered,
    /// It does not commit, and the reply is lost.
    FailsUnanswered,
    /// It never ends.
    Hangs,
}

use Fate::{Commits, CommitsUnanswered, Fails, FailsUnanswered, Hangs, LosesRace};

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
        // A separate connection, which has no faults.
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
                CommitsUnanswered => {
                    self.apply(tx).await;
                    return Err(TxError::unknown("the reply was lost"));
                }
                FailsUnanswered => return Err(TxError::unknown("the reply was lost")),
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

fn done() -> TransactionEnd {
    TransactionEnd::Complete { outcome: outcome("yes"), retention: None }
}

/// Returns a function that writes the number of each run as a line.
fn numbered(ending: TransactionEnd) -> impl FnMut(Tx<Writes>, LeaseHandle) -> Run + Send + 'static {
    let mut run = 0;
    move |mut tx, _| {
        run += 1;
        tx.lines.push(run);
        std::future::ready((ending.clone(), run))
    }
}

type Run = std::future::Ready<(TransactionEnd, u32)>;

/// The ends of the COMMITs, the expected result, the number of runs, and true if the last line is
/// written.
type Case = (&'static [Fate], fn(&TransactionResult) -> bool, u32, bool);

#[tokio::test(start_paused = true)]
async fn a_commit_is_recorded_repeated_or_rolled_back() {
    let cases: [Case; 8] = [
        (&[Commits], |ended| matches!(ended, TransactionResult::Recorded(Some(_))), 1, true),
        (
            &[CommitsUnanswered],
            |ended| matches!(ended, TransactionResult::Recorded(Some(_))),
            1,
            true,
        ),
        (
            &[LosesRace, Commits],
            |ended| matches!(ended, TransactionResult::Recorded(Some(_))),
            2,
            true,
        ),
        (
            &[FailsUnanswered, Commits],
            |ended| matches!(ended, TransactionResult::Recorded(Some(_))),
            2,
            true,
        ),
        (
            &[Hangs, CommitsUnanswered],
            |ended| matches!(ended, TransactionResult::Recorded(Some(_))),
            2,
            true,
        ),
        (&[LosesRace; 4], |ended| matches!(ended, TransactionResult::Exhausted), 4, false),
        (&[FailsUnanswered; 4], |ended| matches!(ended, TransactionResult::Exhausted), 4, false),
        (&[Fails], |ended| matches!(ended, TransactionResult::RolledBack(_)), 1, false),
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
            // The operation did not happen: the next claim executes.
            assert_eq!(own(&process, &reexecute()).await.attempt(), 2, "{fates:?}");
        }
    }
}

/// The store is unavailable when the result of a COMMIT is to be loaded.
#[tokio::test(start_paused = true)]
async fn while_a_commit_is_ambiguous_nothing_is_recorded_and_nothing_runs() {
    for fate in [CommitsUnanswered, FailsUnanswered] {
        let world = World::new();
        let process = world.process();
        let database = Database::new(&world, [fate]);
        let lease = own(&process, &reexecute()).await;
        let backend = TransactionBackend::new(Arc::clone(&database));
        let store = Arc::clone(&world.store);
        let mut work = numbered(done());
        let running_work = move |tx, handle| {
            store.set(Mode::Unavailable);
            work(tx, handle)
        };
        let ran = lease.transact(&backend, running_work).await;
        assert!(matches!(ran, TransactResult::Ended(TransactionResult::Unknown, 1)), "{ran:?}");
        world.store.set(Mode::Healthy);
        if fate == CommitsUnanswered {
            assert_eq!(replayed(&process).await, outcome("yes"));
            assert_eq!(database.lines(), [1]);
        } else {
            let duplicate = claim(&process, "a", &reexecute()).await;
            assert!(matches!(duplicate, Claim::InFlight { .. }), "{duplicate:?}");
            sleep(backend.terms.lease).await;
            assert_eq!(own(&process, &reexecute()).await.attempt(), 2);
            assert_eq!(database.lines(), [0; 0]);
        }
    }
}

/// An operator decides while a COMMIT is ambiguous.
#[tokio::test(start_paused = true)]
async fn a_decision_during_an_ambiguous_commit_is_the_result() {
    for (resolution, expected) in [
        (Resolution::Happened(outcome("theirs")), Some(FinishError::Lost)),
        // The record of that generation is gone: it may have stated that the operation happened.
        (Resolution::DidNotHappen, None),
    ] {
        let world = World::new();
        let process = world.process();
        let database = Database::new(&world, [FailsUnanswered]);
        let lease = own(&process, &reexecute()).await;
        let resolve =
            Resolve { expected: lease.fence(), force: true, forget: false, resolution, note: None };
        let backend = TransactionBackend::new(Arc::clone(&database));
        let store = Arc::clone(&world.store);
        let mut work = numbered(done());
        let running_work = move |tx, handle| {
            store.set(Mode::Unavailable);
            work(tx, handle)
        };
        let running = tokio::spawn(async move { lease.transact(&backend, running_work).await });
        sleep(Duration::from_secs(1)).await;
        let operator = world.elsewhere().process();
        let id = process.operation_id(&Scope::shared(), &key());
        operator.resolve(id, resolve).await.unwrap();
        world.store.set(Mode::Healthy);
        match (running.await.unwrap(), expected) {
            (TransactResult::Ended(TransactionResult::Failed(how), _), Some(expected)) => {
                assert_eq!(how, expected)
            }
            (TransactResult::Ended(TransactionResult::Unknown, _), None) => {}
            other => panic!("{other:?}"),
        }
        assert_eq!(database.lines(), [0; 0]);
    }
}

#[tokio::test(start_paused = true)]
async fn a_lease_is_renewed_before_its_transaction_and_not_during_it() {
    let world = World::new();
    let process = world.process();
    let database = Database::new(&world, []);
    let lease = own(&process, &reexecute()).await;
    assert_eq!(world.store.swaps(), 1);
    let backend = TransactionBackend::new(database);
    let (store, timeout) = (Arc::clone(&world.store), backend.terms.lease);
    let work = move |tx: Tx<Writes>, lease: LeaseHandle| {
        let store = Arc::clone(&store);
        async move {
            assert_eq!(store.swaps(), 2);
            sleep(timeout - Duration::from_millis(1)).await;
            // A checkpoint would change the write id too.
            let saved = lease.save("half".into()).await;
            assert_eq!(saved, Err(FinishError::InTransaction));
            assert_eq!(store.swaps(), 2);
            drop(tx);
            (done(), ())
        }
    };
    let ran = lease.transact(&backend, work).await;
    assert!(matches!(ran, TransactResult::Ended(TransactionResult::Recorded(_), ())), "{ran:?}");
}

#[tokio::test(start_paused = true)]
async fn a_transaction_is_taken_once_at_a_time_and_within_one_run() {
    let world = World::new();
    let process = world.process();
    let database = Database::new(&world, [Commits]);
    let lease = own(&process, &reexecute()).await;
    let backend = TransactionBackend::new(Arc::clone(&database));
    let transacting = TransactionalLease::new(lease, backend.any());
    let run = transacting.run();
    let mut tx = run.take::<Writes>().await.unwrap();
    assert!(matches!(run.take::<Writes>().await, Err(TakeTxError::Taken)));
    tx.lines.push(7);
    drop(tx);
    assert!(matches!(run.take::<u8>().await, Err(TakeTxError::OtherType)));
    drop(run.take::<Writes>().await.unwrap());
    let late = run.clone();
    let ended = transacting.end(run, done()).await;
    assert!(matches!(ended, TransactionResult::Recorded(_)), "{ended:?}");
    assert!(matches!(late.take::<Writes>().await, Err(TakeTxError::Ended)));
    assert_eq!(database.lines(), [7]);
}

/// The first requested type is wrong: no transaction begins, and the run continues without one.
#[tokio::test(start_paused = true)]
async fn a_transaction_of_another_type_is_not_begun() {
    let world = World::new();
    let process = world.process();
    let lease = own(&process, &reexecute()).await;
    let transacting =
        TransactionalLease::new(lease, TransactionBackend::new(Database::new(&world, [])).any());
    let run = transacting.run();
    assert!(matches!(run.take::<u8>().await, Err(TakeTxError::OtherType)));
    drop(run.take::<Writes>().await.unwrap());
    let ended = transacting.end(run, TransactionEnd::Release).await;
    assert!(matches!(ended, TransactionResult::Recorded(None)), "{ended:?}");
}

#[tokio::test(start_paused = true)]
async fn invalid_options_are_rejected() {
    let good = TxOptions::default();
    assert_eq!(good.check(), Ok(()));
    for (terms, error) in [
        (TxOptions { lease: Duration::from_millis(99), ..good }, TxOptionsError::Lease),
        (TxOptions { lease: Duration::MAX, ..good }, TxOptionsError::Lease),
        (TxOptions { begin: Duration::ZERO, ..good }, TxOptionsError::Begin),
        (TxOptions { commit_check: Duration::MAX, ..good }, TxOptionsError::CommitCheck),
    ] {
        assert_eq!(terms.check(), Err(error));
        // A caller that did not check gets the error before anything runs.
        let world = World::new();
        let process = world.process();
        let lease = own(&process, &reexecute()).await;
        let backend = TransactionBackend { database: Database::new(&world, []), terms };
        let ran = lease.transact(&backend, numbered(done())).await;
        assert!(
            matches!(ran, TransactResult::NotBegun(TakeTxError::Terms(found)) if found == error),
            "{ran:?}"
        );
    }
}

/// The function was called without transactions before, with the same key and request.
#[tokio::test(start_paused = true)]
async fn an_outcome_of_another_integration_is_not_read() {
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
fn a_lost_race_is_found_in_any_wrapper() {
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
