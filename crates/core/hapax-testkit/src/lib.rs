//! What it takes to trust a Hapax store, and Hapax itself.
//!
//! - [`suite`]: the rules that every [`Store`](hapax_core::Store) keeps, as tests to call.
//! - [`sim`]: a seeded world of processes, store and network, in which everything goes wrong.
//! - [`faults`]: a network and stores that fail on purpose.
//! - [`history`]: whether what concurrent callers were told could have been told one by one.
//! - [`storm`]: such callers, for a long time, while a test does harm to the store.
//! - `http` (a feature): the HTTP contract as scenarios, for whatever answers at an address.
//! - `functions` (a feature): whether functions keep what they promise, over a store.
//! - `servers` (a feature): private Redis and PostgreSQL for tests.

mod clock;
mod entropy;
pub mod faults;
#[cfg(feature = "functions")]
pub mod functions;
pub mod history;
#[cfg(feature = "http")]
pub mod http;
#[cfg(feature = "servers")]
pub mod servers;
pub mod sim;
pub mod storm;
pub mod suite;

pub use clock::ManualClock;
pub use entropy::SeededEntropy;
