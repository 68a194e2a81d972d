//! Service in front of the layer: checks of a connection and its requests before anything is
//! claimed.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use hapax_http::error_format::ErrorFormat;
use hapax_http::header::other_spelling;
use hapax_http::problem::{Code, Problem, sentence};
use hapax_http::server::{ResponseInfo, ResponseSource};
use hapax_http::{Body, BoxError};
use http::header::{CONNECTION, HeaderName, HeaderValue};
use http::request::Parts;
use http::{Method, Request, Response, StatusCode, Version};
use http_body::{Frame, SizeHint};
use hyper::body::Incoming;
use tokio::time::{Instant, Sleep, sleep};
use tower_service::Service;

use crate::access::{AccessEntry, AccessLog};
use crate::auth::{Auth, AuthRejection};
use crate::cors;
use crate::guard::{GuardState, http2};
use crate::proxy::Peer;
use crate::proxy::headers::{drop_own, name_host};
use crate::proxy::spoofing::overriding;
use crate::proxy::tunnel::Switch;
use crate::shutdown::{Shutdown, ShutdownPhase};
use crate::snapshot::{self, ConfigSnapshot, CurrentConfig, Route};
use crate::upstream::UploadError;

/// Advice about this attempt alone: an earlier one with the same key may have executed.
const NOTHING: &str = "This attempt executed nothing: ask again with the same key.";

/// Handler of requests, shared by all connections.
#[derive(Debug)]
pub(crate) struct RequestHandler {
    pub(crate) current: Arc<CurrentConfig>,
    pub(crate) shutdown: Shutdown,
    pub(crate) stall: Duration,
    /// Access log, with a line for each request.
    pub(crate) access: Option<Arc<AccessLog>>,
}

/// Configuration and connection of a request, from its beginning to its end.
struct RequestContext {
    snapshot: Arc<ConfigSnapshot>,
    route: Arc<Route>,
    connection: Arc<ClientConnection>,
    /// Format of its rejections.
    error_format: ErrorFormat,
}

/// Connection of a request.
#[derive(Debug)]
pub(crate) struct ClientConnection {
    /// State of the guard of an HTTP/1 connection.
    pub(crate) heads: Option<Arc<GuardState>>,
    pub(crate) peer: Peer,
    /// The switch to another protocol, if the connection allows it.
    pub(crate) switch: Option<Switch>,
}

impl RequestHandler {
    /// Answers a request of `connection`.
    pub(crate) async fn answer(
        self: Arc<Self>,
        connection: Arc<ClientConnection>,
        request: Request<Incoming>,
    ) -> Response<Body> {
        let active_requests = self.shutdown.begin_request();
        let mut entry = self.access.as_ref().map(|log| log.begin(&request));
        let (mut parts, body) = request.into_parts();
        // First, and for every request: the guard counts the calls.
        let away = self.rejection(&connection, &mut parts);
        let request = Request::from_parts(parts, body);
        let snapshot = self.current.now();
        let error_format = ErrorFormat::of(request.headers());
        let found = snapshot.route(request.uri().path(), request.method()).cloned();
        name_route(&mut entry, found.as_ref().unwrap_or(snapshot.rest()));
        let mut response = match found {
            Ok(route) => {
                // A preflight that is rejected gets no CORS response.
                let is_answered = away.is_none() || request.method() != Method::OPTIONS;
                let cors = route.cors.clone().filter(|_| is_answered);
                let context = RequestContext {
                    snapshot,
                    route,
                    connection: Arc::clone(&connection),
                    error_format,
                };
                // Boxed: the future is large, and would make each caller's large.
                let answer = |request| Box::pin(self.serve(away, context, request));
                match cors {
                    Some(cors) => cors::answer(&cors, request, answer).await,
                    None => answer(request).await,
                }
            }
            Err(ambiguous) => {
                let rejected =
                    reject(snapshot.rest(), &connection, error_format, &away.unwrap_or(ambiguous));
                with_cors(snapshot.rest(), request, rejected).await
            }
        };
        if self.is_ending() {
            close(&mut response, &connection);
        }
        if let Some(entry) = entry {
            entry.end(&response);
        }
        response.map(|body| active_requests.guard_body(body))
    }

    /// Rejects a request for which there was no permit.
    pub(crate) async fn overloaded(
        &self,
        connection: &ClientConnection,
        request: Request<Incoming>,
    ) -> Response<Body> {
        let mut entry = self.access.as_ref().map(|log| log.begin(&request));
        let detail = format!("Too many requests are under way. {NOTHING}");
        let problem = Problem::new(Code::Overloaded, detail).retry_after(Duration::from_secs(1));
        let snapshot = self.current.now();
        let route =
            snapshot.route(request.uri().path(), request.method()).unwrap_or(snapshot.rest());
        name_route(&mut entry, route);
        let rejected = reject(route, connection, ErrorFormat::of(request.headers()), &problem);
        let response = with_cors(route, request, rejected).await;
        if let Some(entry) = entry {
            entry.end(&response);
        }
        response
    }

    async fn serve(
        &self,
        away: Option<Problem>,
        context: RequestContext,
        request: Request<Incoming>,
    ) -> Response<Body> {
        let answered = match away {
            Some(problem) => Err(problem),
            None => self.forward(&context, request).await,
        };
        match answered {
            Ok(response) => response,
            Err(rejected) => {
                reject(&context.route, &context.connection, context.error_format, &rejected)
            }
        }
    }

    async fn forward(
        &self,
        context: &RequestContext,
        request: Request<Incoming>,
    ) -> Result<Response<Body>, Problem> {
        let RequestContext { snapshot, route, connection, .. } = context;
        let (mut parts, body) = self.admit(context, request)?.into_parts();
        if let Some(auth) = snapshot.auth() {
            auth.drop_given(&mut parts.headers);
            if may_be_protected(route, &parts) {
                match auth.authorize(&parts, connection.peer).await {
                    Ok(given) => parts.headers.extend(given),
                    Err(AuthRejection::Denied(mut answer)) => {
                        let rejected =
                            ResponseInfo { operation: None, by: ResponseSource::Rejection };
                        answer.extensions_mut().insert(rejected);
                        return Ok(answer);
                    }
                    Err(AuthRejection::Malformed(detail)) => {
                        return Err(Problem::new(Code::MalformedRequest, detail));
                    }
                    // The shutdown may have cut off the auth request.
                    Err(AuthRejection::Unavailable) if self.is_ending() => return Err(draining()),
                    Err(AuthRejection::Unavailable) => return Err(auth_unavailable()),
                }
            }
        }
        parts.extensions.insert(connection.peer);
        if let Some(switch) = &connection.switch {
            parts.extensions.insert(switch.clone());
        }
        // Clones are ready: neither the layer nor the proxy waits in `poll_ready`.
        let answered = match &route.service {
            snapshot::RouteService::Protected { layered, policy, .. } => {
                parts.extensions.insert(policy.clone());
                layered.clone().call(Request::from_parts(parts, body)).await
            }
            snapshot::RouteService::Passed(proxy) => {
                proxy.clone().call(Request::from_parts(parts, body)).await
            }
            snapshot::RouteService::Observed(observed) => {
                return Ok(observed.call(parts, body).await);
            }
        };
        match answered {
            Ok(response) => Ok(response),
            Err(never) => match never {},
        }
    }

    fn is_ending(&self) -> bool {
        self.shutdown.phase() >= ShutdownPhase::Draining
    }

    /// Returns the reason to reject a request: an ambiguous head, or the drain. An accepted HTTP/2
    /// request is converted to the form of HTTP/1.1.
    fn rejection(&self, connection: &ClientConnection, parts: &mut Parts) -> Option<Problem> {
        let rejection = match &connection.heads {
            Some(heads) => heads.rejection(),
            None => http2::settle(parts).err(),
        };
        if let Some(rejection) = rejection {
            return Some(Problem::new(Code::MalformedRequest, sentence(&rejection.to_string())));
        }
        self.is_ending().then(draining)
    }

    /// Removes from a request the parts that the layer and the upstream could read differently.
    fn admit(
        &self,
        context: &RequestContext,
        request: Request<Incoming>,
    ) -> Result<Request<Body>, Problem> {
        let RequestContext { snapshot, route, connection, .. } = context;
        let (mut parts, incoming) = request.into_parts();
        name_host(&mut parts.headers, &parts.uri);
        if disguises(snapshot, route, &parts) {
            let detail = "A header names another method, which would be protected.";
            return Err(Problem::new(Code::MalformedRequest, detail));
        }
        // If such a field were dropped, the request would have no key, or another caller.
        let by_auth = |name: &&HeaderName| snapshot.auth().is_some_and(|auth| auth.gives(name));
        let scope = route.scope.iter().filter(|name| !by_auth(name));
        let identity = std::iter::once(&route.key_header).chain(scope);
        if protects(route, &parts.method)
            && let Some((field, name)) = other_spelling(&parts.headers, identity)
        {
            let detail = format!(
                "The header `{field}` has an underscore; `{name}` is expected, because some services \
                 take one for the other."
            );
            return Err(Problem::new(Code::MalformedRequest, detail));
        }
        route.names.drop_spoofed(&mut parts.headers, connection.peer);
        // Bodies that the layer buffers must arrive at a minimum rate; all others stream.
        let kept = may_be_protected(route, &parts);
        let http2 = parts.version == Version::HTTP_2;
        let body = PacedBody::new(incoming, self.stall, kept);
        let (auth, route) = (snapshot.auth().cloned(), Arc::clone(route));
        let body = PacedBody { auth, route: Some(route), http2, ..body };
        Ok(Request::from_parts(parts, Body::new(body)))
    }
}

fn name_route(entry: &mut Option<AccessEntry>, route: &Route) {
    if let Some(entry) = entry {
        entry.route = route.name.to_string();
    }
}

/// Returns whether the layer could claim or replay for this request; it does so for no other.
fn may_be_protected(route: &Route, parts: &Parts) -> bool {
    parts.headers.contains_key(&route.key_header) && protects(route, &parts.method)
}

fn protects(route: &Route, method: &Method) -> bool {
    matches!(&route.service, snapshot::RouteService::Protected { methods, .. } if methods.contains(method))
}

/// Returns whether a header of an unprotected request replaces its method with a protected one.
fn disguises(snapshot: &ConfigSnapshot, route: &Route, parts: &Parts) -> bool {
    let would_be = |method: Method| {
        let there = snapshot.route(parts.uri.path(), &method);
        protects(route, &method) || there.map_or(true, |route| protects(route, &method))
    };
    !protects(route, &parts.method) && overriding(&parts.headers).any(would_be)
}

fn reject(
    route: &Route,
    connection: &ClientConnection,
    error_format: ErrorFormat,
    problem: &Problem,
) -> Response<Body> {
    route.counts.rejected(problem.code());
    let mut response = error_format.render(problem, route.docs.as_ref()).map(Body::from);
    let rejected = ResponseInfo { operation: None, by: ResponseSource::Rejection };
    response.extensions_mut().insert(rejected);
    if problem.code() == Code::MalformedRequest {
        close(&mut response, connection);
    }
    response
}

/// Adds the CORS headers to a rejection; a preflight is not answered by one.
async fn with_cors(
    route: &Route,
    request: Request<Incoming>,
    rejected: Response<Body>,
) -> Response<Body> {
    match route.cors.as_ref().filter(|_| request.method() != Method::OPTIONS) {
        Some(cors) => cors::answer(cors, request, |_| std::future::ready(rejected)).await,
        None => rejected,
    }
}

fn draining() -> Problem {
    Problem::new(Code::Draining, "This server is shutting down; another one may answer.")
        .retry_after(Duration::from_secs(1))
}

fn auth_unavailable() -> Problem {
    let detail = format!("Whether this request is allowed cannot be told now. {NOTHING}");
    Problem::new(Code::AuthUnavailable, detail).retry_after(Duration::from_secs(1))
}

/// Marks the last response of a connection. HTTP/2 uses a frame for this, and a connection that
/// leaves HTTP has no further responses.
fn close(response: &mut Response<Body>, connection: &ClientConnection) {
    if connection.peer.http2 || response.status() == StatusCode::SWITCHING_PROTOCOLS {
        return;
    }
    response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
}

/// A client's body that fails if the client sends nothing for too long, or, if it is buffered, is
/// slower than [`PACE`] overall, or if it ends early: h2 takes `RST_STREAM` with `NO_ERROR` for a
/// regular end. It drops trailers whose names are reserved for the gateway, for heads or for auth
/// responses.
pub(crate) struct PacedBody {
    body: Incoming,
    idle_timeout: Duration,
    paced: bool,
    http2: bool,
    auth: Option<Arc<Auth>>,
    route: Option<Arc<Route>>,
    received: usize,
    /// Total time for which it waited for the client.
    waited: Duration,
    /// Start and timeout of the current wait for the client. Time in which the body is not read
    /// does not count.
    waiting: Option<(Instant, Pin<Box<Sleep>>)>,
}

/// Minimum rate of a buffered body, in bytes a second. The body's memory is reserved while it is
/// read, and a client that sends a byte now and then would hold it for ever.
const PACE: usize = 8 * 1024;

impl PacedBody {
    /// Creates a body that fails after `idle_timeout` without a byte, and with `paced` also below
    /// the minimum rate.
    pub(crate) const fn new(body: Incoming, idle_timeout: Duration, paced: bool) -> Self {
        let waited = Duration::ZERO;
        let (http2, auth, route) = (false, None, None);
        Self { body, idle_timeout, paced, http2, auth, route, received: 0, waited, waiting: None }
    }

    /// Returns the time that the client may send nothing now.
    fn idle(&self) -> Duration {
        if !self.paced {
            return self.idle_timeout;
        }
        let due = Duration::from_secs_f64(self.received as f64 / PACE as f64);
        self.idle_timeout.min((self.idle_timeout + due).saturating_sub(self.waited))
    }
}

impl http_body::Body for PacedBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let this = &mut *self;
        if let Poll::Ready(mut frame) = Pin::new(&mut this.body).poll_frame(cx) {
            if let Some((since, _)) = this.waiting.take() {
                this.waited += since.elapsed();
            }
            if let Some(Ok(frame)) = &mut frame {
                this.received += frame.data_ref().map_or(0, Bytes::len);
                if let Some(trailers) = frame.trailers_mut() {
                    match &this.route {
                        Some(route) => route.names.drop_from_trailers(trailers),
                        None => drop_own(trailers, false),
                    }
                    if let Some(auth) = &this.auth {
                        auth.drop_given(trailers);
                    }
                }
            }
            if frame.is_none() && this.http2 && !this.body.is_end_stream() {
                return Poll::Ready(Some(Err(UploadError::Broken.into())));
            }
            return Poll::Ready(frame.map(|frame| frame.map_err(Into::into)));
        }
        let idle_timeout = this.idle();
        let begin = || (Instant::now(), Box::pin(sleep(idle_timeout)));
        let (_, timer) = this.waiting.get_or_insert_with(begin);
        if timer.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Some(Err(UploadError::Slow.into_error())));
        }
        Poll::Pending
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
