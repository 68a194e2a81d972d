//! The store on a cluster.

use std::num::NonZeroU32;
use std::time::Duration;

use hapax::{Inspect, Store, StoreError};
use hapax_redis::{RedisStore, Severity, diagnose};
use hapax_testkit::servers::{RedisCluster, RedisServer};
use hapax_testkit::suite;
use tokio::time::timeout;

use super::suite::OnOneServer;
use super::support::{at, claim, complete, key, stored};

const SOON: Duration = Duration::from_secs(20);

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_cluster_keeps_the_rules() {
    let cluster = RedisCluster::start(3).await;
    let fixture = OnOneServer::new(at(cluster.nodes()[1].port()));
    suite::store_rules(&fixture).await;
    suite::inspect_rules(&fixture).await;
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
    stored(&store, &claimed).await;
    assert_eq!(from.command(&format!("CLUSTER COUNTKEYSINSLOT {slot}")).await, ":0");
    for node in [to, from] {
        assert_eq!(node.command(&format!("CLUSTER SETSLOT {slot} NODE {to_id}")).await, "+OK");
    }
    stored(&store, &complete(&claimed, 2, b"yes")).await;
    let found = store.load(&key(1)).await.unwrap().cell.expect("it moved with its slot");
    assert_eq!(found.tag, super::support::tag(2));
    // Claimed anew, it is found by its slot, wherever that is.
    assert!(store.swap(claimed).await.is_ok());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_master_that_is_away_takes_only_its_own_keys_with_it() {
    let mut cluster = RedisCluster::start(3).await;
    let options = at(cluster.nodes()[0].port()).timeout(Duration::from_millis(500));
    let store = RedisStore::connect(options).await.unwrap();
    for of in 0..30 {
        stored(&store, &claim(of)).await;
    }
    let everything = NonZeroU32::new(100).unwrap();
    assert_eq!(store.page(None, everything).await.unwrap().cells.len(), 30);
    cluster.node(2).kill().await;
    let (mut served, mut away) = (0, 0);
    for of in 0..30 {
        match store.load(&key(of)).await {
            Ok(seen) => {
                assert!(seen.cell.is_some(), "{of} is forgotten");
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
            while !store.load(&key(of)).await.is_ok_and(|seen| seen.cell.is_some()) {}
        }
    };
    timeout(SOON, back).await.expect("they are served again");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn the_doctor_looks_at_every_node() {
    let cluster = RedisCluster::start(3).await;
    let third = &cluster.nodes()[2];
    third.command("CONFIG SET maxmemory-policy allkeys-random").await;
    let options = at(cluster.nodes()[0].port());
    let findings = diagnose(&options, &hapax::SystemClock).await.unwrap();
    let broken: Vec<_> =
        findings.iter().filter(|finding| finding.severity == Severity::Broken).collect();
    assert_eq!(broken.len(), 1, "{findings:?}");
    assert_eq!(broken[0].server, Some(format!("127.0.0.1:{}", third.port())));
    // It is one of those that would hold records.
    assert!(RedisStore::connect(options).await.is_err());
}
