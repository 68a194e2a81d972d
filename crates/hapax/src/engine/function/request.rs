//! What was asked of a function.

use bytes::Bytes;
use serde::Serialize;

use super::super::claim::Request;
use crate::fingerprint::{Fingerprint, Scheme};
use crate::value::{self, ValueError};

/// A fingerprint of the canonical form of a value.
const SCHEME: &str = "function/1";

/// A request, in the bytes of `crate::value`.
pub(in crate::engine) struct Asked {
    pub(in crate::engine) bytes: Bytes,
    fingerprint: Fingerprint,
}

impl Asked {
    pub(in crate::engine) fn of<R: Serialize + ?Sized>(request: &R) -> Result<Self, ValueError> {
        let bytes = value::write(request, usize::MAX)?;
        let canonical = value::canonical(&bytes)?;
        let fingerprint = Fingerprint::builder(SCHEME).field(&canonical).finish();
        Ok(Self { bytes, fingerprint })
    }
}

impl Request for Asked {
    fn scheme(&self) -> Scheme {
        Scheme::known(SCHEME)
    }

    fn fingerprint(&self, scheme: &Scheme) -> Option<Fingerprint> {
        (scheme.as_str() == SCHEME).then_some(self.fingerprint)
    }
}
