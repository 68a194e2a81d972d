//! Responses: as callers get them, and as the journal has them.

use std::fmt;

use bytes::Bytes;
use hapax_saga::log::Blob;
use http::header::SET_COOKIE;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use serde::{Deserialize, Serialize};

use crate::flow::TryTimes;
use crate::known::operation_id;
use crate::request::RecordedRequest;

/// The largest body that the journal keeps.
pub(crate) const MAX_RECORDED: usize = 1 << 20;

/// The largest body that a caller gets.
pub(crate) const MAX_BODY: usize = 64 << 20;

/// The response of an operation, its body complete. `Set-Cookie` is not among its headers. Its `Debug`
/// form shows neither headers nor body.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ClientResponse {
    /// The status.
    pub status: StatusCode,
    /// The headers.
    pub headers: HeaderMap,
    /// The body.
    pub body: Bytes,
}

impl ClientResponse {
    /// Reads the body as JSON.
    ///
    /// # Errors
    /// [`serde_json::Error`] if the body is no JSON, or not of this type.
    pub fn json<T: serde::de::DeserializeOwned>(&self) -> Result<T, serde_json::Error> {
        serde_json::from_slice(&self.body)
    }
}

impl fmt::Debug for ClientResponse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ClientResponse({}, {} bytes)", self.status, self.body.len())
    }
}

/// The response of an operation, and how it was obtained.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Sent {
    /// The response.
    pub response: ClientResponse,
    /// True if the response comes from a record: the server replayed it, or the journal had it. The execution
    /// may have been that of an earlier try of this call.
    pub replayed: bool,
    /// Tries that began, over all processes and calls, since the operation stopped last, if it did.
    pub tries: u32,
    /// True if the journal has the response, so that the same call gets it again. It has none of more than
    /// 1 MiB, and none of a server that executed nothing and keeps nothing.
    pub stored: bool,
}

/// The kind of a stored response.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) enum ResponseKind {
    /// The response, complete.
    Complete,
    /// A response whose body is too large for the journal.
    #[serde(rename = "NotKept")]
    NotRecorded,
    /// The response of a server that did nothing and keeps nothing: the name is free.
    NothingHappened,
    /// The server has another request under the key.
    Reused,
}

/// A response as the journal has it, with what lists show of its operation.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct RecordedResponse {
    pub(crate) kind: ResponseKind,
    pub(crate) name: String,
    pub(crate) method: String,
    pub(crate) url: String,
    /// Fingerprint of the request. A name that is free again may have another one.
    pub(crate) request: [u8; 32],
    status: u16,
    headers: Vec<(String, Blob)>,
    body: Blob,
    pub(crate) replayed: bool,
    pub(crate) tries: u32,
    /// Responses of earlier releases have none.
    #[serde(default)]
    pub(crate) times: TryTimes,
}

impl RecordedResponse {
    pub(crate) fn new(
        kind: ResponseKind,
        request: &RecordedRequest,
        response: &ClientResponse,
    ) -> Self {
        let is_recorded = |(name, _): &(&HeaderName, &HeaderValue)| **name != SET_COOKIE;
        let headers = response.headers.iter().filter(is_recorded).map(|(name, value)| {
            (name.as_str().to_owned(), Blob(Bytes::copy_from_slice(value.as_bytes())))
        });
        let body = match kind {
            ResponseKind::NotRecorded => Bytes::new(),
            _ => response.body.clone(),
        };
        Self {
            kind,
            name: request.name.clone(),
            method: request.method.clone(),
            url: request.url.clone(),
            request: request.fingerprint(),
            status: response.status.as_u16(),
            headers: headers.collect(),
            body: Blob(body),
            replayed: false,
            tries: 0,
            times: TryTimes::default(),
        }
    }

    /// Sets the number and the times of the tries, and whether the response is a replay.
    pub(crate) fn after(self, tries: u32, replayed: bool, times: TryTimes) -> Self {
        Self { tries, replayed, times, ..self }
    }

    pub(crate) fn status(&self) -> StatusCode {
        // Checked when it was stored.
        StatusCode::from_u16(self.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR)
    }

    /// Returns the operation id that the server has sent.
    pub(crate) fn operation(&self) -> Option<String> {
        operation_id(&self.headers())
    }

    fn headers(&self) -> HeaderMap {
        let headers = self.headers.iter().filter_map(|(name, value)| {
            let value = HeaderValue::from_bytes(&value.0).ok()?;
            Some((HeaderName::try_from(name).ok()?, value))
        });
        headers.collect()
    }

    pub(crate) fn response(&self) -> ClientResponse {
        let (status, headers, body) = (self.status(), self.headers(), self.body.0.clone());
        ClientResponse { status, headers, body }
    }
}
