//! Asking a service what became of an operation.

use std::time::Duration;

use bytes::Bytes;
use hapax::store::BoxFuture;
use hapax_http::Body;
use hapax_http::header::{IDEMPOTENCY_FENCE, IDEMPOTENCY_KEY};
use hapax_http::server::{Doubt, Reconcile, Reconciled};
use http::header::{CONTENT_LENGTH, HOST, HeaderMap, HeaderName, HeaderValue};
use http::uri::{Authority, PathAndQuery};
use http::{Request, Response, StatusCode, Uri};
use http_body_util::{BodyExt, Limited};

use crate::keys::bodiless;
use crate::upstream::Upstream;

/// Response of the service that is asked: the status that the operation was answered with.
const IDEMPOTENCY_STATUS: HeaderName = HeaderName::from_static("idempotency-status");

/// How many questions may be under way at once.
const CONCURRENT: usize = 256;

/// Asks by `GET`: 2xx means that it happened and this is the response; 404 that it did not, and
/// never will under the fence that was asked about; anything else that nobody can say yet.
#[derive(Clone, Debug)]
pub(crate) struct Asker {
    upstream: Upstream,
    path: PathAndQuery,
    scope: Vec<HeaderName>,
    max_body: usize,
}

impl Asker {
    /// Asks at `path` of `authority`, showing the retry's `scope` headers. An answer has at most
    /// `max_body` bytes and no silence longer than `timeout`.
    pub(crate) fn new(
        (authority, path): (Authority, PathAndQuery),
        scope: Vec<HeaderName>,
        max_body: usize,
        timeout: Duration,
    ) -> Self {
        let upstream = Upstream::new(authority, timeout, CONCURRENT);
        Self { upstream, path, scope, max_body }
    }

    /// Where it asks.
    pub(crate) const fn upstream(&self) -> &Upstream {
        &self.upstream
    }

    async fn ask(self, doubt: Doubt) -> Reconciled {
        let mut request = Request::new(Body::empty());
        *request.uri_mut() = Uri::from(self.path.clone());
        let headers = request.headers_mut();
        if let Ok(host) = HeaderValue::from_str(self.upstream.authority().as_str()) {
            headers.insert(HOST, host);
        }
        for name in self.scope.iter().chain([&IDEMPOTENCY_KEY]) {
            for value in doubt.request.headers.get_all(name) {
                headers.append(name, value.clone());
            }
        }
        headers.insert(IDEMPOTENCY_FENCE, doubt.fence.get().into());
        match self.upstream.send(request).await {
            Ok(response) if response.status().is_success() => self.happened(response).await,
            Ok(response) if response.status() == StatusCode::NOT_FOUND => Reconciled::DidNotHappen,
            Ok(response) => {
                let status = response.status().as_u16();
                tracing::info!(status, "the reconcile URL cannot say yet what became of a request");
                Reconciled::CannotSay
            }
            Err(error) => {
                tracing::warn!(%error, "the reconcile URL gave no answer");
                Reconciled::CannotSay
            }
        }
    }

    async fn happened(&self, response: Response<Body>) -> Reconciled {
        let (mut parts, body) = response.into_parts();
        let Some(status) = status(parts.status, &parts.headers) else {
            tracing::warn!("the reconcile URL answered with an invalid Idempotency-Status");
            return Reconciled::CannotSay;
        };
        let Ok(body) = Limited::new(body, self.max_body).collect().await else {
            tracing::warn!("the reconcile URL's answer broke off, or is too large to keep");
            return Reconciled::CannotSay;
        };
        parts.status = status;
        // The named status may be one that has no body; and where the body was chunked, the length
        // may be a lie.
        let body = if bodiless(status) { Bytes::new() } else { body.to_bytes() };
        let length = parts.headers.get(CONTENT_LENGTH).map(HeaderValue::as_bytes);
        if bodiless(status) || length.is_some_and(|it| it != body.len().to_string().as_bytes()) {
            parts.headers.remove(CONTENT_LENGTH);
        }
        Reconciled::Happened(Response::from_parts(parts, body))
    }
}

impl Reconcile for Asker {
    fn reconcile(&self, doubt: Doubt) -> BoxFuture<'static, Reconciled> {
        Box::pin(self.clone().ask(doubt))
    }
}

/// The status of the operation: the answer's own, unless it names another. `None`: it names none
/// that a response can have, and guessing would make up an outcome.
fn status(own: StatusCode, headers: &HeaderMap) -> Option<StatusCode> {
    let mut named = headers.get_all(IDEMPOTENCY_STATUS).iter();
    let Some(first) = named.next() else { return Some(own) };
    let status = StatusCode::from_bytes(first.as_bytes()).ok()?;
    let final_status = (200..=599).contains(&status.as_u16());
    (final_status && named.next().is_none()).then_some(status)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_named_status_wins_and_a_bad_one_says_nothing() {
        let of = |values: &[&'static str]| {
            let mut headers = HeaderMap::new();
            for value in values {
                headers.append(IDEMPOTENCY_STATUS, HeaderValue::from_static(value));
            }
            status(StatusCode::OK, &headers).map(|status| status.as_u16())
        };
        assert_eq!(of(&[]), Some(200));
        assert_eq!(of(&["201"]), Some(201));
        assert_eq!(of(&["422"]), Some(422));
        for bad in [&["101"][..], &["999"], &["2"], &["201", "201"], &[""]] {
            assert_eq!(of(bad), None, "{bad:?}");
        }
    }
}
