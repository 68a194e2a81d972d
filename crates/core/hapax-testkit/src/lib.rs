//! Tools to test a Hapax store, and Hapax itself.
//!
//! - [`suite`]: the rules of every [`Store`](hapax_core::Store), as test functions.
//! - [`schedule`]: the rules of every [`Schedule`](hapax_core::schedule::Schedule).
//! - [`sim`]: a seeded simulation of processes, store and network with every kind of fault.
//! - [`faults`]: a network and stores that fail on purpose.
//! - [`history`]: a checker that the replies to concurrent callers are linearizable.
//! - [`storm`]: many such callers for a long time, while a test disturbs the store.
//! - [`steps`]: swaps and claims of a test, each named by a number.
//! - `http` (a feature): the HTTP contract as scenarios, for any instance at an address.
//! - `messages` (a feature): a broker in memory, and the rules of every adapter to a broker.
//! - `functions` (a feature): rules of functions over a store.
//! - `servers` (a feature): private Redis and PostgreSQL servers for tests.

mod clock;
mod entropy;
pub mod faults;
#[cfg(feature = "functions")]
pub mod functions;
pub mod history;
#[cfg(feature = "http")]
pub mod http;
#[cfg(feature = "messages")]
pub mod messages;
pub mod schedule;
#[cfg(feature = "servers")]
pub mod servers;
pub mod sim;
pub mod steps;
pub mod storm;
pub mod suite;

pub use clock::ManualClock;
pub use entropy::SeededEntropy;
