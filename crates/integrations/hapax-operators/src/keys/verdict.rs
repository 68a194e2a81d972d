//! The verdict of a decision, with the response that retries get.

use hapax_core::machine::DefiniteVerdict;
use hapax_http::classify::is_grpc;
use hapax_http::stored_response::{FullResponse, StoredResponse, bodiless, hop_by_hop};
use http::header::{CONTENT_LENGTH, DATE, TRAILER};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};

use super::view::MAX_BODY;
use super::{Decision, OperatorError, OperatorVerdict};

/// Returns whether a replay can carry a header. The others would contradict the response.
fn may_be_given(name: &HeaderName) -> bool {
    !(hop_by_hop(name)
        || name.as_str().starts_with("idempotency-")
        || [CONTENT_LENGTH, DATE, TRAILER].contains(name))
}

impl Decision {
    /// Checks what can be checked without the record: reason, status, headers and body.
    ///
    /// # Errors
    /// [`OperatorError::Invalid`].
    pub fn check(&self) -> Result<(), OperatorError> {
        crate::audit::reason(&self.reason)?;
        resolution(self.clone()).map(drop)
    }
}

/// Returns the verdict of a decision.
pub(super) fn resolution(decision: Decision) -> Result<DefiniteVerdict, OperatorError> {
    if decision.outcome == OperatorVerdict::DidNotHappen {
        let Decision { status, headers, body, body_base64, .. } = &decision;
        if status.is_some() || !headers.is_empty() || body.is_some() || body_base64.is_some() {
            return Err(OperatorError::Invalid(
                "expected no status, header or body with `did-not-happen`: remove them",
            ));
        }
        return Ok(DefiniteVerdict::DidNotHappen);
    }
    let body = decision.body_bytes()?;
    let Decision { status, headers, .. } = decision;
    let status = StatusCode::from_u16(status.unwrap_or(200))
        .ok()
        .filter(|status| (200..=599).contains(&status.as_u16()))
        .ok_or(OperatorError::Invalid("expected a status from 200 to 599"))?;
    if body.len() > MAX_BODY {
        return Err(OperatorError::Invalid("the body is larger than 1 MiB"));
    }
    let mut map = HeaderMap::new();
    for (name, value) in headers {
        let name = HeaderName::from_bytes(name.as_bytes());
        let value = HeaderValue::from_bytes(value.as_bytes());
        let (Ok(name), Ok(value)) = (name, value) else {
            return Err(OperatorError::Invalid("a header has an invalid name or value"));
        };
        if !may_be_given(&name) {
            return Err(OperatorError::Invalid(
                "a header cannot be given that belongs to a connection or is made anew for each \
                 answer: Connection, Transfer-Encoding, Content-Length, Date, Idempotency-* and \
                 the like",
            ));
        }
        map.append(name, value);
    }
    if bodiless(status) && !body.is_empty() {
        return Err(OperatorError::Invalid("a response of status 204, 205 or 304 has no body"));
    }
    let grpc = is_grpc(&map);
    let whole = FullResponse { status, headers: map, body, trailers: None };
    let whole = if grpc { whole.for_grpc() } else { whole };
    Ok(DefiniteVerdict::Happened(StoredResponse::Whole(whole).outcome()))
}
