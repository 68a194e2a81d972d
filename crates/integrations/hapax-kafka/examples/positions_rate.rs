//! Rate of a consumer in positions mode, beside the same consumer without Hapax, in one run.
//!
//! `cargo run --release -p hapax-kafka --example positions_rate -- [RECORDS] [ROUNDS]` starts a mock
//! cluster and a private server. A hundred records share a transaction, and each has two statements, which
//! insert a row with a primary key. The first fifth of the records, with the start of the group, is not
//! measured.
#![allow(clippy::expect_used, clippy::print_stdout, clippy::unwrap_used, reason = "a measurement")]

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use deadpool_postgres::{Manager, Object, Pool};
use hapax_core::store::BoxFuture;
use hapax_kafka::KafkaSource;
use hapax_messages::{
    BatchConsumer, BatchConsumerLimits, BatchItem, BatchOptions, IdRule, IdRules, MessageFailure,
};
use hapax_postgres_data::Pooled;
use hapax_postgres_messages::{Connections, PgInbox, message_migrations};
use hapax_testkit::servers::PostgresServer;
use rdkafka::ClientConfig;
use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer as _};
use rdkafka::message::Message as _;
use rdkafka::mocking::MockCluster;
use rdkafka::producer::{FutureProducer, FutureRecord};
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep};
use tokio_postgres::types::Type;

type Connection = Pooled<Object>;

const BATCH: NonZeroUsize = NonZeroUsize::new(100).unwrap();
const PARTITIONS: i32 = 4;
const TOPIC: &str = "orders";

/// A mock cluster keeps 5 MiB of a partition.
const MAX_RECORDS: u64 = 70_000;

/// Writes two rows for a record.
async fn write(connection: &Connection, id: &str) -> Result<(), tokio_postgres::Error> {
    let insert = "INSERT INTO effects (message) VALUES ($1)";
    // One round trip for each.
    connection.query_typed(insert, &[(&id, Type::TEXT)]).await?;
    connection.query_typed(insert, &[(&id, Type::TEXT)]).await.map(drop)
}

fn handle<'a>(
    connection: &'a mut Connection,
    messages: &'a [BatchItem],
) -> BoxFuture<'a, Result<(), MessageFailure>> {
    Box::pin(async move {
        for item in messages {
            write(connection, item.id().as_str()).await?;
        }
        Ok(())
    })
}

/// The time between the first fifth and all of the records.
async fn measured(records: u64, handled: impl Fn() -> u64) -> Duration {
    let reached = async |count: u64| {
        while handled() < count {
            sleep(Duration::from_millis(1)).await;
        }
        (Instant::now(), handled())
    };
    let (begun, first) = reached(records / 5).await;
    let (ended, last) = reached(records).await;
    // As if all of them had been measured.
    (ended - begun).mul_f64(records as f64 / (last - first) as f64)
}

/// A group in positions mode.
async fn positions(
    bootstrap: &str,
    pool: &Pool,
    records: u64,
    group: &str,
    has_ids: bool,
) -> Duration {
    let from = pool.clone();
    let connections = Connections::new(move || {
        let pool = from.clone();
        async move { pool.get().await.map(|object| Pooled::new(object, |object| object)) }
    });
    let inbox = PgInbox::new(group, connections, Duration::from_secs(3600), handle);
    let inbox = Arc::new(match has_ids {
        true => inbox.advance_positions(),
        false => inbox.advance_positions_without_ids(),
    });
    let source = KafkaSource::builder([("bootstrap.servers", bootstrap)], [TOPIC], group);
    let source = source.positions(Arc::clone(&inbox) as _).start().await.unwrap();
    let source = Arc::new(source);
    let transactions = NonZeroUsize::new(usize::try_from(PARTITIONS).unwrap()).unwrap();
    let limits =
        BatchConsumerLimits { batch: BATCH, transactions, ..BatchConsumerLimits::default() };
    let ids = IdRules::new([IdRule::Position]);
    let options = BatchOptions { ids, limits, ..BatchOptions::default() };
    let consumer = BatchConsumer::new(inbox, Arc::clone(&source) as _, options).unwrap();
    let monitor = consumer.monitor();
    let (stop, stopped) = oneshot::channel::<()>();
    let consumer = tokio::spawn(consumer.run(async {
        let _ = stopped.await;
    }));
    let took = measured(records, || monitor.stats().handled).await;
    let _ = stop.send(());
    assert!(consumer.await.unwrap());
    source.close().await;
    took
}

/// A consumer without Hapax: a thread for each partition, which commits the offset after its rows.
async fn plain(bootstrap: &str, pool: &Pool, records: u64, group: &str) -> Duration {
    let handled = Arc::new(AtomicU64::new(0));
    let ends = Arc::new(AtomicBool::new(false));
    let runtime = tokio::runtime::Handle::current();
    let threads: Vec<_> = (0..PARTITIONS)
        .map(|partition| {
            let consumer: BaseConsumer = ClientConfig::new()
                .set("bootstrap.servers", bootstrap)
                .set("group.id", group)
                .set("enable.auto.commit", "false")
                .create()
                .unwrap();
            let mut list = TopicPartitionList::new();
            list.add_partition_offset(TOPIC, partition, Offset::Beginning).unwrap();
            consumer.assign(&list).unwrap();
            let (pool, runtime) = (pool.clone(), runtime.clone());
            let (handled, ends) = (Arc::clone(&handled), Arc::clone(&ends));
            std::thread::spawn(move || {
                while !ends.load(Ordering::Relaxed) {
                    let mut ids = Vec::with_capacity(BATCH.get());
                    let mut timeout = Duration::from_millis(100);
                    while ids.len() < BATCH.get()
                        && let Some(polled) = consumer.poll(timeout)
                    {
                        let record = polled.unwrap();
                        let millis = record.timestamp().to_millis().unwrap_or(0);
                        ids.push((
                            format!("{TOPIC}:{partition}:{}:{millis}", record.offset()),
                            record.offset(),
                        ));
                        timeout = Duration::ZERO;
                    }
                    let Some(last) = ids.last().map(|(_, offset)| *offset) else { continue };
                    let (pool, count) = (pool.clone(), ids.len() as u64);
                    // On a thread of the runtime, as the connections are.
                    let transaction = runtime.spawn(async move {
                        let connection =
                            Pooled::new(pool.get().await.unwrap(), |object: &Object| object);
                        connection.batch_execute("BEGIN").await.unwrap();
                        for (id, _) in &ids {
                            write(&connection, id).await.unwrap();
                        }
                        connection.batch_execute("COMMIT").await.unwrap();
                    });
                    runtime.block_on(transaction).unwrap();
                    let mut list = TopicPartitionList::new();
                    list.add_partition_offset(TOPIC, partition, Offset::Offset(last + 1)).unwrap();
                    consumer.commit(&list, CommitMode::Async).unwrap();
                    handled.fetch_add(count, Ordering::Relaxed);
                }
            })
        })
        .collect();
    let took = measured(records, || handled.load(Ordering::Relaxed)).await;
    ends.store(true, Ordering::Relaxed);
    tokio::task::spawn_blocking(move || threads.into_iter().for_each(|it| it.join().unwrap()))
        .await
        .unwrap();
    took
}

#[tokio::main]
async fn main() {
    let mut arguments = std::env::args().skip(1).map(|text| text.parse().unwrap());
    let (records, rounds) = (arguments.next().unwrap_or(70_000), arguments.next().unwrap_or(5));
    assert!(records <= MAX_RECORDS, "expected at most {MAX_RECORDS} records, found {records}");
    let server = PostgresServer::start().await;
    server.sql("postgres", &message_migrations(&Default::default())).await;
    let table = "CREATE TABLE effects (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, message text NOT NULL)";
    server.sql("postgres", table).await;
    let manager = Manager::new(server.url("postgres").parse().unwrap(), tokio_postgres::NoTls);
    let pool = Pool::builder(manager).max_size(8).build().unwrap();
    let cluster = MockCluster::new(1).unwrap();
    cluster.create_topic(TOPIC, PARTITIONS, 1).unwrap();
    let bootstrap = cluster.bootstrap_servers();
    let producer: FutureProducer =
        ClientConfig::new().set("bootstrap.servers", &bootstrap).create().unwrap();
    let payload = "x".repeat(200);
    let partitions: Vec<i32> =
        (0..PARTITIONS).cycle().take(usize::try_from(records).unwrap()).collect();
    for partitions in partitions.chunks(1_000) {
        let record = |partition: &i32| {
            FutureRecord::<(), _>::to(TOPIC).partition(*partition).payload(&payload)
        };
        let sent = partitions.iter().map(|it| producer.send_result(record(it)).unwrap());
        for sent in sent.collect::<Vec<_>>() {
            sent.await.unwrap().unwrap();
        }
    }
    let mut ratios = [const { Vec::new() }; 2];
    for round in 0..rounds {
        let mut took = [Duration::ZERO; 3];
        // The first of the three is another one each time: it is often the fastest, and tables grow.
        for at in (0..3).map(|at| (at + round) % 3) {
            let group = format!("{at}-{round}");
            took[usize::try_from(at).unwrap()] = match at {
                0 => plain(&bootstrap, &pool, records, &group).await,
                _ => positions(&bootstrap, &pool, records, &group, at == 2).await,
            };
        }
        let [without, only, ids] = took;
        let rate = |took: Duration| records as f64 / took.as_secs_f64();
        let [only_ratio, ids_ratio] =
            [only, ids].map(|it| without.as_secs_f64() / it.as_secs_f64());
        println!(
            "{:.0}/s without Hapax, {:.0}/s with positions: {only_ratio:.2}, {:.0}/s with ids too: {ids_ratio:.2}",
            rate(without),
            rate(only),
            rate(ids),
        );
        ratios[0].push(only_ratio);
        ratios[1].push(ids_ratio);
    }
    for (name, mut ratios) in ["positions", "ids too"].into_iter().zip(ratios) {
        ratios.sort_by(f64::total_cmp);
        if let ([least, ..], [.., most]) = (&*ratios, &*ratios) {
            let median = f64::midpoint(ratios[(ratios.len() - 1) / 2], ratios[ratios.len() / 2]);
            println!("{name}: median {median:.2} ({least:.2} to {most:.2})");
        }
    }
}
