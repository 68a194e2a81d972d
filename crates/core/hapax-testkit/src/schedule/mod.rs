//! Rules of every schedule, as one test for each.
//!
//! The fixture is that of the store's own suite, [`StoreFixture`], if its store is a [`Schedule`]
//! too:
//!
//! ```
//! use std::sync::Arc;
//! use std::time::Duration;
//!
//! use hapax_core::{MemoryCapacity, MemoryStore};
//! use hapax_testkit::ManualClock;
//! use hapax_testkit::suite::StoreFixture;
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
//!     hapax_testkit::schedule_suite!(super::Memory::default());
//! }
//! ```
//!
//! `durable_schedule_suite!` is for stores whose entries survive the process ([`ReopenFixture`]).
//! [`schedule_rules`] and [`durable_schedule_rules`] run all rules within one test.
//!
//! The rules hold under a network that loses requests and replies: a call whose result is ambiguous
//! is repeated. Copies of a call that are applied late must have been applied when
//! [`StoreFixture::pass`] returns.

#![allow(
    clippy::expect_used,
    clippy::missing_panics_doc,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a suite fails by panicking"
)]

mod bench;
mod changes;
mod due;
mod notes;
mod pages;
mod races;
mod reopened;

use std::future::Future;
use std::sync::Arc;

use hapax_core::schedule::Schedule;

use crate::suite::{StoreFixture, rules};
use bench::ScheduleBench;
pub use changes::*;
pub use due::*;
pub use notes::*;
pub use pages::*;
pub use races::*;
pub use reopened::*;

/// A [`StoreFixture`] whose stores keep their entries when the process ends.
pub trait ReopenFixture: StoreFixture {
    /// Closes `store`, if it can be closed, and opens its entries as a new process does.
    fn reopen(&self, store: &Self::Store) -> impl Future<Output = Arc<Self::Store>> + Send;
}

rules! {
    /// Checks all rules of every schedule.
    schedule: schedule_rules, schedule_suite, StoreFixture, Schedule:
    an_empty_schedule_has_no_entries
    an_entry_is_due_at_its_time_and_not_before
    due_entries_are_ordered_by_time_and_limited
    the_time_until_the_next_entry_is_returned
    a_thousand_due_entries_hide_no_other_queue
    unknown_and_repeated_queues_do_no_harm
    queues_with_similar_names_are_separate
    very_long_delays_do_not_overflow
    an_entry_inserted_again_stays_as_it_is
    entries_of_one_operation_are_separate
    a_postponement_expects_the_due_time
    a_postponement_without_expectation_is_applied
    a_postponement_of_an_absent_entry_does_nothing
    a_postponed_entry_is_due_at_its_new_time
    a_removal_removes_its_own_entry_only
    reaping_removes_no_entry
    notes_are_read_as_inserted
    a_note_beyond_the_limit_inserts_nothing
    pages_have_every_entry_once_in_order
    a_page_of_entries_begins_after_a_key
    pages_are_in_order_while_entries_are_inserted
    a_page_of_a_namespace_reads_no_more_entries_than_its_limit
    queues_are_counted
    one_of_many_insertions_of_a_key_is_kept
    one_of_many_postponements_is_applied
    a_postponement_in_progress_hides_no_entry
    a_dropped_insertion_is_applied_completely_or_not_at_all
}

rules! {
    /// Checks all rules of schedules whose entries survive the process.
    schedule: durable_schedule_rules, durable_schedule_suite, ReopenFixture, Schedule:
    entries_survive_reopening
    removed_entries_stay_removed_after_reopening
}
