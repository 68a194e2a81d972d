//! Functions: the door for calls within a program. What each answer means is told to users in the
//! manual's page, `manual/functions.md`.

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

/// What a function answered.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Receipt<T> {
    /// Its value.
    pub value: T,
    /// Whether an earlier call executed it.
    pub replayed: bool,
    /// The fencing token of the execution that gave it.
    pub fence: FencingToken,
}

impl Idempotency {
    /// Executes `operation` at most once for `key`, and returns its value to every call with the same
    /// key and request. Lease and retention are those of [`Policy::default`](crate::Policy).
    ///
    /// After an `Err`, a panic or a crash in the middle, `work` may have taken effect
    /// ([`OutcomeClass::Unknown`](crate::OutcomeClass::Unknown)): it does not execute again, and calls get
    /// [`RunError::OutcomeUnknown`] until an operator resolves the record. Where some errors are
    /// known to have no effect, declare a [function](Idempotency::function) that classifies them;
    /// where `work` may be repeated, call [`at_least_once`](Self::at_least_once).
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
    /// - `work` runs on a task of its own, under a lease that is renewed until it is done. Dropping
    ///   this future before that neither stops it nor loses what it answers; dropping it earlier,
    ///   while it claims, leaves nothing behind. [`Idempotency::drain`] waits for it. There are as many
    ///   such tasks as calls: what bounds them is to be where the calls come in.
    /// - Work that blocks its thread belongs into `tokio::task::spawn_blocking`: it may keep the
    ///   runtime from renewing its lease.
    /// - Equal requests are those of equal values, whatever the order of their maps and fields;
    ///   [the manual](crate::manual::functions#which-request-it-is) says what is told apart.
    /// - A value may be anything that serde writes and reads; it is kept exactly, in a format of
    ///   its own, by the names of fields and variants: a type may change between two releases as
    ///   serde allows it (`default`, `alias`). It has at most 64 MiB and 128 levels. That it is read
    ///   back is first seen in a replay, so call twice in a test.
    /// - The record does not know which function it is of. Two functions that are called with one
    ///   key, scope and request would answer for each other: give them scopes of their own, or
    ///   names, by [`Idempotency::function`].
    ///
    /// # Errors
    /// [`RunError`]; [the manual](crate::manual::functions) has a table of what each means.
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

    /// Executes `operation` for `key` until one execution has a value, and returns that to every call
    /// with the same key and request. After an `Err`, a panic or a crash in the middle the next call
    /// executes again, with a larger fencing token: for work that may be repeated. In all else it is
    /// [`at_most_once`](Self::at_most_once).
    ///
    /// # Errors
    /// [`RunError`]; [the manual](crate::manual::functions) has a table of what each means.
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
