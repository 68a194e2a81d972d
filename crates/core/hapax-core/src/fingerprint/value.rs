//! Canonical JSON of anything that serde can write.

use serde::Serialize;

use super::{CanonicalJsonError, canonicalize};

/// The canonical JSON of `value`: the same for the same value, in whichever order its maps are.
///
/// As JSON has it: `NaN` and infinities are `null`, `1.0` is not `1`, and a map whose keys are
/// numbers has them as text. The elements of a set come in its own order: one that differs from
/// run to run, as a `HashSet`'s, is another value each time; a `BTreeSet`'s is not. A field that is
/// added later and left out while it is not set leaves the form as it was.
///
/// ```
/// use std::collections::HashMap;
/// let value = HashMap::from([("b", 1), ("a", 2)]);
/// assert_eq!(hapax_core::canonicalize_value(&value)?, br#"{"a":2,"b":1}"#);
/// # Ok::<(), hapax_core::CanonicalValueError>(())
/// ```
///
/// # Errors
/// [`CanonicalValueError`]: a map with keys that JSON does not have, the same member twice (by
/// `flatten`), more than 128 levels, or an error of the value's own.
pub fn canonicalize_value<T: Serialize + ?Sized>(
    value: &T,
) -> Result<Vec<u8>, CanonicalValueError> {
    Ok(canonicalize(&serde_json::to_vec(value)?)?)
}

/// Why a value has no canonical JSON.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CanonicalValueError {
    /// It cannot be written as JSON.
    #[error("the value cannot be written as JSON")]
    NotJson(#[from] serde_json::Error),
    /// Its JSON has no canonical form.
    #[error("the value has no canonical JSON")]
    NotCanonical(#[from] CanonicalJsonError),
}
