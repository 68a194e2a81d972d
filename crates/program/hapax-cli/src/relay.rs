//! `hapax relay`.

mod sink;

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use hapax_core::{Idempotency, Store};
use hapax_gateway::{ByteSize, StoreOpener, StoreUrl, UrlText};
use hapax_messages::{Outbox as _, OutboxError, Relay, RelayLimits, RelayMonitor, RelayStats};
use hapax_postgres_messages::PgOutbox;

use crate::admin::{self, AdminAddr, Metric, Observed};
use crate::exit::{CliError, of};
use crate::keys::TIMEOUT;
use crate::logging::FormatArg;
use crate::messages::{
    BrokerArgs, HiddenUrl, PropertyArgs, SchemaSelector, connection_to_messages,
};
use crate::proxies::ProxyArg;
use crate::registered::{Pausing, while_registered};
use crate::secrets;
use crate::shutdown::Shutdown;
use crate::store::RequiredStoreArg;

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
    #[command(flatten)]
    schema: SchemaSelector,
    /// The broker: nats://HOST, tls://HOST, amqp://HOST/VHOST or amqps://HOST/VHOST; kafka://HOST[:PORT],…
    /// if this program was built with the feature kafka; or an endpoint of webhooks: https://HOST/PATH or
    /// http://HOST/PATH
    #[arg(long, value_name = "URL", env = "HAPAX_BROKER", hide_env_values = true)]
    to: HiddenUrl,
    /// RabbitMQ: the exchange, at which the destination of a message is its routing key [default: the one
    /// without a name, at which it is a queue]
    #[arg(long, value_name = "NAME")]
    exchange: Option<String>,
    #[command(flatten)]
    broker: BrokerArgs,
    #[command(flatten)]
    properties: PropertyArgs,
    /// For an endpoint: file of the signing secrets, one a line, each whsec_ and base64 [default:
    /// messages are not signed]
    #[arg(long, value_name = "PATH", env = "HAPAX_SIGNING_SECRET_FILE")]
    signing_secret_file: Option<PathBuf>,
    /// For an endpoint: the file of the root certificates to trust, in PEM [default: the system's]
    #[arg(long, value_name = "PATH")]
    to_ca: Option<PathBuf>,
    #[command(flatten)]
    proxy: ProxyArg,
    /// The store of the leases of the shards, the same for all relays of the outbox. It may have those
    /// of several outboxes. A file is for one relay: relays that have a file each publish messages
    /// repeatedly and out of order, and nothing detects that [default: the database of --from]
    #[arg(long, value_name = "URL", env = "HAPAX_STORE", hide_env_values = true)]
    store: Option<UrlText<StoreUrl>>,
    /// The file of the store's secrets [default: PATH.secret beside a file: store, else none]
    #[arg(long, value_name = "PATH", env = "HAPAX_SECRET_FILE")]
    secret_file: Option<PathBuf>,
    #[command(flatten)]
    required: RequiredStoreArg,
    /// Address that serves /metrics, /healthz and /readyz, or off
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:9091", value_parser = admin::admin)]
    admin: AdminAddr,
    /// Largest number of messages that are sent and not acknowledged; to an endpoint, also of
    /// connections, and to RabbitMQ of channels [default: 256; to an endpoint 32, to RabbitMQ 64]
    #[arg(long, value_name = "N")]
    in_flight: Option<NonZeroUsize>,
    /// Bytes of messages in memory; one message may exceed them
    #[arg(long, value_name = "SIZE", default_value = "64MiB")]
    max_buffered_bytes: ByteSize,
    /// Time for the broker or endpoint to acknowledge a message
    #[arg(long, value_name = "DUR", default_value = "10s", value_parser = crate::duration)]
    publish_timeout: Duration,
    /// Lease of a shard: time after which other relays take over the shards of one that died
    #[arg(long, value_name = "DUR", default_value = "15s", value_parser = crate::duration)]
    lease: Duration,
    /// The format of the log
    #[arg(long, value_enum, default_value_t = FormatArg::Text)]
    log_format: FormatArg,
    /// The level of the log: error, warn, info, debug, trace, off, or TARGET=LEVEL
    #[arg(long, value_name = "LEVEL", default_value = "info")]
    log_level: String,
}

/// Runs `hapax relay`.
pub(crate) async fn run(args: RelayArgs) -> Result<ExitCode, CliError> {
    crate::logging::start(args.log_format.into(), &args.log_level)?;
    let mut shutdown = Shutdown::new()?;
    let (sink, in_flight) = sink::open(&args).await?;
    let outbox = connection_to_messages(&args.from, "--from", &args.schema).await?;
    let outbox = PgOutbox::new(&outbox);
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
             `hapax sql` there"
        ))
    })?;
    if !missing.is_empty() {
        return Err(CliError::unavailable(format!(
            "--from: expected a role with the privileges of a relay, found one without {}: run the SQL \
             of `hapax sql --relay-role NAME` there",
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
        must_exist: args.required.store_must_exist,
        ..StoreOpener::new(url.read().map_err(of("--store"))?)
    };
    secrets::warn_of_store(&opener);
    let opened = opener.open().await.map_err(|error| match is_default {
        true => CliError::unavailable(format!(
            "{error}: the leases of the shards are in the database of --from: run the SQL of `hapax sql \
             --relay-role NAME` there, or name another --store"
        )),
        false => CliError::unavailable(error),
    })?;
    tokio::spawn(async move { opener.warn_of_broken().await });
    // The outbox has an identity of its own, which names the leases of its shards.
    let engine = Idempotency::builder(Arc::clone(&opened.store) as Arc<dyn Store>).namespace("");
    let engine = engine.store_timeout(TIMEOUT).build().map_err(CliError::unavailable)?;
    let limits = RelayLimits {
        in_flight: args.in_flight.unwrap_or(in_flight),
        max_buffered_bytes: args.max_buffered_bytes.0,
        publish_timeout: args.publish_timeout,
        lease: args.lease,
        ..RelayLimits::default()
    };
    let serving = async {
        let relay = Relay::new(&identity, Arc::new(outbox), sink, engine.clone(), limits);
        let relay = relay.map_err(CliError::usage)?;
        let stats = serve(relay, &identity, &args.admin, &engine, &mut shutdown).await?;
        if tokio::time::timeout(args.lease, engine.drain()).await.is_err() {
            tracing::warn!("the shards were not released: their leases lapse");
        }
        Ok(stats)
    };
    let served = while_registered(&engine, "the relay", true, Vec::new(), serving).await;
    opened.close().await;
    let stats = served?;
    tracing::info!(published = stats.published, parked = stats.parked, "ended");
    Ok(ExitCode::SUCCESS)
}

/// Publishes until a shutdown is requested.
async fn serve(
    relay: Relay,
    identity: &str,
    admin: &AdminAddr,
    engine: &Idempotency,
    shutdown: &mut Shutdown,
) -> Result<RelayStats, CliError> {
    let monitor = relay.monitor();
    let listener = admin.bind().await?;
    let admin = listener.as_ref().and_then(|listener| listener.local_addr().ok());
    tracing::info!(outbox = identity, admin = admin.map(tracing::field::display), "ready");
    if let Some(listener) = listener {
        let observed = Pausing { observed: monitor.clone(), engine: engine.clone() };
        tokio::spawn(admin::serve(listener, observed));
    }
    relay
        .run(async {
            shutdown.requested().await;
            tracing::info!("shutdown: waiting for messages in flight");
        })
        .await;
    Ok(monitor.stats())
}

impl Observed for RelayMonitor {
    fn metrics(&self) -> Vec<Metric> {
        let stats = self.stats();
        vec![
            Metric::counter(
                "relay_published_total",
                "Messages that the broker or endpoint acknowledged.",
                stats.published as f64,
            ),
            Metric::counter(
                "relay_failures_total",
                "Times that a message was not acknowledged.",
                stats.failures as f64,
            ),
            Metric::counter(
                "relay_parked_total",
                "Messages that became dead letters.",
                stats.parked as f64,
            ),
            Metric::counter("relay_polls_total", "Polls of the outbox.", stats.polls as f64),
            Metric::gauge(
                "relay_shards",
                "Shards that this relay has, of 32.",
                stats.shards as f64,
            ),
            Metric::gauge(
                "outbox_oldest_seconds",
                "Age of the oldest message that is not published.",
                stats.lag.oldest.as_secs_f64(),
            ),
            Metric::gauge(
                "outbox_lag_age_seconds",
                "Time since the other hapax_outbox_ metrics were read from the database.",
                stats.lag_age.as_secs_f64(),
            ),
            Metric::gauge(
                "outbox_messages",
                "Messages that are not published, counted up to 10,000.",
                stats.lag.messages as f64,
            ),
            Metric::gauge(
                "outbox_blocked_keys",
                "Order keys with a dead letter; later messages with them wait.",
                stats.lag.blocked_keys as f64,
            ),
        ]
    }

    fn unready(&self) -> Option<String> {
        lateness(&self.stats())
    }
}

/// Returns the reason for which a relay is not ready.
fn lateness(stats: &RelayStats) -> Option<String> {
    if stats.lag_age >= LATE {
        return Some(format!("the outbox was last read {} s ago\n", stats.lag_age.as_secs()));
    }
    let oldest = stats.lag.oldest;
    (oldest >= LATE).then(|| format!("the oldest message is {} s old\n", oldest.as_secs()))
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
