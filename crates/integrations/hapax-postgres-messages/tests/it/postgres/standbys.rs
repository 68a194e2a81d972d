//! Synchronous standbys that are away: a commit that waits for one becomes visible when the server
//! crashes, and would be lost if the standby were promoted. Nothing follows from it before the standby
//! has it.

use std::sync::Arc;
use std::time::Duration;

use hapax_core::MemoryStore;
use hapax_messages::{
    DeadLetter, DeadLetterStore as _, Message, MessageId, OrderKeyQuery, OrderKeyState,
};
use hapax_postgres::PostgresOptions;
use hapax_postgres_messages::{PgDeadLetterStore, PgOutbox, SharedConnection, put_messages};
use hapax_testkit::messages::MemoryBroker;
use hapax_testkit::servers::PostgresServer;

use super::batch::{run, send, summary, with_effects, write};
use super::relay::{Collected, message, relay, relay_of};

/// Backends that wait for a standby.
const WAITING: &str = "SELECT count(*) > 0 FROM pg_stat_activity WHERE wait_event = 'SyncRep'";

/// Waits until a commit waits for a standby.
async fn waits(server: &PostgresServer) {
    while server.sql("postgres", WAITING).await != "t" {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

async fn standbys(server: &PostgresServer, names: &str) {
    server
        .sql("postgres", &format!("ALTER SYSTEM SET synchronous_standby_names = '{names}'"))
        .await;
    server.sql("postgres", "SELECT pg_reload_conf()").await;
    let current = "SELECT current_setting('synchronous_standby_names')";
    while server.sql("postgres", current).await != names {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Crashes: a commit that waits becomes visible, and is on no standby.
async fn crash(server: &mut PostgresServer) {
    server.kill().await;
    server.restart().await;
}

#[tokio::test]
async fn a_duplicate_of_a_message_that_no_standby_has_is_not_acknowledged() {
    let mut server = with_effects().await;
    standbys(&server, "gone").await;
    let first = MemoryBroker::default();
    send(&first, "m-1");
    let running = run(&server, &first, write);
    waits(&server).await;
    running.abort();
    crash(&mut server).await;
    assert_eq!(summary(&server).await, "1|1", "the commit is visible");
    let again = MemoryBroker::default();
    send(&again, "m-1");
    let running = run(&server, &again, write);
    tokio::select! {
        () = again.emptied() => panic!("a duplicate that failover loses is acknowledged"),
        () = waits(&server) => {}
    }
    assert_eq!(again.backlog(), 1);
    standbys(&server, "").await;
    again.emptied().await;
    assert_eq!(summary(&server).await, "1|1");
    running.stop().await;
}

#[tokio::test]
async fn a_message_that_no_standby_has_is_not_published() {
    let mut server = with_effects().await;
    standbys(&server, "gone").await;
    let pool = super::pool(&server);
    let writing = tokio::spawn(async move {
        let mut connection = pool.get().await.unwrap();
        let transaction = connection.transaction().await.unwrap();
        put_messages(&mut &*transaction, None, &[message("m-1", Some("k"))]).await.unwrap();
        transaction.commit().await
    });
    waits(&server).await;
    crash(&mut server).await;
    writing.await.unwrap().unwrap_err();
    let rows = "SELECT count(*) FROM hapax_outbox";
    assert_eq!(server.sql("postgres", rows).await, "1", "the commit is visible");
    let (leases, sink) = (Arc::new(MemoryStore::default()), Arc::new(Collected::default()));
    let running = relay(&server, &leases, &sink);
    tokio::select! {
        () = sink.reached(1) => panic!("a message that failover loses is published"),
        () = waits(&server) => {}
    }
    assert_eq!(sink.distinct(), 0);
    standbys(&server, "").await;
    sink.reached(1).await;
    running.stop().await;
}

/// Cancels the sessions that wait, as an operator does who believes that they hang.
async fn cancel(server: &PostgresServer) {
    let cancel =
        "SELECT count(pg_cancel_backend(pid)) FROM pg_stat_activity WHERE wait_event = 'SyncRep'";
    server.sql("postgres", cancel).await;
}

/// Returns the outbox on connections of this library.
fn own_outbox(server: &PostgresServer) -> Arc<PgOutbox> {
    let options: PostgresOptions = server.url("postgres").parse().unwrap();
    let shared = SharedConnection::new(move || {
        let options = options.clone();
        async move { options.client().await }
    });
    Arc::new(PgOutbox::new(&shared))
}

#[tokio::test]
async fn a_message_whose_commit_was_cancelled_before_a_standby_had_it_is_not_published() {
    for ends in ["pg_cancel_backend", "pg_terminate_backend"] {
        let server = with_effects().await;
        server.sql("postgres", "ALTER DATABASE postgres SET client_min_messages = error").await;
        let (leases, sink) = (Arc::new(MemoryStore::default()), Arc::new(Collected::default()));
        let running = relay_of(own_outbox(&server), &leases, &sink);
        // The relay has read and published before.
        server.sql("postgres", "SELECT hapax_outbox_put_text('orders', 'x')").await;
        sink.reached(1).await;
        while server.sql("postgres", "SELECT count(*) FROM hapax_outbox").await != "0" {}
        standbys(&server, "gone").await;
        let pool = super::pool(&server);
        let writing = tokio::spawn(async move {
            let connection = pool.get().await.unwrap();
            connection.query("SELECT hapax_outbox_put_text('orders', 'lost')", &[]).await
        });
        waits(&server).await;
        let end = format!(
            "SELECT count({ends}(pid)) FROM pg_stat_activity WHERE wait_event = 'SyncRep' \
             AND query LIKE '%lost%'"
        );
        server.sql("postgres", &end).await;
        let _ = writing.await.unwrap();
        for _ in 0..3 {
            tokio::select! {
                () = sink.reached(2) => panic!("{ends}: a message that failover loses is published"),
                () = waits(&server) => {}
            }
            // Also the wait of the relay is cancelled: it reads the message again, and waits again.
            cancel(&server).await;
        }
        assert_eq!(sink.distinct(), 1);
        standbys(&server, "").await;
        sink.reached(2).await;
        running.stop().await;
    }
}

#[tokio::test]
async fn a_dead_letter_whose_commit_was_cancelled_before_a_standby_had_it_is_not_relied_on() {
    let server = with_effects().await;
    let message = Message::new("memory://orders", "x").with_header("message-id", "m-1");
    let message = message.with_key("k");
    let id = MessageId::new("m-1").unwrap();
    let dead_letter = DeadLetter::id_of("orders", Some(&id), &message);
    let store = PgDeadLetterStore::new(&super::connections(&server));
    let query = OrderKeyQuery {
        consumer: "orders",
        key: "k",
        dead_letter: &dead_letter,
        is_redriven: false,
    };
    assert_eq!(store.order_key(query).await.unwrap(), OrderKeyState::Free);
    standbys(&server, "gone").await;
    let put = format!(
        "SELECT hapax_dead_letter_put(decode('{}', 'hex'), 'orders', 'm-1', 'memory://orders', 'rejected', 1, \
         '', 'k', '{{}}', '{{}}', 'x', now(), now())",
        dead_letter.iter().map(|byte| format!("{byte:02x}")).collect::<String>()
    );
    let pool = super::pool(&server);
    let writing =
        tokio::spawn(async move { pool.get().await.unwrap().query(&put, &[]).await.map(drop) });
    waits(&server).await;
    cancel(&server).await;
    writing.await.unwrap().unwrap();
    tokio::select! {
        state = store.order_key(query) => panic!("{state:?} of a row that failover loses"),
        () = waits(&server) => {}
    }
    standbys(&server, "").await;
    let state = store.order_key(query).await.unwrap();
    assert!(matches!(state, OrderKeyState::Parked(_)), "{state:?}");
}

#[tokio::test]
async fn a_statement_timeout_of_the_role_does_not_end_the_wait_for_a_standby() {
    let server = with_effects().await;
    server.sql("postgres", "ALTER DATABASE postgres SET statement_timeout = '300ms'").await;
    standbys(&server, "gone").await;
    let broker = MemoryBroker::default();
    send(&broker, "m-1");
    let running = run(&server, &broker, write);
    waits(&server).await;
    // An interrupted COMMIT succeeds, with a warning.
    let acknowledged = tokio::time::timeout(Duration::from_secs(2), broker.emptied()).await;
    acknowledged.expect_err("a message that failover loses is acknowledged");
    standbys(&server, "").await;
    broker.emptied().await;
    running.stop().await;
}

#[tokio::test]
async fn an_inbox_writes_even_if_it_finds_duplicates_only() {
    let server = with_effects().await;
    let enter = "SELECT state FROM hapax_inbox('orders', ARRAY['m-1', 'm-2'])";
    let attempt = "SELECT attempt FROM hapax_inbox_attempt('orders', 'm-1')";
    server.sql("postgres", enter).await;
    for call in [enter, attempt] {
        let script = format!("BEGIN; {call}; SELECT pg_current_xact_id_if_assigned() IS NOT NULL");
        let said = server.sql("postgres", &script).await;
        assert_eq!(said.lines().last(), Some("t"), "{said}");
    }
}

#[tokio::test]
async fn an_inbox_commits_durably_whatever_the_role_says() {
    let server = with_effects().await;
    let sql = async |text: &str| server.sql("postgres", text).await;
    for (before, after) in [
        ("off", "on"),
        ("local", "on"),
        ("remote_write", "on"),
        ("on", "on"),
        ("remote_apply", "remote_apply"),
    ] {
        for call in [
            "SELECT FROM hapax_inbox('orders', ARRAY['m-1'])",
            "SELECT FROM hapax_dead_letter_put(sha256('x'), 'orders', 'm-1', 'o', 'rejected', 1, '', \
             NULL, '{}', '{}', '', now(), now())",
            "SELECT FROM hapax_dead_letter_redrive(sha256('x'), 'ann', 'fixed')",
            "SELECT FROM hapax_sequence('orders', 'a', 1, 'm', NULL, 'x', 1, '1 h', 'accept')",
            "SELECT FROM hapax_sequence_next('orders', 'a', '1 h', 'accept')",
            "SELECT FROM hapax_position_acquire('orders', 'orders', 0, 0)",
            "SELECT FROM hapax_position_advance('orders', 'orders', 0, 1, 0, 1, 0)",
        ] {
            let script = format!(
                "BEGIN; SET LOCAL synchronous_commit = {before}; {call}; \
                 SELECT current_setting('synchronous_commit')"
            );
            let said = sql(&script).await;
            assert_eq!(said.lines().last().unwrap_or_default(), after, "{before}: {call}");
        }
    }
}
