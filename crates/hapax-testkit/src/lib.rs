//! What it takes to trust a Hapax store, and Hapax itself.
//!
//! - [`suite`]: the rules that every [`Store`](hapax::Store) keeps, as tests to call.
//! - [`history`]: whether what concurrent callers were told could have been told one by one.
//! - `servers` (feature): real servers that a test starts for itself.

mod clock;
mod entropy;
pub mod history;
#[cfg(feature = "servers")]
pub mod servers;
pub mod suite;

pub use clock::ManualClock;
pub use entropy::SeededEntropy;
