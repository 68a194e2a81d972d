//! Faults between a process and its store, on purpose and by a seed.
//!
//! - [`FaultProxy`] is between a client and a server; it loses, delays, tears and cuts.
//! - [`FaultyStore`] injects such faults into any [`Store`](hapax_core::Store), without a network.
//!
//! Both count their faults, so that a test can assert that they happened.

mod proxy;
mod store;

pub use proxy::{FaultProxy, FaultProxyRates, ProxyCounts};
pub use store::{FaultyCounts, FaultyRates, FaultyStore, InjectedFault, Polling};
