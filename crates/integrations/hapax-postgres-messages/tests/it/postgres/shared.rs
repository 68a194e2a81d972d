//! A connection that callers share.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use hapax_messages::Outbox as _;
use hapax_postgres_messages::{PgOutbox, SharedConnection};
use hapax_testkit::servers::PostgresServer;
use tokio::time::Instant;

use super::server;

/// Returns an outbox on a shared connection, and the number of connections made so far.
fn outbox(server: &PostgresServer) -> (PgOutbox, Arc<AtomicU32>) {
    let made = Arc::new(AtomicU32::default());
    let (url, count) = (server.url("postgres"), Arc::clone(&made));
    let shared = SharedConnection::new(move || {
        let url = url.clone();
        count.fetch_add(1, Ordering::SeqCst);
        async move {
            let (client, connection) = tokio_postgres::connect(&url, tokio_postgres::NoTls).await?;
            tokio::spawn(connection);
            Ok::<_, tokio_postgres::Error>(client)
        }
    });
    (PgOutbox::new(&shared), made)
}

#[tokio::test]
async fn a_statement_that_is_given_up_leaves_its_connection_and_others_share_one() {
    let server = server().await;
    let (outbox, made) = outbox(&server);
    for _ in 0..3 {
        outbox.lag().await.unwrap();
    }
    assert_eq!(made.load(Ordering::SeqCst), 1);
    let mut other = super::pool(&server).get().await.unwrap();
    let open = other.transaction().await.unwrap();
    open.batch_execute("LOCK TABLE hapax_outbox").await.unwrap();
    let waiting = tokio::time::timeout(Duration::from_millis(300), outbox.lag()).await;
    waiting.expect_err("the table is locked");
    open.rollback().await.unwrap();
    // The former connection is answered first.
    while outbox.lag().await.is_err() {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    outbox.lag().await.unwrap();
    assert_eq!(made.load(Ordering::SeqCst), 2);
}

#[tokio::test]
async fn while_nothing_is_answered_few_connections_are_made() {
    let server = server().await;
    let (outbox, made) = outbox(&server);
    let mut other = super::pool(&server).get().await.unwrap();
    let open = other.transaction().await.unwrap();
    open.batch_execute("LOCK TABLE hapax_outbox").await.unwrap();
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(4) {
        if let Ok(answered) = tokio::time::timeout(Duration::from_millis(50), outbox.lag()).await {
            let error = answered.unwrap_err().to_string();
            assert!(error.contains("expected answers on"), "{error}");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
    // At once, and after pauses of 1 and 2 seconds; a slow machine makes fewer.
    let made = made.load(Ordering::SeqCst);
    assert!((1..=3).contains(&made), "{made}");
    let sessions = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE '%hapax_outbox_lag%' \
                    AND pid <> pg_backend_pid()";
    assert_eq!(server.sql("postgres", sessions).await, made.to_string());
    open.rollback().await.unwrap();
    while server.sql("postgres", sessions).await != "0" {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    outbox.lag().await.unwrap();
}
