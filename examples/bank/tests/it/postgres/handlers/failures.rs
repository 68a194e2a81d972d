//! Failures around a handler's transaction.

use hapax_http::server::transaction::TxOptionsError;
use hapax_testkit::faults::{FaultProxy, FaultProxyRates};
use tokio_postgres::Error;

use super::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_panic_rolls_back_and_leaves_the_outcome_unknown() {
    let world = World::new().await;
    let app = world.app(post(|tx: Db| async move {
        tx.execute(LINE, &[]).await.unwrap();
        panic!("in the middle of it");
        #[expect(unreachable_code, reason = "its type")]
        StatusCode::CREATED
    }));
    ask(&app, "k").await.is_problem(500, "handler-failed");
    ask(&app, "k").await.is_problem(409, "outcome-unknown");
    assert_eq!(world.lines().await, "0");
    world.at_rest().await;
}

/// A database error rolls back and allows a retry. After a lost race the handler executes again
/// within the same request, so that the client does not notice.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn errors_of_the_database_roll_back_and_lost_races_run_again() {
    let world = World::new().await;
    let calls = Arc::new(AtomicU32::new(0));
    let count = Arc::clone(&calls);
    let raise =
        |code: &str| format!("DO $$ BEGIN RAISE EXCEPTION 'no' USING ERRCODE = '{code}'; END $$");
    let app = |often: u32, code: &str| {
        let (count, statement) = (Arc::clone(&count), raise(code));
        world.app(post(move |tx: Db, body: String| {
            let (count, statement) = (Arc::clone(&count), statement.clone());
            async move {
                assert_eq!(body, "", "the same request each time");
                tx.execute(LINE, &[]).await?;
                if count.fetch_add(1, Ordering::SeqCst) < often {
                    tx.batch_execute(&statement).await?;
                }
                Ok::<_, HandlerError>(StatusCode::CREATED)
            }
        }))
    };
    for code in ["40001", "40P01"] {
        ask(&app(3, code), code).await.is_first(201);
        assert_eq!(calls.swap(0, Ordering::SeqCst), 4);
    }
    assert_eq!(world.lines().await, "2");
    let always = app(u32::MAX, "40001");
    ask(&always, "k").await.is_problem(503, "overloaded");
    assert_eq!(calls.swap(0, Ordering::SeqCst), 4);
    // The record is released, so that the next request executes.
    ask(&app(0, "40001"), "k").await.is_first(201);

    calls.store(0, Ordering::SeqCst);
    let app = app(1, "22012");
    ask(&app, "other").await.is_problem(500, "handler-failed");
    ask(&app, "other").await.is_first(201);
    assert_eq!(world.lines().await, "4");
    world.at_rest().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_does_not_commit_is_not_answered() {
    let world = World::new().await;
    let deferred = "CREATE TABLE single (of int UNIQUE DEFERRABLE INITIALLY DEFERRED)";
    world.server.sql("postgres", deferred).await;
    let twice = "INSERT INTO single VALUES (1), (1)";
    for (key, statement) in [("commit", twice), ("unheeded", "SELECT 1/0")] {
        let app = world.app(post(move |tx: Db| async move {
            tx.execute(LINE, &[]).await.unwrap();
            tx.batch_execute(statement).await.ok();
            StatusCode::CREATED
        }));
        for _ in 0..2 {
            ask(&app, key).await.is_problem(503, "store-unavailable");
        }
    }
    assert_eq!(world.lines().await, "0");
    world.at_rest().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_in_doubt_is_no_success() {
    let server = PostgresServer::start().await;
    let proxy = FaultProxy::before(server.address(), 3).await.unwrap();
    let mut world = World::by(server, proxy.address().port()).await;
    proxy.only(b"COMMIT\0");
    let second = Duration::from_secs(1);
    let terms = TxOptions { commit_check: second, ..TxOptions::default() };
    world.options.transactions.as_mut().unwrap().terms = terms;
    world.options.policy.terms.lease = second * 6;
    world.options.policy.terms.on_unknown = OnUnknown::Reexecute;
    let app = world.app(post(|tx: Db| async move {
        tx.execute(LINE, &[]).await.unwrap();
        StatusCode::CREATED
    }));
    // The reply to COMMIT is lost, but the engine finds that the transaction committed.
    proxy.set(FaultProxyRates { lose_reply: 1_000, ..FaultProxyRates::default() });
    ask(&app, "lost").await.is_first(201);
    ask(&app, "lost").await.is_replay(201);
    assert_eq!(world.lines().await, "1");
    // Without any reply, the outcome stays unknown for some time.
    proxy.set(FaultProxyRates { silence: 1_000, ..FaultProxyRates::default() });
    ask(&app, "silent").await.is_problem(503, "outcome-pending");
    ask(&app, "silent").await.is_problem(409, "in-flight");
    proxy.set(FaultProxyRates::default());
    proxy.cut();
    let again = timeout(LIMIT, async {
        loop {
            let answer = ask(&app, "silent").await;
            if answer.status == 201 {
                break answer;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    });
    again.await.unwrap().is_first(201);
    assert_eq!(world.lines().await, "2");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_connection_nothing_is_done_and_the_key_is_free() {
    let server = PostgresServer::start().await;
    let world = World::by(server, hapax_testkit::servers::free_port()).await;
    let app = world.app(post(|_tx: Db| async { StatusCode::CREATED }));
    for _ in 0..2 {
        ask(&app, "k").await.is_problem(503, "store-unavailable");
    }
}

/// A client disconnects at any time from the first poll on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_hangs_up_changes_nothing() {
    let mut world = World::new().await;
    world.options.policy.in_flight = InFlight::Wait(LIMIT);
    let app = world.app(post(|tx: Db| async move {
        tx.execute(LINE, &[]).await.unwrap();
        StatusCode::CREATED
    }));
    for of in 0..10 {
        let key = format!("k-{of}");
        timeout(Duration::from_micros(of * 400), ask(&app, &key)).await.ok();
        assert_eq!(ask(&app, &key).await.status, 201);
        assert_eq!(world.lines().await, (of + 1).to_string());
    }
}

/// A hundred duplicates of executions that are in flight, with a pool of two connections.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn copies_hold_no_connection() {
    let mut world = World::new().await;
    world.options.policy.in_flight = InFlight::Wait(LIMIT);
    let (go, begun) = (Arc::new(Barrier::new(3)), Arc::new(Barrier::new(3)));
    let barriers = (Arc::clone(&go), Arc::clone(&begun));
    let app = world.app(post(move |tx: Db| {
        let (go, begun) = (Arc::clone(&barriers.0), Arc::clone(&barriers.1));
        async move {
            tx.execute(LINE, &[]).await.unwrap();
            begun.wait().await;
            go.wait().await;
            StatusCode::CREATED
        }
    }));
    let mut copies = JoinSet::new();
    for copy in 0..102 {
        let app = app.clone();
        copies.spawn(async move { ask(&app, &format!("k-{}", copy % 2)).await });
    }
    begun.wait().await;
    while world.engine.stats().waiting < 100 {
        tokio::task::yield_now().await;
    }
    let status = world.pool.status();
    assert_eq!((status.available, status.waiting), (0, 0));
    // Operations without a transaction execute meanwhile.
    let other = world.app(post(|| async { StatusCode::CREATED }));
    ask(&other, "other").await.is_first(201);
    go.wait().await;
    let answers = timeout(LIMIT, copies.join_all()).await.unwrap();
    assert!(answers.iter().all(|answer| answer.status == 201));
    assert_eq!(answers.iter().filter(|answer| answer.replayed == Some(false)).count(), 2);
    assert_eq!(world.lines().await, "2");
}

/// The end of a drain cuts handlers off and rolls their transactions back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drain_rolls_back_what_it_cuts_off() {
    let world = World::new().await;
    let begun = Arc::new(Barrier::new(2));
    let begin = Arc::clone(&begun);
    let layer = world.layer();
    let handler = post(move |tx: Db| {
        let begin = Arc::clone(&begin);
        async move {
            tx.execute(LINE, &[]).await.unwrap();
            begin.wait().await;
            std::future::pending::<()>().await;
            Ok::<_, HandlerError>(tx.execute(LINE, &[]).await.map(|_| StatusCode::CREATED)?)
        }
    });
    let app = Router::new().route("/", handler).layer(layer.clone());
    let asking = tokio::spawn(async move { ask(&app, "k").await });
    begun.wait().await;
    assert_eq!(layer.drain(Duration::ZERO).await.cut_off, 1);
    asking.await.unwrap().is_problem(504, "upstream-timeout");
    assert_eq!(world.lines().await, "0");
    world.at_rest().await;
}

#[tokio::test]
async fn routes_that_could_not_keep_their_word_are_refused() {
    let world = World::new().await;
    let check = |change: fn(&mut RouteOptions)| {
        let mut options = world.options.clone();
        options.policy.terms.on_unknown = OnUnknown::Reexecute;
        change(&mut options);
        RoutePolicy::new(scope(), options).map(drop)
    };
    assert_eq!(check(|_| ()), Ok(()));
    let open = check(|options| options.store_outage = StoreOutage::Open);
    assert_eq!(open, Err(RouteError::OpenTransactions));
    let keyless = check(|options| options.key = KeyRule::Optional);
    assert_eq!(keyless, Err(RouteError::KeylessTransactions));
    let short = check(|options| {
        options.transactions.as_mut().unwrap().terms.begin = Duration::ZERO;
    });
    assert_eq!(short, Err(RouteError::Transactions(TxOptionsError::Begin)));

    // A handler of a route without transactions gets none.
    let mut plain = world.options.clone();
    plain.transactions = None;
    let policy = RoutePolicy::new(scope(), plain).unwrap();
    let app: Router = Router::new()
        .route("/", post(|_tx: Db| async { StatusCode::CREATED }))
        .layer(IdempotencyLayer::new(world.engine.clone(), policy));
    ask(&app, "k").await.is_problem(500, "handler-failed");
}

/// An error from elsewhere than the database is rolled back too, and its text stays private.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_error_is_told_to_nobody_outside() {
    let world = World::new().await;
    let app = world.app(post(|tx: Db| async move {
        let lines: Result<_, Error> = tx.execute(LINE, &[]).await;
        lines?;
        Err::<StatusCode, HandlerError>(std::io::Error::other("secret").into())
    }));
    let answer = ask(&app, "k").await;
    answer.is_problem(500, "handler-failed");
    assert!(!answer.text.contains("secret"));
    assert_eq!(world.lines().await, "0");
    let response = HandlerError::from(std::io::Error::other("secret")).into_response();
    assert_eq!(response.status(), 500);
}
