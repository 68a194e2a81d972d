//! Keys of calls.

use std::borrow::Borrow;

use bytes::Bytes;
use serde::Serialize;

use crate::key::{Key, NaturalKey};
use crate::scope::Scope;
use crate::value::{self, ValueError};

/// The key of a call, with its scope and with the request that a retry must repeat.
///
/// - `(scope, key, request)`: a key that a caller sends, compared with the request. The scope
///   separates callers.
/// - `(scope, key)`: the same without a request: a retry with the key gets the outcome of the first
///   call, even if its request differs.
/// - [`NaturalKey`]: a key of business identifiers, made by the service. It has no scope
///   ([`Scope::shared`]), so its parts name the customer if that matters.
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not name a call",
    note = "use `(scope, key, request)`, `(scope, key)` or a `NaturalKey`"
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

impl<S: Borrow<Scope>, K: Borrow<Key>> sealed::Named for (S, K) {
    fn named(&self) -> Result<(Scope, Key, Bytes), ValueError> {
        let (scope, key) = self;
        (scope.borrow(), key.borrow(), ()).named()
    }
}

impl sealed::Named for NaturalKey {
    fn named(&self) -> Result<(Scope, Key, Bytes), ValueError> {
        (Scope::shared(), self.key(), ()).named()
    }
}
