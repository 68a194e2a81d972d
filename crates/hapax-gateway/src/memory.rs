//! Who may have how much of the memory that the process may take.

use crate::config::{ConfigError, Limits};
use crate::units::Size;

/// Memory by purpose, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Shares {
    /// Bodies on their way.
    pub(crate) bodies: usize,
    /// Outcomes for a store that is away.
    pub(crate) held_back: usize,
    /// The store: its pages and its queue, or all of its records.
    pub(crate) store: usize,
}

/// More than this makes neither a store nor an outage better.
const MOST_STORE: usize = 128 << 20;
const MOST_HELD_BACK: usize = 64 << 20;

/// What [`Shares::split`] gives to bodies, as a part of what there is to split.
const BODIES: (usize, usize) = (5, 8);

impl Limits {
    /// What the program itself takes: its code, its threads, what counts and what is logged.
    pub const PROGRAM: usize = 24 << 20;
    /// What a connection may take: the head of a request and that of its response, both on either
    /// side, buffers, and bodies of up to 16 KiB.
    pub const PER_CONNECTION: usize = 128 << 10;

    /// Shares that are enough for the largest bodies; `records` if all records are in memory too.
    pub(crate) fn shares(
        &self,
        largest: &LargestBodies,
        records: bool,
    ) -> Result<Shares, ConfigError> {
        let taken =
            Self::PROGRAM.saturating_add(self.connections.saturating_mul(Self::PER_CONNECTION));
        let shares = Shares::split(self.memory.saturating_sub(taken), records);
        if shares.bodies >= largest.need() {
            return Ok(shares);
        }
        let (part, whole) = BODIES;
        let needed = taken.saturating_add(largest.need().saturating_mul(whole).div_ceil(part));
        let mebibytes = needed.div_ceil(1 << 20);
        Err(ConfigError::Memory {
            memory: Size(self.memory),
            connections: self.connections,
            needed: Size(mebibytes << 20),
        })
    }
}

impl Shares {
    const fn split(rest: usize, records: bool) -> Self {
        let (part, whole) = BODIES;
        let held_back = min(rest / 8, MOST_HELD_BACK);
        let store = rest / 4;
        if records {
            return Self { bodies: rest / whole * part, held_back, store };
        }
        let store = min(store, MOST_STORE);
        Self { bodies: rest - held_back - store, held_back, store }
    }
}

const fn min(a: usize, b: usize) -> usize {
    if a < b { a } else { b }
}

/// The largest bodies that are held, in bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LargestBodies {
    pub(crate) request: usize,
    pub(crate) response: usize,
}

impl LargestBodies {
    /// So that the largest still fits its part: half for requests, and a quarter for responses that
    /// are being recorded, each three times.
    fn need(self) -> usize {
        self.request.saturating_mul(2).max(self.response.saturating_mul(12))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LARGEST: LargestBodies = LargestBodies { request: 1 << 20, response: 1 << 20 };

    #[test]
    fn the_shares_are_the_whole() {
        let limits = Limits::default();
        for memory in [320 << 20, 512 << 20, 8 << 30] {
            let limits = Limits { memory, ..limits };
            let taken = Limits::PROGRAM + limits.connections * Limits::PER_CONNECTION;
            for records in [false, true] {
                let Shares { bodies, held_back, store } = limits.shares(&LARGEST, records).unwrap();
                assert!(taken + bodies + held_back + store <= memory);
                assert!(bodies >= (memory - taken) / 8 * 5);
            }
        }
    }

    #[test]
    fn what_is_named_as_needed_is_enough() {
        let little = Limits { memory: 1 << 20, ..Limits::default() };
        let error = little.shares(&LARGEST, false).unwrap_err();
        let ConfigError::Memory { needed, .. } = error else { panic!("{error:?}") };
        let enough = Limits { memory: needed.0, ..little };
        assert!(enough.shares(&LARGEST, false).is_ok());
        let short = Limits { memory: needed.0 - (1 << 20), ..little };
        assert!(short.shares(&LARGEST, false).is_err());
    }
}
