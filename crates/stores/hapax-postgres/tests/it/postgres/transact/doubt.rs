//! COMMITs without a reply.

use hapax_testkit::faults::{FaultProxy, FaultProxyRates};

use super::*;

/// Harm to COMMITs, each time.
fn always(set: fn(&mut FaultProxyRates)) -> FaultProxyRates {
    let mut rates =
        FaultProxyRates { delay_at_most: Duration::from_millis(300), ..FaultProxyRates::default() };
    set(&mut rates);
    rates
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_commit_without_a_reply_is_resolved() {
    let server = PostgresServer::start().await;
    server.sql("postgres", TABLES).await;
    let proxy = Arc::new(FaultProxy::before(server.address(), 7).await.unwrap());
    let world = World::by(&server, proxy.address().port()).await;
    proxy.only(b"COMMIT\0");
    let kinds: [(fn(&mut FaultProxyRates), _); 4] = [
        (|rates| rates.lose_reply = 1_000, Some(1)),
        (|rates| rates.tear_reply = 1_000, Some(1)),
        // It never arrived: the work runs again.
        (|rates| rates.lose_request = 1_000, Some(2)),
        // It arrives after the connection has ended, and perhaps after the server has noticed.
        (|rates| rates.late_request = 1_000, None),
    ];
    let mut expected = 0;
    for (kind, (set, runs)) in kinds.into_iter().enumerate() {
        for of in 0..5 {
            let of = kind as u64 * 100 + of;
            let ran = Arc::new(AtomicU32::new(0));
            let lease = world.own(of, &policy(OnUnknown::Block)).await;
            let (count, harm) = (Arc::clone(&ran), Arc::clone(&proxy));
            let work = move |tx: Tx<PgTx>, _| {
                let first = count.fetch_add(1, Ordering::SeqCst) == 0;
                let harm = Arc::clone(&harm);
                async move {
                    tx.batch_execute("INSERT INTO work VALUES (1)").await.unwrap();
                    harm.set(if first { always(set) } else { FaultProxyRates::default() });
                    (done("yes"), ())
                }
            };
            let database = Arc::clone(&world.database);
            let ran_so = lease.transact(&TransactionBackend::new(database), work).await;
            assert!(
                matches!(ran_so, TransactResult::Ended(ExecutionResult::Recorded(_), ())),
                "{kind}: {ran_so:?}"
            );
            expected += 1;
            if let Some(runs) = runs {
                assert_eq!(ran.load(Ordering::SeqCst), runs, "{kind}");
            }
            assert_eq!(lines(&server).await, expected.to_string(), "{kind}");
            assert_eq!(replayed(&world.engine, of).await, "yes");
        }
    }
    let counts = proxy.counts();
    assert_eq!((counts.lost_replies, counts.torn_replies, counts.lost_requests), (5, 5, 5));
    assert_eq!(counts.late_requests, 5);
}

/// COMMIT is on its way for longer than anybody waits.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn while_the_result_of_a_commit_is_unknown_nothing_runs_again() {
    let server = PostgresServer::start().await;
    server.sql("postgres", TABLES).await;
    let proxy = FaultProxy::before(server.address(), 7).await.unwrap();
    let world = World::by(&server, proxy.address().port()).await;
    proxy.only(b"COMMIT\0");
    proxy.set(always(|rates| rates.silence = 1_000));
    let second = Duration::from_secs(1);
    let terms = TxOptions { commit_check: second, ..TxOptions::default() };
    let mut short = policy(OnUnknown::Reexecute);
    short.terms.lease = second * 4;
    let lease = world.own(1, &short).await;
    let ended = timeout(LIMIT, world.work(lease, terms, done("yes"))).await.unwrap();
    assert!(matches!(ended, ExecutionResult::Unknown), "{ended:?}");
    assert!(matches!(
        claim_key(&world.engine, 1, &policy(OnUnknown::Reexecute)).await,
        Claim::InFlight { .. }
    ));
    // Its lease lapses, and still nobody can take over: the transaction has the row.
    sleep(short.terms.lease).await;
    let scope = hapax_core::Scope::shared();
    let key = super::super::support::named(1);
    let same = super::super::support::SameRequest;
    let claim = world.engine.claim(&scope, &key, &same, &policy(OnUnknown::Reexecute)).await;
    assert!(matches!(claim, Err(hapax_core::ClaimError::Interrupted(_))), "{claim:?}");
    assert_eq!(lines(&server).await, "0");
    // The connection ends without COMMIT: then somebody can.
    proxy.cut();
    let again = timeout(LIMIT, async {
        loop {
            match world.engine.claim(&scope, &key, &same, &policy(OnUnknown::Reexecute)).await {
                Ok(Claim::Execute(lease)) => break lease,
                _ => sleep(Duration::from_millis(50)).await,
            }
        }
    });
    let again = again.await.unwrap();
    proxy.set(FaultProxyRates::default());
    let ended = world.work(again, TxOptions::default(), done("again")).await;
    assert!(matches!(ended, ExecutionResult::Recorded(_)), "{ended:?}");
    assert_eq!(lines(&server).await, "1");
}

/// The caller goes away, sooner or later: it is done all the same.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_dropped_caller_does_not_affect_the_transaction() {
    let server = PostgresServer::start().await;
    let world = World::new(&server).await;
    for of in 0..12 {
        let lease = world.own(of, &policy(OnUnknown::Reexecute)).await;
        let mut calling = Box::pin(world.work(lease, TxOptions::default(), done("yes")));
        let after = Duration::from_micros(of * 300);
        // At least one poll: before that the lease itself would be dropped.
        timeout(after, &mut calling).await.ok();
        drop(calling);
        let patient = Policy { in_flight: InFlight::Wait(LIMIT), ..policy(OnUnknown::Reexecute) };
        let claim = timeout(LIMIT, claim_key(&world.engine, of, &patient)).await.unwrap();
        assert!(matches!(claim, Claim::Replay(_)), "{of}: {claim:?}");
        assert_eq!(lines(&server).await, (of + 1).to_string());
    }
}
