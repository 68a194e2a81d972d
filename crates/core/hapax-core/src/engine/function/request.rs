//! Requests to functions.

use bytes::Bytes;
use serde::Serialize;

use super::super::request::OperationRequest;
use crate::fingerprint::{Fingerprint, FingerprintScheme};
use crate::key::Key;
use crate::value::{self, ValueError};

/// Scheme: fingerprint of the canonical form of a value.
const SCHEME: &str = "function/1";

/// A request, in the bytes of `crate::value`.
pub(in crate::engine) struct FunctionRequest {
    pub(in crate::engine) bytes: Bytes,
    fingerprint: Fingerprint,
}

impl FunctionRequest {
    pub(in crate::engine) fn of<R: Serialize + ?Sized>(request: &R) -> Result<Self, ValueError> {
        Self::written(value::write(request, usize::MAX)?)
    }

    /// Reads a request that [`value`] wrote.
    pub(in crate::engine) fn written(bytes: Bytes) -> Result<Self, ValueError> {
        let canonical = value::canonical(&bytes)?;
        let fingerprint = Fingerprint::builder(SCHEME).field(&canonical).finish();
        Ok(Self { bytes, fingerprint })
    }
}

impl OperationRequest for FunctionRequest {
    fn scheme(&self) -> FingerprintScheme {
        FingerprintScheme::known(SCHEME)
    }

    fn fingerprint(&self, scheme: &FingerprintScheme) -> Option<Fingerprint> {
        (scheme.as_str() == SCHEME).then_some(self.fingerprint)
    }
}

/// A request to a function, with the description that operators see.
pub(in crate::engine) struct DescribedRequest<'a> {
    pub(in crate::engine) request: &'a dyn OperationRequest,
    pub(in crate::engine) function: Option<&'a str>,
    pub(in crate::engine) key: &'a Key,
}

impl OperationRequest for DescribedRequest<'_> {
    fn scheme(&self) -> FingerprintScheme {
        self.request.scheme()
    }

    fn fingerprint(&self, scheme: &FingerprintScheme) -> Option<Fingerprint> {
        self.request.fingerprint(scheme)
    }

    fn description(&self) -> Option<Bytes> {
        self.request.description().or_else(|| {
            let described = serde_json::json!({
                "function": self.function,
                "key": self.key.as_str(),
            });
            serde_json::to_vec(&described).ok().map(Bytes::from)
        })
    }
}
