//! Positions mode: positions and effects in one transaction.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use hapax_core::store::BoxFuture;
use hapax_messages::{
    Attempts, BatchConsumer, BatchConsumerError, BatchError, BatchInbox as _, BatchItem,
    BatchMonitor, BatchOptions, EntryState, Message, MessageFailure, MessageSource,
    PositionStore as _,
};
use hapax_postgres_messages::{BatchHandler, PgInbox};
use hapax_testkit::messages::MemoryBroker;
use hapax_testkit::servers::PostgresServer;
use tokio::sync::{Notify, oneshot};
use tokio::task::JoinHandle;

use super::batch::{Connection, until, write};
use super::connections;
use super::log::{Log, item, partition};

pub(super) const HOUR: Duration = Duration::from_secs(3600);

/// Effects with a number, in the order in which they were written.
const EFFECTS: &str = "
    CREATE TABLE effects (number bigserial PRIMARY KEY, message text NOT NULL)";

pub(super) const IN_ORDER: &str = "SELECT string_agg(message, ' ' ORDER BY number) FROM effects";
pub(super) const POSITION: &str =
    "SELECT next_offset FROM hapax_positions WHERE consumer = 'orders'";
pub(super) const DEAD_LETTERS: &str = "
    SELECT string_agg(message_id || ' ' || reason, ', ' ORDER BY number) FROM hapax_dead_letters";

pub(super) async fn server() -> PostgresServer {
    let server = super::server().await;
    server.sql("postgres", EFFECTS).await;
    server
}

pub(super) fn inbox(
    server: &PostgresServer,
    handler: impl BatchHandler<Connection>,
) -> PgInbox<Connection> {
    PgInbox::new("orders", connections(server), HOUR, handler)
}

/// States the type of a closure.
pub(super) fn handler<F>(handle: F) -> F
where
    F: for<'a> Fn(&'a mut Connection, &'a [BatchItem]) -> BoxFuture<'a, Result<(), MessageFailure>>,
{
    handle
}

pub(super) struct Running {
    pub(super) log: Log,
    pub(super) monitor: BatchMonitor,
    task: JoinHandle<bool>,
    stop: oneshot::Sender<()>,
}

impl Running {
    pub(super) async fn stop(self) {
        let _ = self.stop.send(());
        assert!(self.task.await.unwrap());
    }
}

fn options() -> BatchOptions {
    let pause = Duration::from_millis(20);
    let max = NonZeroU32::new(3).unwrap();
    let attempts =
        Attempts { max, first_pause: pause, longest_pause: pause, ..Attempts::default() };
    BatchOptions { attempts, ..BatchOptions::default() }
}

pub(super) fn run(inbox: PgInbox<Connection>) -> Running {
    let inbox = Arc::new(inbox);
    let log = Log::new(Arc::clone(&inbox) as _);
    let consumer = BatchConsumer::new(inbox, Arc::new(log.clone()), options()).unwrap();
    let (monitor, (stop, stopped)) = (consumer.monitor(), oneshot::channel());
    let task = tokio::spawn(consumer.run(async {
        let _ = stopped.await;
    }));
    Running { log, monitor, task, stop }
}

pub(super) fn message(id: u32, key: Option<&str>) -> Message {
    let message = Message::new("memory://log", format!("payload of {id}"));
    let message = message.with_header("message-id", format!("{id}"));
    match key {
        Some(key) => message.with_key(key),
        None => message,
    }
}

/// Fails for the messages 7, for good, and 9, as often as it is tried.
pub(super) fn failing<'a>(
    connection: &'a mut Connection,
    messages: &'a [BatchItem],
) -> BoxFuture<'a, Result<(), MessageFailure>> {
    Box::pin(async move {
        super::batch::write_effects(connection, messages).await?;
        let has = |id: &str| messages.iter().any(|item| item.id().as_str() == id);
        match (has("7"), has("9")) {
            (true, _) => Err(MessageFailure::reject("no such customer")),
            (_, true) => Err(MessageFailure::retry("the customer is locked")),
            _ => Ok(()),
        }
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn each_record_is_handled_once_in_order_with_and_without_ids() {
    let server = server().await;
    let everything = (0..250).map(|id| id.to_string()).collect::<Vec<_>>().join(" ");
    for ids in [250, 0] {
        let inbox = inbox(&server, write);
        let running = run(match ids {
            0 => inbox.advance_positions_without_ids(),
            _ => inbox.advance_positions(),
        });
        for id in 0..250 {
            running.log.publish(message(id, None));
        }
        running.log.acknowledged(250).await;
        running.stop().await;
        assert_eq!(server.sql("postgres", IN_ORDER).await, everything);
        assert_eq!(server.sql("postgres", POSITION).await, "250");
        assert_eq!(
            server.sql("postgres", "SELECT count(*) FROM hapax_inbox").await,
            ids.to_string()
        );
        server.sql("postgres", "TRUNCATE effects, hapax_positions, hapax_inbox").await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_fails_is_parked_with_its_step_and_blocks_its_key_only() {
    for with_ids in [true, false] {
        let server = server().await;
        let inbox = inbox(&server, failing);
        let running = run(match with_ids {
            true => inbox.advance_positions(),
            false => inbox.advance_positions_without_ids(),
        });
        for id in 0..12 {
            let key = if id % 2 == 0 {
                "even"
            } else if id < 8 {
                "seven"
            } else {
                "others"
            };
            running.log.publish(message(id, Some(key)));
        }
        // It is behind the dead letter of 7.
        running.log.publish(message(12, Some("seven")));
        running.log.acknowledged(13).await;
        running.stop().await;
        assert_eq!(server.sql("postgres", IN_ORDER).await, "0 1 2 3 4 5 6 8 10");
        let letters = "7 rejected, 9 attempts, 11 blocked, 12 blocked";
        assert_eq!(server.sql("postgres", DEAD_LETTERS).await, letters);
        assert_eq!(server.sql("postgres", POSITION).await, "13");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn another_payload_under_an_id_is_parked_and_its_neighbours_are_handled() {
    let server = server().await;
    let running = run(inbox(&server, write).advance_positions());
    running.log.publish(message(1, None));
    running.log.acknowledged(1).await;
    let other = Message::new("memory://log", "other").with_header("message-id", "1");
    running.log.publish(message(2, None));
    running.log.publish(other);
    running.log.publish(message(2, None));
    running.log.publish(message(3, None));
    running.log.acknowledged(5).await;
    running.stop().await;
    assert_eq!(server.sql("postgres", IN_ORDER).await, "1 2 3");
    assert_eq!(server.sql("postgres", DEAD_LETTERS).await, "1 mismatch");
    assert_eq!(server.sql("postgres", POSITION).await, "5");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stale_owner_has_no_effect_and_a_step_is_taken_once() {
    for has_ids in [true, false] {
        let server = server().await;
        let inbox = inbox(&server, write);
        let inbox = match has_ids {
            true => inbox.advance_positions(),
            false => inbox.advance_positions_without_ids(),
        };
        let stale = inbox.acquire(&partition(), 5).await.unwrap();
        assert!(stale.is_new && stale.next == 5);
        let owner = inbox.acquire(&partition(), 0).await.unwrap();
        assert!(!owner.is_new && owner.next == 5 && owner.fence > stale.fence);
        let fenced = inbox.apply(vec![item(stale.fence, 5)], false).await;
        assert!(matches!(fenced, Err(BatchError::Fenced)), "{fenced:?}");
        let batch = vec![item(owner.fence, 5), item(owner.fence, 6)];
        let applied = inbox.apply(batch.clone(), false).await.unwrap();
        assert_eq!(applied, [EntryState::New, EntryState::New]);
        // The reply to its COMMIT was lost.
        let again = inbox.apply(batch, false).await.unwrap();
        assert_eq!(again, [EntryState::Duplicate, EntryState::Duplicate]);
        // The first does not begin at the position; the steps of the second do not follow each other.
        for batch in [vec![item(owner.fence, 8)], vec![item(owner.fence, 7), item(owner.fence, 9)]]
        {
            let fenced = inbox.apply(batch, false).await;
            assert!(matches!(fenced, Err(BatchError::Fenced)), "{fenced:?}");
        }
        assert_eq!(server.sql("postgres", IN_ORDER).await, "m-5 m-6");
        let next = inbox.acquire(&partition(), 0).await.unwrap();
        assert_eq!((next.next, next.handled_timestamp_ms), (7, Some(1_790_000_000_000)));
    }
}

/// The function that advances positions without its checks: an error, which a check has to find.
const UNCHECKED: &str = "
    CREATE OR REPLACE FUNCTION hapax_position_advance(
        consumer text, topic text, partition integer, fence bigint, from_offset bigint,
        to_offset bigint, millis bigint
    ) RETURNS text LANGUAGE sql AS $$
        UPDATE hapax_positions SET next_offset = to_offset;
        SELECT 'advanced'
    $$";

#[tokio::test(flavor = "multi_thread")]
async fn a_step_without_a_check_of_the_owner_is_found() {
    let server = server().await;
    server.sql("postgres", UNCHECKED).await;
    let inbox = inbox(&server, write).advance_positions_without_ids();
    let stale = inbox.acquire(&partition(), 5).await.unwrap();
    let owner = inbox.acquire(&partition(), 5).await.unwrap();
    for fence in [owner.fence, stale.fence] {
        inbox.apply(vec![item(fence, 5)], false).await.unwrap();
    }
    assert_eq!(server.sql("postgres", IN_ORDER).await, "m-5 m-5", "two effects");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_take_waits_for_the_transaction_of_the_previous_owner() {
    let server = server().await;
    let (begun, go) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let (begins, goes) = (Arc::clone(&begun), Arc::clone(&go));
    let handler = handler(move |connection, messages| {
        let (begun, go) = (Arc::clone(&begins), Arc::clone(&goes));
        Box::pin(async move {
            begun.notify_one();
            go.notified().await;
            write(connection, messages).await
        })
    });
    let inbox = Arc::new(inbox(&server, handler).advance_positions_without_ids());
    let owner = inbox.acquire(&partition(), 0).await.unwrap();
    let applying = tokio::spawn({
        let inbox = Arc::clone(&inbox);
        async move { inbox.apply(vec![item(owner.fence, 0)], false).await }
    });
    begun.notified().await;
    let taking = tokio::spawn({
        let inbox = Arc::clone(&inbox);
        async move { inbox.acquire(&partition(), 0).await }
    });
    let waiting = "SELECT count(*) FROM pg_stat_activity
        WHERE wait_event_type = 'Lock' AND query LIKE '%hapax_position_acquire%'
            AND pid <> pg_backend_pid()";
    until("the take waits", async || server.sql("postgres", waiting).await == "1").await;
    go.notify_one();
    assert_eq!(applying.await.unwrap().unwrap(), [EntryState::New]);
    assert_eq!(taking.await.unwrap().unwrap().next, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_position_that_an_operator_sets_is_acquired_again() {
    let server = server().await;
    let running = run(inbox(&server, write).advance_positions_without_ids());
    for id in 0..3 {
        running.log.publish(message(id, None));
    }
    running.log.acknowledged(3).await;
    assert_eq!(running.log.acquisitions(), 1);
    server.sql("postgres", "SELECT hapax_position_set('orders', 'orders', 0, 1)").await;
    running.log.publish(message(3, None));
    running.log.acknowledged(6).await;
    assert_eq!(running.log.acquisitions(), 2);
    running.stop().await;
    assert_eq!(server.sql("postgres", IN_ORDER).await, "0 1 2 1 2 3");
}

#[tokio::test(flavor = "multi_thread")]
async fn positions_of_source_or_inbox_alone_are_refused() {
    let server = server().await;
    let with = || Arc::new(inbox(&server, write).advance_positions());
    let log: Arc<dyn MessageSource> = Arc::new(Log::new(with()));
    let refused = BatchConsumer::new(Arc::new(inbox(&server, write)), log, options());
    let error = refused.err().unwrap();
    assert_eq!(error, BatchConsumerError::Positions { found: "source" });
    let refused = BatchConsumer::new(with(), Arc::new(MemoryBroker::default()), options());
    let error = refused.err().unwrap();
    assert_eq!(error, BatchConsumerError::Positions { found: "inbox" });
}
