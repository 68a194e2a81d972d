//! Keys of calls.

use std::borrow::Borrow;

use bytes::Bytes;
use serde::Serialize;

use crate::key::{Key, NaturalKey};
use crate::scope::Scope;
use crate::value::{self, ValueError};

/// The key of a call, with its scope and with the request that a retry must repeat: a call with
/// another request is rejected ([`RunError::KeyReused`](crate::RunError::KeyReused)).
///
/// - `(scope, key, request)`: a key that a caller sends. The scope separates callers.
/// - `(key, request)` with a [`NaturalKey`]: a key of business identifiers, made by the service. It
///   has no scope ([`Scope::shared`]), so its parts name the customer if that matters.
/// - [`NaturalKey::identifies_alone`]: the parts of the key are the whole request.
///
/// The request contains whatever the operation executes with, such as the amount of a payment. A key
/// without a request does not compile:
///
/// ```compile_fail
/// # async fn pay(engine: hapax_core::Idempotency) {
/// let key = hapax_core::NaturalKey::transfer("DE1", "DE2", "rent 2026-10");
/// let paid = engine.at_most_once(&key, || async { Ok::<_, String>(1) }).await;
/// # }
/// ```
///
/// ```compile_fail
/// # async fn pay(engine: hapax_core::Idempotency, scope: hapax_core::Scope, key: hapax_core::Key) {
/// let paid = engine.at_most_once(&(scope, key), || async { Ok::<_, String>(1) }).await;
/// # }
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not name a call with its request",
    note = "use `(scope, key, request)`, or `(key, request)` with a `NaturalKey`; a natural key whose parts \
            are the whole request is `key.identifies_alone()`"
)]
pub trait OperationKey: sealed::Named {}

impl<K: sealed::Named + ?Sized> OperationKey for K {}

pub(super) mod sealed {
    use super::{Bytes, Key, Scope, ValueError};

    /// The parts of a call's name. Sealed: an implementor could mix up callers.
    pub trait Named {
        /// Returns scope and key, and the request as [`value`](crate::value) writes it.
        ///
        /// # Errors
        /// [`ValueError`] if the request cannot be serialized.
        fn named(&self) -> Result<(Scope, Key, Bytes), ValueError>;
    }
}

impl<S: Borrow<Scope>, K: Borrow<Key>, R: Serialize> sealed::Named for (S, K, R) {
    fn named(&self) -> Result<(Scope, Key, Bytes), ValueError> {
        let (scope, key, request) = self;
        Ok((scope.borrow().clone(), key.borrow().clone(), value::write(request, usize::MAX)?))
    }
}

impl<K: Borrow<NaturalKey>, R: Serialize> sealed::Named for (K, R) {
    fn named(&self) -> Result<(Scope, Key, Bytes), ValueError> {
        let (key, request) = self;
        (Scope::shared(), key.borrow().key(), request).named()
    }
}
