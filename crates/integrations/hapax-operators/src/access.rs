//! Authentication of requests to the operators' API.
//!
//! 1. Every request must have the token as `Authorization: Bearer`.
//! 2. A request that changes something has a JSON body and no foreign `Origin`. So a page in an
//!    operator's browser cannot send one, even if a proxy adds the token.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, HOST, HeaderValue, ORIGIN,
    WWW_AUTHENTICATE, X_CONTENT_TYPE_OPTIONS,
};
use axum::http::{Method, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use crate::OperatorsState;
use crate::api::error;
use crate::token::AdminToken;

/// Rejects a request without the token or with a foreign origin; forwards any other request.
pub(crate) async fn guard(
    State(operators): State<Arc<OperatorsState>>,
    request: Request,
    next: Next,
) -> Response {
    let mut response = match check(&operators.token, &request) {
        Ok(()) => next.run(request).await,
        Err(rejected) => rejected.into_response(),
    };
    let headers = response.headers_mut();
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(CONTENT_SECURITY_POLICY, HeaderValue::from_static("default-src 'none'"));
    response
}

/// The reason why a request is not admitted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Rejected {
    Token,
    Origin,
    NotJson,
}

impl IntoResponse for Rejected {
    fn into_response(self) -> Response {
        let (status, code, reason) = match self {
            Self::Token => (
                StatusCode::UNAUTHORIZED,
                "token",
                "expected the token of the admin token file as `Authorization: Bearer TOKEN`",
            ),
            Self::Origin => (
                StatusCode::FORBIDDEN,
                "origin",
                "expected no `Origin`, or the origin of this API: send the request from a program, not from a web page",
            ),
            Self::NotJson => (
                StatusCode::UNSUPPORTED_MEDIA_TYPE,
                "not-json",
                "the content type must be application/json",
            ),
        };
        let mut response = error(status, code, reason);
        if self == Self::Token {
            response.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

fn check(token: &AdminToken, request: &Request) -> Result<(), Rejected> {
    let headers = request.headers();
    if !token.is_shown_in(headers) {
        return Err(Rejected::Token);
    }
    if matches!(*request.method(), Method::GET | Method::HEAD) {
        return Ok(());
    }
    if let Some(origin) = headers.get(ORIGIN) {
        let own = |scheme: &[u8]| {
            headers
                .get(HOST)
                .is_some_and(|host| origin.as_bytes().strip_prefix(scheme) == Some(host.as_bytes()))
        };
        if !own(b"http://") && !own(b"https://") {
            return Err(Rejected::Origin);
        }
    }
    let kind = headers.get(CONTENT_TYPE).map_or(&b""[..], HeaderValue::as_bytes);
    let media = kind.split(|byte| *byte == b';').next().unwrap_or_default();
    if media.trim_ascii().eq_ignore_ascii_case(b"application/json") {
        Ok(())
    } else {
        Err(Rejected::NotJson)
    }
}

#[cfg(test)]
mod tests {
    use axum::body::Body;

    use super::*;

    fn seen(method: &str, fields: &[(&str, &str)]) -> Result<(), Rejected> {
        let mut builder = axum::http::Request::builder().method(method).uri("/api/stats");
        for (name, value) in fields {
            builder = builder.header(*name, *value);
        }
        let token = AdminToken::new("sixteen-letters!").unwrap();
        check(&token, &builder.body(Body::empty()).unwrap())
    }

    const SHOWN: (&str, &str) = ("authorization", "Bearer sixteen-letters!");

    #[test]
    fn a_request_without_the_token_is_rejected_on_loopback_too() {
        assert_eq!(seen("GET", &[SHOWN]), Ok(()));
        assert_eq!(seen("GET", &[("host", "localhost:9090")]), Err(Rejected::Token));
        assert_eq!(seen("GET", &[("authorization", "Bearer x")]), Err(Rejected::Token));
    }

    #[test]
    fn a_changing_request_must_be_json_of_the_same_origin() {
        let host = ("host", "localhost:9090");
        let json = ("content-type", "application/json; charset=utf-8");
        assert_eq!(seen("POST", &[SHOWN, host, json]), Ok(()));
        assert_eq!(seen("POST", &[host, json]), Err(Rejected::Token));
        for own in ["http://localhost:9090", "https://localhost:9090"] {
            assert_eq!(seen("POST", &[SHOWN, host, json, ("origin", own)]), Ok(()), "{own}");
        }
        for origin in ["http://evil.example", "null", "http://localhost:90"] {
            let fields = [SHOWN, host, json, ("origin", origin)];
            assert_eq!(seen("POST", &fields), Err(Rejected::Origin), "{origin}");
        }
        let form = ("content-type", "text/plain");
        assert_eq!(seen("POST", &[SHOWN, host, form]), Err(Rejected::NotJson));
        assert_eq!(seen("POST", &[SHOWN, host]), Err(Rejected::NotJson));
    }
}
