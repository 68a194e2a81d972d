//! The store on a cluster.

use std::collections::BTreeSet;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use hapax_core::diagnose::Severity;
use hapax_core::schedule::Schedule;
use hapax_core::store::Swapped;
use hapax_core::{Inspect, Notify, Store, StoreError};
use hapax_redis::{RedisOptions, RedisStore, RedisStoreError, diagnose};
use hapax_testkit::faults::{FaultProxy, FaultProxyRates};
use hapax_testkit::schedule;
use hapax_testkit::servers::{RedisCluster, RedisServer};
use hapax_testkit::suite;
use tokio::net::TcpListener;
use tokio::time::timeout;

use super::schedule::{entry, queue};
use super::suite::OnOneServer;
use super::support::{at, claim, complete, connect_within, expect_stored, key};

const SOON: Duration = Duration::from_secs(60);

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_store_on_a_cluster_follows_the_rules() {
    let cluster = RedisCluster::start(3).await;
    let fixture = OnOneServer::new(at(cluster.nodes()[1].port()));
    suite::store_rules(&fixture).await;
    suite::inspect_rules(&fixture).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_schedule_on_a_cluster_follows_the_rules() {
    let cluster = RedisCluster::start(3).await;
    schedule::schedule_rules(&OnOneServer::new(at(cluster.nodes()[1].port()))).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_poll_returns_the_entries_of_reachable_masters() {
    let mut cluster = RedisCluster::start(3).await;
    let options = at(cluster.nodes()[0].port()).timeout(Duration::from_secs(2));
    let store = connect_within(options).await;
    let most = NonZeroU32::new(100).unwrap();
    for of in 0..64 {
        let inserted = async { while store.insert(entry(of, Duration::ZERO)).await.is_err() {} };
        timeout(SOON, inserted).await.expect("all nodes answer");
    }
    cluster.node(2).kill().await;
    let mut found = BTreeSet::new();
    let polling = async {
        // Until what is left is at the master that is away.
        while let Ok(due) = store.due(&[queue()], most).await {
            assert!(!due.entries.is_empty(), "a poll without part of the slots looks complete");
            for (key, _) in due.entries {
                found.insert(key);
                while store.remove(key).await.is_err() {}
            }
        }
    };
    timeout(SOON, polling).await.expect("entries are removed");
    assert!((10..64).contains(&found.len()), "{} of 64", found.len());
    // A page without the others would look complete.
    assert!(store.entries(None, most).await.is_err());
    assert!(store.queues().await.is_err());
    cluster.node(2).restart().await;
    cluster.agree().await;
    let back = async {
        loop {
            match store.due(&[queue()], most).await {
                Ok(due) if due.next_in.is_none() => return due.entries,
                _ => {}
            }
        }
    };
    let left = timeout(SOON, back).await.expect("they are due again");
    assert_eq!(found.len() + left.len(), 64);
    assert!(left.iter().all(|(key, _)| !found.contains(key)), "removed, and due again");
}

/// A proxy before each node, which is what clients are told to connect to.
async fn proxies(cluster: &RedisCluster) -> Vec<FaultProxy> {
    let mut proxies = Vec::new();
    for node in cluster.nodes() {
        let proxy = FaultProxy::before(node.address(), 1).await.unwrap();
        let port = proxy.address().port();
        let announced = node.command(&format!("CONFIG SET cluster-announce-port {port}")).await;
        assert_eq!(announced, "+OK");
        proxies.push(proxy);
    }
    let known = async {
        for node in cluster.nodes() {
            for proxy in &proxies {
                let port = format!(":{}", proxy.address().port());
                while !node.command("CLUSTER SLOTS").await.contains(&port) {}
            }
        }
    };
    timeout(SOON, known).await.expect("all nodes tell of the proxies");
    proxies
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_store_on_a_cluster_follows_the_rules_over_a_network_that_loses_replies() {
    let cluster = RedisCluster::start(3).await;
    let proxies = proxies(&cluster).await;
    for proxy in &proxies {
        proxy.set(FaultProxyRates {
            lose_reply: 20,
            lose_request: 10,
            ..FaultProxyRates::default()
        });
    }
    suite::store_rules(&OnOneServer::new(at(proxies[0].address().port()))).await;
    let counts = proxies.iter().map(FaultProxy::counts);
    let (replies, requests) = counts.fold((0, 0), |(replies, requests), counts| {
        (replies + counts.lost_replies, requests + counts.lost_requests)
    });
    assert!(replies > 20 && requests > 10, "{replies} replies, {requests} requests");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_write_whose_reply_is_lost_is_ambiguous() {
    let cluster = RedisCluster::start(1).await;
    let proxies = proxies(&cluster).await;
    for of in 0..10 {
        proxies[0].set(FaultProxyRates::default());
        let options = at(proxies[0].address().port());
        let store = RedisStore::connect(options).await.unwrap();
        // Not only its own: all that the client asks to find its way again.
        proxies[0].set(FaultProxyRates { lose_reply: 1000, ..FaultProxyRates::default() });
        let swapped = store.swap(claim(of)).await;
        assert!(matches!(swapped, Err(StoreError::Ambiguous(_))), "{of}: {swapped:?}");
        let there = cluster.nodes()[0].command(&format!("EXISTS hapax:{}", key(of))).await;
        assert_eq!(there, ":1", "nothing was tested");
    }
}

/// Where a key is served, as indices: its slot's owner, and somebody else.
async fn owner(cluster: &RedisCluster, name: &str) -> (String, usize, usize) {
    let nodes = cluster.nodes();
    let slot = nodes[0].command(&format!("CLUSTER KEYSLOT {name}")).await;
    let slot = slot.trim_start_matches(':').to_owned();
    for (at, node) in nodes.iter().enumerate() {
        if !node.command(&format!("GET {name}")).await.starts_with("-MOVED") {
            return (slot, at, (at + 1) % nodes.len());
        }
    }
    panic!("nobody serves {name}")
}

async fn id(node: &RedisServer) -> String {
    let id = node.command("CLUSTER MYID").await;
    id.lines().last().unwrap_or_default().to_owned()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_key_is_found_while_its_slot_moves_and_after() {
    let cluster = RedisCluster::start(3).await;
    let store = RedisStore::connect(at(cluster.nodes()[0].port())).await.unwrap();
    let claimed = claim(1);
    let name = format!("hapax:{}", key(1));
    let (slot, from, to) = owner(&cluster, &name).await;
    let (from, to) = (&cluster.nodes()[from], &cluster.nodes()[to]);
    let (from_id, to_id) = (id(from).await, id(to).await);
    assert_eq!(to.command(&format!("CLUSTER SETSLOT {slot} IMPORTING {from_id}")).await, "+OK");
    assert_eq!(from.command(&format!("CLUSTER SETSLOT {slot} MIGRATING {to_id}")).await, "+OK");
    // It is not at its old place, so it is written to its new one.
    expect_stored(&store, &claimed).await;
    assert_eq!(from.command(&format!("CLUSTER COUNTKEYSINSLOT {slot}")).await, ":0");
    for node in [to, from] {
        assert_eq!(node.command(&format!("CLUSTER SETSLOT {slot} NODE {to_id}")).await, "+OK");
    }
    expect_stored(&store, &complete(&claimed, 2, b"yes")).await;
    let found = store.load(&key(1)).await.unwrap().stored.expect("it moved with its slot");
    assert_eq!(found.write_id, super::support::write_id(2));
    // Claimed anew, it is found by its slot, wherever that is.
    assert!(store.swap(claimed).await.is_ok());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn an_unreachable_master_affects_its_own_keys_only() {
    let mut cluster = RedisCluster::start(3).await;
    let options = at(cluster.nodes()[0].port()).timeout(Duration::from_secs(2));
    let store = connect_within(options).await;
    for of in 0..30 {
        expect_stored(&store, &claim(of)).await;
    }
    let everything = NonZeroU32::new(100).unwrap();
    assert_eq!(store.page(None, everything).await.unwrap().records.len(), 30);
    cluster.node(2).kill().await;
    let (mut served, mut away) = (0, 0);
    for of in 0..30 {
        match store.load(&key(of)).await {
            Ok(seen) => {
                assert!(seen.stored.is_some(), "{of} is forgotten");
                served += 1;
            }
            Err(StoreError::Unavailable(_)) => away += 1,
            Err(other) => panic!("{other:?}"),
        }
    }
    assert!(served > 10 && away > 0, "{served} served, {away} away");
    // A page without them would look whole.
    assert!(store.page(None, everything).await.is_err());
    // Who comes now is served as well, as far as possible.
    let options = at(cluster.nodes()[0].port());
    assert!(RedisStore::connect(options).await.is_ok());
    cluster.node(2).restart().await;
    cluster.agree().await;
    let back = async {
        for of in 0..30 {
            while !store.load(&key(of)).await.is_ok_and(|seen| seen.stored.is_some()) {}
        }
    };
    timeout(SOON, back).await.expect("they are served again");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn an_unresponsive_node_affects_its_own_keys_only() {
    let cluster = RedisCluster::start(3).await;
    let [silent, other, _] = cluster.nodes() else { panic!("three nodes") };
    let before = RedisStore::connect(at(other.port())).await.unwrap();
    let mut away = Vec::new();
    for of in 0..30 {
        expect_stored(&before, &claim(of)).await;
        away.push(!silent.command(&format!("GET hapax:{}", key(of))).await.starts_with("-MOVED"));
    }
    assert!(away.contains(&true) && away.contains(&false));
    silent.pause();
    // Who comes now, and asks that one first, is served by the others.
    let url = format!("redis://127.0.0.1:{},127.0.0.1:{}", silent.port(), other.port());
    let after = RedisStore::connect(RedisOptions::new(url)).await.unwrap();
    let gone = away.iter().position(|away| *away).unwrap() as u64;
    for store in [&before, &after] {
        let connections = store.stats().connections;
        let lost = store.swap(complete(&claim(gone), 99, b"lost")).await;
        assert!(lost.is_err(), "{lost:?}");
        for of in (0..30).filter(|of| !away[*of as usize]) {
            let seen = store.load(&key(of)).await.unwrap_or_else(|error| panic!("{of}: {error:?}"));
            assert!(seen.stored.is_some(), "{of} is forgotten");
        }
        assert_eq!(store.stats().connections, connections, "all of it was given up");
    }
    silent.resume();
    let back = async { while after.load(&key(gone)).await.is_err() {} };
    timeout(SOON, back).await.expect("it is served again");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_node_that_stays_unreachable_delays_requests_for_a_bounded_time() {
    let mut cluster = RedisCluster::start(3).await;
    let store = Arc::new(RedisStore::connect(at(cluster.nodes()[0].port())).await.unwrap());
    let third = cluster.node(2);
    let (mut away, mut there) = (Vec::new(), Vec::new());
    for of in 0..30 {
        expect_stored(&*store, &claim(of)).await;
        let moved = third.command(&format!("GET hapax:{}", key(of))).await.starts_with("-MOVED");
        if moved { there.push(of) } else { away.push(of) }
    }
    assert!(!away.is_empty() && !there.is_empty());
    let port = third.port();
    third.kill().await;
    // In its place somebody who takes connections and never says a word on them.
    let silence = TcpListener::bind(("127.0.0.1", port)).await.unwrap();
    let asking = tokio::spawn({
        let store = Arc::clone(&store);
        async move {
            for of in away.iter().cycle() {
                assert!(store.load(&key(*of)).await.is_err());
            }
        }
    });
    for of in there.iter().take(8) {
        let seen = store.load(&key(*of)).await.unwrap_or_else(|error| panic!("{of}: {error:?}"));
        assert!(seen.stored.is_some(), "{of} is forgotten");
    }
    assert_eq!(store.stats().connections, 1, "all of it was given up");
    assert!(!asking.is_finished());
    asking.abort();
    drop(silence);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_rejection_by_a_cluster_node_is_ambiguous() {
    let cluster = RedisCluster::start(1).await;
    let node = &cluster.nodes()[0];
    let store = RedisStore::connect(at(node.port())).await.unwrap();
    // A server alone would be believed. Here the client may say so of another request.
    node.command("CONFIG SET maxmemory 1").await;
    let swapped = store.swap(claim(1)).await;
    assert!(matches!(swapped, Err(StoreError::Ambiguous(_))), "{swapped:?}");
    node.command("CONFIG SET maxmemory 0").await;
    expect_stored(&store, &claim(1)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_reconnected_node_is_checked_again() {
    let cluster = RedisCluster::start(3).await;
    let options = at(cluster.nodes()[0].port()).timeout(Duration::from_secs(2));
    let store = connect_within(options).await;
    expect_stored(&store, &claim(1)).await;
    let third = &cluster.nodes()[2];
    third.command("CONFIG SET maxmemory-policy allkeys-random").await;
    third.command("CLIENT KILL TYPE normal").await;
    let refused = async {
        loop {
            if let Err(StoreError::Unavailable(why)) = store.swap(claim(1)).await
                && why.to_string().contains("allkeys-random")
            {
                return;
            }
        }
    };
    timeout(SOON, refused).await.expect("it is no place for a store any more");
    third.command("CONFIG SET maxmemory-policy noeviction").await;
    let back = async { while store.swap(claim(1)).await.is_err() {} };
    timeout(SOON, back).await.expect("it is one again");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn diagnose_checks_every_node() {
    let cluster = RedisCluster::start(3).await;
    let third = &cluster.nodes()[2];
    third.command("CONFIG SET maxmemory-policy allkeys-random").await;
    let options = at(cluster.nodes()[0].port());
    let findings = diagnose(&options, &hapax_core::SystemClock).await.unwrap();
    let broken: Vec<_> =
        findings.iter().filter(|finding| finding.severity == Severity::Broken).collect();
    assert_eq!(broken.len(), 1, "{findings:?}");
    assert_eq!(broken[0].server, Some(format!("127.0.0.1:{}", third.port())));
    // It is one of those that would hold records.
    assert!(RedisStore::connect(options).await.is_err());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_waiter_is_notified_of_writes_of_its_key_only() {
    let cluster = RedisCluster::start(3).await;
    let [first, second, third] = cluster.nodes() else { panic!("three nodes") };
    let here = RedisStore::connect(at(first.port())).await.unwrap();
    let there = RedisStore::connect(at(second.port())).await.unwrap();
    for of in 0..12 {
        // The first news is that it is subscribed to.
        let key = key(of);
        timeout(SOON, here.written(&key)).await.expect("it is subscribed to");
        let written = here.written(&key);
        let claimed = claim(of);
        expect_stored(&there, &claimed).await;
        expect_stored(&there, &complete(&claimed, 100 + of, b"yes")).await;
        timeout(SOON, written).await.expect("news");
    }
    // Whoever tells of writes is lost, and found again elsewhere.
    let again = key(99);
    timeout(SOON, here.written(&again)).await.expect("it is subscribed to");
    let written = here.written(&again);
    for node in [first, second, third] {
        node.command("CLIENT KILL TYPE pubsub").await;
    }
    timeout(SOON, written).await.expect("news of the new connection");
    let silent = async {
        for node in [first, second, third] {
            while node.command("PUBSUB CHANNELS *").await != "*0" {}
        }
    };
    timeout(SOON, silent).await.expect("nothing is subscribed to for nothing");
}

/// A request that is told the answer to another one may execute twice.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn answers_match_their_requests_while_slots_move_and_duplicates_wait() {
    const ROUNDS: usize = 12;
    let cluster = RedisCluster::start(3).await;
    let store = Arc::new(RedisStore::connect(at(cluster.nodes()[0].port())).await.unwrap());
    for of in 0..64 {
        expect_stored(&*store, &claim(of)).await;
    }
    let waiting: Vec<_> = (0..64)
        .map(|of| {
            let store = Arc::clone(&store);
            tokio::spawn(async move {
                loop {
                    store.written(&key(of)).await
                }
            })
        })
        .collect();
    let asking: Vec<_> = (0..16)
        .map(|task: u64| {
            let store = Arc::clone(&store);
            tokio::spawn(async move {
                let (mut fresh, mut taken) = (0, 0);
                for of in 0.. {
                    let of = 1_000 + task * 1_000_000 + of;
                    match store.swap(claim(of)).await {
                        Ok(Swapped::Stored(_)) => fresh += 1,
                        // While its slot moves, nobody may serve it for a moment.
                        Err(StoreError::Unavailable(_)) => {}
                        Err(StoreError::Ambiguous(why)) if !unreadable(&*why) => {}
                        other => panic!("{of} is free: {other:?}"),
                    }
                    // Another claim, of a key that is taken.
                    let mut other = claim(of % 64);
                    other.write_id = super::support::write_id(of);
                    match store.swap(other).await {
                        Ok(Swapped::Conflict(seen)) => {
                            assert!(seen.stored.is_some(), "{of} is forgotten");
                            taken += 1;
                        }
                        Err(StoreError::Unavailable(_)) => {}
                        Err(StoreError::Ambiguous(why)) if !unreadable(&*why) => {}
                        other => panic!("{of} is taken: {other:?}"),
                    }
                    tokio::task::yield_now().await;
                    if of % 1_000_000 > 1_000 + 400 {
                        break;
                    }
                }
                (fresh, taken)
            })
        })
        .collect();
    // The slot of a key that is nowhere goes round, and each time the client learns of it anew.
    let name = format!("hapax:{}", key(500));
    for _ in 0..ROUNDS {
        let (slot, _, to) = owner(&cluster, &name).await;
        let to = id(&cluster.nodes()[to]).await;
        let moved = async {
            // A node that gossips its older view may undo the move on another one.
            loop {
                for node in cluster.nodes() {
                    node.command(&format!("CLUSTER SETSLOT {slot} NODE {to}")).await;
                }
                let found = async { while store.load(&key(500)).await.is_err() {} };
                if timeout(Duration::from_secs(2), found).await.is_ok() {
                    return;
                }
            }
        };
        timeout(SOON, moved).await.expect("it is found at its new place");
    }
    for task in asking {
        let (fresh, taken) = task.await.unwrap();
        assert!(fresh > 300 && taken > 300, "{fresh} fresh, {taken} taken");
    }
    waiting.iter().for_each(tokio::task::JoinHandle::abort);
}

fn unreadable(why: &(dyn std::error::Error + 'static)) -> bool {
    matches!(why.downcast_ref(), Some(RedisStoreError::Unreadable))
}
