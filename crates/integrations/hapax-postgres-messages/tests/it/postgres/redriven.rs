//! Messages that are redriven in positions mode.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use hapax_messages::{BatchItem, MessageFailure};
use hapax_postgres_messages::{BatchHandler, PgInbox};
use hapax_testkit::faults::{FaultProxy, FaultProxyRates};
use hapax_testkit::servers::PostgresServer;

use super::batch::{Connection, until, write};
use super::positions::{
    DEAD_LETTERS, HOUR, IN_ORDER, POSITION, Running, failing, handler, inbox, message, run, server,
};

const LETTER_IDS: &str =
    "SELECT string_agg(encode(id, 'hex'), ' ' ORDER BY number) FROM hapax_dead_letters";

/// Decides to redrive a dead letter, and publishes a copy of its message.
async fn redrive(server: &PostgresServer, running: &Running, hex: &str, id: u32) {
    let decision = format!("SELECT hapax_dead_letter_redrive('\\x{hex}', 'operator', 'test')");
    server.sql("postgres", &decision).await;
    copy(running, hex, id);
}

fn copy(running: &Running, hex: &str, id: u32) {
    let message = message(id, Some("seven"));
    running.log.publish(message.with_header("hapax-redrive", hex.to_owned()));
}

/// Returns a handler that fails as [`failing`] while `fails`.
fn failing_while(fails: &Arc<AtomicBool>) -> impl BatchHandler<Connection> + use<> {
    let fails = Arc::clone(fails);
    handler(move |connection, messages| match fails.load(Ordering::SeqCst) {
        true => failing(connection, messages),
        false => write(connection, messages),
    })
}

/// With the ids, or without.
fn advancing(inbox: PgInbox<Connection>, with_ids: bool) -> PgInbox<Connection> {
    match with_ids {
        true => inbox.advance_positions(),
        false => inbox.advance_positions_without_ids(),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_is_redriven_is_handled_once() {
    for with_ids in [true, false] {
        let server = server().await;
        let fails = Arc::new(AtomicBool::new(true));
        let running = run(advancing(inbox(&server, failing_while(&fails)), with_ids));
        for id in [7, 12, 8] {
            running.log.publish(message(id, Some("seven")));
        }
        running.log.acknowledged(3).await;
        fails.store(false, Ordering::SeqCst);
        let ids = server.sql("postgres", LETTER_IDS).await;
        for (hex, id) in ids.split(' ').zip([7, 12, 8]) {
            redrive(&server, &running, hex, id).await;
            // Again, as after a crash of the redrive.
            copy(&running, hex, id);
        }
        running.log.acknowledged(9).await;
        running.stop().await;
        assert_eq!(server.sql("postgres", IN_ORDER).await, "7 12 8");
        assert_eq!(server.sql("postgres", "SELECT count(*) FROM hapax_dead_letters").await, "0");
        assert_eq!(server.sql("postgres", POSITION).await, "9");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_is_parked_again_keeps_its_dead_letter_after_a_lost_reply() {
    for with_ids in [true, false] {
        let server = server().await;
        let proxy = Arc::new(FaultProxy::before(server.address(), 1).await.unwrap());
        // Not the BEGIN, which has the word COMMITTED.
        proxy.only(b"COMMIT\0");
        let connections = super::connections_of(super::pool_through(&proxy, &server));
        let loses = Arc::new(AtomicBool::new(false));
        let (of_handler, faults) = (Arc::clone(&loses), Arc::clone(&proxy));
        let handler = handler(move |_, _: &[BatchItem]| {
            if of_handler.swap(false, Ordering::SeqCst) {
                // Of the transaction in which the message is parked.
                faults.set(FaultProxyRates { lose_reply: 1000, ..FaultProxyRates::default() });
            }
            Box::pin(async { Err(MessageFailure::reject("no such customer")) })
        });
        let inbox = PgInbox::new("orders", connections, HOUR, handler);
        let running = run(advancing(inbox, with_ids));
        running.log.publish(message(7, Some("seven")));
        running.log.acknowledged(1).await;
        loses.store(true, Ordering::SeqCst);
        let hex = server.sql("postgres", LETTER_IDS).await;
        redrive(&server, &running, &hex, 7).await;
        until("the reply is lost", async || proxy.counts().lost_replies > 0).await;
        proxy.set(FaultProxyRates::default());
        running.log.acknowledged(2).await;
        running.stop().await;
        assert_eq!(server.sql("postgres", DEAD_LETTERS).await, "7 rejected", "ids: {with_ids}");
        assert_eq!(server.sql("postgres", POSITION).await, "2");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_waits_for_another_transaction_that_removes_its_dead_letter() {
    let server = server().await;
    let fails = Arc::new(AtomicBool::new(true));
    let running = run(advancing(inbox(&server, failing_while(&fails)), false));
    running.log.publish(message(7, Some("seven")));
    running.log.acknowledged(1).await;
    fails.store(false, Ordering::SeqCst);
    let hex = server.sql("postgres", LETTER_IDS).await;
    let mut client = super::pool(&server).get().await.unwrap();
    let removing = client.transaction().await.unwrap();
    removing.batch_execute("DELETE FROM hapax_dead_letters").await.unwrap();
    copy(&running, &hex, 7);
    until("the copy is held", async || running.monitor.stats().held_in_flight > 0).await;
    removing.commit().await.unwrap();
    running.log.acknowledged(2).await;
    running.stop().await;
    assert_eq!(server.sql("postgres", IN_ORDER).await, "", "it is not handled");
    assert_eq!(server.sql("postgres", POSITION).await, "2");
}
