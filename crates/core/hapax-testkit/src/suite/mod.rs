//! Rules of every store, as one test for each.
//!
//! A store's crate implements [`StoreFixture`], which opens a store for a test, and calls the
//! macros:
//!
//! ```
//! use std::sync::Arc;
//! use std::time::Duration;
//!
//! use hapax_core::{MemoryCapacity, MemoryStore};
//! use hapax_testkit::ManualClock;
//! use hapax_testkit::suite::{ClockFixture, StoreFixture};
//!
//! #[derive(Default)]
//! struct Memory(Arc<ManualClock>);
//!
//! impl StoreFixture for Memory {
//!     type Store = MemoryStore;
//!     const REAPS_AUTOMATICALLY: bool = false;
//!
//!     async fn open(&self) -> Arc<MemoryStore> {
//!         Arc::new(MemoryStore::new(self.0.clone(), MemoryCapacity::default()))
//!     }
//!
//!     async fn pass(&self, _: &MemoryStore, by: Duration) {
//!         self.0.advance(by);
//!     }
//! }
//!
//! mod suite {
//!     hapax_testkit::store_suite!(super::Memory::default());   // every store
//!     hapax_testkit::inspect_suite!(super::Memory::default()); // those that can be paged through
//! }
//! ```
//!
//! `clock_suite!` is for stores whose clock tests can set back ([`ClockFixture`]). Each rule is a
//! separate `#[tokio::test]`, so that the crate needs tokio with `rt-multi-thread` among its
//! dev-dependencies. If opening is expensive (a server), [`store_rules`] and its siblings run all
//! rules within one test. `server_suite!` is for stores on a server (feature `servers`).
//!
//! The rules hold under a network that loses replies: a swap whose result is ambiguous is sent
//! again, as the engine does.

#![allow(
    clippy::expect_used,
    clippy::missing_panics_doc,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a suite fails by panicking"
)]

pub(crate) mod bench;
mod clocks;
mod emptied;
mod pages;
mod races;
#[cfg(feature = "servers")]
pub mod server;
mod swaps;
mod times;

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use hapax_core::{Inspect, OperationId, Store};

use bench::Bench;
pub use clocks::*;
pub use emptied::*;
pub use pages::*;
pub use races::*;
pub use swaps::*;
pub use times::*;

/// A factory of stores for tests.
pub trait StoreFixture: Send + Sync + 'static {
    /// The store.
    type Store: Store;

    /// Whether the store removes records that are due automatically, without a call of `reap`.
    const REAPS_AUTOMATICALLY: bool;

    /// Opens an empty store, which no other test uses.
    fn open(&self) -> impl Future<Output = Arc<Self::Store>> + Send;

    /// Returns once the store's clock shows at least `by` more than at the call. Moves the clock if
    /// the test controls it, or [`wait`]s for it.
    fn pass(&self, store: &Self::Store, by: Duration) -> impl Future<Output = ()> + Send;
}

/// A [`StoreFixture`] whose stores read a clock that tests can set.
pub trait ClockFixture: StoreFixture {
    /// Sets the store's clock back by `by`.
    fn step_back(&self, store: &Self::Store, by: Duration) -> impl Future<Output = ()> + Send;
}

/// Waits until the store's own clock shows at least `by` more than now.
pub async fn wait(store: &dyn Store, by: Duration) {
    let key = OperationId::from_bytes([0; 32]);
    let mut until = None;
    loop {
        // A failed load does not show the time; try again.
        if let Ok(seen) = store.load(&key).await {
            let until = *until.get_or_insert(seen.now.after(by));
            if seen.now >= until {
                return;
            }
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

macro_rules! rules {
    ($(#[$doc:meta])* $module:ident: $all:ident, $suite:ident, $bound:path $(, $store:path)?: $($rule:ident)*) => {
        $(#[$doc])*
        pub async fn $all<F: $bound>(fixture: &F) $(where F::Store: $store)? {
            $(
                eprintln!("rule {}", stringify!($rule));
                $rule(fixture).await;
            )*
        }

        // A separate test for each rule.
        rules!(@export ($) $(#[$doc])* $module $suite $($rule)*);
    };
    (@export ($d:tt) $(#[$doc:meta])* $module:ident $suite:ident $($rule:ident)*) => {
        $(#[$doc])*
        ///
        /// Takes an expression that gives the [`StoreFixture`]($crate::suite::StoreFixture); makes
        /// a `#[tokio::test]` of each rule.
        #[macro_export]
        macro_rules! $suite {
            ($d fixture:expr) => {
                $(
                    #[::tokio::test(flavor = "multi_thread", worker_threads = 4)]
                    async fn $rule() {
                        $d crate::$module::$rule(&$d fixture).await;
                    }
                )*
            };
        }
    };
}
pub(crate) use rules;

rules! {
    /// Checks all rules of every store.
    suite: store_rules, store_suite, StoreFixture:
    an_absent_record_loads_as_absent
    a_swap_that_expects_no_record_creates_one
    a_swap_replaces_what_it_expected
    a_swap_that_expected_something_else_changes_nothing
    a_conflict_returns_the_same_record_as_a_load
    the_same_swap_again_is_stored_and_changes_nothing
    a_repeated_swap_is_a_conflict_after_a_later_write
    a_conflicting_swap_may_be_stored_later
    keys_that_differ_in_one_bit_have_separate_records
    every_state_is_read_as_written
    large_records_are_read_as_written
    new_executions_get_larger_fences
    other_writes_keep_the_fence
    a_fence_survives_a_release
    deadlines_count_from_the_stores_clock
    a_record_without_retention_has_no_keep_until
    very_long_durations_do_not_overflow
    an_expired_record_stays_until_it_is_reaped
    a_record_is_reaped_one_lease_after_it_expires
    reaping_uses_the_deadline_of_the_last_write
    a_record_without_retention_is_never_reaped
    reaping_stops_at_its_limit
    one_of_many_claims_is_stored
    one_of_many_swaps_on_one_write_id_is_stored
    no_write_is_lost
    a_dropped_swap_is_applied_completely_or_not_at_all
    reaping_never_removes_a_renewed_record
    histories_are_linearizable
}

rules! {
    /// Checks all rules of stores that can be paged through.
    suite: inspect_rules, inspect_suite, StoreFixture, Inspect:
    an_empty_store_has_an_empty_page
    pages_have_every_record_once_in_order
    a_page_begins_after_a_key
    pages_include_expired_records
    a_walk_visits_every_undecided_record
}

rules! {
    /// Checks all rules of stores whose clock can be set.
    suite: clock_rules, clock_suite, ClockFixture:
    fences_grow_while_the_clock_steps_back
    fences_are_the_clock_in_microseconds
}
