//! What it takes to trust a Hapax store, and Hapax itself.
//!
//! - [`suite`]: the rules that every [`Store`](hapax::Store) keeps, as tests to call.
//! - [`history`]: whether what concurrent callers were told could have been told one by one.
//! - [`storm`]: such callers, for a long time, while a test does harm to the store.
//! - `servers` and `faults` (feature `servers`): real servers that a test starts for itself, and a
//!   proxy that loses what passes it.

mod clock;
mod entropy;
#[cfg(feature = "servers")]
pub mod faults;
pub mod history;
#[cfg(feature = "servers")]
pub mod servers;
pub mod storm;
pub mod suite;

pub use clock::ManualClock;
pub use entropy::SeededEntropy;
