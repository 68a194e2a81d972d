//! Canonical JSON of anything that serde can serialize.

use serde::Serialize;

use super::{CanonicalJsonError, canonicalize};

/// Returns the canonical JSON of `value`: the same for the same value, whatever the order of its
/// maps.
///
/// As in JSON, `NaN` and infinities are `null`, `1.0` is not `1`, and the keys of a map of numbers
/// are text. The elements of a set have its own order: an order that differs from run to run, as
/// that of a `HashSet`, gives another value each time; that of a `BTreeSet` does not. A field that
/// is added later and left out while it is not set does not change the form.
///
/// ```
/// use std::collections::HashMap;
/// let value = HashMap::from([("b", 1), ("a", 2)]);
/// assert_eq!(hapax_core::canonicalize_value(&value)?, br#"{"a":2,"b":1}"#);
/// # Ok::<(), hapax_core::CanonicalValueError>(())
/// ```
///
/// # Errors
/// [`CanonicalValueError`] if a map has keys that JSON does not have, a member occurs twice (by
/// `flatten`), there are more than 128 levels, or the value's `Serialize` fails.
pub fn canonicalize_value<T: Serialize + ?Sized>(
    value: &T,
) -> Result<Vec<u8>, CanonicalValueError> {
    Ok(canonicalize(&serde_json::to_vec(value)?)?)
}

/// Errors of canonical JSON.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CanonicalValueError {
    /// The value cannot be serialized as JSON.
    #[error("the value cannot be written as JSON")]
    NotJson(#[from] serde_json::Error),
    /// The JSON of the value has no canonical form.
    #[error("the value has no canonical JSON")]
    NotCanonical(#[from] CanonicalJsonError),
}
