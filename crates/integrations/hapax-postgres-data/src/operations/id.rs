//! Ids of operations.

use hapax_core::{Fingerprint, canonicalize_value};
use serde::Serialize;

use crate::error::{DataError, ItemError};

/// The id of an operation, created once by its caller, and sent again with every retry.
///
/// Without a request, an id that is used again for another change of the same row gives
/// [`AlreadyApplied`](crate::IdentifiedUpdate::AlreadyApplied), and the second change is never
/// made. Versions, and values computed from them, differ between attempts, so the item cannot be
/// compared. [`for_request`](Self::for_request) adds a request, which is compared.
///
/// ```
/// use hapax_postgres_data::UpdateId;
/// use serde_json::json;
///
/// let plain: UpdateId = "deposit-7".into();
/// let told = UpdateId::from("deposit-7").for_request(&json!({"account": "a-1", "cents": 500}))?;
/// # Ok::<(), hapax_postgres_data::DataError>(())
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct UpdateId {
    id: String,
    asked: Option<Fingerprint>,
}

impl UpdateId {
    /// Adds the request of the operation (not the row that results from it). The fingerprint of its
    /// canonical JSON is stored with the id; the same id with another request, or with none, is
    /// [`DataError::OperationReused`].
    ///
    /// # Errors
    /// [`ItemError::NoCanonicalForm`].
    pub fn for_request<T: Serialize + ?Sized>(mut self, request: &T) -> Result<Self, DataError> {
        let form = canonicalize_value(request);
        let form = form.map_err(|problem| ItemError::NoCanonicalForm(problem).at(0))?;
        let fingerprint = Fingerprint::builder("hapax-postgres-data/asked/1").field(&form).finish();
        self.asked = Some(fingerprint);
        Ok(self)
    }

    pub(crate) fn as_str(&self) -> &str {
        &self.id
    }

    /// Returns the fingerprint of the request; empty if there is none.
    pub(crate) fn request_fingerprint(&self) -> String {
        self.asked
            .iter()
            .flat_map(Fingerprint::as_bytes)
            .map(|byte| format!("{byte:02x}"))
            .collect()
    }
}

impl<S: Into<String>> From<S> for UpdateId {
    fn from(id: S) -> Self {
        Self { id: id.into(), asked: None }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_requests_fingerprint_does_not_depend_on_the_order_of_fields() {
        let of = |text: &str| {
            let request: serde_json::Value = serde_json::from_str(text).unwrap();
            UpdateId::from("o").for_request(&request).unwrap().request_fingerprint()
        };
        assert_eq!(of(r#"{"a": 1, "b": [2]}"#), of(r#"{"b":[2],"a":1}"#));
        assert_ne!(of(r#"{"a": 1}"#), of(r#"{"a": 2}"#));
        assert_eq!(of("1").len(), 64);
        assert_eq!(UpdateId::from("o").request_fingerprint(), "");
        let twice = std::collections::BTreeMap::from([(vec![1], json!(1))]);
        assert!(UpdateId::from("o").for_request(&twice).is_err());
    }
}
