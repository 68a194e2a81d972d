//! Rejections of deliveries: RFC 9457 problem details.

use bytes::Bytes;
use http::header::{ALLOW, CONTENT_TYPE, HeaderValue, WWW_AUTHENTICATE};
use http::{Response, StatusCode};
use serde_json::json;

/// The reason for which a delivery was rejected; also an extension of the response, for access logs.
///
/// Nothing was claimed and nothing executed. The problem has the members that
/// [`hapax_http::problem`] documents.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum WebhookRejection {
    /// `invalid-signature`, 401: the signature is missing, malformed, or of other content or another
    /// secret.
    InvalidSignature,
    /// `timestamp-outside-tolerance`, 401: the delivery was signed too long ago, or in the future.
    TimestampOutsideTolerance,
    /// `invalid-delivery-id`, 400: the delivery has no id, or none that can be a key.
    InvalidDeliveryId,
    /// `malformed-request`, 400: the body broke off.
    MalformedRequest,
    /// `method-not-allowed`, 405: deliveries are POST requests; a signature covers no method.
    MethodNotAllowed,
    /// `request-timeout`, 408: the body arrived too slowly for the server.
    RequestTimeout,
    /// `body-too-large`, 413: the body is over the limit.
    BodyTooLarge,
}

impl WebhookRejection {
    /// Returns the code as it is sent.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        self.words().0
    }

    /// Returns the status of the response.
    #[must_use]
    pub const fn status(self) -> StatusCode {
        match self {
            Self::InvalidSignature | Self::TimestampOutsideTolerance => StatusCode::UNAUTHORIZED,
            Self::InvalidDeliveryId | Self::MalformedRequest => StatusCode::BAD_REQUEST,
            Self::MethodNotAllowed => StatusCode::METHOD_NOT_ALLOWED,
            Self::RequestTimeout => StatusCode::REQUEST_TIMEOUT,
            Self::BodyTooLarge => StatusCode::PAYLOAD_TOO_LARGE,
        }
    }

    const fn words(self) -> (&'static str, &'static str) {
        match self {
            Self::InvalidSignature => ("invalid-signature", "The signature is not valid"),
            Self::TimestampOutsideTolerance => {
                ("timestamp-outside-tolerance", "The timestamp is too old or in the future")
            }
            Self::InvalidDeliveryId => ("invalid-delivery-id", "The delivery's id is not valid"),
            Self::MalformedRequest => ("malformed-request", "The request is malformed"),
            Self::MethodNotAllowed => ("method-not-allowed", "A delivery is a POST request"),
            Self::RequestTimeout => ("request-timeout", "The request came too slowly"),
            Self::BodyTooLarge => ("body-too-large", "The request body is too large"),
        }
    }

    const fn error_type(self) -> &'static str {
        match self.status() {
            StatusCode::BAD_REQUEST | StatusCode::PAYLOAD_TOO_LARGE => "invalid_request_error",
            _ => "api_error",
        }
    }
}

/// A rejection with a sentence about this occurrence, which contains no secret and no content.
#[derive(Debug)]
pub(crate) struct Rejected {
    pub(crate) reason: WebhookRejection,
    detail: String,
}

impl Rejected {
    pub(crate) fn new(reason: WebhookRejection, detail: impl Into<String>) -> Self {
        Self { reason, detail: detail.into() }
    }

    /// Returns the response.
    pub(crate) fn response(&self) -> Response<Bytes> {
        let Self { reason, detail } = self;
        let (code, title) = reason.words();
        let problem = json!({
            "type": format!("urn:hapax:problem:{code}"),
            "title": title,
            "status": reason.status().as_u16(),
            "detail": detail,
            "code": code,
            "error": { "type": reason.error_type(), "code": code, "message": detail },
        });
        let mut response = Response::new(Bytes::from(problem.to_string()));
        *response.status_mut() = reason.status();
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
        match reason.status() {
            // Both are required with their status (RFC 9110, 15.5.2 and 15.5.6).
            StatusCode::UNAUTHORIZED => {
                headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Signature"));
            }
            StatusCode::METHOD_NOT_ALLOWED => {
                headers.insert(ALLOW, HeaderValue::from_static("POST"));
            }
            _ => {}
        }
        response.extensions_mut().insert(*reason);
        response
    }
}
