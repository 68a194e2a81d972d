//! The requests of the routes.

use std::time::Duration;

use axum::body::{Bytes, to_bytes};
use axum::extract::Request;
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE, LOCATION, RETRY_AFTER};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use hapax_core::{Key, Scope, canonicalize};
use hapax_http::header::{
    self, Grammar, IDEMPOTENCY_FENCE, IDEMPOTENCY_KEY, IDEMPOTENCY_OUTCOME, IDEMPOTENCY_REPLAYED,
    other_spelling,
};
use hapax_http::problem::{Code, Problem};
use hapax_http::stored_response::named_by_connection;
use serde::Serialize;
use serde::de::{DeserializeOwned, IgnoredAny};
use serde_json::Value;
use tokio::time::timeout;

use super::prefer::{PREFERENCE_APPLIED, Preferences};
use super::progress::Progress;
use super::rejection::{Rejected, not_retained, of_body, of_cancel, of_start, of_store};
use super::{RoutesState, SagaOutcome, SagaRoutes, location};
use crate::error::{SagaError, SagaStartError, SignalError};
use crate::handle::SagaHandle;
use crate::operator::{SagaLookup, SagaOperator};

/// The largest answer that the status resource shows, in bytes.
const MAX_SHOWN: usize = 1 << 20;

/// Attempts to read a state that changes while it is read.
const READS: u32 = 3;

impl<I, O, E> SagaRoutes<I, O, E>
where
    I: Serialize + DeserializeOwned,
    O: DeserializeOwned,
    E: DeserializeOwned,
{
    pub(super) async fn post(&self, request: Request) -> Response {
        let (parts, body) = request.into_parts();
        // Before the body is read.
        if let Err(rejected) = self.state.identify(&parts) {
            return rejected.response(&parts.headers);
        }
        let limit = self.state.max_body;
        let body = match to_bytes(body, limit).await {
            Ok(body) => body,
            Err(error) => {
                return Rejected::from(of_body(error, limit)).response(&parts.headers);
            }
        };
        match serde_json::from_slice(&body) {
            Ok(input) => match canonicalize(&body) {
                Ok(request) => self.answer(&parts, &input, Some(&request)).await,
                Err(error) => {
                    let rejected = of_start(&SagaStartError::Input(error.into()));
                    Rejected::from(rejected).response(&parts.headers)
                }
            },
            Err(error) => {
                // Without the text of the error, which may quote the body.
                let (line, column) = (error.line(), error.column());
                let detail = format!(
                    "The body is not the JSON that is expected here: line {line}, column {column}."
                );
                Rejected::from(Problem::new(Code::MalformedRequest, detail))
                    .response(&parts.headers)
            }
        }
    }
}

impl<I: Serialize, O: DeserializeOwned, E: DeserializeOwned> SagaRoutes<I, O, E> {
    /// Answers a request that starts a saga, for a handler that reads the input itself. `parts` is the
    /// head of the request, which has key, scope and preferences. The same request is the one with the
    /// same input.
    pub async fn start(&self, parts: &Parts, input: &I) -> Response {
        self.answer(parts, input, None).await
    }

    /// `request` is the request in canonical JSON; `None` if that is the input.
    async fn answer(&self, parts: &Parts, input: &I, request: Option<&[u8]>) -> Response {
        let state = &*self.state;
        match state.start(parts, input, request).await {
            Ok(response) => response,
            Err(rejected) => rejected.response(&parts.headers),
        }
    }

    /// Answers a request for the state of a saga. `key` is the last segment of the path, with its
    /// escapes decoded.
    pub async fn status(&self, parts: &Parts, key: &str) -> Response {
        let state = &*self.state;
        let answered = async {
            let (_, started) = state.find(parts, key).await?;
            state.state(&started).await
        };
        match answered.await {
            Ok(shown) => shown.response(StatusCode::OK),
            Err(rejected) => rejected.response(&parts.headers),
        }
    }

    /// Answers a request to cancel a saga. `key` is the last segment of the path, with its escapes
    /// decoded.
    pub async fn cancel(&self, parts: &Parts, key: &str) -> Response {
        let state = &*self.state;
        let answered = async {
            let (key, started) = state.find(parts, key).await?;
            let before = state.state(&started).await?;
            if before.has_ended() {
                return Ok(before.response(StatusCode::OK));
            }
            match started.cancel("cancelled by its caller").await {
                // What it is now is shown.
                Ok(_) | Err(SignalError::Ended | SignalError::NotFound) => {}
                Err(error) => return Err(of_cancel(&error).into()),
            }
            let shown = state.state(&started).await?;
            if shown.has_ended() {
                return Ok(shown.response(StatusCode::OK));
            }
            // It continues now, however long it was to be parked.
            let mut response = shown.response(StatusCode::ACCEPTED);
            response.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static("1"));
            Ok(state.located(response, &key))
        };
        match answered.await {
            Ok(response) => response,
            Err(rejected) => Rejected::response(&rejected, &parts.headers),
        }
    }
}

impl<I, O, E> RoutesState<I, O, E> {
    /// Returns the scope of a request.
    fn scope(&self, parts: &Parts) -> Result<Scope, Rejected> {
        let key = IDEMPOTENCY_KEY;
        let names = std::iter::once(&key).chain(self.scope.names());
        if let Some((field, name)) = other_spelling(&parts.headers, names.clone()) {
            let detail = format!("The header `{field}` has an underscore; `{name}` is expected.");
            return Err(Problem::new(Code::MalformedRequest, detail).into());
        }
        let named = named_by_connection(&parts.headers);
        if let Some(name) = names.into_iter().find(|name| named.contains(name)) {
            let detail = format!(
                "Expected a header `Connection` without `{name}`, found it there: remove it."
            );
            return Err(Problem::new(Code::MalformedRequest, detail).into());
        }
        Ok(self.scope.scope(parts)?)
    }

    /// Returns scope and key of a request that starts a saga.
    fn identify(&self, parts: &Parts) -> Result<(Scope, Key), Rejected> {
        let key = match header::key(&parts.headers, Grammar::Lenient) {
            Ok(Some(key)) => key,
            Ok(None) => {
                let detail = format!(
                    "Expected the header `{IDEMPOTENCY_KEY}`, found none: send one with each operation, and the same in its retries."
                );
                return Err(Problem::new(Code::MissingKey, detail).into());
            }
            Err(error) => {
                let detail = format!(
                    "The header `{IDEMPOTENCY_KEY}` has no valid idempotency key: {error}."
                );
                return Err(Problem::new(Code::InvalidKey, detail).into());
            }
        };
        Ok((self.scope(parts)?, key))
    }

    fn located(&self, mut response: Response, key: &Key) -> Response {
        if let Some(location) = location::header(&self.location, key) {
            response.headers_mut().insert(LOCATION, location);
        }
        response
    }
}

impl<I: Serialize, O: DeserializeOwned, E: DeserializeOwned> RoutesState<I, O, E> {
    async fn start(
        &self,
        parts: &Parts,
        input: &I,
        request: Option<&[u8]>,
    ) -> Result<Response, Rejected> {
        let (scope, key) = self.identify(parts)?;
        let preferences = Preferences::of(&parts.headers);
        let started = match request {
            Some(request) => {
                self.sagas.start_request(&self.saga, (&scope, &key), input, request).await
            }
            None => self.sagas.start(&self.saga, &scope, &key, input).await,
        };
        let started = started.map_err(|error| of_start(&error))?;
        let replays = !started.is_first();
        if let Some(end) = self.wait(&started, preferences).await {
            let mut response = self.answer(end)?;
            let headers = response.headers_mut();
            let value = if replays { "true" } else { "false" };
            headers.insert(IDEMPOTENCY_REPLAYED, HeaderValue::from_static(value));
            for_gateway(&parts.headers, headers, "final");
            return Ok(response);
        }
        let shown = match replays || !self.time(preferences).is_zero() {
            // The saga was started: a failure to read its state is no failure of the request.
            true => self.state(&started).await.unwrap_or_else(|_| Shown::begun()),
            false => Shown::begun(),
        };
        let mut response = self.located(shown.response(StatusCode::ACCEPTED), &key);
        let headers = response.headers_mut();
        // It may have ended since: the next look has the answer.
        headers.entry(RETRY_AFTER).or_insert(HeaderValue::from_static("1"));
        if preferences.respond_async {
            headers.insert(PREFERENCE_APPLIED, HeaderValue::from_static("respond-async"));
        }
        for_gateway(&parts.headers, headers, "retryable");
        Ok(response)
    }

    fn time(&self, preferences: Preferences) -> Duration {
        preferences.wait(self.wait, self.max_wait)
    }

    /// Waits for the end, as long as request and service allow; `None` if there is none yet.
    async fn wait(
        &self,
        started: &SagaHandle<O, E>,
        preferences: Preferences,
    ) -> Option<Result<O, SagaError<E>>> {
        let wait = self.time(preferences);
        // Past the limit of requests that wait, nothing waits.
        let permit = self.waiting.try_acquire().ok().filter(|_| !wait.is_zero());
        let ended = match permit {
            Some(_permit) => timeout(wait, started.outcome()).await.ok()?,
            None if started.is_first() => return None,
            None => started.poll_outcome().await.ok().flatten()?,
        };
        // A store that is unavailable now: the saga was started, and its end is found later.
        Some(ended).filter(|ended| !matches!(ended, Err(SagaError::Store(_) | SagaError::Gone)))
    }

    /// Maps the end of a saga to the service's answer.
    fn answer(&self, end: Result<O, SagaError<E>>) -> Result<Response, Rejected> {
        let (_, answer) = self.end(end)?;
        Ok(answer)
    }

    fn end(&self, end: Result<O, SagaError<E>>) -> Result<(&'static str, Response), Rejected> {
        let (state, end) = match end {
            Ok(output) => ("done", SagaOutcome::Done(output)),
            Err(SagaError::Undone(error)) => ("undone", SagaOutcome::Undone(error)),
            Err(SagaError::Cancelled { reason }) => {
                ("cancelled", SagaOutcome::Cancelled { reason })
            }
            Err(SagaError::Unreadable) => return Err(not_retained().into()),
            Err(SagaError::Gone) => return Err(Rejected::NotFound),
            Err(SagaError::Store(error)) => return Err(of_store(&error).into()),
        };
        Ok((state, (self.answer)(end)))
    }

    /// Finds the saga of a path's last segment in the request's scope.
    async fn find(&self, parts: &Parts, key: &str) -> Result<(Key, SagaHandle<O, E>), Rejected> {
        let scope = self.scope(parts)?;
        let key = location::key(key).ok_or(Rejected::NotFound)?;
        let found = self.sagas.find(&self.saga, &scope, &key).await;
        let started = found.map_err(|error| of_store(&error))?.ok_or(Rejected::NotFound)?;
        Ok((key, started))
    }

    /// Returns the state of a saga.
    async fn state(&self, started: &SagaHandle<O, E>) -> Result<Shown, Rejected> {
        let operator = SagaOperator::new(started.node.engine.clone());
        for _ in 0..READS {
            if let Some(end) = started.poll_outcome().await.map_err(|error| of_store(&error))? {
                let (state, answer) = self.end(end)?;
                return Ok(Shown::ended(state, answer).await);
            }
            match operator.show(&started.id()).await {
                Ok(SagaLookup::Unfinished(view)) => {
                    return Ok(Shown::unfinished(Progress::of(&view)));
                }
                // It has ended meanwhile.
                Ok(SagaLookup::Ended(_) | SagaLookup::NotFound) => {}
                Err(error) => return Err(of_store(&error).into()),
            }
        }
        Err(Rejected::NotFound)
    }
}

/// A representation of the status resource.
struct Shown {
    body: String,
    /// Seconds after which to look again; `None` at the end.
    retry_after: Option<u64>,
}

impl Shown {
    fn begun() -> Self {
        Self::unfinished(Progress::begun())
    }

    fn unfinished(progress: Progress) -> Self {
        let time = progress.retry_after;
        let seconds = time.as_secs() + u64::from(time.subsec_nanos() > 0);
        Self { body: Value::Object(progress.members).to_string(), retry_after: Some(seconds) }
    }

    async fn ended(state: &str, answer: Response) -> Self {
        let status = answer.status().as_u16();
        let body = to_bytes(answer.into_body(), MAX_SHOWN).await.unwrap_or_default();
        let body = shown(&body).map(|body| format!(r#","body":{body}"#)).unwrap_or_default();
        let body = format!(r#"{{"state":"{state}","answer":{{"status":{status}{body}}}}}"#);
        Self { body, retry_after: None }
    }

    const fn has_ended(&self) -> bool {
        self.retry_after.is_none()
    }

    fn response(self, status: StatusCode) -> Response {
        let json = HeaderValue::from_static("application/json");
        let no_store = HeaderValue::from_static("no-store");
        let headers = [(CONTENT_TYPE, json), (CACHE_CONTROL, no_store)];
        let mut response = (status, headers, self.body).into_response();
        if let Some(seconds) = self.retry_after {
            response.headers_mut().insert(RETRY_AFTER, seconds.into());
        }
        response
    }
}

/// Returns a body as JSON: JSON as it is, so that no number changes, and other text as a string.
fn shown(body: &Bytes) -> Option<String> {
    let text = std::str::from_utf8(body).ok().filter(|text| !text.is_empty())?;
    match serde_json::from_str::<IgnoredAny>(text) {
        Ok(_) => Some(text.to_owned()),
        Err(_) => Some(Value::from(text).to_string()),
    }
}

/// Sets the class of a response for a gateway or layer in front, which stores responses.
fn for_gateway(request: &HeaderMap, headers: &mut HeaderMap, class: &'static str) {
    if request.contains_key(IDEMPOTENCY_FENCE) {
        headers.insert(IDEMPOTENCY_OUTCOME, HeaderValue::from_static(class));
    }
}
