//! Canonical JSON (placeholder until the parser lands).

/// Not canonical.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotCanonical;

/// Placeholder.
///
/// # Errors
/// Always.
pub fn canonicalize(_json: &[u8]) -> Result<Vec<u8>, NotCanonical> {
    Err(NotCanonical)
}
