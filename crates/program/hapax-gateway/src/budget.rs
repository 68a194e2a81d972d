//! Who may have how much of the memory that the process may take.

use crate::config::{ConfigError, ServerLimits};
use crate::units::ByteSize;

/// Memory by purpose, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct MemoryPlan {
    /// Bodies on their way.
    pub(crate) bodies: usize,
    /// Outcomes for a store that is away.
    pub(crate) deferred: usize,
    /// The store: its pages, its queue and its answers, or all of its records.
    pub(crate) store: usize,
    /// What is observed.
    pub(crate) observed: usize,
}

/// A record beside its body: heads, and what the engine needs.
const HEADS: usize = 64 << 10;

/// The parts that [`MemoryPlan::split`] makes, and what is worth splitting.
const PARTS: usize = 8;
const LEAST: usize = 32 << 20;

impl ServerLimits {
    /// What the program itself takes: its code, its threads, what counts and what is logged, and
    /// operators.
    pub const PROGRAM: usize = 32 << 20;
    /// What a connection may take: heads of requests and responses and buffers, those of TLS included, on
    /// either side, and bodies of up to 16 KiB. One of HTTP/2 counts as more where it may have more than
    /// four requests open, and so does each that is under way on it beyond the first.
    pub const PER_CONNECTION: usize = 192 << 10;

    /// The shares, if they are enough for the largest bodies.
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

/// Claims at one time that are worth having: more make nothing faster.
const CLAIMS: usize = 1024;

/// How many claims may be told an outcome at one time where so many bytes are for that: each is
/// there as it came, sealed, and opened.
pub(crate) fn claims(replies: usize, largest_response: usize) -> usize {
    let one = largest_response.saturating_add(HEADS).saturating_mul(2);
    (replies / one.max(1)).clamp(1, CLAIMS)
}

/// What is for a store, by purpose, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct StoreMemoryPlan {
    /// The store itself: pages, what waits for it, or all of its records.
    pub(crate) store: usize,
    /// A cache in front of it: its entries, or what waits for it.
    pub(crate) cache: usize,
    /// Outcomes that claims are told by a server, or by a cache. A store in this process has what it
    /// tells already, or bounds it by itself.
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
    /// What is observed gets something of what is not `needed`: without it, it only is not measured.
    fn split(rest: usize, needed: usize) -> Self {
        let part = rest / PARTS;
        let observed = ((rest - needed) / PARTS).min(rest / (2 * PARTS));
        Self { bodies: rest - 4 * part - observed, deferred: part, store: 3 * part, observed }
    }
}

/// The largest bodies that are held, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct MaxBodies {
    pub(crate) request: usize,
    pub(crate) response: usize,
}

impl MaxBodies {
    /// So that each purpose has room for what it is for: bodies for three of the largest requests
    /// and sixteen of the largest responses (see
    /// [`body_memory`](hapax_http::server::IdempotencyLayer::body_memory)), a store for a record
    /// sealed and opened.
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
    fn the_shares_are_the_whole() {
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
    fn what_is_named_as_needed_is_enough() {
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
            // It is rounded up to whole mebibytes.
            let short = ServerLimits { memory: needed.0 - 2 * MIB, ..little };
            assert!(short.memory_plan(largest).is_err());
        }
    }

    #[test]
    fn sizes_beyond_all_memory_are_refused() {
        let largest = MaxBodies { request: usize::MAX, response: usize::MAX };
        let error = ServerLimits::default().memory_plan(largest).unwrap_err();
        let ConfigError::Memory { needed, .. } = error else { panic!("{error:?}") };
        assert!(needed.0 > usize::MAX - MIB);
    }
}
