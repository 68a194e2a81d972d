//! Responses as outcomes: the parts that are stored, and their encoding.
//!
//! 1. Stored: status, headers, body and trailers. Not stored: hop-by-hop headers, those that
//!    `Connection` names, `Date`, every `Idempotency-*`, and `Set-Cookie` unless configured: a
//!    cookie may be a credential of one attempt.
//! 2. The bytes (format [`FORMAT`]) are length-prefixed, big-endian: `form u8` (0 whole, 1 not
//!    retained), `status u16`; if whole: headers, `body`, trailers. A map is `count u32`, then name
//!    and value of each line; a text is `length u32` and that many bytes.
//! 3. Any bytes decode to a response or an error.

use std::fmt;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use hapax_core::Outcome;
use http::header::{
    CONNECTION, CONTENT_LENGTH, CONTENT_TYPE, DATE, HeaderMap, HeaderName, HeaderValue,
    PROXY_AUTHENTICATE, PROXY_AUTHORIZATION, SET_COOKIE, TE, TRANSFER_ENCODING, UPGRADE,
};
use http::{Response, StatusCode};

use crate::header::{is_protocol_header, retain};
use crate::length;

/// The name of the format in an outcome.
pub const FORMAT: &str = "http/1";

const GRPC_STATUS: &str = "grpc-status";

const WHOLE: u8 = 0;
const NOT_RETAINED: u8 = 1;

/// The stored part of a response. Its `Debug` form shows no contents.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum StoredResponse {
    /// The whole response.
    Whole(FullResponse),
    /// Only the fact of a response that was too large, or streamed.
    NotRetained {
        /// Its status.
        status: StatusCode,
    },
}

/// A whole response. Its `Debug` form shows no contents.
#[derive(Clone, PartialEq, Eq)]
pub struct FullResponse {
    /// Its status.
    pub status: StatusCode,
    /// Its headers, without those that belong to one connection or one attempt.
    pub headers: HeaderMap,
    /// Its body.
    pub body: Bytes,
    /// Its trailers, without `Idempotency-*`.
    pub trailers: Option<HeaderMap>,
}

impl FullResponse {
    /// Returns the part of a response that is stored.
    #[must_use]
    pub fn of(response: &Response<Bytes>, trailers: Option<&HeaderMap>, cookies: Cookies) -> Self {
        let named = named_by_connection(response.headers());
        let no_length = length::excludes_length(response.status(), trailers);
        let is_stored = |name: &HeaderName| {
            !(is_protocol_header(name)
                || (*name == CONTENT_LENGTH && no_length)
                || hop_by_hop(name)
                || named.contains(name)
                || *name == DATE
                || (*name == SET_COOKIE && cookies == Cookies::Drop))
        };
        let mut headers = response.headers().clone();
        retain(&mut headers, is_stored);
        let mut trailers = trailers.cloned();
        if let Some(trailers) = &mut trailers {
            retain(trailers, |name| !is_protocol_header(name));
        }
        Self { status: response.status(), headers, body: response.body().clone(), trailers }
    }

    /// Returns the response for gRPC clients, if it was not a gRPC response: its `grpc-*` headers
    /// are trailers if `grpc-status` is not there already, and without it the status is 0.
    #[must_use]
    pub fn for_grpc(self) -> Self {
        let Self { status, mut headers, body, trailers } = self;
        // The encoding of the message belongs to the head.
        let moves = |name: &HeaderName| {
            name.as_str().starts_with("grpc-") && !name.as_str().ends_with("-encoding")
        };
        let mut trailers = trailers.unwrap_or_default();
        if !trailers.contains_key(GRPC_STATUS) {
            for (name, value) in headers.iter().filter(|(name, _)| moves(name)) {
                trailers.append(name, value.clone());
            }
            retain(&mut headers, |name| !moves(name));
        }
        if !trailers.contains_key(GRPC_STATUS) {
            trailers.insert(GRPC_STATUS, HeaderValue::from_static("0"));
        }
        retain(&mut headers, |name| *name != CONTENT_LENGTH);
        if !headers.contains_key(CONTENT_TYPE) {
            headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
        }
        Self { status, headers, body, trailers: Some(trailers) }
    }
}

impl fmt::Debug for FullResponse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FullResponse")
            .field("status", &self.status)
            .field("headers", &self.headers.len())
            .field("body_bytes", &self.body.len())
            .field("trailers", &self.trailers.as_ref().map(HeaderMap::len))
            .finish()
    }
}

/// Rule for `Set-Cookie`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Cookies {
    /// Cookies are not stored.
    #[default]
    Drop,
    /// Cookies are stored, and every replay sets the same ones.
    Keep,
}

impl StoredResponse {
    /// Encodes the response as an outcome.
    #[must_use]
    pub fn outcome(&self) -> Outcome {
        Outcome::new(FORMAT, self.encode())
    }

    /// Decodes an outcome.
    ///
    /// # Errors
    /// [`StoredResponseError`] if the record belongs to another integration, or is damaged.
    pub fn from_outcome(outcome: &Outcome) -> Result<Self, StoredResponseError> {
        if outcome.format() == FORMAT {
            Self::decode(outcome.bytes())
        } else {
            Err(StoredResponseError)
        }
    }

    /// Returns the status.
    #[must_use]
    pub const fn status(&self) -> StatusCode {
        match self {
            Self::Whole(whole) => whole.status,
            Self::NotRetained { status } => *status,
        }
    }

    fn encode(&self) -> Bytes {
        // Exactly as much as is needed: a deferred write is counted by its length.
        let mut out = BytesMut::with_capacity(self.encoded_len());
        match self {
            Self::NotRetained { status } => {
                out.put_u8(NOT_RETAINED);
                out.put_u16(status.as_u16());
            }
            Self::Whole(FullResponse { status, headers, body, trailers }) => {
                out.put_u8(WHOLE);
                out.put_u16(status.as_u16());
                put_map(&mut out, headers);
                put(&mut out, body);
                out.put_u8(u8::from(trailers.is_some()));
                if let Some(trailers) = trailers {
                    put_map(&mut out, trailers);
                }
            }
        }
        out.freeze()
    }

    fn encoded_len(&self) -> usize {
        match self {
            Self::NotRetained { .. } => 3,
            Self::Whole(FullResponse { headers, body, trailers, .. }) => {
                let trailers = trailers.as_ref().map_or(0, map_len);
                3 + map_len(headers) + 4 + body.len() + 1 + trailers
            }
        }
    }

    fn decode(bytes: &Bytes) -> Result<Self, StoredResponseError> {
        let mut rest = bytes.clone();
        let form = rest.try_get_u8().map_err(|_| StoredResponseError)?;
        let status = rest.try_get_u16().map_err(|_| StoredResponseError)?;
        let status = StatusCode::from_u16(status).map_err(|_| StoredResponseError)?;
        let stored = match form {
            NOT_RETAINED => Self::NotRetained { status },
            WHOLE => {
                let headers = take_map(&mut rest)?;
                let body = take(&mut rest)?;
                let trailers = match rest.try_get_u8() {
                    Ok(0) => None,
                    Ok(1) => Some(take_map(&mut rest)?),
                    _ => return Err(StoredResponseError),
                };
                Self::Whole(FullResponse { status, headers, body, trailers })
            }
            _ => return Err(StoredResponseError),
        };
        if rest.is_empty() { Ok(stored) } else { Err(StoredResponseError) }
    }
}

/// The bytes are not a stored response.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the outcome is not a stored HTTP response")]
pub struct StoredResponseError;

/// Returns whether a header belongs to one connection (RFC 9110, 7.6.1), not to the message.
#[must_use]
pub fn hop_by_hop(name: &HeaderName) -> bool {
    [CONNECTION, TE, TRANSFER_ENCODING, UPGRADE, PROXY_AUTHENTICATE, PROXY_AUTHORIZATION]
        .contains(name)
        || matches!(name.as_str(), "keep-alive" | "proxy-connection")
}

/// Returns whether responses of this status have no body (RFC 9110, 6.4.1 and 15.3.6).
#[must_use]
pub const fn bodiless(status: StatusCode) -> bool {
    matches!(status.as_u16(), 204 | 205 | 304)
}

/// Returns the headers that `Connection` names.
#[must_use]
pub fn named_by_connection(headers: &HeaderMap) -> Vec<HeaderName> {
    headers
        .get_all(CONNECTION)
        .iter()
        .flat_map(|line| line.as_bytes().split(|byte| *byte == b','))
        .filter_map(|name| HeaderName::from_bytes(name.trim_ascii()).ok())
        .collect()
}

fn put(out: &mut BytesMut, bytes: &[u8]) {
    // Nothing here is near 4 GiB: bodies have a limit, and so have the heads of messages.
    out.put_u32(u32::try_from(bytes.len()).unwrap_or(u32::MAX));
    out.put_slice(bytes);
}

fn put_map(out: &mut BytesMut, map: &HeaderMap) {
    out.put_u32(u32::try_from(map.len()).unwrap_or(u32::MAX));
    for (name, value) in map {
        put(out, name.as_str().as_bytes());
        put(out, value.as_bytes());
    }
}

/// Reads a map that [`put_map`] wrote.
fn map_len(map: &HeaderMap) -> usize {
    4 + map.iter().map(|(name, value)| 8 + name.as_str().len() + value.len()).sum::<usize>()
}

fn take(rest: &mut Bytes) -> Result<Bytes, StoredResponseError> {
    let length = rest.try_get_u32().map_err(|_| StoredResponseError)? as usize;
    if length > rest.len() { Err(StoredResponseError) } else { Ok(rest.split_to(length)) }
}

fn take_map(rest: &mut Bytes) -> Result<HeaderMap, StoredResponseError> {
    let count = rest.try_get_u32().map_err(|_| StoredResponseError)?;
    let mut map = HeaderMap::new();
    for _ in 0..count {
        let name = HeaderName::from_bytes(&take(rest)?).map_err(|_| StoredResponseError)?;
        let value = HeaderValue::from_maybe_shared(take(rest)?).map_err(|_| StoredResponseError)?;
        map.try_append(name, value).map_err(|_| StoredResponseError)?;
    }
    Ok(map)
}
