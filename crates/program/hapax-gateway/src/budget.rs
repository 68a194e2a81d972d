//! Division of the process's memory by purpose.

use hapax_proxy::ByteSize;
use hapax_proxy::listener::PER_CONNECTION;

use crate::config::{ConfigError, ServerLimits};

/// Memory by purpose, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct MemoryPlan {
    /// Bodies that are being read or written.
    pub(crate) bodies: usize,
    /// Deferred writes: outcomes that an unavailable store has not accepted.
    pub(crate) deferred: usize,
    /// The store: its pages, its queue and its responses, or all of its records.
    pub(crate) store: usize,
    /// Records and bodies of observed routes.
    pub(crate) observed: usize,
}

/// Bytes of a record besides its body: heads, and fields of the engine.
const HEADS: usize = 64 << 10;

/// Number of equal parts that [`MemoryPlan::split`] makes, and the least memory that is divided.
const PARTS: usize = 8;
const LEAST: usize = 32 << 20;

impl ServerLimits {
    /// Memory of the program itself: code, threads, metrics, logs, and the operators' listener.
    pub const PROGRAM: usize = 32 << 20;
    /// Memory of one connection, as the listener counts it.
    pub const PER_CONNECTION: usize = PER_CONNECTION;

    /// Returns the memory by purpose, or an error if it is too little for the largest bodies.
    pub(crate) fn memory_plan(&self, largest: MaxBodies) -> Result<MemoryPlan, ConfigError> {
        let connections = self.connections.saturating_mul(Self::PER_CONNECTION);
        let taken = Self::PROGRAM.saturating_add(connections);
        let needed = largest.rest();
        if self.memory.saturating_sub(taken) >= needed {
            return Ok(MemoryPlan::split(self.memory - taken, needed));
        }
        let needed = taken.saturating_add(needed).div_ceil(1 << 20).saturating_mul(1 << 20);
        Err(ConfigError::Memory {
            memory: ByteSize(self.memory),
            connections: self.connections,
            needed: ByteSize(needed),
        })
    }
}

/// Most concurrent claims: more do not increase the throughput.
const CLAIMS: usize = 1024;

/// Returns how many claims may read an outcome at once within `replies` bytes: each holds the
/// outcome both sealed and opened.
pub(crate) fn claims(replies: usize, largest_response: usize) -> usize {
    let one = largest_response.saturating_add(HEADS).saturating_mul(2);
    (replies / one.max(1)).clamp(1, CLAIMS)
}

/// Memory of a store by purpose, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct StoreMemoryPlan {
    /// The store itself: its pages and its queue, or all of its records.
    pub(crate) store: usize,
    /// The cache in front of it: its entries, or its queue.
    pub(crate) cache: usize,
    /// Outcomes that a server or a cache returns to claims. A store in this process holds its
    /// outcomes already, or bounds them itself.
    pub(crate) replies: usize,
}

impl StoreMemoryPlan {
    pub(crate) const fn split(memory: usize, on_server: bool, cached: bool) -> Self {
        let quarter = memory / 4;
        let cache = if cached { quarter } else { 0 };
        let replies = match (on_server, cached) {
            (true, false) => 2 * quarter,
            (_, true) => quarter,
            (false, false) => 0,
        };
        Self { store: memory - cache - replies, cache, replies }
    }
}

impl MemoryPlan {
    /// Divides `rest`. Observation gets memory only from the part that is not `needed`: without
    /// memory, requests are merely not measured.
    fn split(rest: usize, needed: usize) -> Self {
        let part = rest / PARTS;
        let observed = ((rest - needed) / PARTS).min(rest / (2 * PARTS));
        Self { bodies: rest - 4 * part - observed, deferred: part, store: 3 * part, observed }
    }
}

/// Largest bodies that are buffered, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct MaxBodies {
    pub(crate) request: usize,
    pub(crate) response: usize,
}

impl MaxBodies {
    /// Returns the memory that the purposes need together: bodies for three of the largest requests
    /// and sixteen of the largest responses (see
    /// [`body_memory`](hapax_http::server::IdempotencyLayer::body_memory)), and for a store the
    /// largest record, sealed and opened.
    fn rest(self) -> usize {
        let bodies = self.request.saturating_mul(3).max(self.response.saturating_mul(16));
        let replies = self.response.saturating_add(HEADS).saturating_mul(2 * PARTS);
        // The division loses a few bytes.
        bodies.saturating_mul(2).max(replies).saturating_add(PARTS).max(LEAST)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;
    const LARGEST: MaxBodies = MaxBodies { request: MIB, response: MIB };

    #[test]
    fn the_parts_of_the_memory_add_up_to_the_whole() {
        for memory in [400 * MIB, 512 * MIB, 8 << 30] {
            let limits = ServerLimits { memory, ..ServerLimits::default() };
            let taken = ServerLimits::PROGRAM + limits.connections * ServerLimits::PER_CONNECTION;
            let MemoryPlan { bodies, deferred, store, observed } =
                limits.memory_plan(LARGEST).unwrap();
            assert_eq!(taken + bodies + deferred + store + observed, memory);
            assert!(bodies >= (memory - taken) * 7 / 16);
        }
    }

    #[test]
    fn the_memory_that_the_error_names_is_sufficient() {
        for response in [4 << 10, MIB, 64 * MIB] {
            let largest = MaxBodies { request: MIB, response };
            let little = ServerLimits { memory: MIB, ..ServerLimits::default() };
            let error = little.memory_plan(largest).unwrap_err();
            let ConfigError::Memory { needed, .. } = error else { panic!("{error:?}") };
            let enough = ServerLimits { memory: needed.0, ..little };
            let MemoryPlan { bodies, deferred, store, .. } = enough.memory_plan(largest).unwrap();
            assert!(bodies >= 16 * response && bodies >= 2 * MIB);
            assert!(deferred >= response && store / 3 >= 2 * (response + HEADS));
            for (on_server, cached) in [(false, true), (true, false), (true, true)] {
                let parts = StoreMemoryPlan::split(store, on_server, cached);
                assert_eq!(parts.store + parts.cache + parts.replies, store);
                assert!(parts.replies >= 2 * (response + HEADS));
                assert!(claims(parts.replies, response) * 2 * (response + HEADS) <= parts.replies);
            }
            // The needed memory is rounded up to whole mebibytes.
            let short = ServerLimits { memory: needed.0 - 2 * MIB, ..little };
            assert!(short.memory_plan(largest).is_err());
        }
    }

    #[test]
    fn sizes_beyond_all_memory_are_rejected() {
        let largest = MaxBodies { request: usize::MAX, response: usize::MAX };
        let error = ServerLimits::default().memory_plan(largest).unwrap_err();
        let ConfigError::Memory { needed, .. } = error else { panic!("{error:?}") };
        assert!(needed.0 > usize::MAX - MIB);
    }
}
