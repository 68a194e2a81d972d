//! The process of a consumer.

use std::fmt;
use std::num::{NonZeroU32, NonZeroUsize};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use hapax_core::store::BoxFuture;
use hapax_core::transaction::TransactionBackend;
use hapax_core::{HookTiming, Idempotency, Store, Verdict};
use hapax_file::{FileOptions, FileStore};
use hapax_messages::{
    Attempts, BatchConsumer, BatchConsumerLimits, BatchItem, BatchOptions, Consumer,
    ConsumerLimits, Delivery, Inbox, Message, MessageExecution, MessageFailure,
    MessageReconcileCall, MessageSource, SourceError, SourceLimits,
};
use hapax_postgres::{PgTransactions, PgTx, PostgresOptions, PostgresStore};
use hapax_postgres_messages::{BatchHandler, PgDeadLetterStore, PgInbox};
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::sleep;
use tokio_postgres::Config;

use crate::broker::{self, CONSUMER};
use crate::database::{Connection, Database, EffectError, effect};
use crate::faults::{Fault, FaultKind, Faults};
use crate::{ConsumerMode, ConsumersError, PlantedBug, failed};

/// Time after which another process gets the messages of a dead one.
pub(crate) const LEASE: Duration = Duration::from_secs(2);

/// Duration of the work of a handler beside its effect, so that faults meet messages in progress.
const WORK: Duration = Duration::from_millis(20);

/// Arguments of a consumer's process.
#[derive(Clone, Debug, clap::Args)]
pub struct ConsumerArgs {
    /// The mode
    #[arg(long)]
    pub mode: ConsumerMode,
    /// URL of the broker
    #[arg(long)]
    pub broker: String,
    /// URL of the database
    #[arg(long)]
    pub database: Config,
    /// File of the records, in the mode `claims-file`
    #[arg(long)]
    pub store: PathBuf,
    /// Folder of the files for faults that happened
    #[arg(long)]
    pub happened: PathBuf,
    /// Faults of this process, as KIND:ID
    #[arg(long = "fault")]
    pub faults: Vec<Fault>,
    /// A deliberate error
    #[arg(long)]
    pub plant: Option<PlantedBug>,
}

/// Runs a consumer until SIGTERM. Returns whether every message in progress ended in time.
///
/// # Errors
/// [`ConsumersError`] if the consumer does not start.
pub async fn consume(args: ConsumerArgs) -> Result<bool, ConsumersError> {
    let mut terminate = signal(SignalKind::terminate()).map_err(failed("listening to SIGTERM"))?;
    let shutdown = async move {
        terminate.recv().await;
    };
    let database = Database::new(args.database.clone())?;
    let faults = Arc::new(Faults::new(args.happened, args.faults));
    let opened = broker::open(&args.broker).await?;
    let source = FaultySource {
        source: Arc::clone(&opened.source),
        faults: Arc::clone(&faults),
        acks_first: args.plant == Some(PlantedBug::AckFirst),
    };
    let work = Arc::new(Work { database, faults, mode: args.mode, plant: args.plant });
    let config = args.database;
    let ended = match args.mode {
        ConsumerMode::ClaimsFile => {
            let store = FileStore::open(FileOptions::new(&args.store));
            let store = Arc::new(store.map_err(failed("opening the store"))?);
            claims(work, store, source, None, shutdown).await
        }
        ConsumerMode::ClaimsPostgres => {
            claims(work, postgres(config).await?, source, None, shutdown).await
        }
        ConsumerMode::Transaction => {
            let store = postgres(config).await?;
            let pool = work.database.pool.clone();
            let get = move || {
                let pool = pool.clone();
                async move { pool.get().await }
            };
            let transactions = PgTransactions::new(Arc::clone(&store), get, |object| object);
            let backend = TransactionBackend::new(Arc::new(transactions)).any();
            claims(work, store, source, Some(backend), shutdown).await
        }
        ConsumerMode::Batch => batch(work, source, shutdown).await,
    };
    opened.close().await;
    ended
}

async fn postgres(config: Config) -> Result<Arc<PostgresStore>, ConsumersError> {
    let store = PostgresStore::connect(PostgresOptions::new(config)).await;
    Ok(Arc::new(store.map_err(failed("connecting the store"))?))
}

fn attempts() -> Attempts {
    let pause = Duration::from_millis(200);
    let max = NonZeroU32::MIN.saturating_add(4);
    Attempts { max, first_pause: pause, longest_pause: 5 * pause, ..Attempts::default() }
}

async fn claims(
    work: Arc<Work>,
    store: Arc<dyn Store>,
    source: FaultySource,
    backend: Option<TransactionBackend>,
    shutdown: impl Future<Output = ()>,
) -> Result<bool, ConsumersError> {
    let engine =
        Idempotency::builder(store).namespace("").build().map_err(failed("building the engine"))?;
    let letters = Arc::new(PgDeadLetterStore::new(&work.database.connections()));
    let inbox = Inbox::builder(CONSUMER, engine.clone())
        .lease(LEASE)
        .attempts(attempts())
        .dead_letters(letters);
    let reexecutes = backend.is_some() || work.plant == Some(PlantedBug::Reexecute);
    let inbox = match backend {
        Some(backend) => inbox.transactions(backend),
        None => inbox,
    };
    let inbox = if reexecutes {
        inbox.reexecute()
    } else {
        let timing = HookTiming { after: Duration::ZERO, timeout: Duration::from_secs(5) };
        let work = Arc::clone(&work);
        inbox.reconcile_with(timing, move |call| Arc::clone(&work).reconcile(call))
    };
    let inbox = inbox.build().map_err(failed("building the inbox"))?;
    let handler = move |message| Arc::clone(&work).handle(message);
    let consumer = Consumer::new(inbox, Arc::new(source), handler, ConsumerLimits::default())
        .map_err(failed("building the consumer"))?;
    let ended = consumer.run(shutdown).await;
    engine.drain().await;
    Ok(ended)
}

async fn batch(
    work: Arc<Work>,
    source: FaultySource,
    shutdown: impl Future<Output = ()>,
) -> Result<bool, ConsumersError> {
    let connections = work.database.connections();
    let inbox = PgInbox::new(CONSUMER, connections, Duration::from_secs(3600), Batches(work));
    const BATCH: NonZeroUsize = NonZeroUsize::new(20).unwrap();
    let limits = BatchConsumerLimits { batch: BATCH, ..BatchConsumerLimits::default() };
    let options = BatchOptions { attempts: attempts(), limits, ..BatchOptions::default() };
    let consumer = BatchConsumer::new(Arc::new(inbox), Arc::new(source), options);
    Ok(consumer.map_err(failed("building the consumer"))?.run(shutdown).await)
}

/// The handler of batches.
struct Batches(Arc<Work>);

impl BatchHandler<Connection> for Batches {
    fn handle<'a>(
        &'a self,
        connection: &'a mut Connection,
        items: &'a [BatchItem],
    ) -> BoxFuture<'a, Result<(), MessageFailure>> {
        Box::pin(self.0.handle_batch(connection, items))
    }
}

/// The handler.
#[derive(Debug)]
struct Work {
    database: Database,
    faults: Arc<Faults>,
    mode: ConsumerMode,
    plant: Option<PlantedBug>,
}

impl Work {
    async fn handle(self: Arc<Self>, message: MessageExecution) -> Result<(), MessageFailure> {
        let id = message.id().as_str().to_owned();
        sleep(WORK).await;
        self.faults.reach(FaultKind::FreezeInHandler, &id);
        self.faults.reach(FaultKind::KillInHandler, &id);
        self.write(&message, &id).await?;
        self.faults.reach(FaultKind::KillAfterEffect, &id);
        Ok(())
    }

    async fn write(&self, message: &MessageExecution, id: &str) -> Result<(), MessageFailure> {
        if self.mode == ConsumerMode::Transaction {
            let tx = message.transaction::<PgTx>().await?;
            return match self.plant {
                Some(PlantedBug::OwnConnection) => Ok(self.database.effect(id).await?),
                _ => Ok(effect(&tx, id).await?),
            };
        }
        let written = match self.plant {
            Some(PlantedBug::NoFence) => self.database.effect(id).await,
            _ => self.database.fenced_effect(id, message.fence()).await,
        };
        written.map_err(|error| match error {
            EffectError::Statement(_) => MessageFailure::unknown(error),
            EffectError::Connect(_) | EffectError::Fenced => MessageFailure::retry(error),
        })
    }

    async fn reconcile(self: Arc<Self>, call: MessageReconcileCall) -> Verdict<()> {
        match self.database.reconcile(call.id.as_str(), call.fence).await {
            Ok(true) => Verdict::Happened(()),
            Ok(false) => Verdict::DidNotHappen,
            Err(_) => Verdict::CannotSay,
        }
    }

    async fn handle_batch(
        &self,
        connection: &Connection,
        items: &[BatchItem],
    ) -> Result<(), MessageFailure> {
        sleep(WORK).await;
        for item in items {
            let id = item.id().as_str();
            self.faults.reach(FaultKind::FreezeInHandler, id);
            self.faults.reach(FaultKind::KillInHandler, id);
            match self.plant {
                Some(PlantedBug::OwnConnection) => self.database.effect(id).await?,
                _ => effect(connection, id).await?,
            }
            self.faults.reach(FaultKind::KillAfterEffect, id);
        }
        Ok(())
    }
}

/// A source with faults after messages are received and before they are acknowledged.
struct FaultySource {
    source: Arc<dyn MessageSource>,
    faults: Arc<Faults>,
    acks_first: bool,
}

impl fmt::Debug for FaultySource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FaultySource").field("source", &self.source).finish_non_exhaustive()
    }
}

impl MessageSource for FaultySource {
    fn receive(
        &self,
        max: NonZeroUsize,
    ) -> BoxFuture<'_, Result<Vec<Arc<dyn Delivery>>, SourceError>> {
        Box::pin(async move {
            let received = self.source.receive(max).await?;
            let mut deliveries = Vec::with_capacity(received.len());
            for delivery in received {
                if self.acks_first {
                    delivery.acknowledge().await?;
                }
                let faults = Arc::clone(&self.faults);
                let delivery = FaultyDelivery { delivery, faults, acks_first: self.acks_first };
                delivery.reach(FaultKind::FreezeReceived);
                deliveries.push(Arc::new(delivery) as Arc<dyn Delivery>);
            }
            Ok(deliveries)
        })
    }

    fn limits(&self) -> SourceLimits {
        self.source.limits()
    }

    fn full_limit(&self) -> Option<String> {
        self.source.full_limit()
    }
}

struct FaultyDelivery {
    delivery: Arc<dyn Delivery>,
    faults: Arc<Faults>,
    acks_first: bool,
}

impl FaultyDelivery {
    fn reach(&self, kind: FaultKind) {
        let id = self.delivery.message().header("message-id");
        if let Some(id) = id.and_then(|id| std::str::from_utf8(id).ok()) {
            self.faults.reach(kind, id);
        }
    }
}

impl fmt::Debug for FaultyDelivery {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FaultyDelivery").field("delivery", &self.delivery).finish_non_exhaustive()
    }
}

impl Delivery for FaultyDelivery {
    fn message(&self) -> &Message {
        self.delivery.message()
    }

    fn is_redelivery(&self) -> bool {
        self.delivery.is_redelivery()
    }

    fn unreadable(&self) -> Option<&str> {
        self.delivery.unreadable()
    }

    fn has_ended(&self) -> bool {
        self.delivery.has_ended()
    }

    fn delay(&self, pause: Duration) -> BoxFuture<'_, Result<bool, SourceError>> {
        self.delivery.delay(pause)
    }

    fn return_behind_delayed(&self) -> bool {
        self.delivery.return_behind_delayed()
    }

    fn keep_followers(&self) -> bool {
        self.delivery.keep_followers()
    }

    fn was_delayed(&self) -> bool {
        self.delivery.was_delayed()
    }

    fn acknowledge(&self) -> BoxFuture<'_, Result<(), SourceError>> {
        if self.acks_first {
            return Box::pin(async { Ok(()) });
        }
        self.reach(FaultKind::KillBeforeAck);
        self.delivery.acknowledge()
    }

    fn hold(&self) -> BoxFuture<'_, Result<(), SourceError>> {
        self.delivery.hold()
    }
}
