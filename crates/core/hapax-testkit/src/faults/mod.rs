//! What goes wrong between a process and its store, on purpose and by a seed.
//!
//! - [`FaultProxy`] stands between a client and a server and loses, delays, tears and cuts.
//! - [`FaultyStore`] does the like to any [`Store`](hapax_core::Store), without a network.
//!
//! Both count what they did, so that a test can assert that it happened.

mod proxy;
mod store;

pub use proxy::{FaultProxy, FaultProxyRates, ProxyCounts};
pub use store::{FaultyCounts, FaultyRates, FaultyStore, InjectedFault, Polling};
