//! `hapax consume`.

mod args;
mod headers;
mod observed;
mod service;
mod source;

use std::process::ExitCode;
use std::sync::Arc;

use hapax_core::{Idempotency, MemoryStore, Namespace, Store};
use hapax_gateway::{OpenStore, StoreOpenError, StoreOpener, StoreUrl};
use hapax_messages::{
    Attempts, Consumer, ConsumerLimits, ConsumerStats, DeadLetterStore, IdRules, Inbox, InboxError,
    MessageIdError,
};
use hapax_postgres_messages::PgDeadLetterStore;
use hapax_webhooks::{RejectedStatuses, WebhookSink};

pub(crate) use self::args::ConsumeArgs;
use self::args::{LimitArgs, SourceArgs};
use self::observed::ConsumeMonitor;
use self::service::Service;
use self::source::{OpenSource, SourcePlan};
use crate::admin;
use crate::exit::{CliError, of, with_causes};
use crate::keys::TIMEOUT;
use crate::messages::{HiddenUrl, connection, connection_to_messages};
use crate::registered::{Pausing, while_registered};
use crate::secrets;
use crate::shutdown::Shutdown;
use crate::webhooks::{self, EndpointFiles};

/// Runs `hapax consume`.
pub(crate) async fn run(args: ConsumeArgs) -> Result<ExitCode, CliError> {
    crate::logging::start(args.log_format.into(), &args.log_level)?;
    let mut shutdown = Shutdown::new()?;
    // What needs no connection is checked first.
    let limits = &args.limits;
    let broker = broker_url(&args.source)?;
    let plan = SourcePlan::new(&broker.0, &args.source, &args.consumer, limits)?;
    let sink = service_sink(&args).await?;
    let service = Service::new(sink, &args.to.0, limits.max_body, attempts(limits));
    let store = store_url(&args)?;
    let database = database_url(&args, &store)?;
    if limits.drain_timeout < limits.timeout {
        return Err(CliError::usage(format!(
            "--drain-timeout: expected at least --timeout, {:?}, so that a shutdown cuts off no request, \
             found {:?}",
            limits.timeout, limits.drain_timeout
        )));
    }

    let namespace = args.namespace.clone().unwrap_or_default();
    // The settings of the inbox, with a store in memory, before the first connection.
    let unused = PgDeadLetterStore::new(&connection(&database, "--database")?);
    let in_memory = engine(Arc::new(MemoryStore::default()), &namespace)?;
    inbox(&args, &in_memory, &Arc::new(unused), true)?;

    let messages = connection_to_messages(&database, "--database", &args.schema).await?;
    let dead_letters = Arc::new(PgDeadLetterStore::new(&messages).statement_timeout(TIMEOUT));
    check(&dead_letters).await?;
    let opened = open(store, &args).await?;
    let engine = engine(Arc::clone(&opened.store) as Arc<dyn Store>, &namespace)?;
    let what = format!("the consumer {}", args.consumer);
    let naming = source::naming(&broker.0, &args.source, &args.consumer, &args.ids);
    let serving = async {
        let source = plan.open(&broker.0).await?;
        serve(&args, source, service, &engine, &dead_letters, &mut shutdown).await
    };
    let served = Box::pin(while_registered(&engine, &what, false, vec![naming], serving)).await;
    close(engine, opened, limits).await;
    let (stats, failure) = served?;
    tracing::info!(handled = stats.handled, parked = stats.parked, "ended");
    failure.map_or(Ok(ExitCode::SUCCESS), Err)
}

/// Consumes until a shutdown is requested. Returns the error of messages that end the consumer.
async fn serve(
    args: &ConsumeArgs,
    source: OpenSource,
    service: Service,
    engine: &Idempotency,
    dead_letters: &Arc<PgDeadLetterStore>,
    shutdown: &mut Shutdown,
) -> Result<(ConsumerStats, Option<CliError>), CliError> {
    let limits = &args.limits;
    let receiver = source.receiver();
    let inbox = inbox(args, engine, dead_letters, receiver.limits().has_order_keys)?;
    let of_consumer = ConsumerLimits {
        handlers: limits.in_flight,
        max_unacknowledged: limits.max_unacknowledged,
        max_unacknowledged_bytes: limits.max_unacknowledged_bytes,
        drain_timeout: limits.drain_timeout,
    };
    let consumer = Consumer::new(inbox, receiver, service.clone(), of_consumer);
    let consumer = consumer.map_err(CliError::usage)?;
    let monitor = ConsumeMonitor { consumer: consumer.monitor(), service, source: source.clone() };
    let listener = args.admin.bind().await?;
    let admin = listener.as_ref().and_then(|listener| listener.local_addr().ok());
    tracing::info!(consumer = args.consumer, admin = admin.map(tracing::field::display), "ready");
    if let Some(listener) = listener {
        let observed = Pausing { observed: monitor.clone(), engine: engine.clone() };
        tokio::spawn(admin::serve(listener, observed));
    }
    let mut failure = None;
    consumer
        .run(async {
            tokio::select! {
                () = shutdown.requested() => {
                    tracing::info!("shutdown: waiting for requests in progress");
                }
                error = monitor.consumer.until_ids_are_missing() => {
                    failure = Some(without_ids(&error, monitor.consumer.stats().without_id));
                }
                error = source.until_records_are_too_old() => failure = Some(error),
            }
        })
        .await;
    source.close().await;
    Ok((monitor.consumer.stats(), failure))
}

/// Returns the error of the first messages, none of which has an id.
fn without_ids(error: &MessageIdError, messages: u64) -> CliError {
    CliError::usage(format!(
        "--id: {error} in any of the first messages ({messages}): name the header or field that has it (--id \
         header:NAME, --id json:/POINTER), or add a last rule without one (--id position, --id payload-hash). \
         The messages stay at the broker"
    ))
}

/// Waits for the writes to the store, and closes it.
async fn close(engine: Idempotency, opened: OpenStore, limits: &LimitArgs) {
    if tokio::time::timeout(limits.drain_timeout, engine.drain()).await.is_err() {
        let deferred = engine.stats().deferred;
        tracing::warn!(deferred, "records were not written: their messages are posted again");
    }
    opened.close().await;
}

fn attempts(limits: &LimitArgs) -> Attempts {
    let usual = Attempts::default();
    Attempts {
        max: limits.attempts,
        max_crashes: limits.crashes,
        first_pause: usual.first_pause.min(limits.longest_pause),
        longest_pause: limits.longest_pause,
    }
}

fn engine(store: Arc<dyn Store>, namespace: &Namespace) -> Result<Idempotency, CliError> {
    let engine = Idempotency::builder(store).namespace(namespace.as_str()).store_timeout(TIMEOUT);
    engine.build().map_err(CliError::unavailable)
}

async fn open(store: StoreUrl, args: &ConsumeArgs) -> Result<OpenStore, CliError> {
    let opener = StoreOpener {
        secret_file: args.secret_file.clone(),
        timeout: TIMEOUT,
        must_exist: args.required.store_must_exist,
        ..StoreOpener::new(store)
    };
    secrets::warn_of_store(&opener);
    let opened = opener.open().await.map_err(|error| match error {
        // They name their flag. A file may be there at the next start.
        error if secrets::is_not_there(&error, opener.secret_file.as_deref()) => {
            CliError::unavailable(error)
        }
        StoreOpenError::Secret { .. } => CliError::usage(error),
        error => CliError::unavailable(format!("--store: {error}")),
    })?;
    tokio::spawn(async move { opener.warn_of_broken().await });
    Ok(opened)
}

/// Returns the inbox; an error names the flag.
fn inbox(
    args: &ConsumeArgs,
    engine: &Idempotency,
    dead_letters: &Arc<PgDeadLetterStore>,
    is_ordered: bool,
) -> Result<Inbox, CliError> {
    let limits = &args.limits;
    let mut inbox = Inbox::builder(&*args.consumer, engine.clone())
        // The service has one effect for an id.
        .reexecute()
        .expect_ids()
        .lease(limits.lease)
        .settle(limits.timeout)
        .retention(limits.retention)
        .attempts(attempts(limits))
        .dead_letters(Arc::clone(dead_letters) as Arc<dyn DeadLetterStore>);
    if !args.ids.is_empty() {
        inbox = inbox.ids(IdRules::new(args.ids.clone()));
    }
    if is_ordered {
        inbox = inbox.ordered();
    }
    inbox.build().map_err(|error| {
        let flag = match &error {
            InboxError::Consumer { .. } | InboxError::NamespacedConsumer { .. } => "--consumer: ",
            InboxError::Pauses { .. } => {
                return CliError::usage(format!(
                    "--longest-pause: expected 1ms to {}d, found another time",
                    Attempts::MAX_PAUSE.as_secs() / (24 * 60 * 60)
                ));
            }
            InboxError::Policy(_) => "--lease, --retention: ",
            _ => "",
        };
        CliError::usage(format!("{flag}{error}"))
    })
}

/// Returns the sink that posts messages.
async fn service_sink(args: &ConsumeArgs) -> Result<WebhookSink, CliError> {
    let builder = WebhookSink::builder(&args.to.0)
        .timeout(args.limits.timeout)
        .max_response(args.limits.max_response.get())
        .rejected(RejectedStatuses::ClientErrors);
    let builder = match args.proxy.of(&args.to.0)? {
        Some(proxy) => builder.proxy(proxy),
        None => builder,
    };
    let files = EndpointFiles {
        secrets: args.signing_secret_file.as_deref(),
        roots: args.to_ca.as_deref(),
    };
    webhooks::sink(builder, files, "--timeout").await
}

/// Returns the URL of the broker, of a flag or a file.
fn broker_url(args: &SourceArgs) -> Result<HiddenUrl, CliError> {
    let Some(file) = &args.from_file else {
        let Some(url) = &args.from else {
            return Err(CliError::usage("--from: expected a broker, found none"));
        };
        return Ok(url.clone());
    };
    secrets::warn_if_open(file);
    let text = std::fs::read_to_string(file);
    let text =
        text.map_err(|error| CliError::usage(format!("--from-file: {}: {error}", file.display())))?;
    Ok(HiddenUrl(text.trim().to_owned()))
}

/// Returns the store, which outlasts the process.
fn store_url(args: &ConsumeArgs) -> Result<StoreUrl, CliError> {
    let url = args.store.clone().read().map_err(of("--store"))?;
    match &url {
        StoreUrl::Memory => Err(CliError::usage(
            "--store: expected a store that outlasts this process, found memory:, after whose end each \
             message that is delivered again is posted again: name file:PATH or a server",
        )),
        StoreUrl::Server(_) | StoreUrl::File(_) => Ok(url),
    }
}

/// Returns the database of the dead letters.
fn database_url(args: &ConsumeArgs, store: &StoreUrl) -> Result<HiddenUrl, CliError> {
    match (&args.database, store) {
        (Some(url), _) => Ok(url.clone()),
        (None, StoreUrl::Server(server)) if !server.is_redis() => {
            Ok(HiddenUrl(server.as_str().to_owned()))
        }
        (None, _) => Err(CliError::usage(
            "--database: expected a PostgreSQL database for the dead letters, found none, and --store is \
             not one: add --database postgres://USER@HOST/DB",
        )),
    }
}

/// Checks that dead letters can be stored: later a message whose dead letter cannot be stored would be
/// held.
async fn check(dead_letters: &PgDeadLetterStore) -> Result<(), CliError> {
    let missing = dead_letters.missing_privileges().await.map_err(|error| {
        CliError::unavailable(format!(
            "--database: expected the table of dead letters, found an error: {}: check the URL, and run \
             the SQL of `hapax sql` there",
            with_causes(&*error)
        ))
    })?;
    if missing.is_empty() {
        return Ok(());
    }
    Err(CliError::unavailable(format!(
        "--database: expected a role with the privileges of a consumer, found one without {}: run the SQL \
         of `hapax sql --service-role NAME` there",
        missing.join(", ")
    )))
}
