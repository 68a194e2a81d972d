//! Entries that commit with a caller's own writes.

use hapax_core::schedule::{MAX_NOTE, ScheduleEntry, TransactionalSchedule};
use hapax_core::transaction::Transactions;
use hapax_postgres::PgTransactions;

use super::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn an_entry_exists_once_its_transaction_has_committed() {
    let server = PostgresServer::start().await;
    let store = connect(&server).await;
    let mut client = client(&server).await;
    for (of, commit) in [(1, false), (2, true), (3, true)] {
        let mut transaction = client.transaction().await.unwrap();
        transaction.batch_execute("SELECT 1").await.unwrap();
        let entry = entry(of, Duration::ZERO);
        store.insert_in(&mut transaction, entry.clone()).await.unwrap();
        // Again, as after an ambiguous answer.
        store.insert_in(&mut transaction, entry.clone()).await.unwrap();
        assert!(!all(&store).await.contains(&entry.key));
        match commit {
            true => transaction.commit().await.unwrap(),
            false => transaction.rollback().await.unwrap(),
        }
        assert_eq!(all(&store).await.contains(&entry.key), commit);
    }
    // An entry with its key stays as it is.
    let found = store.entries(None, NonZeroU32::new(10).unwrap()).await.unwrap().entries;
    let mut transaction = client.transaction().await.unwrap();
    store.insert_in(&mut transaction, entry(2, LONG)).await.unwrap();
    transaction.commit().await.unwrap();
    let after = store.entries(None, NonZeroU32::new(10).unwrap()).await.unwrap().entries;
    let whole = |entries: Vec<(EntryKey, Result<ScheduleEntry, StoreError>)>| {
        entries.into_iter().map(|(_, entry)| entry.unwrap()).collect::<Vec<_>>()
    };
    assert_eq!(whole(after), whole(found));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn an_entry_is_not_inserted_within_a_savepoint() {
    let server = PostgresServer::start().await;
    let store = connect(&server).await;
    let mut client = client(&server).await;
    let mut transaction = client.transaction().await.unwrap();
    let mut savepoint = transaction.transaction().await.unwrap();
    let answer = store.insert_in(&mut savepoint, entry(1, LONG)).await;
    assert!(matches!(reason(answer), PostgresStoreError::Savepoint));
    drop(savepoint);
    transaction.rollback().await.unwrap();
    // A savepoint that was released is no matter.
    let mut transaction = client.transaction().await.unwrap();
    transaction.batch_execute("SAVEPOINT a; RELEASE a").await.unwrap();
    store.insert_in(&mut transaction, entry(2, LONG)).await.unwrap();
    transaction.commit().await.unwrap();
    assert_eq!(all(&store).await, [entry(2, LONG).key]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_transaction_whose_entry_was_rejected_cannot_commit() {
    let server = PostgresServer::start().await;
    let store = connect(&server).await;
    expect_stored(&*store, &claim(1)).await;
    server.sql("postgres", "CREATE TABLE work (of bigint)").await;
    let mut client = client(&server).await;
    server.sql("postgres", "TRUNCATE hapax_cells").await;
    let long = Bytes::from(vec![0; MAX_NOTE + 1]);
    for entry in [entry(1, LONG), NewEntry { note: long, ..entry(2, LONG) }] {
        let mut transaction = client.transaction().await.unwrap();
        transaction.batch_execute("INSERT INTO work VALUES (1)").await.unwrap();
        let answer = store.insert_in(&mut transaction, entry).await;
        assert!(matches!(answer, Err(StoreError::Unavailable(_))), "{answer:?}");
        transaction.commit().await.ok();
    }
    assert!(store.is_replaced());
    assert_eq!(server.sql("postgres", "SELECT count(*) FROM work").await, "0");
    assert_eq!(all(&store).await, []);

    // The first one after a confirmation learns of it.
    connect(&server).await.confirm().await.unwrap();
    for is_known in [false, true] {
        let mut transaction = client.transaction().await.unwrap();
        let answer = store.insert_in(&mut transaction, entry(1, LONG)).await;
        assert_eq!(answer.is_ok(), is_known, "{answer:?}");
        transaction.commit().await.ok();
    }
    assert_eq!(all(&store).await, [entry(1, LONG).key]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn an_entry_commits_with_an_operation_in_a_transaction() {
    let server = PostgresServer::start().await;
    let store = connect(&server).await;
    let url = server.url("postgres");
    let get = move || {
        let url = url.clone();
        async move {
            let (client, connection) = tokio_postgres::connect(&url, tokio_postgres::NoTls).await?;
            tokio::spawn(connection);
            Ok::<_, tokio_postgres::Error>(client)
        }
    };
    let transactions = PgTransactions::new(Arc::clone(&store), get, |client| client);
    for (of, commit) in [(1, true), (2, false)] {
        let mut tx = transactions.connect().await.unwrap();
        transactions.begin(&mut tx).await.unwrap();
        store.insert_in(&mut tx, entry(of, LONG)).await.unwrap();
        match commit {
            true => transactions.commit(tx).await.unwrap(),
            false => transactions.rollback(tx).await.unwrap(),
        }
    }
    assert_eq!(all(&store).await, [entry(1, LONG).key]);
}

#[cfg(feature = "sqlx")]
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn an_entry_commits_with_a_transaction_of_sqlx() {
    use sqlx::Connection;

    let server = PostgresServer::start().await;
    let store = connect(&server).await;
    let mut connection = sqlx::PgConnection::connect(&server.url("postgres")).await.unwrap();
    let outside = store.insert_in(&mut connection, entry(9, LONG)).await;
    assert!(matches!(reason(outside), PostgresStoreError::NoTransaction));

    let mut transaction = connection.begin().await.unwrap();
    store.insert_in(&mut transaction, entry(1, LONG)).await.unwrap();
    transaction.rollback().await.unwrap();
    assert_eq!(all(&store).await, []);

    let mut transaction = connection.begin().await.unwrap();
    store.insert_in(&mut *transaction, entry(1, LONG)).await.unwrap();
    store.insert_in(&mut transaction, entry(2, LONG)).await.unwrap();
    transaction.commit().await.unwrap();
    let mut two = [entry(1, LONG).key, entry(2, LONG).key];
    two.sort_unstable();
    assert_eq!(all(&store).await, two);

    let mut transaction = connection.begin().await.unwrap();
    let mut savepoint = transaction.begin().await.unwrap();
    let answer = store.insert_in(&mut savepoint, entry(3, LONG)).await;
    assert!(matches!(reason(answer), PostgresStoreError::Savepoint));
    drop(savepoint);
    transaction.rollback().await.unwrap();

    let mut transaction = connection.begin().await.unwrap();
    let long = Bytes::from(vec![0; MAX_NOTE + 1]);
    let answer = store.insert_in(&mut transaction, NewEntry { note: long, ..entry(4, LONG) }).await;
    assert!(answer.is_err());
    transaction.commit().await.ok();
    assert_eq!(all(&store).await, two);
}
