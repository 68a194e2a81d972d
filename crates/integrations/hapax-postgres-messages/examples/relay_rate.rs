//! Rate of a relay, and times of its polls, while a snapshot stays open.
//!
//! `cargo run --release -p hapax-postgres-messages --example relay_rate -- [MESSAGES]` starts a
//! private server, writes messages, and relays them to a sink that accepts everything.
#![allow(clippy::expect_used, clippy::print_stdout, clippy::unwrap_used, reason = "a measurement")]

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hapax_core::store::BoxFuture;
use hapax_core::{Idempotency, MemoryStore};
use hapax_messages::{
    MessageSink, Outbox, OutboxFuture, OutboxLag, OutboxMessage, OutboxPage, OutboxPosition,
    OutboxQuery, OutboxWriters, OutgoingMessage, PublishError, Relay, RelayLimits,
};
use hapax_postgres_messages::{PgOutbox, SharedConnection, message_migrations};
use hapax_testkit::servers::PostgresServer;
use tokio::time::Instant;

#[derive(Debug, Default)]
struct Accepting(AtomicU64);

impl MessageSink for Accepting {
    fn publish<'a>(&'a self, _: &'a OutgoingMessage) -> BoxFuture<'a, Result<(), PublishError>> {
        self.0.fetch_add(1, Ordering::Relaxed);
        Box::pin(std::future::ready(Ok(())))
    }
}

/// An outbox that notes the time of each poll.
#[derive(Debug)]
struct Timed {
    outbox: PgOutbox,
    polls: Arc<Mutex<Vec<Duration>>>,
}

impl Outbox for Timed {
    fn poll<'a>(&'a self, query: OutboxQuery<'a>) -> OutboxFuture<'a, OutboxPage> {
        Box::pin(async move {
            let begun = Instant::now();
            let page = self.outbox.poll(query).await;
            self.polls.lock().unwrap().push(begun.elapsed());
            page
        })
    }

    fn remove<'a>(&'a self, positions: &'a [OutboxPosition]) -> OutboxFuture<'a, ()> {
        self.outbox.remove(positions)
    }

    fn park<'a>(
        &'a self,
        message: &'a OutboxMessage,
        error: &'a str,
        attempts: u32,
    ) -> OutboxFuture<'a, ()> {
        self.outbox.park(message, error, attempts)
    }

    fn writers(&self) -> OutboxFuture<'_, OutboxWriters> {
        self.outbox.writers()
    }

    fn first_above<'a>(
        &'a self,
        shards: &'a [OutboxPosition],
    ) -> OutboxFuture<'a, Vec<OutboxPosition>> {
        self.outbox.first_above(shards)
    }

    fn lag(&self) -> OutboxFuture<'_, OutboxLag> {
        self.outbox.lag()
    }
}

#[tokio::main]
async fn main() {
    let messages: u64 = std::env::args().nth(1).map_or(1_000_000, |text| text.parse().unwrap());
    let server = PostgresServer::start().await;
    server.sql("postgres", &message_migrations(&Default::default())).await;
    let url = server.url("postgres");
    let connect = move || {
        let url = url.clone();
        async move {
            let (client, connection) = tokio_postgres::connect(&url, tokio_postgres::NoTls).await?;
            tokio::spawn(connection);
            Ok::<_, tokio_postgres::Error>(client)
        }
    };
    let snapshot = connect().await.unwrap();
    let begin = "BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM hapax_outbox";
    snapshot.batch_execute(begin).await.unwrap();
    let writer = connect().await.unwrap();
    let writing = tokio::spawn(async move {
        // A thousand in a transaction, of a thousand order keys.
        let put = "SELECT count(*) FROM hapax_outbox_put_all(
            array_fill('orders'::text, ARRAY[1000]), array_fill('\\x00'::bytea, ARRAY[1000]),
            (SELECT array_agg('key-' || n) FROM generate_series(1, 1000) n),
            (SELECT array_agg($1::bigint * 1000 + n || '') FROM generate_series(1, 1000) n))";
        for batch in 0..(messages / 1000) as i64 {
            writer.query_one(put, &[&batch]).await.unwrap();
        }
    });
    let (sink, polls) = (Arc::new(Accepting::default()), Arc::<Mutex<Vec<Duration>>>::default());
    let outbox = PgOutbox::new(&SharedConnection::new(connect));
    let timed = Timed { outbox, polls: Arc::clone(&polls) };
    let engine = Idempotency::builder(Arc::new(MemoryStore::default())).build().unwrap();
    let limits = RelayLimits::default();
    let relay =
        Relay::new("rate", Arc::new(timed), Arc::clone(&sink) as _, engine, limits).unwrap();
    let begun = Instant::now();
    let relay = tokio::spawn(relay.run(std::future::pending()));
    while sink.0.load(Ordering::Relaxed) < messages {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let took = begun.elapsed().as_secs_f64();
    writing.await.unwrap();
    relay.abort();
    let mut polls = std::mem::take(&mut *polls.lock().unwrap());
    polls.sort();
    let at = |share: f64| polls[((polls.len() - 1) as f64 * share) as usize];
    println!("{messages} messages in {took:.1} s: {:.0}/s", messages as f64 / took);
    println!("{} polls: p50 {:?}, p99 {:?}, longest {:?}", polls.len(), at(0.5), at(0.99), at(1.0));
}
