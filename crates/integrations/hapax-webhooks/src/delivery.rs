//! A verified delivery: its id as an idempotency key.

use std::sync::Arc;

use hapax_core::{Key, Scope, Timestamp};
use hapax_http::header::{IDEMPOTENCY_KEY, encode, other_spelling};
use hapax_http::server::{ScopeError, ScopeSource};
use http::request::Parts;
use http::{HeaderName, HeaderValue};
use serde_json::Value;

use crate::rejection::{Rejected, WebhookRejection};
use crate::scheme::FoundId;

/// Request header: the name of the source of a verified delivery. The layer overwrites the sender's
/// own.
///
/// Its value forms the scope of the delivery's key, so `hapax keys` finds a record by
/// `--scope 'webhook-source: NAME'`.
pub const WEBHOOK_SOURCE: HeaderName = HeaderName::from_static("webhook-source");

/// A request extension: a delivery whose signature the layer has verified.
#[derive(Clone, Debug)]
pub struct VerifiedWebhook {
    source: Arc<str>,
    key: Key,
    timestamp: Option<Timestamp>,
}

impl VerifiedWebhook {
    /// Returns the name of the source.
    #[must_use]
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Returns the idempotency key: the delivery's id.
    #[must_use]
    pub const fn key(&self) -> &Key {
        &self.key
    }

    /// Returns the time at which this attempt was signed, to the second; `None` if the sender signs
    /// none.
    #[must_use]
    pub const fn timestamp(&self) -> Option<Timestamp> {
        self.timestamp
    }

    /// Returns the scope of the key: that of the header [`WEBHOOK_SOURCE`].
    #[must_use]
    pub fn scope(&self) -> Scope {
        Scope::of([(WEBHOOK_SOURCE.as_str(), &*self.source)])
    }

    pub(crate) const fn new(source: Arc<str>, key: Key, timestamp: Option<Timestamp>) -> Self {
        Self { source, key, timestamp }
    }

    /// Sets key and source of this delivery on the request, in place of those that the sender set.
    pub(crate) fn mark(self, name: &HeaderValue, parts: &mut Parts) {
        let ours = [IDEMPOTENCY_KEY, WEBHOOK_SOURCE];
        // Behind CGI and the like, `Webhook_Source` is the same variable as `Webhook-Source`.
        while let Some((field, _)) = other_spelling(&parts.headers, ours.iter()) {
            let field = field.clone();
            parts.headers.remove(field);
        }
        parts.headers.insert(IDEMPOTENCY_KEY, encode(&self.key));
        parts.headers.insert(WEBHOOK_SOURCE, name.clone());
        parts.extensions.insert(self);
    }
}

/// Returns the scope for the policy of the HTTP layer behind a
/// [`WebhookLayer`](crate::WebhookLayer): the source of the verified delivery.
///
/// It reads an extension, which no header of a request can make. A request that no webhook layer
/// has verified gets 400 `missing-scope`, and nothing executes.
#[must_use]
pub fn scope() -> ScopeSource {
    ScopeSource::function(|parts| {
        let verified = parts.extensions.get::<VerifiedWebhook>();
        verified.map(VerifiedWebhook::scope).ok_or(ScopeError::Missing)
    })
}

/// Returns the key of a delivery whose signature is valid.
pub(crate) fn key(id: &FoundId, body: &[u8]) -> Result<Key, Rejected> {
    let text = match id {
        FoundId::Text(text) => match std::str::from_utf8(text) {
            Ok(text) => text.to_owned(),
            Err(_) => return Err(invalid("bytes that are not UTF-8")),
        },
        FoundId::InBody(pointers) => id_in(pointers, body)?,
    };
    if text.trim_ascii().is_empty() {
        return Err(invalid("an empty one"));
    }
    Key::new(&text).map_err(|_| invalid(&format!("{} bytes with another form", text.len())))
}

/// Returns the id in a JSON body: the one value, or an array of several.
fn id_in(pointers: &[String], body: &[u8]) -> Result<String, Rejected> {
    let body: Value =
        serde_json::from_slice(body).map_err(|_| invalid("a body that is not JSON"))?;
    let mut parts = Vec::new();
    for pointer in pointers {
        match body.pointer(pointer) {
            Some(Value::String(text)) if !text.trim_ascii().is_empty() => {
                parts.push(Value::from(text.as_str()));
            }
            Some(Value::Number(number)) if number.is_u64() || number.is_i64() => {
                parts.push(Value::from(number.clone()));
            }
            Some(_) => return Err(invalid(&format!("another value at `{pointer}`"))),
            None => return Err(invalid(&format!("nothing at `{pointer}`"))),
        }
    }
    Ok(match &parts[..] {
        [Value::String(text)] => text.clone(),
        [number] => number.to_string(),
        _ => Value::from(parts).to_string(),
    })
}

fn invalid(found: &str) -> Rejected {
    let detail = format!(
        "Expected a delivery's id of 1 to 255 printable ASCII characters, found {found}: send the \
         delivery with its id."
    );
    Rejected::new(WebhookRejection::InvalidDeliveryId, detail)
}
