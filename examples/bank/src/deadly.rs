//! A store and transactions that kill their process between any two steps. They can plant a bug, so
//! that the tests can show that they find it.

use std::env;
use std::error::Error;
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use hapax_core::store::{BoxFuture, Capabilities, Reaped, Snapshot, Stamped, Swap, Swapped};
use hapax_core::transaction::{Transactions, TxError};
use hapax_core::{FencingToken, OperationId, Store, StoreError, Timestamp};
use hapax_postgres::{PgTransactions, PgTx, PostgresStore};
use rustix::process::{Signal, getpid, kill_process};

/// Random choice of the step at which the process is killed, and the planted bug.
#[derive(Debug)]
pub(crate) struct Death {
    once_in: u64,
    dice: AtomicU64,
    bug: Option<Bug>,
}

/// A planted bug.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Bug {
    /// Writes the record after COMMIT, outside the transaction.
    Outside,
    /// Writes the record before COMMIT, outside the transaction.
    Early,
}

impl Death {
    pub(crate) fn of_environment() -> Result<Self, Box<dyn Error>> {
        let number = |name| env::var(name).map_or(Ok(0), |text| text.parse::<u64>());
        let bug = match env::var("BANK_BUG").as_deref() {
            Ok("outside") => Some(Bug::Outside),
            Ok("early") => Some(Bug::Early),
            Ok(other) => return Err(format!("no bug is called {other}").into()),
            Err(_) => None,
        };
        let dice = AtomicU64::new(number("BANK_SEED")?);
        Ok(Self { once_in: number("BANK_DIE")?, dice, bug })
    }

    /// Kills the process once in `once_in` steps, at random.
    fn step(&self, name: &str) {
        if self.once_in == 0 {
            return;
        }
        // SplitMix64.
        let mut roll = self.dice.fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::Relaxed);
        roll = (roll ^ (roll >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        roll = (roll ^ (roll >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        roll ^= roll >> 31;
        if roll.is_multiple_of(self.once_in) {
            eprintln!("died {name}");
            // A process that survives SIGKILL cannot be helped.
            kill_process(getpid(), Signal::KILL).ok();
        }
    }
}

/// Returns the store and the transactions, with steps at which the process may be killed.
pub(crate) fn both(
    store: Arc<PostgresStore>,
    transactions: PgTransactions,
    death: Arc<Death>,
) -> (Arc<dyn Store>, Arc<Deadly>) {
    let steps = Arc::new(Steps { store, death: Arc::clone(&death) });
    let deadly = Deadly { inner: transactions, steps: Arc::clone(&steps), left: Mutex::default() };
    (steps, Arc::new(deadly))
}

#[derive(Debug)]
struct Steps {
    store: Arc<PostgresStore>,
    death: Arc<Death>,
}

impl Store for Steps {
    fn swap(&self, swap: Swap) -> BoxFuture<'_, Result<Swapped, StoreError>> {
        Box::pin(async move {
            let claim = swap.expected.is_none();
            self.death.step(if claim { "before a claim" } else { "before a write" });
            let swapped = self.store.swap(swap).await;
            self.death.step(if claim { "after a claim" } else { "after a write" });
            swapped
        })
    }

    fn load<'a>(&'a self, key: &'a OperationId) -> BoxFuture<'a, Result<Snapshot, StoreError>> {
        self.store.load(key)
    }

    fn reap(&self, limit: NonZeroU32) -> BoxFuture<'_, Result<Reaped, StoreError>> {
        self.store.reap(limit)
    }

    fn capabilities(&self) -> Capabilities<'_> {
        self.store.capabilities()
    }
}

/// Transactions with steps at which the process may be killed.
#[derive(Debug)]
pub(crate) struct Deadly {
    inner: PgTransactions,
    steps: Arc<Steps>,
    /// Records that a bug has yet to write, roughly in the order of their COMMITs.
    left: Mutex<Vec<Swap>>,
}

impl Deadly {
    fn step(&self, name: &str) {
        self.steps.death.step(name);
    }

    /// Returns what a store returns for a swap that it stored.
    fn pretend() -> Swapped {
        Swapped::Stored(Stamped {
            now: Timestamp::default(),
            fence: FencingToken::default(),
            lease_until: Timestamp::default(),
        })
    }
}

impl Transactions for Deadly {
    type Tx = PgTx;

    fn connect(&self) -> BoxFuture<'_, Result<PgTx, TxError>> {
        Box::pin(async move {
            let tx = self.inner.connect().await;
            self.step("with a connection");
            tx
        })
    }

    fn begin<'a>(&'a self, tx: &'a mut PgTx) -> BoxFuture<'a, Result<(), TxError>> {
        Box::pin(async move {
            self.step("before BEGIN");
            self.inner.begin(tx).await?;
            self.step("after BEGIN");
            Ok(())
        })
    }

    fn swap_in<'a>(
        &'a self,
        tx: &'a mut PgTx,
        swap: Swap,
    ) -> BoxFuture<'a, Result<Swapped, TxError>> {
        Box::pin(async move {
            self.step("after the work");
            let swapped = match self.steps.death.bug {
                None => self.inner.swap_in(tx, swap).await?,
                Some(Bug::Outside) => {
                    self.left.lock().unwrap_or_else(PoisonError::into_inner).push(swap);
                    Self::pretend()
                }
                Some(Bug::Early) => self.steps.store.swap(swap).await.map_err(TxError::failed)?,
            };
            self.step("before COMMIT");
            Ok(swapped)
        })
    }

    fn commit(&self, tx: PgTx) -> BoxFuture<'_, Result<(), TxError>> {
        Box::pin(async move {
            self.inner.commit(tx).await?;
            self.step("after COMMIT");
            let left =
                std::mem::take(&mut *self.left.lock().unwrap_or_else(PoisonError::into_inner));
            for swap in left {
                self.steps.store.swap(swap).await.map_err(TxError::failed)?;
            }
            Ok(())
        })
    }

    fn rollback(&self, tx: PgTx) -> BoxFuture<'_, Result<(), TxError>> {
        Box::pin(async move {
            self.step("before ROLLBACK");
            let rolled_back = self.inner.rollback(tx).await;
            self.step("after ROLLBACK");
            rolled_back
        })
    }

    fn is_conflict(&self, error: &(dyn Error + 'static)) -> bool {
        self.inner.is_conflict(error)
    }

    fn committed(&self, key: &OperationId) {
        self.inner.committed(key);
    }
}
