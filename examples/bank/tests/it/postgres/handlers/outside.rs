//! Events outside the handler that affect its transaction.

use hapax_testkit::faults::FaultProxy;
use tokio_postgres::IsolationLevel;

use super::*;

/// Of two transactions that read what the other writes, one fails. The server may detect this only
/// when the record is written.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_race_at_the_last_statement_runs_again() {
    let mut world = World::new().await;
    let purse = "CREATE TABLE purse (id int PRIMARY KEY, amount bigint NOT NULL);
        INSERT INTO purse VALUES (1, 60), (2, 60)";
    world.server.sql("postgres", purse).await;
    let url = world.server.url("postgres");
    let store = PostgresStore::connect(url.parse().unwrap()).await.unwrap();
    let database = transactions(Arc::new(store), &world.pool);
    let database = database.isolation(IsolationLevel::Serializable);
    world.options.transactions = Some(TransactionBackend::new(Arc::new(database)).any());
    let (other, connection) = tokio_postgres::connect(&url, NoTls).await.unwrap();
    tokio::spawn(connection);
    let (other, calls) = (Arc::new(other), Arc::new(AtomicU32::new(0)));
    let count = Arc::clone(&calls);
    let app = world.app(post(move |tx: Db| {
        let (other, count) = (Arc::clone(&other), Arc::clone(&count));
        async move {
            let sum = "SELECT sum(amount)::bigint FROM purse";
            let first = count.fetch_add(1, Ordering::SeqCst) == 0;
            tx.query_one(sum, &[]).await?;
            if first {
                other.batch_execute("BEGIN ISOLATION LEVEL SERIALIZABLE").await?;
                other.query_one(sum, &[]).await?;
                other.batch_execute("UPDATE purse SET amount = amount - 60 WHERE id = 2").await?;
            }
            tx.execute("UPDATE purse SET amount = amount - 60 WHERE id = 1", &[]).await?;
            if first {
                other.batch_execute("COMMIT").await?;
            }
            Ok::<_, HandlerError>(StatusCode::CREATED)
        }
    }));
    ask(&app, "k").await.is_first(201);
    assert_eq!(calls.load(Ordering::SeqCst), 2);
}

/// The network of a pooled connection stops delivering packets.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_begin_without_an_answer_is_waited_for_no_longer_than_said() {
    let server = PostgresServer::start().await;
    let proxy = FaultProxy::before(server.address(), 3).await.unwrap();
    let mut world = World::by(server, proxy.address().port()).await;
    let terms = &mut world.options.transactions.as_mut().unwrap().terms;
    terms.begin = Duration::from_millis(300);
    let app = world.app(post(|tx: Db| async move {
        tx.execute(LINE, &[]).await.unwrap();
        StatusCode::CREATED
    }));
    ask(&app, "warm").await.is_first(201);
    proxy.freeze();
    ask(&app, "k").await.is_problem(503, "store-unavailable");
    proxy.cut();
    proxy.thaw();
    // Nothing was executed, and the record is released.
    let again = timeout(LIMIT, async {
        loop {
            let answer = ask(&app, "k").await;
            if answer.status != 503 {
                break answer;
            }
        }
    });
    again.await.unwrap().is_first(201);
    assert_eq!(world.lines().await, "2");
}

/// An acknowledged outcome survives a crash of the server under any settings of the role.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_acknowledged_is_durable() {
    let mut world = World::new().await;
    let server = &world.server;
    // The server flushes asynchronous commits only every 10 s.
    server.sql("postgres", "ALTER SYSTEM SET wal_writer_delay = '10s'").await;
    server.sql("postgres", "SELECT pg_reload_conf()").await;
    let role = "CREATE ROLE app SUPERUSER LOGIN; ALTER ROLE app SET synchronous_commit = off";
    server.sql("postgres", role).await;
    let mut config = Config::new();
    config.host("127.0.0.1").port(server.port()).user("app").dbname("postgres");
    let pool = Pool::builder(Manager::new(config, NoTls)).max_size(2).build().unwrap();
    let store = PostgresStore::connect(server.url("postgres").parse().unwrap()).await.unwrap();
    let database = transactions(Arc::new(store), &pool);
    world.options.transactions = Some(TransactionBackend::new(Arc::new(database)).any());
    let app = world.app(post(|tx: Db| async move {
        let setting = tx.query_one("SHOW synchronous_commit", &[]).await?;
        assert_eq!(setting.get::<_, &str>(0), "off");
        tx.execute(LINE, &[]).await?;
        Ok::<_, HandlerError>(StatusCode::CREATED)
    }));
    ask(&app, "k").await.is_first(201);
    world.server.kill().await;
    world.server.restart().await;
    assert_eq!(world.lines().await, "1");
}
