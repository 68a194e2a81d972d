//! `hapax relay`.

mod sink;

use std::fmt::Write as _;
use std::net::SocketAddr;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use hapax_core::{Idempotency, Store};
use hapax_gateway::{ByteSize, LogFormat, StoreOpener, StoreUrl, UrlText};
use hapax_messages::{Outbox as _, OutboxError, Relay, RelayLimits, RelayMonitor, RelayStats};
use hapax_postgres_messages::PgOutbox;
use http::{Method, Response, StatusCode};
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};

use crate::exit::{CliError, of};
use crate::keys::TIMEOUT;
use crate::messages::{HiddenUrl, connection};

/// Time for a request of the operators' listener.
const REQUEST: Duration = Duration::from_secs(10);

/// Age of the oldest message, and of what is known of it, from which on the relay is not ready.
const LATE: Duration = Duration::from_secs(60);

/// Publish the messages of an outbox in PostgreSQL
///
/// Each message is published at least once, under one id, and deleted once the broker or endpoint
/// has acknowledged it. Messages with one order key are published in the order in which they were
/// committed. Several relays of one outbox share its shards: when one ends, the others take over
/// its shards.
#[derive(Debug, Args)]
pub(crate) struct RelayArgs {
    /// The database with the outbox: postgres://USER@HOST/DB
    #[arg(long = "from", value_name = "URL", env = "HAPAX_DATABASE", hide_env_values = true)]
    from: HiddenUrl,
    /// The broker: nats://HOST or tls://HOST; or an endpoint of webhooks: https://HOST/PATH or
    /// http://HOST/PATH
    #[arg(long, value_name = "URL", env = "HAPAX_BROKER", hide_env_values = true)]
    to: HiddenUrl,
    /// For an endpoint: file of the signing secrets, one a line, each whsec_ and base64 [default:
    /// messages are not signed]
    #[arg(long, value_name = "PATH", env = "HAPAX_SIGNING_SECRET_FILE")]
    signing_secret_file: Option<PathBuf>,
    /// For an endpoint: the file of the root certificates to trust, in PEM [default: the system's]
    #[arg(long, value_name = "PATH")]
    to_ca: Option<PathBuf>,
    /// The store of the leases of the shards, the same for all relays of the outbox. It may have those
    /// of several outboxes. A file is for one relay: relays that have a file each publish messages
    /// repeatedly and out of order, and nothing detects that [default: the database of --from]
    #[arg(long, value_name = "URL", env = "HAPAX_STORE", hide_env_values = true)]
    store: Option<UrlText<StoreUrl>>,
    /// The file of the store's secrets [default: PATH.secret beside a file: store, else none]
    #[arg(long, value_name = "PATH", env = "HAPAX_SECRET_FILE")]
    secret_file: Option<PathBuf>,
    /// Address that serves /metrics, /healthz and /readyz, or off
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:9091", value_parser = admin)]
    admin: AdminAddr,
    /// Largest number of messages that are sent and not acknowledged; to an endpoint, also of
    /// connections [default: 256; to an endpoint 32]
    #[arg(long, value_name = "N")]
    in_flight: Option<NonZeroUsize>,
    /// Bytes of messages in memory; one message may exceed them
    #[arg(long, value_name = "SIZE", default_value = "64MiB")]
    max_buffered_bytes: ByteSize,
    /// Time for the broker or endpoint to acknowledge a message
    #[arg(long, value_name = "DUR", default_value = "10s", value_parser = duration)]
    publish_timeout: Duration,
    /// Lease of a shard: time after which other relays take over the shards of one that died
    #[arg(long, value_name = "DUR", default_value = "15s", value_parser = duration)]
    lease: Duration,
    /// The format of the log
    #[arg(long, value_enum, default_value_t = FormatArg::Text)]
    log_format: FormatArg,
    /// The level of the log: error, warn, info, debug, trace, off, or TARGET=LEVEL
    #[arg(long, value_name = "LEVEL", default_value = "info")]
    log_level: String,
}

/// Formats of the log.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum FormatArg {
    Text,
    Json,
}

/// The operators' address, or none.
#[derive(Clone, Copy, Debug)]
struct AdminAddr(Option<SocketAddr>);

fn admin(text: &str) -> Result<AdminAddr, &'static str> {
    match text {
        "off" => Ok(AdminAddr(None)),
        text => crate::addr(text).map(|addr| AdminAddr(Some(addr))),
    }
}

fn duration(text: &str) -> Result<Duration, String> {
    hapax_gateway::parse_duration(text).map_err(|error| error.to_string())
}

/// Runs `hapax relay`.
pub(crate) async fn run(args: RelayArgs) -> Result<ExitCode, CliError> {
    let format = match args.log_format {
        FormatArg::Text => LogFormat::Text,
        FormatArg::Json => LogFormat::Json,
    };
    crate::logging::start(format, &args.log_level)?;
    let mut terminate = signal(SignalKind::terminate()).map_err(CliError::unavailable)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(CliError::unavailable)?;
    let (sink, in_flight) = sink::open(&args).await?;
    let outbox = PgOutbox::new(&connection(&args.from, "--from")?);
    // An outbox that cannot be read now is a wrong URL, or lacks its tables or privileges.
    let reading = async {
        let missing = outbox.missing_privileges().await?;
        if !missing.is_empty() {
            return Ok((missing, String::new()));
        }
        outbox.lag().await?;
        Ok((missing, outbox.identity().await?))
    };
    let read = tokio::time::timeout(RelayLimits::default().outbox_timeout, reading).await;
    let read = read.map_err(|_| {
        CliError::unavailable(
            "--from: expected an outbox, found no answer: check the URL and the server",
        )
    })?;
    let (missing, identity) = read.map_err(|error: OutboxError| {
        CliError::unavailable(format!(
            "--from: expected an outbox, found an error: {error}: check the URL, and run the SQL of \
             `hapax messages migrations` there"
        ))
    })?;
    if !missing.is_empty() {
        return Err(CliError::unavailable(format!(
            "--from: expected a role with the privileges of a relay, found one without {}: run the SQL \
             of `hapax messages migrations --relay-role NAME` there",
            missing.join(", ")
        )));
    }
    let is_default = args.store.is_none();
    let url = match args.store {
        Some(url) => url,
        None => {
            args.from.0.parse().unwrap_or_else(|never: std::convert::Infallible| match never {})
        }
    };
    let opener = StoreOpener {
        secret_file: args.secret_file,
        timeout: TIMEOUT,
        ..StoreOpener::new(url.read().map_err(of("--store"))?)
    };
    let opened = opener.open().await.map_err(|error| match is_default {
        true => CliError::unavailable(format!(
            "{error}: the leases of the shards are in the database of --from: run the SQL of `hapax \
             messages migrations --relay-role NAME` there, or name another --store"
        )),
        false => CliError::unavailable(error),
    })?;
    let engine = Idempotency::builder(Arc::clone(&opened.store) as Arc<dyn Store>);
    let engine = engine.store_timeout(TIMEOUT).build().map_err(CliError::unavailable)?;
    let limits = RelayLimits {
        in_flight: args.in_flight.unwrap_or(in_flight),
        max_buffered_bytes: args.max_buffered_bytes.0,
        publish_timeout: args.publish_timeout,
        lease: args.lease,
        ..RelayLimits::default()
    };
    let relay = Relay::new(&identity, Arc::new(outbox), sink, engine.clone(), limits)
        .map_err(CliError::usage)?;
    let monitor = relay.monitor();
    let listener = match args.admin.0 {
        Some(addr) => Some(TcpListener::bind(addr).await.map_err(|error| {
            CliError::unavailable(format!("--admin: cannot listen on {addr}: {error}"))
        })?),
        None => None,
    };
    let admin = listener.as_ref().and_then(|listener| listener.local_addr().ok());
    tracing::info!(outbox = identity, admin = admin.map(tracing::field::display), "ready");
    if let Some(listener) = listener {
        tokio::spawn(serve(listener, monitor.clone()));
    }
    relay
        .run(async {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
            tracing::info!("shutdown: waiting for messages in flight");
        })
        .await;
    if tokio::time::timeout(args.lease, engine.drain()).await.is_err() {
        tracing::warn!("the shards were not released: their leases lapse");
    }
    opened.close().await;
    let stats = monitor.stats();
    tracing::info!(published = stats.published, parked = stats.parked, "ended");
    Ok(ExitCode::SUCCESS)
}

/// Serves the operators' listener. It has no contents of messages, and needs no token.
async fn serve(listener: TcpListener, monitor: RelayMonitor) {
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(%error, "the operators' listener did not accept a connection");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let monitor = monitor.clone();
        tokio::spawn(async move {
            let service = service_fn(move |request: http::Request<Incoming>| {
                let response = respond(request.method(), request.uri().path(), &monitor);
                async move { Ok::<_, std::convert::Infallible>(response) }
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

fn respond(method: &Method, path: &str, monitor: &RelayMonitor) -> Response<Full<Bytes>> {
    let (status, text) = match (method, path) {
        (&(Method::GET | Method::HEAD), "/metrics") => (StatusCode::OK, metrics(monitor)),
        (&(Method::GET | Method::HEAD), "/healthz") => (StatusCode::OK, "ok\n".to_owned()),
        (&(Method::GET | Method::HEAD), "/readyz") => match lateness(&monitor.stats()) {
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

/// Returns the reason for which a relay is not ready.
fn lateness(stats: &RelayStats) -> Option<String> {
    if stats.lag_age >= LATE {
        return Some(format!("the outbox was last read {} s ago\n", stats.lag_age.as_secs()));
    }
    let oldest = stats.lag.oldest;
    (oldest >= LATE).then(|| format!("the oldest message is {} s old\n", oldest.as_secs()))
}

/// Returns the metrics in the text format of Prometheus.
fn metrics(monitor: &RelayMonitor) -> String {
    let stats = monitor.stats();
    let mut out = String::new();
    for (name, kind, help, value) in [
        (
            "relay_published_total",
            "counter",
            "Messages that the broker or endpoint acknowledged.",
            stats.published as f64,
        ),
        (
            "relay_failures_total",
            "counter",
            "Times that a message was not acknowledged.",
            stats.failures as f64,
        ),
        (
            "relay_parked_total",
            "counter",
            "Messages that became dead letters.",
            stats.parked as f64,
        ),
        ("relay_polls_total", "counter", "Polls of the outbox.", stats.polls as f64),
        ("relay_shards", "gauge", "Shards that this relay has, of 32.", stats.shards as f64),
        (
            "outbox_oldest_seconds",
            "gauge",
            "Age of the oldest message that is not published.",
            stats.lag.oldest.as_secs_f64(),
        ),
        (
            "outbox_lag_age_seconds",
            "gauge",
            "Time since the other hapax_outbox_ metrics were read from the database.",
            stats.lag_age.as_secs_f64(),
        ),
        (
            "outbox_messages",
            "gauge",
            "Messages that are not published, counted up to 10,000.",
            stats.lag.messages as f64,
        ),
        (
            "outbox_blocked_keys",
            "gauge",
            "Order keys with a dead letter; later messages with them wait.",
            stats.lag.blocked_keys as f64,
        ),
    ] {
        // Writing to a string does not fail.
        let _ = write!(
            out,
            "# HELP hapax_{name} {help}\n# TYPE hapax_{name} {kind}\nhapax_{name} {value}\n"
        );
    }
    out
}

#[cfg(test)]
mod tests {
    use hapax_messages::OutboxLag;

    use super::*;

    #[test]
    fn a_relay_whose_outbox_is_late_or_was_not_read_is_not_ready() {
        let mut stats = RelayStats::default();
        assert_eq!(lateness(&stats), None);
        stats.lag = OutboxLag::new(LATE, 1, 0);
        assert_eq!(lateness(&stats).as_deref(), Some("the oldest message is 60 s old\n"));
        stats.lag = OutboxLag::default();
        stats.lag_age = LATE * 2;
        assert_eq!(lateness(&stats).as_deref(), Some("the outbox was last read 120 s ago\n"));
    }
}
