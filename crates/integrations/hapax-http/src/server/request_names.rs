//! An extension of requests, for access logs.

use std::sync::{Arc, OnceLock};

use hapax_core::{Idempotency, Key, OperationId};
use http::request::Parts;

use super::scope::ScopePart;

/// A request extension that the layer fills, for a service in front of it that writes an access log. It is
/// filled before the claim, so that the names are there also if the client disconnects.
///
/// A service that makes its own copy of a request removes the extension from the copy.
#[derive(Clone, Debug, Default)]
pub struct RequestNamesSlot(Arc<OnceLock<RequestNames>>);

/// Names of a request with a key and a caller, which reveal neither.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RequestNames {
    /// The operation id.
    pub operation: OperationId,
    /// The keyed hash of the key; `None` without a secret that seals.
    pub key_hash: Option<String>,
    /// The keyed hash of the caller, as of [`caller_hash`]; `None` without a secret that seals.
    pub caller_hash: Option<String>,
}

impl RequestNamesSlot {
    /// Returns the names; `None` if the request has none, or was rejected before they were known.
    #[must_use]
    pub fn names(&self) -> Option<&RequestNames> {
        self.0.get()
    }
}

/// Fills the slot of a request, if it has one.
pub(super) fn fill(
    engine: &Idempotency,
    parts: &Parts,
    named_by: &[ScopePart],
    key: &Key,
    operation: OperationId,
) {
    let Some(RequestNamesSlot(slot)) = parts.extensions.get() else { return };
    // A layer in front of this one has filled it.
    slot.get_or_init(|| {
        let mut found = Vec::new();
        for part in named_by {
            // The request has a scope, so that each part can be read.
            let _ = part.add_values(parts, &mut found);
        }
        RequestNames {
            operation,
            key_hash: engine.key_pseudonym(key),
            caller_hash: caller_hash(engine, found.into_iter().map(|(_, value)| value)),
        }
    });
}

/// Returns the keyed hash of a caller: that of each value of the scope, in their order and separated by
/// commas. Records show these hashes of values that may be credentials. `None` without a value or a secret that seals.
pub fn caller_hash<'a>(
    engine: &Idempotency,
    values: impl Iterator<Item = &'a [u8]>,
) -> Option<String> {
    let hashes: Option<Vec<String>> = values.map(|value| engine.pseudonym(value)).collect();
    hashes.filter(|hashes| !hashes.is_empty()).map(|hashes| hashes.join(","))
}
