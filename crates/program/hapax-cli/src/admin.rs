//! The operators' listener of `hapax relay` and `hapax consume`: metrics and health. It has no contents
//! of messages, and needs no token.

use std::convert::Infallible;
use std::fmt::Write as _;
use std::net::SocketAddr;
use std::time::Duration;

use hapax_operators::supervised;
use http::{Method, Response, StatusCode};
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::TcpListener;

use crate::exit::CliError;

/// Time for a request.
const REQUEST: Duration = Duration::from_secs(10);

/// The operators' address, or none.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AdminAddr(Option<SocketAddr>);

/// Parses an address, or `off`.
pub(crate) fn admin(text: &str) -> Result<AdminAddr, &'static str> {
    match text {
        "off" => Ok(AdminAddr(None)),
        text => crate::addr(text).map(|addr| AdminAddr(Some(addr))),
    }
}

impl AdminAddr {
    /// Listens on the address, if there is one.
    pub(crate) async fn bind(self) -> Result<Option<TcpListener>, CliError> {
        let Some(addr) = self.0 else { return Ok(None) };
        let listener = TcpListener::bind(addr).await.map_err(|error| {
            CliError::unavailable(format!("--admin: cannot listen on {addr}: {error}"))
        })?;
        Ok(Some(listener))
    }
}

/// A metric. The name has the prefix `hapax_` on the wire.
#[derive(Debug)]
pub(crate) struct Metric {
    name: &'static str,
    /// Labels with their braces. Metrics with one name follow each other.
    labels: &'static str,
    kind: &'static str,
    help: &'static str,
    value: f64,
}

impl Metric {
    pub(crate) const fn counter(name: &'static str, help: &'static str, value: f64) -> Self {
        Self { name, labels: "", kind: "counter", help, value }
    }

    pub(crate) const fn gauge(name: &'static str, help: &'static str, value: f64) -> Self {
        Self { name, labels: "", kind: "gauge", help, value }
    }

    pub(crate) const fn labelled(mut self, labels: &'static str) -> Self {
        self.labels = labels;
        self
    }
}

/// A process that operators observe.
pub(crate) trait Observed: Clone + Send + 'static {
    fn metrics(&self) -> Vec<Metric>;

    /// Returns the reason for which it is not ready, as a line.
    fn unready(&self) -> Option<String>;
}

/// Serves the listener. Does not end.
pub(crate) async fn serve(listener: TcpListener, observed: impl Observed + Sync) {
    supervised("the operators' listener", || accept(&listener, &observed)).await;
}

async fn accept(listener: &TcpListener, observed: &impl Observed) {
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(%error, "the operators' listener did not accept a connection");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let observed = observed.clone();
        tokio::spawn(async move {
            let service = service_fn(move |request: http::Request<Incoming>| {
                let response = respond(request.method(), request.uri().path(), &observed);
                async move { Ok::<_, Infallible>(response) }
            });
            let mut server = hyper::server::conn::http1::Builder::new();
            server.timer(TokioTimer::new()).header_read_timeout(REQUEST).keep_alive(false);
            let _ = tokio::time::timeout(
                REQUEST,
                server.serve_connection(TokioIo::new(stream), service),
            )
            .await;
        });
    }
}

fn respond(method: &Method, path: &str, observed: &impl Observed) -> Response<Full<Bytes>> {
    let (status, text) = match (method, path) {
        (&(Method::GET | Method::HEAD), "/metrics") => (StatusCode::OK, text(observed.metrics())),
        (&(Method::GET | Method::HEAD), "/healthz") => (StatusCode::OK, "ok\n".to_owned()),
        (&(Method::GET | Method::HEAD), "/readyz") => match observed.unready() {
            Some(text) => (StatusCode::SERVICE_UNAVAILABLE, text),
            None => (StatusCode::OK, "ready\n".to_owned()),
        },
        _ => (StatusCode::NOT_FOUND, "expected /metrics, /healthz or /readyz\n".to_owned()),
    };
    let mut response = Response::new(Full::new(text.into()));
    *response.status_mut() = status;
    let text = http::HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    response.headers_mut().insert(http::header::CONTENT_TYPE, text);
    response
}

/// Returns metrics in the text format of Prometheus.
fn text(metrics: Vec<Metric>) -> String {
    let (mut out, mut last) = (String::new(), "");
    for Metric { name, labels, kind, help, value } in metrics {
        // Writing to a string does not fail.
        if name != last {
            let _ = write!(out, "# HELP hapax_{name} {help}\n# TYPE hapax_{name} {kind}\n");
        }
        let _ = writeln!(out, "hapax_{name}{labels} {value}");
        last = name;
    }
    out
}
