//! The process of a consumer: this program, started again in a role.

use std::fmt;
use std::num::{NonZeroU32, NonZeroUsize};
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use deadpool_postgres::{Manager, Object, Pool};
use hapax_core::Idempotency;
use hapax_core::store::BoxFuture;
use hapax_core::transaction::TransactionBackend;
use hapax_kafka::KafkaSource;
use hapax_messages::{
    Attempts, BatchConsumer, BatchConsumerLimits, BatchInbox, BatchItem, BatchOptions, Consumer,
    ConsumerLimits, Delivery, Inbox, Message, MessageExecution, MessageFailure, MessageSource,
    SourceError, SourceLimits,
};
use hapax_postgres::{PgTransactions, PgTx, PostgresOptions, PostgresStore};
use hapax_postgres_data::Pooled;
use hapax_postgres_messages::{BatchHandler, Connections, PgDeadLetterStore, PgInbox};
use rustix::process::{Pid, Signal, kill_process};
use tokio::process::{Child, Command};
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::sleep;
use tokio_postgres::{Client, Config, NoTls};

/// The variable with the role of a process: mode, brokers, topic, group and database.
const ROLE: &str = "HAPAX_KAFKA_ROLE";

/// Time after which another process gets the messages of a dead one.
const LEASE: Duration = Duration::from_secs(2);

const HOUR: Duration = Duration::from_secs(3600);

/// Work of a handler beside its effect, so that faults meet messages in progress.
const WORK: Duration = Duration::from_millis(20);

/// Payload of the message that ends its process.
pub(crate) const POISON: &str = "poison";

/// The table of effects, which has no unique index.
pub(crate) const TABLES: &str = "
    CREATE TABLE effects (
        seq bigserial PRIMARY KEY, id text NOT NULL, order_key text NOT NULL,
        partition int NOT NULL, \"offset\" bigint NOT NULL);
    CREATE INDEX ON effects (id)";

const EFFECT: &str = "
    INSERT INTO effects (id, order_key, partition, \"offset\") VALUES ($1, $2, $3, $4)";

/// How a process handles messages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Mode {
    /// Claim mode, with records in the transaction of the effect.
    Claims,
    /// Claim mode that acknowledges messages before they are handled: an error.
    AckFirst,
    /// Batch mode.
    Batches,
    /// Positions mode, without ids.
    Positions,
    /// Positions mode, with ids.
    PositionsWithIds,
}

/// A process.
pub(crate) struct Process(Child);

impl Process {
    pub(crate) fn start(mode: Mode, place: &[&str; 4]) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["postgres::consumer::role_of_a_consumer", "--exact", "--nocapture"])
            .env(ROLE, format!("{mode:?} {}", place.join(" ")))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .kill_on_drop(true);
        Self(command.spawn().unwrap())
    }

    fn signal(&self, signal: Signal) {
        let id = self.0.id().expect("the process runs");
        let id = Pid::from_raw(i32::try_from(id).unwrap()).unwrap();
        kill_process(id, signal).expect("our own process takes signals");
    }

    pub(crate) fn freeze(&self) {
        self.signal(Signal::STOP);
    }

    pub(crate) fn thaw(&self) {
        self.signal(Signal::CONT);
    }

    pub(crate) async fn kill(mut self) {
        self.0.kill().await.unwrap();
    }

    /// Ends the process in an orderly way.
    pub(crate) async fn stop(mut self) {
        self.signal(Signal::TERM);
        let ended = self.0.wait().await.unwrap();
        assert!(ended.success(), "{ended}");
    }

    /// Returns the bytes of its memory that are resident.
    pub(crate) fn resident(&self) -> u64 {
        let id = self.0.id().expect("the process runs");
        let status = std::fs::read_to_string(format!("/proc/{id}/status")).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        1024 * line.trim().trim_end_matches(" kB").parse::<u64>().unwrap()
    }

    /// Returns whether the process has ended.
    pub(crate) fn has_ended(&mut self) -> bool {
        self.0.try_wait().unwrap().is_some()
    }
}

/// Plays the role of a consumer until SIGTERM. Without a role it does nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn role_of_a_consumer() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let parts: Vec<&str> = role.split(' ').collect();
    let [mode, brokers, topic, group, database] = parts[..] else { panic!("{role}") };
    let mut terminate = signal(SignalKind::terminate()).unwrap();
    let shutdown = async move {
        terminate.recv().await;
    };
    let properties = [
        ("bootstrap.servers", brokers),
        ("session.timeout.ms", "3000"),
        ("heartbeat.interval.ms", "200"),
        ("max.poll.interval.ms", "6000"),
        ("fetch.wait.max.ms", "50"),
    ];
    let config: Config = database.parse().unwrap();
    let mut source = KafkaSource::builder(properties, [topic], group)
        .order_by_key()
        .commit_every(Duration::from_millis(100))
        .idle_check_after(Duration::from_secs(1))
        .drain_for(Duration::from_secs(1));
    // A transaction of a frozen process delays the next owner for no longer.
    let inbox = PgInbox::new("orders", connections(&pool(&config)), HOUR, Batches)
        .statement_timeout(Duration::from_secs(2))
        .transaction_timeout(Duration::from_secs(2));
    let inbox = match mode {
        "Positions" => Arc::new(inbox.advance_positions_without_ids()),
        "PositionsWithIds" => Arc::new(inbox.advance_positions()),
        _ => Arc::new(inbox),
    };
    if mode.starts_with("Positions") {
        source = source.positions(Arc::clone(&inbox) as _);
    }
    let source = Arc::new(source.start().await.unwrap());
    let ended = match mode {
        "Claims" => claims(Arc::clone(&source) as _, config, shutdown).await,
        "AckFirst" => claims(Arc::new(AckFirst(Arc::clone(&source))), config, shutdown).await,
        "Batches" | "Positions" | "PositionsWithIds" => {
            batches(Arc::clone(&source) as _, inbox, shutdown).await
        }
        other => panic!("{other}"),
    };
    source.close().await;
    assert!(ended, "messages in progress have ended");
}

fn pool(config: &Config) -> Pool {
    Pool::builder(Manager::new(config.clone(), NoTls)).max_size(24).build().unwrap()
}

fn connections(pool: &Pool) -> Connections<Pooled<Object>> {
    let pool = pool.clone();
    Connections::new(move || {
        let pool = pool.clone();
        let got = async move { pool.get().await.map(|object| Pooled::new(object, |o| o)) };
        Box::pin(got) as BoxFuture<'static, _>
    })
}

fn attempts() -> Attempts {
    let pause = Duration::from_millis(100);
    let max_crashes = NonZeroU32::new(3).unwrap();
    Attempts { max_crashes, first_pause: pause, longest_pause: 5 * pause, ..Attempts::default() }
}

async fn claims(
    source: Arc<dyn MessageSource>,
    config: Config,
    shutdown: impl Future<Output = ()>,
) -> bool {
    let pool = pool(&config);
    let letters = Arc::new(PgDeadLetterStore::new(&connections(&pool)));
    let store = Arc::new(PostgresStore::connect(PostgresOptions::new(config)).await.unwrap());
    let get = move || {
        let pool = pool.clone();
        async move { pool.get().await }
    };
    // A transaction of a frozen process delays the next owner for no longer.
    let transactions = PgTransactions::new(Arc::clone(&store), get, |object| object).idle(LEASE);
    let transactions = TransactionBackend::new(Arc::new(transactions));
    let engine = Idempotency::builder(store).namespace("").build().unwrap();
    let inbox = Inbox::builder("orders", engine.clone())
        .lease(LEASE)
        .attempts(attempts())
        .dead_letters(letters)
        .transactions(transactions.any())
        .reexecute()
        .ordered()
        .build()
        .unwrap();
    let handler = |execution: MessageExecution| async move {
        sleep(WORK).await;
        die_of_poison(execution.message());
        let tx = execution.transaction::<PgTx>().await?;
        effect(&tx, execution.id().as_str(), execution.message()).await
    };
    let limits = ConsumerLimits {
        handlers: NonZeroUsize::new(12).unwrap(),
        max_unacknowledged: NonZeroUsize::new(100).unwrap(),
        ..ConsumerLimits::default()
    };
    let consumer = Consumer::new(inbox, source, handler, limits).unwrap();
    let ended = consumer.run(shutdown).await;
    engine.drain().await;
    ended
}

async fn batches(
    source: Arc<dyn MessageSource>,
    inbox: Arc<dyn BatchInbox>,
    shutdown: impl Future<Output = ()>,
) -> bool {
    let batch = NonZeroUsize::new(10).unwrap();
    let limits = BatchConsumerLimits { batch, ..BatchConsumerLimits::default() };
    let options = BatchOptions { attempts: attempts(), limits, ..BatchOptions::default() };
    BatchConsumer::new(inbox, source, options).unwrap().run(shutdown).await
}

/// The handler of batches.
struct Batches;

impl BatchHandler<Pooled<Object>> for Batches {
    fn handle<'a>(
        &'a self,
        connection: &'a mut Pooled<Object>,
        items: &'a [BatchItem],
    ) -> BoxFuture<'a, Result<(), MessageFailure>> {
        Box::pin(async move {
            sleep(WORK).await;
            for item in items {
                die_of_poison(item.message());
                effect(connection, item.id().as_str(), item.message()).await?;
            }
            Ok(())
        })
    }
}

fn die_of_poison(message: &Message) {
    if message.payload == POISON {
        let own = rustix::process::getpid();
        kill_process(own, Signal::KILL).unwrap();
    }
}

async fn effect(client: &Client, id: &str, message: &Message) -> Result<(), MessageFailure> {
    let position = message.position.as_ref().expect("a record has a position");
    let partition = i32::try_from(position.partition).unwrap();
    let offset = i64::try_from(position.offset).unwrap();
    let key = message.key.as_deref().unwrap_or_default();
    client.execute(EFFECT, &[&id, &key, &partition, &offset]).await?;
    Ok(())
}

/// A source that acknowledges messages before they are handled: an error, which a check has to find.
struct AckFirst(Arc<KafkaSource>);

impl fmt::Debug for AckFirst {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("AckFirst")
    }
}

impl MessageSource for AckFirst {
    fn receive(
        &self,
        max: NonZeroUsize,
    ) -> BoxFuture<'_, Result<Vec<Arc<dyn Delivery>>, SourceError>> {
        Box::pin(async move {
            let received = self.0.receive(max).await?;
            for delivery in &received {
                delivery.acknowledge().await?;
            }
            Ok(received)
        })
    }

    fn limits(&self) -> SourceLimits {
        self.0.limits()
    }
}
