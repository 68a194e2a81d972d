//! The service in front of the layer: what concerns the connection, before anything is claimed.

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

/// Of this attempt alone: an earlier one with the same key may have been executed.
const NOTHING: &str = "This attempt executed nothing: ask again with the same key.";

/// One for all connections.
#[derive(Debug)]
pub(crate) struct RequestHandler {
    pub(crate) current: Arc<CurrentConfig>,
    pub(crate) shutdown: Shutdown,
    pub(crate) stall: Duration,
    /// Where each request has a line.
    pub(crate) access: Option<Arc<AccessLog>>,
}

/// What holds for a request, from its beginning to its end.
struct RequestContext {
    snapshot: Arc<ConfigSnapshot>,
    route: Arc<Route>,
    connection: Arc<ClientConnection>,
    /// How it is refused.
    error_format: ErrorFormat,
}

/// The connection that a request came by.
#[derive(Debug)]
pub(crate) struct ClientConnection {
    /// What its guard says of HTTP/1 requests.
    pub(crate) heads: Option<Arc<GuardState>>,
    pub(crate) peer: Peer,
    /// Where it can leave HTTP.
    pub(crate) switch: Option<Switch>,
}

impl RequestHandler {
    /// Answers a request that came by `link`.
    pub(crate) async fn answer(
        self: Arc<Self>,
        connection: Arc<ClientConnection>,
        request: Request<Incoming>,
    ) -> Response<Body> {
        let active_requests = self.shutdown.begin_request();
        let mut entry = self.access.as_ref().map(|log| log.begin(&request));
        let (mut parts, body) = request.into_parts();
        // First of all and for every request: the guard counts them.
        let away = self.rejection(&connection, &mut parts);
        let request = Request::from_parts(parts, body);
        let snapshot = self.current.now();
        let error_format = ErrorFormat::of(request.headers());
        let found = snapshot.route(request.uri().path(), request.method()).cloned();
        name_route(&mut entry, found.as_ref().unwrap_or(snapshot.rest()));
        let mut response = match found {
            Ok(route) => {
                // A preflight that is turned away is not answered as one.
                let is_answered = away.is_none() || request.method() != Method::OPTIONS;
                let cors = route.cors.clone().filter(|_| is_answered);
                let context = RequestContext {
                    snapshot,
                    route,
                    connection: Arc::clone(&connection),
                    error_format,
                };
                // Boxed: it is large, and each caller of it would be.
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

    /// Answers a request for which there was no place.
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
                match auth.ask(&parts, connection.peer).await {
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
                    // The question may have been cut off.
                    Err(AuthRejection::Unavailable) if self.is_ending() => return Err(draining()),
                    Err(AuthRejection::Unavailable) => return Err(auth_unavailable()),
                }
            }
        }
        parts.extensions.insert(connection.peer);
        if let Some(switch) = &connection.switch {
            parts.extensions.insert(switch.clone());
        }
        // Clones are ready: neither the layer nor the proxy has anything to wait for.
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

    /// Why no request is taken from this connection, or none at all. What passes has the form that
    /// HTTP/1.1 gives it.
    fn rejection(&self, connection: &ClientConnection, parts: &mut Parts) -> Option<Problem> {
        let refusal = match &connection.heads {
            Some(heads) => heads.refusal(),
            None => http2::settle(parts).err(),
        };
        if let Some(refusal) = refusal {
            return Some(Problem::new(Code::MalformedRequest, sentence(&refusal.to_string())));
        }
        self.is_ending().then(draining)
    }

    /// What is left of a request that may go on: what the layer and the upstream see alike.
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
        // Dropped, such a field would leave a request without a key, or of another caller.
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
        // What the layer keeps whole in memory must come at a pace; everything else streams.
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

/// Whether the layer could claim or replay for this request: it does so for no other.
fn may_be_protected(route: &Route, parts: &Parts) -> bool {
    parts.headers.contains_key(&route.key_header) && protects(route, &parts.method)
}

fn protects(route: &Route, method: &Method) -> bool {
    matches!(&route.service, snapshot::RouteService::Protected { methods, .. } if methods.contains(method))
}

/// Whether a request that is not protected asks its service, by a header, to take it for one that is.
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

/// A refusal as pages may read it; preflights are not answered by one.
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

/// Says that it is the connection's last answer. HTTP/2 says so by a frame, and a connection that
/// leaves HTTP has no next one.
fn close(response: &mut Response<Body>, connection: &ClientConnection) {
    if connection.peer.http2 || response.status() == StatusCode::SWITCHING_PROTOCOLS {
        return;
    }
    response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
}

/// A client's body that fails when its client is silent for too long, or, where it takes up memory,
/// slower than [`PACE`] on the whole, and where it ends before its end: to the library, `RST_STREAM` with
/// `NO_ERROR` ends a body well. Of its trailers it hands on none that are named like ours, or like what
/// only a head or an auth answer may say.
pub(crate) struct PacedBody {
    body: Incoming,
    idle_timeout: Duration,
    paced: bool,
    http2: bool,
    auth: Option<Arc<Auth>>,
    route: Option<Arc<Route>>,
    received: usize,
    /// How long it waited for the client, in all.
    waited: Duration,
    /// Since when, and until when, it waits for the client now. Whether the client could have sent
    /// more while nobody read is not for it to answer for.
    waiting: Option<(Instant, Pin<Box<Sleep>>)>,
}

/// Bytes a second. While a body is read, its whole share of memory is taken; a client that sends
/// a byte now and then would hold it for ever.
const PACE: usize = 8 * 1024;

impl PacedBody {
    /// Fails after a silence of `patience`; `paced`: or where it is too slow.
    pub(crate) const fn new(body: Incoming, idle_timeout: Duration, paced: bool) -> Self {
        let waited = Duration::ZERO;
        let (http2, auth, route) = (false, None, None);
        Self { body, idle_timeout, paced, http2, auth, route, received: 0, waited, waiting: None }
    }

    /// How long it may be silent now.
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
