//! Functions: the integration for calls within a program. The manual's page, `manual/functions.md`,
//! explains each result to users.

mod declared;
mod error;
mod execute;
mod key;
mod outcome;
pub(super) mod request;

pub use declared::{Function, FunctionBuilder, FunctionError, ReconcileCall};
pub use error::RunError;
pub use key::OperationKey;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::idempotency::Idempotency;
use crate::record::{FencingToken, OnUnknown};

/// Result of a function.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Receipt<T> {
    /// Value of the function.
    pub value: T,
    /// True if an earlier call executed it.
    pub replayed: bool,
    /// Fence of the execution that returned the value.
    pub fence: FencingToken,
}

impl Idempotency {
    /// Executes `operation` at most once for `key`, and returns its value to every call with the
    /// same key and request. Lease and retention are those of [`Policy::default`](crate::Policy).
    ///
    /// After an `Err`, a panic or a crash in the middle, `operation` may have taken effect
    /// ([`OutcomeClass::Unknown`](crate::OutcomeClass::Unknown)). It does not execute again, and
    /// calls get [`RunError::OutcomeUnknown`] until an operator resolves the record. If some errors
    /// are known to have no effect, declare a [function](Idempotency::function) that classifies
    /// them; if `operation` may be repeated, call [`at_least_once`](Self::at_least_once).
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use hapax_core::{Idempotency, Key, MemoryStore, Scope};
    /// # async fn charge(cents: u64) -> Result<String, std::io::Error> { Ok(format!("ch_{cents}")) }
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let idempotency = Idempotency::builder(Arc::new(MemoryStore::default())).build()?;
    /// let key = (Scope::of([("customer", "c-1")]), Key::new("order-17")?, 100);
    /// let first = idempotency.at_most_once(&key, || charge(100)).await?;
    /// let again = idempotency.at_most_once(&key, || charge(100)).await?;
    /// assert_eq!((first.value, first.replayed), ("ch_100".into(), false));
    /// assert_eq!((again.value, again.replayed), ("ch_100".into(), true));
    /// # Ok(()) }
    /// ```
    ///
    /// - `operation` executes in this future, under a lease that is renewed until it ends. If this
    ///   future is dropped then, the operation continues on a task and its outcome is recorded;
    ///   dropping this future earlier, during the claim, leaves nothing behind.
    ///   [`Idempotency::drain`] waits for the operation. Dropped calls go on, so limit the calls
    ///   where they enter the program.
    /// - An operation that takes longer than a third of its lease also continues on a task, and this
    ///   future waits for it. So it must not use task-local values of its caller.
    /// - Pass code that blocks its thread to `tokio::task::spawn_blocking`: otherwise it may keep
    ///   the runtime from renewing the lease.
    /// - Requests are equal if their values are, in any order of maps and fields; [the
    ///   manual](crate::manual::functions#which-request-it-is) lists which values differ.
    /// - A value has any type that serde writes and reads. It is stored exactly, in a separate
    ///   format, by the names of fields and variants: a type may change between two releases as
    ///   serde allows (`default`, `alias`). A value has at most 64 MiB and 128 levels. A replay is
    ///   the first to read it back, so call twice in a test.
    /// - The record does not contain the function. Two functions that are called with the same key,
    ///   scope and request would replay each other's outcome: use separate scopes, or names, see
    ///   [`Idempotency::function`].
    ///
    /// # Errors
    /// [`RunError`]; [the manual](crate::manual::functions) has a table of their meanings.
    pub async fn at_most_once<T, E, K, W, F>(
        &self,
        key: &K,
        operation: W,
    ) -> Result<Receipt<T>, RunError<T, E>>
    where
        T: Serialize + DeserializeOwned + Send + 'static,
        E: Send + 'static,
        K: OperationKey + ?Sized,
        W: FnOnce() -> F + Send + 'static,
        F: Future<Output = Result<T, E>> + Send + 'static,
    {
        Function::unnamed(self, OnUnknown::Block).run_named(key, operation).await
    }

    /// Executes `operation` for `key` until one execution returns a value, and returns that value
    /// to every call with the same key and request. After an `Err`, a panic or a crash in the
    /// middle the next call executes again, with a larger fence: use it for an operation that may
    /// be repeated. Everything else is as for [`at_most_once`](Self::at_most_once).
    ///
    /// # Errors
    /// [`RunError`]; [the manual](crate::manual::functions) has a table of their meanings.
    pub async fn at_least_once<T, E, K, W, F>(
        &self,
        key: &K,
        operation: W,
    ) -> Result<Receipt<T>, RunError<T, E>>
    where
        T: Serialize + DeserializeOwned + Send + 'static,
        E: Send + 'static,
        K: OperationKey + ?Sized,
        W: FnOnce() -> F + Send + 'static,
        F: Future<Output = Result<T, E>> + Send + 'static,
    {
        Function::unnamed(self, OnUnknown::Reexecute).run_named(key, operation).await
    }
}
