//! Servers that freeze, crash and return, and networks that lose messages.

use std::sync::Arc;
use std::time::Duration;

use hapax_core::schedule::Schedule;
use hapax_core::{
    Claim, FinishError, Idempotency, OnUnknown, Outcome, RecordState, Scope, Store, StoreError,
};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

use super::{ServerFixture, StoreConnection, TIMEOUT, answers_again, open, open_by};
use crate::SeededEntropy;
use crate::faults::{FaultProxy, FaultProxyRates};
use crate::schedule::schedule_rules;
use crate::steps::{
    SameRequest, claim, claim_key, complete, expect_stored, key, named, own, policy,
};
use crate::suite::store_rules;

/// Every rule of a store holds over a network that loses requests and replies.
pub async fn the_rules_hold_over_a_network_that_loses_replies<F: ServerFixture>() {
    let server = F::start().await;
    let proxy = FaultProxy::before(server.address(), 1).await.unwrap();
    proxy.set(FaultProxyRates { lose_reply: 20, lose_request: 10, ..FaultProxyRates::default() });
    store_rules(&server.stores(proxy.address().port())).await;
    let counts = proxy.counts();
    assert!(counts.lost_replies > 20 && counts.lost_requests > 10, "{counts:?}");
}

/// Every rule of a schedule holds over a network that loses requests and replies. A store that is a
/// schedule too calls it; `server_suite!` does not.
pub async fn schedule_rules_hold_over_a_network_that_loses_replies<F: ServerFixture>()
where
    F::Store: Schedule,
{
    let server = F::start().await;
    let proxy = FaultProxy::before(server.address(), 2).await.unwrap();
    proxy.set(FaultProxyRates { lose_reply: 20, lose_request: 10, ..FaultProxyRates::default() });
    schedule_rules(&server.stores(proxy.address().port())).await;
    let counts = proxy.counts();
    assert!(counts.lost_replies > 20 && counts.lost_requests > 10, "{counts:?}");
}

/// Claims that are sent to a frozen server, and given up by their callers, are released later.
pub async fn claims_dropped_during_a_freeze_block_no_key<F: ServerFixture>() {
    const KEYS: u64 = 120;
    let server = F::start().await;
    for on_unknown in [OnUnknown::Reexecute, OnUnknown::Block] {
        let store = Arc::new(open(&server).await);
        let process = Idempotency::builder(Arc::clone(&store)).namespace("").build().unwrap();
        let scope = Scope::of([("policy", format!("{on_unknown:?}"))]);
        let entropy = SeededEntropy::new(on_unknown as u64);
        server.pause();
        let frozen = Instant::now();
        let mut callers = JoinSet::new();
        for of in 0..KEYS {
            let (process, scope) = (process.clone(), scope.clone());
            let leaves = Duration::from_millis(entropy.below(2_500));
            callers.spawn(async move {
                let (key, policy) = (named(of), policy(on_unknown));
                let claim = process.claim(&scope, &key, &SameRequest, &policy);
                match timeout(leaves, claim).await {
                    Ok(Ok(claim)) => panic!("claimed on a frozen server: {claim:?}"),
                    Ok(Err(_)) => true,
                    Err(_) => false,
                }
            });
        }
        let (mut rejected, mut gone) = (0, 0);
        while let Some(is_rejected) = callers.join_next().await {
            if is_rejected.unwrap() { rejected += 1 } else { gone += 1 }
        }
        // Each caller got an error, or did not wait for it.
        assert!(frozen.elapsed() >= Duration::from_secs(2), "{:?}", frozen.elapsed());
        server.resume();
        assert!(rejected > 0 && gone > 0, "{rejected} rejected, {gone} gone");

        timeout(TIMEOUT, process.drain()).await.expect("late claims are released");
        let mut landed = 0;
        for of in 0..KEYS {
            let id = process.operation_id(&scope, &named(of));
            landed += u32::from(store.load(&id).await.unwrap().stored.is_some());
            let claimed =
                process.claim(&scope, &named(of), &SameRequest, &policy(on_unknown)).await;
            match claimed.unwrap() {
                Claim::Execute(lease) => assert_eq!(lease.attempt(), 1),
                other => panic!("key {of} is wedged under {on_unknown:?}: {other:?}"),
            }
        }
        assert!(landed > 0, "no claim landed late: nothing was tested");
    }
}

/// A frozen server gives ambiguous errors, then, without a connection, unavailable ones.
pub async fn a_frozen_server_is_reported_in_time_and_found_again<F: ServerFixture>() {
    let server = F::start().await;
    let connection = StoreConnection::through(server.address().port());
    let store = open_by(&server, connection.timeout(Duration::from_secs(2))).await;
    server.pause();
    let (mut unavailable, mut ambiguous) = (0, 0);
    for of in 0..8 {
        let before = Instant::now();
        match store.swap(claim(of)).await {
            Err(StoreError::Unavailable(_)) => unavailable += 1,
            Err(StoreError::Ambiguous(_)) => ambiguous += 1,
            other => panic!("{other:?} from a frozen server"),
        }
        assert!(before.elapsed() < TIMEOUT, "{:?} for an answer", before.elapsed());
    }
    assert!(unavailable > 0 && ambiguous > 0, "{unavailable} unavailable, {ambiguous} ambiguous");
    server.resume();
    answers_again(&store).await;
}

/// A connection whose network no longer delivers anything is replaced.
pub async fn a_connection_without_a_working_network_is_replaced<F: ServerFixture>() {
    let server = F::start().await;
    let proxy = FaultProxy::before(server.address(), 1).await.unwrap();
    let connection = StoreConnection::through(proxy.address().port());
    let store = open_by(&server, connection.timeout(Duration::from_secs(2))).await;
    expect_stored(&store, &claim(1)).await;
    let before = proxy.counts().connections;
    proxy.freeze();
    assert!(store.load(&key(1)).await.is_err());
    while proxy.counts().connections == before {
        store.load(&key(1)).await.unwrap_err();
    }
    proxy.thaw();
    answers_again(&store).await;
    assert!(store.load(&key(1)).await.unwrap().stored.is_some());
}

/// A swap that finds no server is unavailable, not ambiguous.
pub async fn a_swap_without_a_server_is_unavailable<F: ServerFixture>() {
    let mut server = F::start().await;
    let store = open(&server).await;
    server.kill().await;
    // The first swap may be the one that finds the connection closed.
    let _ = store.swap(claim(9)).await;
    for of in 0..3 {
        let swapped = store.swap(claim(of)).await;
        assert!(matches!(swapped, Err(StoreError::Unavailable(_))), "{swapped:?}");
    }
    server.restart().await;
    answers_again(&store).await;
}

/// Completions that were acknowledged survive kills of the server.
pub async fn acknowledged_completions_survive_kills<F: ServerFixture>() {
    let mut server = F::start().await;
    let store = Arc::new(open(&server).await);
    let mut acknowledged = Vec::new();
    let mut interrupted = 0;
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
            interrupted += 1;
        }
        server.restart().await;
        answers_again(&*store).await;
    }
    assert!(acknowledged.len() > 100 && interrupted == 80, "{}", acknowledged.len());
    for of in acknowledged {
        let stored = store.load(&key(of)).await.unwrap().stored.expect("it was acknowledged");
        let RecordState::Done(outcome) = stored.record.state else { panic!("{of} is undone") };
        assert_eq!(outcome.bytes(), format!("{of}").as_bytes());
    }
}

/// A completion without a server is deferred, and written when the server returns.
pub async fn a_deferred_outcome_is_written_when_the_server_returns<F: ServerFixture>() {
    let mut server = F::start().await;
    let process = Idempotency::builder(open(&server).await).namespace("").build().unwrap();
    let lease = own(&process, 1, &policy(OnUnknown::Block)).await;
    server.kill().await;
    let finished = lease.complete(Outcome::new("test/1", "yes"), None).await;
    assert_eq!(finished, Err(FinishError::Pending));
    server.restart().await;
    timeout(TIMEOUT, process.drain()).await.expect("the deferred write is sent");
    let elsewhere = Idempotency::builder(open(&server).await).namespace("").build().unwrap();
    let claimed = claim_key(&elsewhere, 1, &policy(OnUnknown::Block)).await;
    let Claim::Replay(replay) = claimed else { panic!("it is not in the store: {claimed:?}") };
    assert_eq!(replay.outcome.bytes(), "yes");
}
