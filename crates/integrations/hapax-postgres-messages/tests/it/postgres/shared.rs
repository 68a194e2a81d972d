//! A connection that callers share.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use hapax_messages::Outbox as _;
use hapax_postgres_messages::{PgOutbox, SharedConnection};

use super::server;

#[tokio::test]
async fn a_statement_that_is_given_up_leaves_its_connection_and_others_share_one() {
    let server = server().await;
    let made = Arc::new(AtomicU32::default());
    let shared = {
        let (url, made) = (server.url("postgres"), Arc::clone(&made));
        SharedConnection::new(move || {
            let url = url.clone();
            made.fetch_add(1, Ordering::SeqCst);
            async move {
                let (client, connection) =
                    tokio_postgres::connect(&url, tokio_postgres::NoTls).await?;
                tokio::spawn(connection);
                Ok::<_, tokio_postgres::Error>(client)
            }
        })
    };
    let outbox = PgOutbox::new(&shared);
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
    for _ in 0..3 {
        outbox.lag().await.unwrap();
    }
    assert_eq!(made.load(Ordering::SeqCst), 2);
}
