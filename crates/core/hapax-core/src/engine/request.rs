//! The part of a request that a claim compares: scheme and fingerprint.

use bytes::Bytes;

use crate::fingerprint::{Fingerprint, FingerprintScheme};

/// A request for an operation, with the fingerprint by which a claim detects another request under the
/// same key.
pub trait OperationRequest: Send + Sync {
    /// Returns the scheme in force for new records.
    fn scheme(&self) -> FingerprintScheme;

    /// Returns the fingerprint by `scheme`, which may be that of an older record; `None` if the
    /// scheme is unknown here.
    fn fingerprint(&self, scheme: &FingerprintScheme) -> Option<Fingerprint>;

    /// Returns a description of the operation for operators, at most
    /// [`MAX_DESCRIPTION`](crate::codec::MAX_DESCRIPTION) bytes; a longer one is not stored. It
    /// must not contain credentials. The engine calls this, and stores the result, only if the store
    /// seals it.
    fn description(&self) -> Option<Bytes> {
        None
    }

    /// Returns the name of the route of the request in metrics, if it has one.
    fn route(&self) -> Option<&str> {
        None
    }
}

/// A request whose fingerprints are keyed by the secret that names records, if there is one. A record whose scheme
/// states that it was written without a secret is compared without it.
pub(super) struct KeyedRequest<'a> {
    pub(super) request: &'a dyn OperationRequest,
    pub(super) key: Option<&'a [u8; 32]>,
}

impl OperationRequest for KeyedRequest<'_> {
    fn scheme(&self) -> FingerprintScheme {
        let scheme = self.request.scheme();
        if self.key.is_some() { scheme.keyed() } else { scheme }
    }

    fn fingerprint(&self, scheme: &FingerprintScheme) -> Option<Fingerprint> {
        match scheme.unkeyed() {
            // Without the secret the request cannot be compared, so it is neither executed nor
            // replayed.
            Some(unkeyed) => Some(self.request.fingerprint(&unkeyed)?.keyed(self.key?)),
            None => self.request.fingerprint(scheme),
        }
    }

    fn route(&self) -> Option<&str> {
        self.request.route()
    }
}
