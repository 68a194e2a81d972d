//! The store by sentinels.

use std::time::Duration;

use hapax_core::Store;
use hapax_redis::{RedisOptions, RedisStore};
use hapax_testkit::servers::{RedisServer, RedisServerOptions};
use tokio::time::timeout;

use super::support::{claim, expect_stored, key};

const SOON: Duration = Duration::from_secs(60);

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn the_next_master_is_found_after_a_failover() {
    let at_once = RedisServerOptions::new().set("repl-diskless-sync-delay", "0");
    let mut master = RedisServer::start_with(at_once).await;
    let of = format!("127.0.0.1 {}", master.port());
    let replica = RedisServer::start_with(RedisServerOptions::new().set("replicaof", of)).await;
    let sentinel = RedisServerOptions::sentinel()
        .set("sentinel monitor orders", format!("127.0.0.1 {} 1", master.port()))
        .set("sentinel down-after-milliseconds orders", "500")
        .set("sentinel failover-timeout orders", "3000");
    let sentinel = RedisServer::start_with(sentinel).await;
    let url = format!("redis+sentinel://127.0.0.1:{}/orders", sentinel.port());
    let store = RedisStore::connect(RedisOptions::new(url)).await.unwrap();
    expect_stored(&store, &claim(1)).await;
    let name = format!("EXISTS hapax:{}", key(1));
    let copied = async { while replica.command(&name).await != ":1" {} };
    timeout(SOON, copied).await.expect("a copy");
    let known = async {
        while !sentinel
            .command("SENTINEL REPLICAS orders")
            .await
            .contains(&replica.port().to_string())
        {}
    };
    timeout(SOON, known).await.expect("the sentinel knows the replica");

    master.kill().await;
    let found = async { while store.load(&key(1)).await.is_err() {} };
    timeout(SOON, found).await.expect("the next master");
    assert!(store.load(&key(1)).await.unwrap().stored.is_some());
    expect_stored(&store, &claim(2)).await;
    assert_eq!(replica.command(&format!("EXISTS hapax:{}", key(2))).await, ":1");
}
