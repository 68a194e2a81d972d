//! A bound on the memory that bodies take, over all requests.
//!
//! Requests and responses have pools of their own: what holds a request's share may wait for a
//! response's, never the other way round, so that nobody waits for each other. A share is taken
//! whole before the first byte is read, for the same reason.

use std::sync::Arc;

use bytes::Bytes;
use http_body::SizeHint;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Bytes of one permit: a semaphore counts no further than 2^61, and a share no further than 2^32.
const UNIT: usize = 1024;

#[derive(Clone, Debug)]
pub(super) struct Memory {
    pub(super) requests: Pool,
    pub(super) responses: Pool,
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
        Self { requests: Pool(None), responses: Pool(None) }
    }

    pub(super) fn bounded(bytes: usize) -> Self {
        let units = units(bytes.max(2 << 20) / 2);
        let pool = || Pool(Some(Bounded { free: Arc::new(Semaphore::new(units as usize)), units }));
        Self { requests: pool(), responses: pool() }
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
}

impl Share {
    /// Ties the share to what was read: it is given back with the last reference to the bytes,
    /// wherever they went; what was not needed of it, now.
    pub(super) fn hold(self, bytes: Bytes) -> Bytes {
        let Some(mut permit) = self.0 else { return bytes };
        let surplus = permit.num_permits().saturating_sub(units(bytes.len()) as usize);
        drop(permit.split(surplus));
        Bytes::from_owner(Held { bytes, _permit: permit })
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
