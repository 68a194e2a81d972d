//! What was asked of a function.

use super::super::claim::Request;
use crate::fingerprint::{Fingerprint, Scheme};

/// A fingerprint of canonical JSON.
const SCHEME: &str = "function/1";

/// The canonical JSON of a request.
pub(in crate::engine) struct Canonical(pub(in crate::engine) Vec<u8>);

impl Request for Canonical {
    fn scheme(&self) -> Scheme {
        Scheme::known(SCHEME)
    }

    fn fingerprint(&self, scheme: &Scheme) -> Option<Fingerprint> {
        (scheme.as_str() == SCHEME).then(|| Fingerprint::builder(SCHEME).field(&self.0).finish())
    }
}
