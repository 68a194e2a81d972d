//! What this store does not promise. Each test shows that it does happen: were it to pass by
//! itself one day, the documentation would have to change.

use std::time::Duration;

use hapax_core::store::Swapped;
use hapax_core::{FinishError, Idempotency, OnUnknown, Outcome, RecordState, Scope, Store};
use hapax_redis::{RedisStore, diagnose};
use hapax_testkit::faults::FaultProxy;
use hapax_testkit::servers::{RedisServer, RedisServerOptions};
use hapax_testkit::steps::named;
use tokio::time::timeout;

use super::support::{at, claim, complete, connect, expect_stored, key, own, policy};

const SOON: Duration = Duration::from_secs(60);

#[tokio::test]
async fn an_evicted_record_executes_again() {
    let evicts = RedisServerOptions::new().set("maxmemory-policy", "allkeys-lru");
    let server = RedisServer::start_with(evicts).await;
    let store = RedisStore::connect(at(server.port()).allow_eviction()).await.unwrap();
    let process = Idempotency::builder(std::sync::Arc::new(store)).namespace("").build().unwrap();
    // Under `block` the store rejects new keys where its identity is among what was evicted.
    let anew = policy(OnUnknown::Reexecute);
    own(&process, 0, &anew).await.complete(Outcome::new("test/1", "paid"), None).await.unwrap();
    // Others fill what memory there is, until it is the turn of the first.
    server.command("CONFIG SET maxmemory 3mb").await;
    let name = format!("EXISTS hapax:{}", process.operation_id(&Scope::shared(), &named(0)));
    assert_eq!(server.command(&name).await, ":1");
    timeout(SOON, async {
        let mut of = 0;
        while server.command(&name).await != ":0" {
            of += 1;
            let lease = own(&process, of, &anew).await;
            let big = Outcome::new("test/1", vec![of as u8; 64 << 10]);
            // What is in flight may be thrown out like anything else.
            let kept = lease.complete(big, None).await;
            assert!(matches!(kept, Ok(_) | Err(FinishError::Gone)), "{kept:?}");
        }
    })
    .await
    .expect("the server evicts the first record");
    let again = own(&process, 0, &anew).await;
    assert_eq!(again.attempt(), 1, "it does not even know that there was a first");
}

#[tokio::test]
async fn a_failover_loses_what_was_acknowledged() {
    let at_once = RedisServerOptions::new().set("repl-diskless-sync-delay", "0");
    let mut master = RedisServer::start_with(at_once).await;
    let wire = FaultProxy::before(master.address(), 1).await.unwrap();
    let of = format!("127.0.0.1 {}", wire.address().port());
    let replica = RedisServer::start_with(RedisServerOptions::new().set("replicaof", of)).await;
    let store = connect(&master).await;
    let claimed = claim(1);
    expect_stored(&*store, &claimed).await;
    let name = format!("EXISTS hapax:{}", key(1));
    timeout(SOON, async { while replica.command(&name).await != ":1" {} }).await.expect("a copy");
    // The replica lags, and the master answers all the same.
    wire.freeze();
    expect_stored(&*store, &complete(&claimed, 2, b"paid")).await;
    master.kill().await;
    replica.command("REPLICAOF NO ONE").await;
    let promoted = connect(&replica).await;
    let found = promoted.load(&key(1)).await.unwrap().stored.expect("the claim was copied");
    assert_eq!((found.write_id, found.record.state), (claimed.write_id, RecordState::InFlight));
}

#[tokio::test]
async fn a_step_of_the_servers_clock_ends_every_retention() {
    let server = RedisServer::start_with(RedisServerOptions::new().own_clock()).await;
    let store = connect(&server).await;
    let claimed = claim(1);
    let first = expect_stored(&*store, &claimed).await;
    expect_stored(&*store, &complete(&claimed, 2, b"paid")).await;
    server.set_clock(2 * 86_400);
    assert_eq!(store.load(&key(1)).await.unwrap().stored, None, "kept for a day, two days ago");
    let second = expect_stored(&*store, &claim(1)).await;
    assert!(second.fence > first.fence);
    // Back again: leases and retention last longer, and fences still grow.
    server.set_clock(-86_400);
    let seen = store.load(&key(1)).await.unwrap();
    assert!(
        seen.stored
            .is_some_and(|stored| stored.lease_until.since(seen.now) > Duration::from_secs(86_400))
    );
    let mut third = claim(1);
    (third.expected, third.write_id) = (Some(third.write_id), super::support::write_id(3));
    let Swapped::Stored(third) = store.swap(third).await.unwrap() else { panic!("a conflict") };
    assert_eq!(third.fence.get(), second.fence.get() + 1);
    let findings = diagnose(&at(server.port()), &hapax_core::SystemClock).await.unwrap();
    assert!(
        findings.iter().any(|finding| finding.found.contains("behind this one")),
        "{findings:?}"
    );
}
