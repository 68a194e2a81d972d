//! What it takes to trust a Hapax store, and Hapax itself.
//!
//! - [`suite`]: the rules that every [`Store`](hapax::Store) keeps, as tests to call.
//! - [`history`]: whether what concurrent callers were told could have been told one by one.

mod clock;
mod entropy;
pub mod history;
pub mod suite;

pub use clock::ManualClock;
pub use entropy::SeededEntropy;
