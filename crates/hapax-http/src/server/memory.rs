//! A bound on the memory that bodies take, over all requests.
//!
//! There are three pools, and what holds a share of one may wait for the next, never the other way
//! round, so that nobody waits for each other. A share is taken whole before the first byte is
//! read, for the same reason.
//!
//! 1. *Requests*: from the first byte of a body until the handler has let go of it. Waiting here,
//!    a request has claimed and executed nothing.
//! 2. *Recording*: from a response's head until its outcome is recorded. This wait comes after the
//!    effect, so that what holds a share must depend on handlers and the store only.
//! 3. *Answers*: from there until the client has read it, which may be never. Nobody waits here:
//!    an outcome that is recorded has lost nothing, so that the client for whose answer there is
//!    no room is told to ask again. One pool for 2 and 3 would let a client that does not read
//!    keep the payments of others from being recorded.
//!
//! To reserve an answer's room before the handler runs would need no such refusal. But it would be
//! room for the largest answer, for as long as the handler takes: with the gateway's defaults, 128
//! executions at one time.

use std::sync::Arc;

use bytes::Bytes;
use http_body::SizeHint;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Bytes of one permit: a semaphore counts no further than 2^61, and a share no further than 2^32.
const UNIT: usize = 1024;

/// Bytes of an answer that need no share.
const SMALL: usize = 16 * 1024;

#[derive(Clone, Debug)]
pub(super) struct Memory {
    pub(super) requests: Pool,
    pub(super) recording: Pool,
    pub(super) answers: Pool,
}

/// One of the pools; `None` for no bound.
#[derive(Clone, Debug)]
pub(super) struct Pool(Option<Bounded>);

#[derive(Clone, Debug)]
struct Bounded {
    free: Arc<Semaphore>,
    units: u32,
}

impl Memory {
    pub(super) const fn unbounded() -> Self {
        Self { requests: Pool(None), recording: Pool(None), answers: Pool(None) }
    }

    pub(super) fn bounded(bytes: usize) -> Self {
        let quarter = bytes.max(2 << 20) / 4;
        let pool = |bytes| {
            let units = units(bytes);
            Pool(Some(Bounded { free: Arc::new(Semaphore::new(units as usize)), units }))
        };
        Self { requests: pool(quarter * 2), recording: pool(quarter), answers: pool(quarter) }
    }
}

/// A part of a pool.
#[derive(Debug)]
pub(super) struct Share(Option<OwnedSemaphorePermit>);

impl Pool {
    /// A share for a body of which at most `limit` bytes and a frame are held. One that is larger
    /// than the pool gets all of it: it waits until it is alone.
    ///
    /// Dropped while it waits, it leaves its place in the queue.
    pub(super) async fn share(&self, size: SizeHint, limit: usize) -> Share {
        let Some(Bounded { free, units: all }) = &self.0 else { return Share(None) };
        let upper = size.upper().map(|upper| usize::try_from(upper).unwrap_or(usize::MAX));
        let most = upper.map_or(limit, |upper| upper.min(limit));
        // The pool is never closed, so that this is always a share.
        Share(Arc::clone(free).acquire_many_owned(units(most).min(*all)).await.ok())
    }

    /// Ties a share to what is on its way to a client, if there is room now. What is small needs
    /// none: its connection takes more.
    pub(super) fn hold_now(&self, bytes: Bytes) -> Option<Bytes> {
        let Some(Bounded { free, units: all }) = &self.0 else { return Some(bytes) };
        if bytes.len() <= SMALL {
            return Some(bytes);
        }
        let needed = units(bytes.len()).min(*all);
        let permit = Arc::clone(free).try_acquire_many_owned(needed).ok()?;
        Some(Share(Some(permit)).hold(bytes))
    }
}

impl Share {
    /// Of no pool.
    pub(super) const fn none() -> Self {
        Self(None)
    }

    /// Ties the share to what was read: it is given back with the last reference to the bytes,
    /// wherever they went; what was not needed of it, now.
    pub(super) fn hold(mut self, bytes: Bytes) -> Bytes {
        self.trim(bytes.len());
        let Some(permit) = self.0 else { return bytes };
        Bytes::from_owner(Held { bytes, _permit: permit })
    }

    /// Gives back what more than `bytes` do not need.
    pub(super) fn trim(&mut self, bytes: usize) {
        if let Some(permit) = &mut self.0 {
            let surplus = permit.num_permits().saturating_sub(units(bytes) as usize);
            drop(permit.split(surplus));
        }
    }
}

struct Held {
    bytes: Bytes,
    _permit: OwnedSemaphorePermit,
}

impl AsRef<[u8]> for Held {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

fn units(bytes: usize) -> u32 {
    u32::try_from(bytes.div_ceil(UNIT)).unwrap_or(u32::MAX)
}
