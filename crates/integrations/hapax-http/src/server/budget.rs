//! The memory budget for the bodies of all requests.
//!
//! Small bodies are not counted: they are part of what a connection takes. For larger ones there
//! are four pools. The owner of a reservation in one pool may wait for the next pool, never the
//! other way round, so that there is no deadlock. A reservation is taken whole, for the same
//! reason.
//!
//! 1. *Requests*: from the first byte of a body until the handler has dropped it. A request that
//!    waits here has claimed and executed nothing.
//! 2. *Responses*: from a response's head until its outcome is recorded, also while its write is
//!    deferred because the store is unavailable. This wait is after the effect, so its end must
//!    depend on handlers and the store only.
//! 3. *Recording*: a response that is being recorded is in memory [`COPIES`] times more:
//!    encoded, and sealed.
//! 4. *Answers*: from there until the client has read the response, which may never happen. There
//!    is no wait here: the outcome is recorded, so nothing is lost if the client has to retry
//!    because there is no memory for the response. If this pool were part of the former ones, a
//!    client that does not read could prevent the recording of other clients' outcomes.
//!
//! A reservation for the response before the handler runs would avoid that rejection. But it would
//! have to be for the largest response, for as long as the handler takes.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

/// Bytes of one permit. A semaphore counts up to 2^61, and a reservation up to 2^32.
const UNIT: usize = 1024;

/// Largest body in bytes that needs no reservation.
pub(super) const SMALL: usize = 16 * 1024;

/// Copies that exist while a response is recorded, besides the one that was read: encoded, and
/// sealed.
const COPIES: usize = 2;

#[derive(Clone, Debug)]
pub(super) struct BodyBudgets {
    pub(super) requests: MemoryBudget,
    pub(super) responses: MemoryBudget,
    pub(super) recording: MemoryBudget,
    pub(super) answers: MemoryBudget,
}

/// One pool; `None` without a bound.
#[derive(Clone, Debug)]
pub(super) struct MemoryBudget(Option<Bounded>);

#[derive(Clone, Debug)]
struct Bounded {
    free: Arc<Semaphore>,
    units: u32,
    /// Number of copies of a body in memory.
    copies: usize,
}

impl BodyBudgets {
    pub(super) fn unbounded() -> Self {
        let none = || MemoryBudget(None);
        Self { requests: none(), responses: none(), recording: none(), answers: none() }
    }

    pub(super) fn bounded(bytes: usize) -> Self {
        let eighth = bytes.max(2 << 20) / 8;
        let budget = |bytes, copies| {
            let units = units(bytes);
            MemoryBudget(Some(Bounded {
                free: Arc::new(Semaphore::new(units as usize)),
                units,
                copies,
            }))
        };
        Self {
            requests: budget(eighth * 3, 1),
            responses: budget(eighth * 2, 1),
            recording: budget(eighth, COPIES),
            answers: budget(eighth * 2, 1),
        }
    }
}

/// A reservation of a pool.
#[derive(Debug)]
pub(super) struct Reservation(Option<ReservedUnits>);

#[derive(Debug)]
struct ReservedUnits {
    permit: OwnedSemaphorePermit,
    copies: usize,
}

impl MemoryBudget {
    /// Reserves memory for a body of which at most `most` bytes and a frame are in memory; `None`
    /// if there is none within `wait_for`. A body larger than the pool gets all of it: it waits
    /// until it is alone.
    ///
    /// If the future is dropped, it leaves the queue.
    pub(super) async fn reserve(
        &self,
        most: usize,
        wait_for: Option<Duration>,
    ) -> Option<Reservation> {
        let Some(Bounded { free, units: all, copies }) = &self.0 else {
            return Some(Reservation(None));
        };
        let needed = units(most.saturating_mul(*copies)).min(*all);
        let permit = Arc::clone(free).acquire_many_owned(needed);
        let permit = match wait_for {
            Some(wait_for) => timeout(wait_for, permit).await.ok()?,
            None => permit.await,
        };
        // The pool is never closed, so the acquisition does not fail.
        Some(Reservation(Some(ReservedUnits { permit: permit.ok()?, copies: *copies })))
    }

    /// Attaches a reservation to bytes that are sent to a client, if there is memory now. Small
    /// bytes need none: their connection takes more.
    pub(super) fn hold_now(&self, bytes: Bytes) -> Option<Bytes> {
        let Some(Bounded { free, units: all, copies }) = &self.0 else { return Some(bytes) };
        if bytes.len() <= SMALL {
            return Some(bytes);
        }
        let needed = units(bytes.len().saturating_mul(*copies)).min(*all);
        let permit = Arc::clone(free).try_acquire_many_owned(needed).ok()?;
        Some(Reservation(Some(ReservedUnits { permit, copies: *copies })).hold(bytes))
    }
}

impl Reservation {
    /// Returns the empty reservation, of no pool.
    pub(super) const fn none() -> Self {
        Self(None)
    }

    pub(super) const fn is_none(&self) -> bool {
        self.0.is_none()
    }

    /// Attaches the reservation to the bytes that were read: it is returned with the last reference
    /// to them, wherever that is.
    pub(super) fn hold(self, bytes: Bytes) -> Bytes {
        let Some(part) = self.0 else { return bytes };
        Bytes::from_owner(HeldBytes { bytes, _part: part })
    }

    /// Returns the part that more than `bytes` bytes would need.
    pub(super) fn trim(&mut self, bytes: usize) {
        if let Some(ReservedUnits { permit, copies }) = &mut self.0 {
            let needed = units(bytes.saturating_mul(*copies)) as usize;
            let surplus = permit.num_permits().saturating_sub(needed);
            drop(permit.split(surplus));
        }
    }
}

struct HeldBytes {
    bytes: Bytes,
    _part: ReservedUnits,
}

impl AsRef<[u8]> for HeldBytes {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

fn units(bytes: usize) -> u32 {
    u32::try_from(bytes.div_ceil(UNIT)).unwrap_or(u32::MAX)
}
