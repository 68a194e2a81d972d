//! Rejections: problems of the HTTP layer, and 404.

use std::time::Duration;

use axum::body::Body;
use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use hapax_http::error_format::ErrorFormat;
use hapax_http::problem::{Code, Problem};
use http_body_util::LengthLimitError;
use serde_json::json;

use crate::{SagaStartError, SignalError};
use hapax_core::ClaimError;

const SOON: Duration = Duration::from_secs(1);

/// A request that gets no answer and no state.
pub(super) enum Rejected {
    Problem(Problem),
    NotFound,
}

impl From<Problem> for Rejected {
    fn from(problem: Problem) -> Self {
        Self::Problem(problem)
    }
}

impl Rejected {
    pub(super) fn response(&self, request: &HeaderMap) -> Response {
        match self {
            Self::Problem(problem) => {
                ErrorFormat::of(request).render(problem, None).map(Body::from)
            }
            Self::NotFound => not_found(),
        }
    }
}

fn not_found() -> Response {
    let detail =
        "This caller has no saga under this key: it was not started, or its outcome has expired.";
    let body = json!({
        "type": "urn:hapax:problem:not-found",
        "title": "There is no such operation",
        "status": 404,
        "detail": detail,
        "code": "not-found",
        "error": { "type": "invalid_request_error", "code": "not-found", "message": detail },
    });
    let content_type = HeaderValue::from_static("application/problem+json");
    (StatusCode::NOT_FOUND, [(CONTENT_TYPE, content_type)], body.to_string()).into_response()
}

/// Returns the rejection of a body that cannot be read.
pub(super) fn of_body(error: axum::Error, limit: usize) -> Problem {
    match error.into_inner().is::<LengthLimitError>() {
        true => {
            let detail = format!(
                "Expected a body of at most {limit} bytes, found a larger one: shorten it."
            );
            Problem::new(Code::BodyTooLarge, detail)
        }
        false => Problem::new(Code::MalformedRequest, "The request body broke off."),
    }
}

/// Returns the rejection of a start that failed.
pub(super) fn of_start(error: &SagaStartError) -> Problem {
    match error {
        SagaStartError::KeyReused => {
            let detail = "Expected the content of the first request with this key, found another: the first one may have happened, so look up its state before anything is sent under another key.";
            return Problem::new(Code::KeyReused, detail);
        }
        SagaStartError::Input(_) => {
            let detail = "Expected a body that has a canonical JSON form, found a value without one, such as a number that is not finite.";
            return Problem::new(Code::MalformedRequest, detail);
        }
        SagaStartError::Value(_) => {
            return Problem::new(Code::BodyTooLarge, "The input is too large or nested too deep.");
        }
        _ => {}
    }
    tracing::warn!(error = error as &dyn std::error::Error, "a saga could not be started");
    if let SagaStartError::Claim(ClaimError::Quarantined { retry_in }) = error {
        let detail = "The store may have lost the record of an earlier request with this key. This attempt executed \
                      nothing: retry with the same key.";
        return Problem::new(Code::Quarantined, detail).retry_after(*retry_in);
    }
    if let SagaStartError::Claim(_) = error {
        let detail = "The store did not answer, so it is unknown whether this request was made before. This attempt \
                      executed nothing: retry with the same key.";
        return Problem::new(Code::StoreUnavailable, detail).retry_after(SOON);
    }
    pending("The saga may have been started: send the same request again under its key.")
}

/// Returns the rejection of a cancellation that failed.
pub(super) fn of_cancel(error: &SignalError) -> Problem {
    tracing::warn!(error = error as &dyn std::error::Error, "a saga could not be cancelled");
    if let SignalError::Claim(ClaimError::Quarantined { retry_in }) = error {
        let detail = "The store may have lost the record of an earlier cancellation. Nothing was cancelled now: send \
                      the same request again.";
        return Problem::new(Code::Quarantined, detail).retry_after(*retry_in);
    }
    pending("The saga may have been cancelled: send the same request again.")
}

/// Returns the rejection for a store that cannot be read.
pub(super) fn of_store(error: &dyn std::error::Error) -> Problem {
    tracing::warn!(%error, "the state of a saga could not be read");
    Problem::new(Code::StoreUnavailable, "The store did not answer: send the same request again.")
        .retry_after(SOON)
}

/// Returns the rejection for an outcome that cannot be answered.
pub(super) fn not_retained() -> Problem {
    let detail = "The saga has ended. Expected an outcome that this version of the service can read, found another: send the request again after the upgrade has finished.";
    Problem::new(Code::ResponseNotRetained, detail)
}

fn pending(detail: &str) -> Problem {
    Problem::new(Code::OutcomePending, detail).retry_after(SOON)
}
