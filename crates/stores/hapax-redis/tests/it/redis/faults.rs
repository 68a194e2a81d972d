//! Servers that freeze, die and come back, and networks that lose what passes them.

use std::sync::Arc;
use std::time::Duration;

use hapax_core::{Claim, FinishError, Idempotency, OnUnknown, Outcome, Scope, Store, StoreError};
use hapax_redis::RedisStore;
use hapax_testkit::SeededEntropy;
use hapax_testkit::faults::{FaultProxy, FaultProxyRates};
use hapax_testkit::servers::{RedisServer, RedisServerOptions};
use hapax_testkit::suite;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

use super::suite::OnOneServer;
use super::support::{
    Same, ask, at, claim, complete, connect, connect_within, expect_stored, key, named, own, policy,
};

/// More than any test's server needs to come back to its callers.
const SOON: Duration = Duration::from_secs(60);

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn the_rules_hold_over_a_network_that_loses_replies() {
    let server = RedisServer::start().await;
    let proxy = FaultProxy::before(server.address(), 1).await.unwrap();
    proxy.set(FaultProxyRates { lose_reply: 20, lose_request: 10, ..FaultProxyRates::default() });
    suite::store_rules(&OnOneServer::new(at(proxy.address().port()))).await;
    let counts = proxy.counts();
    assert!(counts.lost_replies > 20 && counts.lost_requests > 10, "{counts:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_freeze_under_claims_whose_callers_go_away_wedges_no_key() {
    const KEYS: u64 = 120;
    let server = RedisServer::start().await;
    for on_unknown in [OnUnknown::Reexecute, OnUnknown::Block] {
        let store = connect(&server).await;
        let process = Idempotency::builder(store).build().unwrap();
        let scope = Scope::of([("policy", format!("{on_unknown:?}"))]);
        let dice = SeededEntropy::new(on_unknown as u64);
        server.pause();
        let frozen = Instant::now();
        let mut callers = JoinSet::new();
        for of in 0..KEYS {
            let (process, scope) = (process.clone(), scope.clone());
            let leaves = Duration::from_millis(dice.below(2_500));
            callers.spawn(async move {
                let claim =
                    async { process.claim(&scope, &named(of), &Same, &policy(on_unknown)).await };
                match timeout(leaves, claim).await {
                    // Whoever got through owns the key for good; nobody can while it is frozen.
                    Ok(Ok(claim)) => panic!("claimed on a frozen server: {claim:?}"),
                    Ok(Err(_)) => true,
                    Err(_) => false,
                }
            });
        }
        let (mut refused, mut gone) = (0, 0);
        while let Some(told) = callers.join_next().await {
            if told.unwrap() { refused += 1 } else { gone += 1 }
        }
        // All of them heard that there is no answer, or did not wait for it.
        assert!(frozen.elapsed() >= Duration::from_secs(2), "{:?}", frozen.elapsed());
        server.resume();
        assert!(refused > 0 && gone > 0, "{refused} refused, {gone} gone");

        timeout(SOON, process.drain()).await.expect("what was given up is landed and released");
        let mut landed = 0;
        for of in 0..KEYS {
            let claimed = process.claim(&scope, &named(of), &Same, &policy(on_unknown)).await;
            match claimed.unwrap() {
                Claim::Execute(lease) => landed += u32::from(lease.attempt() > 1),
                other => panic!("key {of} is wedged under {on_unknown:?}: {other:?}"),
            }
        }
        assert!(landed > 0, "no claim landed late: nothing was tested");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_frozen_server_is_answered_for_in_time_and_found_again() {
    const LIMIT: Duration = Duration::from_secs(2);
    let server = RedisServer::start().await;
    let store = connect_within(at(server.port()).timeout(LIMIT)).await;
    server.pause();
    let mut kinds = (0, 0);
    for of in 0..8 {
        let before = Instant::now();
        match store.swap(claim(of)).await {
            Err(StoreError::Unavailable(_)) => kinds.0 += 1,
            Err(StoreError::Ambiguous(_)) => kinds.1 += 1,
            other => panic!("{other:?} from a frozen server"),
        }
        assert!(before.elapsed() < SOON, "{:?} for an answer", before.elapsed());
    }
    // First it is asked and says nothing; once the silence is noticed there is no connection.
    assert!(kinds.0 > 0 && kinds.1 > 0, "{kinds:?}");
    server.resume();
    comes_back(&store).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_connection_into_nowhere_is_replaced() {
    const LIMIT: Duration = Duration::from_secs(2);
    let server = RedisServer::start().await;
    let proxy = FaultProxy::before(server.address(), 1).await.unwrap();
    let store = connect_within(at(proxy.address().port()).timeout(LIMIT)).await;
    expect_stored(&store, &claim(1)).await;
    let before = proxy.counts().connections;
    proxy.freeze();
    assert!(store.load(&key(1)).await.is_err());
    while proxy.counts().connections == before {
        store.load(&key(1)).await.unwrap_err();
    }
    proxy.thaw();
    comes_back(&store).await;
    assert!(store.load(&key(1)).await.unwrap().stored.is_some());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_server_that_is_gone_did_nothing() {
    let mut server = RedisServer::start().await;
    let store = connect(&server).await;
    server.kill().await;
    // The end of the connection may be noticed by the first one.
    let _ = store.swap(claim(9)).await;
    for of in 0..3 {
        let swapped = store.swap(claim(of)).await;
        assert!(matches!(swapped, Err(StoreError::Unavailable(_))), "{swapped:?}");
    }
    server.restart().await;
    comes_back(&store).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn nothing_acknowledged_is_lost_by_kills() {
    let always = RedisServerOptions::new().set("appendfsync", "always");
    let mut server = RedisServer::start_with(always).await;
    let store = connect(&server).await;
    let mut acknowledged = Vec::new();
    let mut lost_track = 0;
    for round in 0..5 {
        let mut callers = JoinSet::new();
        for caller in 0..16 {
            let store = Arc::clone(&store);
            callers.spawn(async move {
                let mut recorded = Vec::new();
                for number in 0.. {
                    let of = round * 1_000_000 + caller * 10_000 + number * 2;
                    let claimed = claim(of);
                    let completed = complete(&claimed, of + 1, format!("{of}").as_bytes());
                    for swap in [claimed, completed] {
                        if store.swap(swap).await.is_err() {
                            return recorded;
                        }
                    }
                    recorded.push(of);
                }
                recorded
            });
        }
        sleep(Duration::from_millis(150)).await;
        server.kill().await;
        for recorded in callers.join_all().await {
            acknowledged.extend(recorded);
            lost_track += 1;
        }
        server.restart().await;
        comes_back(&store).await;
    }
    assert!(acknowledged.len() > 100 && lost_track == 80, "{}", acknowledged.len());
    for of in acknowledged {
        let stored = store.load(&key(of)).await.unwrap().stored.expect("it was acknowledged");
        let hapax_core::RecordState::Done(outcome) = stored.record.state else {
            panic!("{of} is undone")
        };
        assert_eq!(outcome.bytes(), format!("{of}").as_bytes());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn an_outcome_that_finds_no_server_is_written_when_it_returns() {
    let always = RedisServerOptions::new().set("appendfsync", "always");
    let mut server = RedisServer::start_with(always).await;
    let process = Idempotency::builder(connect(&server).await).build().unwrap();
    let lease = own(&process, 1, &policy(OnUnknown::Block)).await;
    server.kill().await;
    let finished = lease.complete(Outcome::new("test/1", "yes"), None).await;
    assert_eq!(finished, Err(FinishError::Pending));
    server.restart().await;
    timeout(SOON, process.drain()).await.expect("what is held back is written");
    let elsewhere = Idempotency::builder(connect(&server).await).build().unwrap();
    let asked = ask(&elsewhere, 1, &policy(OnUnknown::Block)).await;
    let Claim::Replay(replay) = asked else { panic!("it is not in the store: {asked:?}") };
    assert_eq!(replay.outcome.bytes(), "yes");
}

/// Waits until the store is answered again.
async fn comes_back(store: &RedisStore) {
    let answered = async { while store.load(&key(0)).await.is_err() {} };
    timeout(SOON, answered).await.expect("the server is back");
}
