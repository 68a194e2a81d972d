//! Canonical JSON of values that serde can write.

use serde::Serialize;

use super::{CanonicalJsonError, canonicalize};

/// Returns the canonical JSON of `value`, which does not depend on the order of its maps.
///
/// It has the limits of JSON: `NaN` and infinities are `null`, `1.0` is not `1`, and numeric keys
/// of maps are text. The elements of a set keep its order. A `HashSet`, whose order differs from
/// run to run, is another value each time; a `BTreeSet` is not. A field that is added later, and
/// left out while it is not set, leaves the text unchanged.
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

/// Errors of the canonical JSON of a value.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CanonicalValueError {
    /// The value cannot be written as JSON.
    #[error("the value cannot be written as JSON")]
    NotJson(#[from] serde_json::Error),
    /// Its JSON has no canonical form.
    #[error("the value has no canonical JSON")]
    NotCanonical(#[from] CanonicalJsonError),
}
