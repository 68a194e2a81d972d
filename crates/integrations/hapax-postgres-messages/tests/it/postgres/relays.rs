//! Relays that are killed and delayed at random, beside writers that commit late or roll back: no
//! message is skipped, and the handler receives those of one order key in the order of their ids.
//! BuggyOutbox bugs must be found.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hapax_core::store::BoxFuture;
use hapax_core::{Idempotency, MemoryStore};
use hapax_messages::{
    MessageSink, Outbox, OutboxFuture, OutboxLag, OutboxMessage, OutboxPage, OutboxPosition,
    OutboxQuery, OutboxWriters, OutgoingMessage, PublishError, Relay, RelayLimits,
};
use hapax_postgres_messages::PgOutbox;
use hapax_testkit::SeededEntropy;
use hapax_testkit::servers::PostgresServer;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{Instant, sleep};

use super::{connections, pool, server};

const WRITERS: u64 = 8;
const KEYS: u64 = 16;
const RELAYS: usize = 3;
const LEASE: Duration = Duration::from_secs(1);

/// A bug of the relay or its outbox.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum PlantedBug {
    /// As it is.
    None,
    /// The relay reads above the largest id that it has read.
    Cursor,
    /// The relay reads rows of transactions older than the oldest one that runs.
    OldestTransaction,
    /// Rows that another relay has are skipped, and no relay has a shard for itself.
    SkipLocked,
    /// Writers of one key are not serialized.
    Unserialized,
    /// A relay does not check its lease before it sends, and has several messages of a key in
    /// flight.
    ManyInFlight,
}

/// An inbox behind the sink: it drops duplicates, and notes the order of the rest.
#[derive(Debug, Default)]
struct Handler {
    seen: Mutex<HashSet<String>>,
    by_key: Mutex<BTreeMap<String, Vec<u64>>>,
    duplicates: AtomicU64,
    /// Messages that were delayed past the lease of their shard.
    late: AtomicU64,
}

/// A sink that delays some messages, for longer than the lease of a shard, and loses replies.
#[derive(Debug)]
struct Slow {
    handler: Arc<Handler>,
    dice: SeededEntropy,
    bug: PlantedBug,
}

impl MessageSink for Slow {
    fn publish<'a>(
        &'a self,
        message: &'a OutgoingMessage,
    ) -> BoxFuture<'a, Result<(), PublishError>> {
        Box::pin(async move {
            match self.dice.below(400) {
                0 => {
                    self.handler.late.fetch_add(1, Ordering::Relaxed);
                    sleep(LEASE * 2).await;
                }
                chance if chance < 20 => sleep(Duration::from_millis(chance)).await,
                _ => {}
            }
            self.handler.receive(message);
            match self.dice.below(100) {
                0 => Err(PublishError::not_acknowledged("the reply is lost")),
                _ => Ok(()),
            }
        })
    }

    fn keeps_order(&self) -> bool {
        self.bug == PlantedBug::ManyInFlight
    }
}

impl Handler {
    fn receive(&self, message: &OutgoingMessage) {
        if !self.seen.lock().unwrap().insert(message.id.to_string()) {
            self.duplicates.fetch_add(1, Ordering::Relaxed);
            return;
        }
        let number = message.id.as_str().parse().unwrap();
        let key = message.key.clone().unwrap_or_default();
        self.by_key.lock().unwrap().entry(key).or_default().push(number);
    }
}

/// An outbox with a [`PlantedBug`].
#[derive(Debug)]
struct BuggyOutbox {
    right: PgOutbox,
    server: Arc<PostgresServer>,
    bug: PlantedBug,
    /// Largest id of each shard that was read, for [`PlantedBug::Cursor`].
    read: Mutex<HashMap<u16, u64>>,
    /// Rows that a relay has, by its number.
    locked: Arc<Mutex<HashMap<OutboxPosition, usize>>>,
    relay: usize,
}

impl Outbox for BuggyOutbox {
    fn poll<'a>(&'a self, query: OutboxQuery<'a>) -> OutboxFuture<'a, OutboxPage> {
        Box::pin(async move {
            let mut shards = query.shards.to_vec();
            if self.bug == PlantedBug::Cursor {
                let read = self.read.lock().unwrap();
                for shard in &mut shards {
                    shard.id = shard.id.max(read.get(&shard.shard).copied().unwrap_or_default());
                }
            }
            let mut page = self.right.poll(OutboxQuery { shards: &shards, ..query }).await?;
            match self.bug {
                PlantedBug::Cursor => {
                    let mut read = self.read.lock().unwrap();
                    for message in &page.messages {
                        let last = read.entry(message.position.shard).or_default();
                        *last = (*last).max(message.position.id);
                    }
                }
                PlantedBug::OldestTransaction => {
                    let old = "SELECT id FROM hapax_outbox \
                               WHERE xmin::text::bigint < txid_snapshot_xmin(txid_current_snapshot())";
                    let old = self.server.sql("postgres", old).await;
                    let old: HashSet<_> = old.lines().map(str::to_owned).collect();
                    page.messages.retain(|it| old.contains(&it.position.id.to_string()));
                }
                PlantedBug::SkipLocked => {
                    let mut locked = self.locked.lock().unwrap();
                    page.messages.retain(|it| {
                        *locked.entry(it.position).or_insert(self.relay) == self.relay
                    });
                }
                PlantedBug::None | PlantedBug::Unserialized | PlantedBug::ManyInFlight => {}
            }
            Ok(page)
        })
    }

    fn remove<'a>(&'a self, positions: &'a [OutboxPosition]) -> OutboxFuture<'a, ()> {
        self.right.remove(positions)
    }

    fn park<'a>(
        &'a self,
        message: &'a OutboxMessage,
        error: &'a str,
        attempts: u32,
    ) -> OutboxFuture<'a, ()> {
        self.right.park(message, error, attempts)
    }

    fn writers(&self) -> OutboxFuture<'_, OutboxWriters> {
        self.right.writers()
    }

    fn first_above<'a>(
        &'a self,
        shards: &'a [OutboxPosition],
    ) -> OutboxFuture<'a, Vec<OutboxPosition>> {
        self.right.first_above(shards)
    }

    fn lag(&self) -> OutboxFuture<'_, OutboxLag> {
        self.right.lag()
    }
}

struct World {
    server: Arc<PostgresServer>,
    leases: Arc<MemoryStore>,
    handler: Arc<Handler>,
    locked: Arc<Mutex<HashMap<OutboxPosition, usize>>>,
    bug: PlantedBug,
}

impl World {
    fn relay(&self, number: usize, seed: u64) -> JoinHandle<()> {
        // Without shards each relay has leases of its own.
        let leases = match self.bug {
            PlantedBug::SkipLocked => Arc::new(MemoryStore::default()),
            _ => Arc::clone(&self.leases),
        };
        let engine = Idempotency::builder(leases).namespace("").build().unwrap();
        let limits = RelayLimits { lease: LEASE, ..RelayLimits::default() };
        let outbox = BuggyOutbox {
            right: PgOutbox::new(&connections(&self.server)),
            server: Arc::clone(&self.server),
            bug: self.bug,
            read: Mutex::default(),
            locked: Arc::clone(&self.locked),
            relay: number,
        };
        let sink = Arc::new(Slow {
            handler: Arc::clone(&self.handler),
            dice: SeededEntropy::new(seed),
            bug: self.bug,
        });
        let relay = Relay::new("orders", Arc::new(outbox), sink, engine, limits);
        tokio::spawn(relay.unwrap().run(std::future::pending()))
    }

    /// Writes messages, each in a transaction, of which some take long and some are rolled back.
    /// Returns the ids that were committed.
    async fn write(&self, writer: u64, transactions: u64) -> Vec<u64> {
        let dice = SeededEntropy::new(1_000 + writer);
        let mut connection = pool(&self.server).get().await.unwrap();
        let mut committed = Vec::new();
        for _ in 0..transactions {
            let transaction = connection.transaction().await.unwrap();
            let key = format!("key-{}", dice.below(KEYS));
            let payload = format!("of {writer}");
            let id = if self.bug == PlantedBug::Unserialized {
                // As a plain INSERT would, without turns.
                let insert = "INSERT INTO hapax_outbox (shard, id, message_id, destination, order_key, headers, payload) \
                     SELECT hapax_outbox_shard($1), n.id, n.id::text, 'orders', $1, '{}', $2 \
                     FROM (SELECT nextval('hapax_outbox_ids') AS id OFFSET 0) n RETURNING id";
                let row =
                    transaction.query_one(insert, &[&key, &payload.as_bytes()]).await.unwrap();
                row.get::<_, i64>(0)
            } else {
                // The id of the message is that of its row.
                let put = "SELECT hapax_outbox_put('orders', $1, $2)";
                transaction.execute(put, &[&payload.as_bytes(), &key]).await.unwrap();
                let name = "UPDATE hapax_outbox SET message_id = id::text \
                            WHERE id = currval('hapax_outbox_ids') RETURNING id";
                transaction.query_one(name, &[]).await.unwrap().get::<_, i64>(0)
            };
            if dice.below(10) == 0 {
                sleep(Duration::from_millis(dice.below(40))).await;
            }
            if dice.below(10) == 0 {
                transaction.rollback().await.unwrap();
            } else {
                transaction.commit().await.unwrap();
                committed.push(id.unsigned_abs());
            }
        }
        committed
    }
}

/// Runs writers and relays, and returns the first violation.
async fn check(bug: PlantedBug, transactions: u64) -> Result<(), String> {
    let server = Arc::new(server().await);
    server.create_database("elsewhere").await;
    let world = Arc::new(World {
        server: Arc::clone(&server),
        leases: Arc::default(),
        handler: Arc::default(),
        locked: Arc::default(),
        bug,
    });
    // Transactions that stay open: one that writes elsewhere, and one that writes another table
    // here.
    let mut open = Vec::new();
    for database in ["elsewhere", "postgres"] {
        let (client, connection) =
            tokio_postgres::connect(&server.url(database), tokio_postgres::NoTls).await.unwrap();
        tokio::spawn(connection);
        let begin =
            "BEGIN; CREATE TABLE long_transaction (n int); INSERT INTO long_transaction VALUES (1)";
        client.batch_execute(begin).await.unwrap();
        open.push(client);
    }
    let mut writers = JoinSet::new();
    for writer in 0..WRITERS {
        let world = Arc::clone(&world);
        writers.spawn(async move { world.write(writer, transactions).await });
    }
    let relays = tokio::spawn(relays(Arc::clone(&world)));
    let mut committed = HashSet::new();
    while let Some(ids) = writers.join_next().await {
        committed.extend(ids.unwrap());
    }
    let arrived = all_arrive(&world, committed.len()).await;
    relays.abort();
    drop(open);
    for (key, ids) in world.handler.by_key.lock().unwrap().iter() {
        if let Some(pair) = ids.windows(2).find(|pair| pair[0] > pair[1]) {
            return Err(format!("{key}: {} arrives after {}", pair[1], pair[0]));
        }
    }
    if !arrived {
        let count = world.handler.seen.lock().unwrap().len();
        return Err(format!("{count} of {} messages arrive", committed.len()));
    }
    let seen: HashSet<u64> =
        world.handler.seen.lock().unwrap().iter().map(|id| id.parse().unwrap()).collect();
    assert_eq!(seen, committed, "a message of a transaction that was rolled back was published");
    if bug == PlantedBug::None {
        assert!(
            world.handler.late.load(Ordering::Relaxed) > 0,
            "no message was delayed past its lease"
        );
        let duplicates = world.handler.duplicates.load(Ordering::Relaxed);
        assert!(duplicates > 0, "nothing was published twice");
    }
    Ok(())
}

/// Runs three relays, and kills one of them again and again.
async fn relays(world: Arc<World>) {
    let dice = SeededEntropy::new(7);
    let mut running: Vec<_> =
        (0..RELAYS).map(|number| world.relay(number, number as u64)).collect();
    for seed in 100.. {
        sleep(Duration::from_millis(300 + dice.below(900))).await;
        let number = dice.below(RELAYS as u64) as usize;
        std::mem::replace(&mut running[number], world.relay(number, seed)).abort();
    }
}

/// Waits until every message has arrived, or nothing arrives any more.
async fn all_arrive(world: &World, expected: usize) -> bool {
    let (mut last, mut since) = (0, Instant::now());
    loop {
        let count = world.handler.seen.lock().unwrap().len();
        if count >= expected {
            return true;
        }
        if count != last {
            (last, since) = (count, Instant::now());
        }
        if since.elapsed() > Duration::from_secs(15) {
            return false;
        }
        sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn no_message_is_skipped_or_reordered() {
    let transactions = std::env::var("HAPAX_RELAY_TRANSACTIONS").ok();
    let transactions = transactions.and_then(|text| text.parse().ok()).unwrap_or(250);
    check(PlantedBug::None, transactions).await.unwrap();
}

macro_rules! finds {
    ($($name:ident: $bug:ident)*) => {$(
        #[tokio::test(flavor = "multi_thread")]
        async fn $name() {
            let found = check(PlantedBug::$bug, 250).await;
            println!("{:?}: {}", PlantedBug::$bug, found.expect_err("the bug is found"));
        }
    )*};
}

finds! {
    finds_a_cursor_over_ids: Cursor
    finds_a_cursor_by_the_oldest_transaction: OldestTransaction
    finds_rows_that_are_skipped_while_another_relay_has_them: SkipLocked
    finds_writers_that_are_not_serialized: Unserialized
    finds_several_messages_of_a_key_in_flight: ManyInFlight
}
