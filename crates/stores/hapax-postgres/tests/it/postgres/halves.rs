//! Transactions that stop half-way.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use hapax_core::store::{Swap, Swapped};
use hapax_core::{Store, StoreError};
use hapax_postgres::{PostgresOptions, PostgresStore};
use hapax_testkit::servers::{PgBouncer, PostgresServer};
use tokio::time::timeout;

use super::meddler::Meddler;
use super::support::{at, by, claim, complete, connect_within, expect_stored, load, write_id};

const SOON: Duration = Duration::from_secs(60);

#[tokio::test(flavor = "multi_thread")]
async fn rows_of_a_rolled_back_transaction_do_not_count_as_success() {
    const LAST: &[u8] = b"SET LOCAL statement_timeout = 0";
    let server = PostgresServer::start().await;
    let meddling = Arc::new(AtomicBool::new(false));
    let meddler = Meddler::before(server.address(), {
        let meddling = Arc::clone(&meddling);
        move |message| {
            // As if it were cancelled: the server rolls back at COMMIT, without an error there.
            if meddling.load(Ordering::Relaxed) && message[5..].starts_with(LAST) {
                message[5..9].copy_from_slice(b"SAT ");
            }
            true
        }
    })
    .await;
    let store = PostgresStore::connect(by(meddler.port())).await.unwrap();
    let claimed = claim(1);
    expect_stored(&store, &claimed).await;
    meddling.store(true, Ordering::Relaxed);
    for swap in [complete(&claimed, 2, b"yes"), claim(3)] {
        let swapped = store.swap(swap).await;
        assert!(matches!(swapped, Err(StoreError::Unavailable(_))), "{swapped:?}");
    }
    meddling.store(false, Ordering::Relaxed);
    assert_eq!(load(&store, 1).await.map(|stored| stored.write_id), Some(claimed.write_id));
    assert!(load(&store, 3).await.is_none());
    expect_stored(&store, &complete(&claimed, 2, b"yes")).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_locks_of_a_vanished_process_are_released_soon() {
    const LIMIT: Duration = Duration::from_secs(2);
    let server = PostgresServer::start().await;
    let vanishing = Arc::new(AtomicBool::new(false));
    let meddler = Meddler::before(server.address(), {
        let vanishing = Arc::clone(&vanishing);
        move |message| !(vanishing.load(Ordering::Relaxed) && message[5..].starts_with(b"COMMIT"))
    })
    .await;
    let options = by(meddler.port()).timeout(LIMIT);
    let vanished = connect_within(options).await;
    let claimed = claim(1);
    expect_stored(&vanished, &claimed).await;
    vanishing.store(true, Ordering::Relaxed);
    let swapped = vanished.swap(complete(&claimed, 2, b"never")).await;
    assert!(matches!(swapped, Err(StoreError::Ambiguous(_))), "{swapped:?}");

    let other = connect_within(at(&server).timeout(LIMIT)).await;
    let taken = Swap { write_id: write_id(3), ..complete(&claimed, 3, b"yes") };
    let through = async {
        loop {
            match other.swap(taken.clone()).await {
                Ok(swapped) => break swapped,
                Err(StoreError::Unavailable(_)) => {}
                Err(error) => panic!("{error}"),
            }
        }
    };
    let swapped = timeout(SOON, through).await.expect("the lock is let go");
    assert!(matches!(swapped, Swapped::Stored(_)), "{swapped:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_setting_of_another_client_does_not_weaken_durability() {
    let server = PostgresServer::start().await;
    let pooler = PgBouncer::start(&server, 1).await;
    let options: PostgresOptions = pooler.url("postgres").parse().unwrap();
    let store = PostgresStore::connect(options).await.unwrap();
    let witness = "CREATE TABLE kept (how text);
        CREATE FUNCTION keep() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
            INSERT INTO kept VALUES (current_setting('synchronous_commit')); RETURN NULL;
        END $$;
        CREATE TRIGGER keep AFTER INSERT OR UPDATE ON hapax_cells
            FOR EACH ROW EXECUTE FUNCTION keep()";
    server.sql("postgres", witness).await;
    let (other, connection) =
        tokio_postgres::connect(&pooler.url("postgres"), tokio_postgres::NoTls).await.unwrap();
    let _driver = tokio::spawn(connection);
    other.batch_execute("SET synchronous_commit = off").await.unwrap();
    expect_stored(&store, &claim(1)).await;
    // There is one session; whatever is set in it is left to the next.
    let left = other.simple_query("SHOW synchronous_commit").await.unwrap();
    let left = left.iter().find_map(|message| match message {
        tokio_postgres::SimpleQueryMessage::Row(row) => row.get(0),
        _ => None,
    });
    assert_eq!(left, Some("off"));
    assert_eq!(server.sql("postgres", "SELECT DISTINCT how FROM kept").await, "on");
}
