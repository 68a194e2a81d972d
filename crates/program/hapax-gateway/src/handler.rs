//! Service in front of the layer: checks of a connection and its requests before anything is
//! claimed.

use std::sync::Arc;
use std::time::Duration;

use hapax_http::Body;
use hapax_http::error_format::ErrorFormat;
use hapax_http::header::other_spelling;
use hapax_http::problem::{Code, Problem, sentence};
use hapax_http::server::{ResponseInfo, ResponseSource};
use hapax_proxy::headers::set_host;
use hapax_proxy::{
    ClientRequest, PacedBody, Peer, ProxyHandler, Shutdown, ShutdownPhase, guard::HeadError,
};
use http::header::{HeaderMap, HeaderName};
use http::request::Parts;
use http::{Method, Request, Response, Version};
use hyper::body::Incoming;
use tokio::time::timeout;
use tower_service::Service;

use crate::access::AccessLog;
use crate::auth::{Auth, AuthRejection};
use crate::context::RequestContext;
use crate::cors;
use crate::proxy::spoofing::overriding;
use crate::snapshot::{ConfigSnapshot, CurrentConfig, Route, RouteService};
use crate::tokens::TokenRejection;

/// Advice about this attempt alone: an earlier one with the same key may have executed.
const NOTHING: &str = "This attempt executed nothing: retry with the same key.";

/// Handler of requests, shared by all connections.
#[derive(Debug)]
pub(crate) struct RequestHandler {
    pub(crate) current: Arc<CurrentConfig>,
    pub(crate) shutdown: Shutdown,
    pub(crate) stall: Duration,
    /// Access log, with a line for each request.
    pub(crate) access: Option<Arc<AccessLog>>,
}

impl ProxyHandler for RequestHandler {
    type Body = Body;

    async fn answer(self: Arc<Self>, request: ClientRequest) -> Response<Body> {
        let ClientRequest { mut request, rejection, peer, switch } = request;
        let mut entry = self.access.as_ref().map(|log| log.begin(&mut request));
        let away = self.rejection(rejection);
        let snapshot = self.current.load_full();
        let found = snapshot.route(request.uri().path(), request.method()).cloned();
        if let Some(entry) = &mut entry {
            entry.name_route(found.as_deref().ok(), request.headers());
        }
        let response = match found {
            Ok(route) => {
                // A preflight that is rejected gets no CORS response.
                let is_answered = away.is_none() || request.method() != Method::OPTIONS;
                let cors = route.cors.clone().filter(|_| is_answered);
                let context = RequestContext { route, peer, switch, shadow: None };
                // Boxed: the future is large, and would make each caller's large.
                let answer = |request| Box::pin(self.serve(away, snapshot, context, request));
                match cors {
                    Some(cors) => Box::pin(cors::answer(&cors, request, answer)).await,
                    None => answer(request).await,
                }
            }
            Err(ambiguous) => {
                let error_format = ErrorFormat::of(request.headers());
                let rejected =
                    reject(snapshot.rest(), peer, error_format, &away.unwrap_or(ambiguous));
                with_cors(snapshot.rest(), request, rejected).await
            }
        };
        if let Some(entry) = entry {
            entry.end(&response);
        }
        response
    }

    async fn overloaded(
        self: Arc<Self>,
        peer: Peer,
        mut request: Request<Incoming>,
    ) -> Response<Body> {
        let mut entry = self.access.as_ref().map(|log| log.begin(&mut request));
        let detail = format!("Too many requests are in progress. {NOTHING}");
        let problem = Problem::new(Code::Overloaded, detail).retry_after(Duration::from_secs(1));
        let snapshot = self.current.load_full();
        let found = snapshot.route(request.uri().path(), request.method());
        if let Some(entry) = &mut entry {
            entry.name_route(found.as_deref().ok().map(|route| &**route), request.headers());
        }
        let route = found.unwrap_or(snapshot.rest());
        let rejected = reject(route, peer, ErrorFormat::of(request.headers()), &problem);
        let response = with_cors(route, request, rejected).await;
        if let Some(entry) = entry {
            entry.end(&response);
        }
        response
    }
}

impl RequestHandler {
    async fn serve(
        &self,
        away: Option<Problem>,
        snapshot: Arc<ConfigSnapshot>,
        context: RequestContext,
        request: Request<Incoming>,
    ) -> Response<Body> {
        let error_format = ErrorFormat::of(request.headers());
        let answered = match away {
            Some(problem) => Err(problem),
            None => self.forward(&snapshot, &context, request).await,
        };
        match answered {
            Ok(response) => response,
            Err(rejected) => reject(&context.route, context.peer, error_format, &rejected),
        }
    }

    async fn forward(
        &self,
        snapshot: &ConfigSnapshot,
        context: &RequestContext,
        request: Request<Incoming>,
    ) -> Result<Response<Body>, Problem> {
        let RequestContext { route, peer, .. } = context;
        let (mut parts, body) = self.admit(snapshot, context, request)?.into_parts();
        if let Some(auth) = snapshot.auth() {
            auth.drop_given(&mut parts.headers);
            if may_be_protected(route, &parts) {
                match auth.authorize(&parts, *peer).await {
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
        let named = name_caller(snapshot, route, &mut parts).await;
        parts.extensions.insert(context.clone());
        let request = Request::from_parts(parts, body);
        if let Err(problem) = named {
            return match &route.service {
                RouteService::Observed(observed) => {
                    Ok(observed.forward_rejected(problem.code(), request).await)
                }
                _ => Err(problem),
            };
        }
        Ok(match &route.service {
            RouteService::Protected { layered, .. } => {
                // A clone is ready: the layer does not wait in `poll_ready`.
                let Ok(response) = layered.clone().call(request).await;
                response
            }
            RouteService::Passed(proxy) => proxy.forward(request, false).await,
            RouteService::Observed(observed) => observed.call(request).await,
        })
    }

    fn is_ending(&self) -> bool {
        self.shutdown.phase() >= ShutdownPhase::Draining
    }

    /// Returns the reason to reject a request: an ambiguous head, or the drain.
    fn rejection(&self, rejection: Option<HeadError>) -> Option<Problem> {
        if let Some(rejection) = rejection {
            return Some(Problem::new(Code::MalformedRequest, sentence(&rejection.to_string())));
        }
        self.is_ending().then(draining)
    }

    /// Removes from a request the parts that the layer and the upstream could read differently.
    fn admit(
        &self,
        snapshot: &ConfigSnapshot,
        context: &RequestContext,
        request: Request<Incoming>,
    ) -> Result<Request<Body>, Problem> {
        let RequestContext { route, peer, .. } = context;
        let (mut parts, incoming) = request.into_parts();
        set_host(&mut parts.headers, &parts.uri);
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
        route.names.drop_spoofed(&mut parts.headers, *peer);
        // Bodies that the layer buffers must arrive at a minimum rate; all others stream.
        let kept = may_be_protected(route, &parts);
        let http2 = parts.version == Version::HTTP_2;
        let (auth, route) = (snapshot.auth().cloned(), Arc::clone(route));
        let clean =
            move |trailers: &mut HeaderMap| clean_trailers(trailers, &route, auth.as_deref());
        let body = PacedBody::new(incoming, self.stall, kept, http2, clean);
        Ok(Request::from_parts(parts, Body::new(body)))
    }
}

/// Adds the claims by which the token of a request names its caller, once it is verified.
async fn name_caller(
    snapshot: &ConfigSnapshot,
    route: &Route,
    parts: &mut Parts,
) -> Result<(), Problem> {
    let Some(tokens) = snapshot.tokens().filter(|_| !route.claims.is_empty()) else {
        return Ok(());
    };
    let is_concerned = route.policy().is_some_and(|policy| {
        let options = policy.options();
        options.methods.contains(&parts.method) && parts.headers.contains_key(&options.key_header)
    });
    if !is_concerned {
        return Ok(());
    }
    let claims = tokens.claims(&parts.headers, &route.claims);
    let claims = match &route.service {
        // Observation delays no request: keys that would have to be fetched first are not there.
        RouteService::Observed(_) => {
            timeout(Duration::ZERO, claims).await.unwrap_or(Err(TokenRejection::Unavailable))
        }
        _ => claims.await,
    };
    match claims {
        Ok(claims) => {
            if let Some(claims) = claims {
                parts.extensions.insert(claims);
            }
            Ok(())
        }
        Err(TokenRejection::Ambiguous) => {
            let detail = "The request must have one `Authorization` header, because its bearer token names the caller.";
            Err(Problem::new(Code::MalformedRequest, detail))
        }
        Err(TokenRejection::Invalid(reason)) => {
            let detail = format!(
                "The bearer token, which names the caller of a request with an idempotency key, is not valid: {reason}. \
                 Retry with a new token and the same key."
            );
            Err(Problem::new(Code::InvalidToken, detail))
        }
        Err(TokenRejection::Unavailable) => {
            let detail = format!(
                "The keys of the token's issuer could not be read, so it is unknown who sends this request. {NOTHING}"
            );
            let problem = Problem::new(Code::AuthUnavailable, detail);
            Err(problem.retry_after(Duration::from_secs(1)))
        }
    }
}

/// Removes trailers whose names are reserved for the gateway, for heads or for auth responses.
fn clean_trailers(trailers: &mut HeaderMap, route: &Route, auth: Option<&Auth>) {
    route.names.drop_from_trailers(trailers);
    if let Some(auth) = auth {
        auth.drop_given(trailers);
    }
}

/// Returns whether the layer could claim or replay for this request; it does so for no other.
fn may_be_protected(route: &Route, parts: &Parts) -> bool {
    parts.headers.contains_key(&route.key_header) && protects(route, &parts.method)
}

fn protects(route: &Route, method: &Method) -> bool {
    matches!(&route.service, RouteService::Protected { methods, .. } if methods.contains(method))
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
    peer: Peer,
    error_format: ErrorFormat,
    problem: &Problem,
) -> Response<Body> {
    route.counts.rejected(problem.code());
    let mut response = error_format.render(problem, route.docs.as_ref()).map(Body::from);
    let rejected = ResponseInfo { operation: None, by: ResponseSource::Rejection };
    response.extensions_mut().insert(rejected);
    if problem.code() == Code::MalformedRequest {
        peer.close(&mut response);
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
        // Boxed: it is large, and few requests need it.
        Some(cors) => Box::pin(cors::answer(cors, request, |_| std::future::ready(rejected))).await,
        None => rejected,
    }
}

fn draining() -> Problem {
    Problem::new(Code::Draining, "This server is shutting down; another one may answer.")
        .retry_after(Duration::from_secs(1))
}

fn auth_unavailable() -> Problem {
    let detail = format!(
        "The auth service gave no usable response, so it is unknown whether this request is allowed. {NOTHING}"
    );
    Problem::new(Code::AuthUnavailable, detail).retry_after(Duration::from_secs(1))
}
