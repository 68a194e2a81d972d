//! Parts that the examples share.

use std::error::Error;
use std::process::ExitCode;
use std::time::Duration;

use axum::body::Bytes;
use axum::http::header::{AUTHORIZATION, CONTENT_TYPE};
use axum::http::{Method, StatusCode};
use hapax::saga::{StepError, StepRetry};
use http_body_util::{BodyExt, Full};
use hyper::Request;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde::Serialize;
use serde_json::Value;

/// An error that ends a program.
pub type ProgramError = Box<dyn Error + Send + Sync>;

/// Returns the exit code of a program, and prints its error with the causes. A `main` that returns the error
/// prints its `Debug` form instead.
#[must_use]
pub fn exit(ended: Result<ExitCode, ProgramError>) -> ExitCode {
    let error = match ended {
        Ok(code) => return code,
        Err(error) => error,
    };
    let causes = std::iter::successors(Some(&*error as &dyn Error), |error| (*error).source());
    let text: Vec<_> = causes.map(ToString::to_string).collect();
    eprintln!("{}", text.join(": "));
    ExitCode::FAILURE
}

/// Media type of a service's own answers. Those of the HTTP layer are `application/problem+json`.
const JSON: &str = "application/json";

/// A service over HTTP that honors idempotency keys.
#[derive(Clone, Debug)]
pub struct Remote {
    client: Client<HttpConnector, Full<Bytes>>,
    url: String,
}

/// An answer of a service.
#[derive(Clone, Debug)]
pub struct RemoteAnswer {
    /// The status.
    pub status: StatusCode,
    /// True if the service itself answered, not the layer in front of it.
    pub is_own: bool,
    /// The body; null if it is no JSON.
    pub body: Value,
}

impl Remote {
    /// Creates a client of the service at `url`.
    #[must_use]
    pub fn new(url: impl Into<String>) -> Self {
        Self { client: Client::builder(TokioExecutor::new()).build_http(), url: url.into() }
    }

    /// Calls the service as a step of a saga does: under the key of the step. The end of the call
    /// decides how the step ended.
    ///
    /// # Errors
    /// - [`StepError::Rejected`]: the service itself answered with a 4xx, so nothing happened. The error
    ///   is its body.
    /// - [`StepError::NotSent`]: no connection.
    /// - [`StepError::Unknown`]: anything else, such as a connection that broke, a 5xx, or a 409 of
    ///   the layer because an earlier try still runs.
    pub async fn step(
        &self,
        path: &str,
        key: &str,
        body: &impl Serialize,
    ) -> Result<Value, StepError<String>> {
        let body = serde_json::to_vec(body).map_err(StepError::not_sent)?;
        let answer = self.send(Method::POST, path, &[("idempotency-key", key)], body).await?;
        match answer.status.as_u16() {
            200..300 => Ok(answer.body),
            400..500 if answer.is_own => {
                Err(StepError::Rejected(answer.body.as_str().unwrap_or_default().to_owned()))
            }
            status => Err(StepError::unknown(format!("status {status}: {}", answer.body))),
        }
    }

    /// Sends a request of the caller `shop`.
    ///
    /// # Errors
    /// [`StepError::NotSent`] without a connection, else [`StepError::Unknown`].
    pub async fn send(
        &self,
        method: Method,
        path: &str,
        headers: &[(&str, &str)],
        body: Vec<u8>,
    ) -> Result<RemoteAnswer, StepError<String>> {
        let mut request = Request::builder()
            .method(method)
            .uri(format!("{}{path}", self.url))
            .header(AUTHORIZATION, "Bearer shop")
            .header(CONTENT_TYPE, JSON);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(Full::from(body)).map_err(StepError::not_sent)?;
        let response = match self.client.request(request).await {
            Ok(response) => response,
            Err(error) if error.is_connect() => return Err(StepError::not_sent(error)),
            Err(error) => return Err(StepError::unknown(error)),
        };
        let status = response.status();
        let is_own = response.headers().get(CONTENT_TYPE).is_some_and(|it| it == JSON);
        let body = response.into_body().collect().await.map_err(StepError::unknown)?.to_bytes();
        let body = serde_json::from_slice(&body).unwrap_or_default();
        Ok(RemoteAnswer { status, is_own, body })
    }
}

/// Returns the retries of a step whose service may be restarted at any time.
pub fn retries() -> StepRetry {
    let (first, longest) = (Duration::from_millis(100), Duration::from_secs(1));
    StepRetry::within(Duration::from_secs(60 * 60))
        .timeout(Duration::from_secs(5))
        .pauses(first, longest)
}

/// Waits for SIGTERM or Ctrl-C.
pub async fn shutdown() {
    use tokio::signal::unix::{SignalKind, signal};
    let Ok(mut terminate) = signal(SignalKind::terminate()) else { return };
    tokio::select! {
        _ = terminate.recv() => {}
        _ = tokio::signal::ctrl_c() => {}
    }
}

/// Returns the argument at `place`, from 1.
///
/// # Errors
/// An error that names the argument.
pub fn argument(place: usize, name: &str) -> Result<String, ProgramError> {
    std::env::args().nth(place).ok_or_else(|| format!("expected {name} as argument {place}").into())
}
