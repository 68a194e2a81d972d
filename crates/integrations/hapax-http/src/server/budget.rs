//! The memory budget for the bodies of all requests.
//!
//! Small bodies are not counted: they are part of the cost of a connection. For larger ones there
//! are four pools. A reservation of one pool may wait for the next pool, never the other way round,
//! so that no two requests wait for each other. A reservation is taken whole, for the same reason.
//!
//! 1. *Requests*: from the first byte of a body until the handler drops it. A request that waits
//!    here has claimed and executed nothing.
//! 2. *Responses*: from the head of a response until its outcome is recorded, also while the write
//!    is deferred. This wait comes after the effect, so that reservations must depend on handlers
//!    and the store only.
//! 3. *Recording*: while a response is recorded there are [`COPIES`] more of it: for the client,
//!    and sealed.
//! 4. *Answers*: from there until the client has read it, which may be never. No request waits
//!    here: a recorded outcome has lost nothing, so a client without memory for its response is
//!    asked to retry. With one pool for all, a client that does not read would keep the payments of
//!    others from being recorded.
//!
//! Reserving the memory for a response before the handler runs would avoid that rejection. But it
//! would be memory for the largest response, for as long as the handler takes.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

/// Bytes of one permit. A semaphore counts up to 2^61, and a reservation up to 2^32.
const UNIT: usize = 1024;

/// Largest body in bytes that needs no reservation.
pub(super) const SMALL: usize = 16 * 1024;

/// While it is recorded, a response is in memory as it was read, as it is stored, and sealed.
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
    /// Returns a reservation of no pool.
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
