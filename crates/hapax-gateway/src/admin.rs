//! The operators' listener.
//!
//! 1. `/healthz`, `/readyz` and `/metrics` need no token. Everything else does, if there is one.
//! 2. Without a token it is on loopback, where any web page in a browser on the same machine can
//!    send requests. Such a page cannot forge `Host`, nor send JSON elsewhere than home without being
//!    asked first: so without a token `Host` must name loopback (against DNS rebinding), and what
//!    changes something must be JSON and must not come from another origin.

mod api;
mod listener;

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::Router;
use axum::extract::{DefaultBodyLimit, Request, State};
use axum::http::header::{
    AUTHORIZATION, CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, HOST, HeaderMap,
    HeaderValue, ORIGIN, WWW_AUTHENTICATE, X_CONTENT_TYPE_OPTIONS,
};
use axum::http::{Method, StatusCode};
use axum::middleware::{Next, from_fn_with_state, map_response};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::config::AdminToken;
use crate::keys::Keys;
use crate::live::Current;
use crate::metrics::{Gauges, Metrics};
use crate::store::Opened;
use crate::work::{Phase, Work};

/// What is here beside the API: method, path, what it is.
const PROBES: [(&str, &str, &str); 3] = [
    ("GET", "/healthz", "whether this process answers"),
    ("GET", "/readyz", "whether its store answers and it is not draining"),
    ("GET", "/metrics", "for Prometheus"),
];

/// The largest body of a request: a response of a mebibyte as base64 in JSON.
const MAX_BODY: usize = 2 << 20;

/// What the admin listener knows.
#[derive(Debug)]
pub(crate) struct Admin {
    pub(crate) keys: Keys,
    pub(crate) engine: hapax::Idempotency,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) work: Work,
    pub(crate) token: Option<AdminToken>,
    /// What holds now: it says which headers name callers.
    pub(crate) current: Arc<Current>,
    /// The store, for what it counts.
    pub(crate) opened: Opened,
    /// Whether the store answered when last asked.
    pub(crate) store_up: AtomicBool,
}

/// The admin listener at work, from the moment that the gateway listens.
///
/// Until [`open`](Self::open) it answers probes alone: the process is there and not ready.
#[derive(Debug)]
pub(crate) struct Serving {
    task: JoinHandle<()>,
    app: watch::Sender<Router>,
}

impl Serving {
    /// Begins to accept connections, until `work` closes. The caller aborts the task, or awaits it.
    pub(crate) fn begin(listener: TcpListener, work: Work) -> Self {
        let (app, current) = watch::channel(before_the_store());
        Self { task: tokio::spawn(listener::serve(listener, current, work)), app }
    }

    /// Serves everything from the next request on, on connections that are there as well.
    pub(crate) fn open(self, admin: Arc<Admin>) -> JoinHandle<()> {
        drop(self.app.send_replace(app(admin)));
        self.task
    }

    pub(crate) fn abort(&self) {
        self.task.abort();
    }
}

/// The routes while there is no store yet.
fn before_the_store() -> Router {
    let away = (StatusCode::SERVICE_UNAVAILABLE, "the store was not reached yet\n");
    Router::new()
        .route("/healthz", get(|| async { "ok\n" }))
        .fallback(move || async move { away })
        .layer(map_response(async |response: Response| secured(response)))
}

/// The routes of a gateway whose store is open.
fn app(admin: Arc<Admin>) -> Router {
    let guarded = from_fn_with_state(Arc::clone(&admin), guard);
    Router::new()
        .route("/", get(|| async { index() }))
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(ready))
        .route("/metrics", get(metrics))
        .nest("/api", api::routes())
        .route("/api/", get(api::index))
        .layer(guarded)
        .layer(DefaultBodyLimit::max(MAX_BODY))
        .with_state(admin)
}

fn index() -> String {
    let lines = PROBES.iter().chain(&api::INDEX);
    lines.fold("hapax gateway\n\n".to_owned(), |text, (method, path, about)| {
        text + &format!("{method:<4} {path:<24} {about}\n")
    })
}

async fn ready(State(admin): State<Arc<Admin>>) -> Response {
    if admin.work.phase() > Phase::Serving {
        return (StatusCode::SERVICE_UNAVAILABLE, "draining\n").into_response();
    }
    let up = admin.keys.store_answers().await;
    admin.store_up.store(up, Ordering::Relaxed);
    if !up {
        (StatusCode::SERVICE_UNAVAILABLE, "the store does not answer\n").into_response()
    } else if !admin.metrics.calls.are_written() {
        // Nor would it take them from another gateway, and what has no key is still served.
        "ready, but the store did not take what was last written\n".into_response()
    } else if admin.metrics.auth_is_up() {
        "ready\n".into_response()
    } else {
        // Another gateway would ask the same URL, and what needs no asking is still served.
        "ready, but the auth URL did not answer when last asked\n".into_response()
    }
}

async fn metrics(State(admin): State<Arc<Admin>>) -> Response {
    let gauges = Gauges {
        engine: admin.engine.stats(),
        requests: admin.work.in_hand(),
        store_up: admin.keys.store_answers().await,
    };
    admin.store_up.store(gauges.store_up, Ordering::Relaxed);
    let kind = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    ([(CONTENT_TYPE, kind)], admin.metrics.render(gauges, &admin.opened)).into_response()
}

async fn guard(State(admin): State<Arc<Admin>>, request: Request, next: Next) -> Response {
    let open = matches!(request.uri().path(), "/healthz" | "/readyz" | "/metrics");
    let refused =
        if open { Ok(()) } else { check(admin.token.as_ref().map(AdminToken::as_str), &request) };
    secured(match refused {
        Ok(()) => next.run(request).await,
        Err(refused) => refused.into_response(),
    })
}

/// Adds the fields that keep a browser from storing or embedding a response.
fn secured(mut response: Response) -> Response {
    let headers = response.headers_mut();
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(CONTENT_SECURITY_POLICY, HeaderValue::from_static("default-src 'none'"));
    response
}

/// Why a request is not for this listener.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Refused {
    Token,
    Host,
    Origin,
    NotJson,
}

impl IntoResponse for Refused {
    fn into_response(self) -> Response {
        let (status, code, reason) = match self {
            Self::Token => (StatusCode::UNAUTHORIZED, "token", "a valid bearer token is needed"),
            Self::Host => (StatusCode::FORBIDDEN, "host", "Host does not name this listener"),
            Self::Origin => (StatusCode::FORBIDDEN, "origin", "the request is another site's"),
            Self::NotJson => (
                StatusCode::UNSUPPORTED_MEDIA_TYPE,
                "not-json",
                "the content type must be application/json",
            ),
        };
        let mut response = api::error(status, code, reason);
        if self == Self::Token {
            response.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

fn check(token: Option<&str>, request: &Request) -> Result<(), Refused> {
    let headers = request.headers();
    match token {
        Some(token) if !shows(headers, token) => return Err(Refused::Token),
        None if !names_loopback(headers) => return Err(Refused::Host),
        _ => {}
    }
    if matches!(*request.method(), Method::GET | Method::HEAD) {
        return Ok(());
    }
    if let Some(origin) = headers.get(ORIGIN) {
        let home = headers.get(HOST).map(|host| [b"http://", host.as_bytes()].concat());
        if home.as_deref() != Some(origin.as_bytes()) {
            return Err(Refused::Origin);
        }
    }
    let kind = headers.get(CONTENT_TYPE).map_or(&b""[..], HeaderValue::as_bytes);
    let media = kind.split(|byte| *byte == b';').next().unwrap_or_default();
    if media.trim_ascii().eq_ignore_ascii_case(b"application/json") {
        Ok(())
    } else {
        Err(Refused::NotJson)
    }
}

fn shows(headers: &HeaderMap, token: &str) -> bool {
    let shown = headers.get(AUTHORIZATION).map_or(&b""[..], HeaderValue::as_bytes);
    let (scheme, shown) = shown.split_at_checked(7).unwrap_or((b"", b""));
    let same_length = shown.len() == token.len();
    // Looks at every byte, so that the time tells nothing of where the first wrong one is.
    let difference = shown.iter().zip(token.bytes()).fold(0, |seen, (a, b)| seen | (a ^ b));
    scheme.eq_ignore_ascii_case(b"bearer ") && same_length && difference == 0
}

/// Whether `Host` is `localhost` or an address of loopback, with any port.
fn names_loopback(headers: &HeaderMap) -> bool {
    let Some(Ok(host)) = headers.get(HOST).map(HeaderValue::to_str) else { return false };
    if let Ok(address) = host.parse::<SocketAddr>() {
        return address.ip().is_loopback();
    }
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => host,
    };
    let bare = name.trim_start_matches('[').trim_end_matches(']');
    name.eq_ignore_ascii_case("localhost")
        || bare.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

#[cfg(test)]
mod tests {
    use axum::body::Body;

    use super::*;

    fn request(method: &str, fields: &[(&str, &str)]) -> Request {
        let mut builder = axum::http::Request::builder().method(method).uri("/api/stats");
        for (name, value) in fields {
            builder = builder.header(*name, *value);
        }
        builder.body(Body::empty()).unwrap()
    }

    fn seen(token: Option<&str>, method: &str, fields: &[(&str, &str)]) -> Result<(), Refused> {
        check(token, &request(method, fields))
    }

    #[test]
    fn without_a_token_the_host_must_be_loopback() {
        for host in ["localhost", "localhost:9090", "127.0.0.1:1", "127.8.8.8", "[::1]:9", "[::1]"]
        {
            assert_eq!(seen(None, "GET", &[("host", host)]), Ok(()), "{host}");
        }
        for host in ["evil.example", "localhost.evil.example:80", "10.0.0.1:9090", "", "[::2]:1"] {
            assert_eq!(seen(None, "GET", &[("host", host)]), Err(Refused::Host), "{host}");
        }
        assert_eq!(seen(None, "GET", &[]), Err(Refused::Host));
    }

    #[test]
    fn a_token_must_be_shown_whole() {
        let with = |value| seen(Some("secret"), "GET", &[("authorization", value)]);
        assert_eq!(with("Bearer secret"), Ok(()));
        assert_eq!(with("bearer secret"), Ok(()));
        for bad in ["Bearer secre", "Bearer secret1", "Basic secret", "secret", "", "Bearer "] {
            assert_eq!(with(bad), Err(Refused::Token), "{bad}");
        }
    }

    #[test]
    fn what_changes_something_is_json_from_here() {
        let host = ("host", "localhost:9090");
        let json = ("content-type", "application/json; charset=utf-8");
        assert_eq!(seen(None, "POST", &[host, json]), Ok(()));
        let home = ("origin", "http://localhost:9090");
        assert_eq!(seen(None, "POST", &[host, json, home]), Ok(()));
        for origin in ["http://evil.example", "null", "https://localhost:9090"] {
            let fields = [host, json, ("origin", origin)];
            assert_eq!(seen(None, "POST", &fields), Err(Refused::Origin));
        }
        let form = ("content-type", "text/plain");
        assert_eq!(seen(None, "POST", &[host, form]), Err(Refused::NotJson));
        assert_eq!(seen(None, "POST", &[host]), Err(Refused::NotJson));
    }
}
