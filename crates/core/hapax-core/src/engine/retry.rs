//! Sends swaps to the store by the rule of `exchange`: the same swap again until its answer is
//! definite.

use std::time::Duration;

use tokio::time::{Instant, sleep, timeout_at};

use super::idempotency::deadline_after;
use crate::entropy::{Entropy, EntropyError};
use crate::exchange::{ClaimExchange, ClaimResult, Next, WriteExchange, WriteResult};
use crate::store::{Store, StoreError, Swap, Swapped};

/// Pauses between copies of one swap: they double from the first to the last.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LAST_PAUSE: Duration = Duration::from_secs(1);

/// The interface that both kinds of exchange share.
pub(super) trait Exchange {
    type Out;
    fn receive(
        &mut self,
        swapped: Swapped,
        entropy: &dyn Entropy,
    ) -> Result<Next<Self::Out>, EntropyError>;
}

impl Exchange for ClaimExchange {
    type Out = ClaimResult;
    fn receive(
        &mut self,
        swapped: Swapped,
        entropy: &dyn Entropy,
    ) -> Result<Next<ClaimResult>, EntropyError> {
        Self::receive(self, swapped, entropy)
    }
}

impl Exchange for WriteExchange {
    type Out = WriteResult;
    fn receive(
        &mut self,
        swapped: Swapped,
        entropy: &dyn Entropy,
    ) -> Result<Next<WriteResult>, EntropyError> {
        Self::receive(self, swapped, entropy)
    }
}

/// An exchange that did not end.
#[derive(Debug)]
pub(super) enum ExchangeError {
    /// The store did not answer this swap. `may_land` is true if an earlier copy has no result.
    Store { swap: Box<Swap>, error: StoreError, may_land: bool },
    /// There was no randomness for a further swap; every swap that was sent has a result.
    Entropy(EntropyError),
}

/// Runs an exchange to its end, or to the deadline.
///
/// Dropping this future leaves the last swap without a result; callers run it to its end.
#[allow(clippy::manual_async_fn, reason = "an `async fn` has room for each argument twice")]
pub(super) fn run<X: Exchange>(
    store: &dyn Store,
    entropy: &dyn Entropy,
    deadline: Instant,
    exchange: &mut X,
    next: Next<X::Out>,
) -> impl Future<Output = Result<X::Out, ExchangeError>> {
    async move { run_timed(store, entropy, deadline, exchange, next, &mut || {}).await }
}

/// Does the same, and calls `on_send` before each copy of a swap is sent: the snapshot or stamps of its
/// reply are of a later time.
#[allow(clippy::manual_async_fn, reason = "an `async fn` has room for each argument twice")]
pub(super) fn run_timed<X: Exchange>(
    store: &dyn Store,
    entropy: &dyn Entropy,
    deadline: Instant,
    exchange: &mut X,
    mut next: Next<X::Out>,
    on_send: &mut (dyn FnMut() + Send),
) -> impl Future<Output = Result<X::Out, ExchangeError>> {
    async move {
        loop {
            if let Next::Send(swap) = &next {
                let swapped = match send_until_deadline(store, deadline, swap, on_send).await {
                    Ok(swapped) => swapped,
                    Err((error, may_land)) => {
                        let swap = Box::new(swap.clone());
                        return Err(ExchangeError::Store { swap, error, may_land });
                    }
                };
                next = exchange.receive(swapped, entropy).map_err(ExchangeError::Entropy)?;
            }
            if let Next::Ready(out) = next {
                return Ok(out);
            }
        }
    }
}

/// Sends one swap until its answer is definite or the deadline is over. Errors state whether a copy
/// may still land.
async fn send_until_deadline(
    store: &dyn Store,
    deadline: Instant,
    swap: &Swap,
    on_send: &mut (dyn FnMut() + Send),
) -> Result<Swapped, (StoreError, bool)> {
    let mut pause = FIRST_PAUSE;
    let mut may_land = false;
    loop {
        on_send();
        let error = match timeout_at(deadline, store.swap(swap.clone())).await {
            Ok(Ok(swapped)) => return Ok(swapped),
            // This copy was not applied; an earlier one may have been.
            Ok(Err(error @ StoreError::Unavailable(_))) if !may_land => {
                return Err((error, false));
            }
            Ok(Err(error @ StoreError::Corrupt(_))) => return Err((error, may_land)),
            Ok(Err(error @ StoreError::Unavailable(_))) => error,
            Ok(Err(error @ StoreError::Ambiguous(_))) => {
                may_land = true;
                error
            }
            Err(_) => return Err((StoreError::ambiguous("no answer within the timeout"), true)),
        };
        if Instant::now() + pause >= deadline {
            return Err((error, may_land));
        }
        sleep(pause).await;
        pause = (pause * 2).min(LAST_PAUSE);
    }
}

/// Sends one swap until its answer is definite, however long that takes. `None`: the record is
/// damaged, so nothing can be swapped there.
pub(super) async fn send_until_definite(
    store: &dyn Store,
    permits: &tokio::sync::Semaphore,
    store_timeout: Duration,
    swap: &Swap,
) -> Option<Swapped> {
    let mut pause = FIRST_PAUSE;
    loop {
        // Few at a time, so that a store that returns is not overloaded.
        let permit = permits.acquire().await;
        let deadline = deadline_after(store_timeout);
        let answer = send_until_deadline(store, deadline, swap, &mut || {}).await;
        drop(permit);
        match answer {
            Ok(swapped) => return Some(swapped),
            Err((error @ StoreError::Corrupt(_), _)) => {
                tracing::error!(key = ?swap.id, %error, "a deferred write is given up");
                return None;
            }
            Err((error, _)) => tracing::debug!(key = ?swap.id, %error, "a write is still deferred"),
        }
        sleep(pause).await;
        pause = (pause * 2).min(LAST_PAUSE);
    }
}
