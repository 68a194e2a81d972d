//! Which servers a store is opened on, and what it needs there.

use std::time::Duration;

use hapax_core::store::{Cursor, StoredRecord, Swapped};
use hapax_core::{Inspect, OperationId, Store, StoreError};
use hapax_redis::{RedisConnectError, RedisOptions, RedisStore, UnfitServer};
use hapax_testkit::servers::{RedisServer, RedisServerOptions, free_port};

use super::support::{at, claim, complete, connect, connect_within, expect_stored, key, permit};

async fn refused(options: RedisOptions) -> RedisConnectError {
    RedisStore::connect(options).await.expect_err("it is no place for a store")
}

#[tokio::test]
async fn a_server_that_evicts_is_rejected_unless_allowed() {
    let evicts = RedisServerOptions::new().set("maxmemory-policy", "allkeys-lru");
    let server = RedisServer::start_with(evicts).await;
    let error = refused(at(server.port())).await;
    let RedisConnectError::Unfit(UnfitServer::Evicts { policy }) = &error else {
        panic!("{error:?}")
    };
    assert_eq!(policy, "allkeys-lru");
    assert!(error.to_string().contains("set it to `noeviction`"), "{error}");
    assert!(RedisStore::connect(at(server.port()).allow_eviction()).await.is_ok());
}

#[tokio::test]
async fn a_server_that_begins_to_evict_is_rejected_at_reconnection() {
    begins_to_evict(true).await;
}

#[tokio::test]
async fn a_server_that_begins_to_evict_is_rejected_by_the_periodic_check() {
    begins_to_evict(false).await;
}

async fn begins_to_evict(disconnect: bool) {
    let server = RedisServer::start().await;
    // It is looked at again after thirty of them.
    let options = at(server.port()).timeout(Duration::from_millis(500));
    let store = connect_within(options).await;
    expect_stored(&store, &claim(1)).await;
    server.command("CONFIG SET maxmemory-policy volatile-ttl").await;
    if disconnect {
        server.command("CLIENT KILL TYPE normal").await;
    }
    let error = loop {
        match store.swap(claim(2)).await {
            Err(StoreError::Unavailable(source)) => break source,
            // The end of the connection, or an answer from before it.
            Err(StoreError::Ambiguous(_)) | Ok(_) => {
                tokio::time::sleep(Duration::from_millis(50)).await
            }
            Err(other) => panic!("{other:?}"),
        }
    };
    assert!(error.to_string().contains("volatile-ttl"), "{error}");
    server.command("CONFIG SET maxmemory-policy noeviction").await;
    while store.swap(claim(3)).await.is_err() {}
}

#[tokio::test]
async fn a_replica_is_rejected() {
    let master = RedisServer::start().await;
    let of = format!("127.0.0.1 {}", master.port());
    let replica = RedisServer::start_with(RedisServerOptions::new().set("replicaof", of)).await;
    let error = refused(at(replica.port())).await;
    assert!(matches!(error, RedisConnectError::Unfit(UnfitServer::Replica)), "{error:?}");
}

#[tokio::test]
async fn a_master_that_becomes_a_replica_takes_no_writes() {
    let other = RedisServer::start().await;
    let server = RedisServer::start().await;
    let store = connect(&server).await;
    expect_stored(&*store, &claim(1)).await;
    server.command(&format!("REPLICAOF 127.0.0.1 {}", other.port())).await;
    // By the server's word, or because it is not let in again: nothing is written either way.
    for of in 2..5 {
        let swapped = store.swap(claim(of)).await;
        assert!(matches!(swapped, Err(StoreError::Unavailable(_))), "{swapped:?}");
    }
    server.command("REPLICAOF NO ONE").await;
    while store.swap(claim(5)).await.is_err() {}
}

#[tokio::test]
async fn an_unreachable_server_is_reported_within_the_timeout() {
    let error = refused(at(free_port())).await;
    assert!(matches!(error, RedisConnectError::Unreachable(_)), "{error:?}");
    let server = RedisServer::start().await;
    server.pause();
    let limit = Duration::from_millis(200);
    let error = refused(at(server.port()).timeout(limit)).await;
    assert!(matches!(error, RedisConnectError::TimedOut(_)), "{error:?}");
}

#[tokio::test]
async fn invalid_options_are_rejected_before_connecting() {
    let nowhere = || RedisOptions::new("redis://127.0.0.1:1");
    for url in ["127.0.0.1", "http://127.0.0.1", "redis://127.0.0.1/two", "redis+sentinel://h/"] {
        let error = refused(RedisOptions::new(url)).await;
        assert!(matches!(error, RedisConnectError::Url(_)), "{url}: {error:?}");
    }
    for options in [
        nowhere().prefix("{tag}:"),
        nowhere().prefix("all*"),
        nowhere().prefix("x".repeat(65)),
        nowhere().timeout(Duration::ZERO),
    ] {
        let error = refused(options).await;
        assert!(matches!(error, RedisConnectError::Option(_)), "{error:?}");
    }
}

#[tokio::test]
async fn the_documented_permissions_suffice() {
    let server = RedisServer::start().await;
    permit(&server, "hapax:").await;
    let url = format!("redis://hapax:word@127.0.0.1:{}", server.port());
    let store = RedisStore::connect(RedisOptions::new(&url)).await.unwrap();
    let claimed = claim(1);
    expect_stored(&store, &claimed).await;
    expect_stored(&store, &complete(&claimed, 2, b"yes")).await;
    assert!(store.load(&key(1)).await.unwrap().stored.is_some());
    assert_eq!(store.page(None, std::num::NonZeroU32::MIN).await.unwrap().records.len(), 1);

    // Nobody else's keys, no scripts, no word: heard at once.
    let denied = |error: &RedisConnectError| matches!(error, RedisConnectError::Denied { .. });
    let error = refused(RedisOptions::new(&url).prefix("other:")).await;
    assert!(denied(&error), "{error:?}");
    server.command("ACL SETUSER hapax -evalsha").await;
    let error = refused(RedisOptions::new(&url)).await;
    assert!(denied(&error), "{error:?}");
    let error = refused(RedisOptions::new(url.replace("word", "guess"))).await;
    assert!(matches!(error, RedisConnectError::Unreachable(_)), "{error:?}");
}

#[tokio::test]
async fn a_write_that_is_not_permitted_is_known_not_to_have_happened() {
    let server = RedisServer::start().await;
    permit(&server, "hapax:").await;
    let url = format!("redis://hapax:word@127.0.0.1:{}", server.port());
    let store = RedisStore::connect(RedisOptions::new(url)).await.unwrap();
    server.command("ACL SETUSER hapax -set").await;
    let swapped = store.swap(claim(1)).await;
    assert!(matches!(swapped, Err(StoreError::Unavailable(_))), "{swapped:?}");
    // Whoever may not tell others writes all the same.
    server.command("ACL SETUSER hapax +set resetchannels -publish").await;
    let claimed = claim(2);
    expect_stored(&store, &claimed).await;
    expect_stored(&store, &complete(&claimed, 3, b"yes")).await;
}

#[tokio::test]
async fn a_server_without_memory_rejects_writes() {
    let server = RedisServer::start().await;
    let store = connect(&server).await;
    server.command("CONFIG SET maxmemory 1").await;
    let swapped = store.swap(claim(1)).await;
    assert!(matches!(swapped, Err(StoreError::Unavailable(_))), "{swapped:?}");
    assert_eq!(store.load(&key(1)).await.unwrap().stored, None);
    server.command("CONFIG SET maxmemory 0").await;
    expect_stored(&*store, &claim(1)).await;
}

#[tokio::test]
async fn a_missing_script_is_sent_again() {
    let mut server = RedisServer::start().await;
    let store = connect(&server).await;
    server.command("SCRIPT FLUSH SYNC").await;
    expect_stored(&*store, &claim(1)).await;
    server.command("SCRIPT FLUSH SYNC").await;
    assert!(store.load(&key(1)).await.unwrap().stored.is_some());
    server.stop().await;
    server.restart().await;
    while store.load(&key(1)).await.is_err() {}
    expect_stored(&*store, &claim(2)).await;
}

#[tokio::test]
async fn foreign_values_are_not_changed() {
    let server = RedisServer::start().await;
    let store = connect(&server).await;
    let name = |of| format!("hapax:{}", key(of));
    server.command(&format!("SET {} note", name(1))).await;
    server.command(&format!("LPUSH {} note", name(2))).await;
    server.command("SET hapax:note x").await;
    // Like a cell, but for its numbers.
    let odd = format!("hxc1{}{}", "t".repeat(16), "x".repeat(64));
    server.command(&format!("SET {} {odd}", name(3))).await;
    for of in 1..=3 {
        let swapped = store.swap(claim(of)).await;
        assert!(matches!(swapped, Err(StoreError::Corrupt(_))), "{of}: {swapped:?}");
        let loaded = store.load(&key(of)).await;
        assert!(matches!(loaded, Err(StoreError::Corrupt(_))), "{of}: {loaded:?}");
    }
    assert_eq!(server.command(&format!("GET {}", name(1))).await, "$4\r\nnote");
    // A record that was moved to another key.
    expect_stored(&*store, &claim(4)).await;
    server.command(&format!("COPY {} {}", name(4), name(5))).await;
    let moved = store.swap(claim(5)).await;
    assert!(matches!(moved, Err(StoreError::Corrupt(_))), "{moved:?}");
    let page = store.page(None, std::num::NonZeroU32::MAX).await.unwrap();
    let broken = page.records.iter().filter(|(_, stored)| stored.is_err()).count();
    assert_eq!((page.records.len(), broken), (5, 4));
}

#[tokio::test]
async fn requests_beyond_the_limit_are_rejected_new_keys_first() {
    let server = RedisServer::start().await;
    let store = RedisStore::connect(at(server.port()).queue(8, 1 << 20)).await.unwrap();
    let first = claim(100);
    expect_stored(&store, &first).await;
    server.pause();
    let waiting: Vec<_> = (0..7).map(|of| store.swap(claim(of))).collect();
    let mut waiting = Box::pin(join(waiting));
    let full = tokio::select! {
        biased;
        _ = &mut waiting => panic!("answered by a frozen server"),
        rejected = store.swap(claim(9)) => rejected,
    };
    let Err(StoreError::Unavailable(source)) = full else { panic!("{full:?}") };
    assert!(source.to_string().contains("too many"), "{source}");
    let complete = complete(&first, 101, b"yes");
    let work = store.swap(complete);
    server.resume();
    let (answers, work) = tokio::join!(waiting, work);
    assert!(answers.iter().all(|answer| matches!(answer, Ok(Swapped::Stored(_)))), "{answers:?}");
    assert!(matches!(work, Ok(Swapped::Stored(_))), "{work:?}");
}

#[tokio::test]
async fn a_walk_needs_no_more_than_the_least_limit_of_requests() {
    let server = RedisServer::start().await;
    let store = RedisStore::connect(at(server.port()).queue(8, 1 << 20)).await.unwrap();
    for of in 0..40 {
        expect_stored(&store, &claim(of)).await;
    }
    let (mut ids, mut place) = (std::collections::HashSet::new(), Some(Cursor::default()));
    while let Some(from) = place {
        let mut visit = |id: &OperationId, _: &Result<StoredRecord, StoreError>, _| {
            ids.insert(*id);
        };
        place =
            store.scan_all(from, std::num::NonZeroU32::MAX, None, &mut visit).await.unwrap().next;
    }
    assert_eq!(ids.len(), 40);
}

/// Polls all of them, in order, until all are ready.
async fn join<F: Future + Unpin>(mut futures: Vec<F>) -> Vec<F::Output> {
    let mut ready: Vec<_> = futures.iter().map(|_| None).collect();
    std::future::poll_fn(|context| {
        for (future, ready) in futures.iter_mut().zip(&mut ready) {
            if ready.is_none()
                && let std::task::Poll::Ready(answer) = std::pin::Pin::new(future).poll(context)
            {
                *ready = Some(answer);
            }
        }
        match ready.iter().all(Option::is_some) {
            true => std::task::Poll::Ready(()),
            false => std::task::Poll::Pending,
        }
    })
    .await;
    ready.into_iter().flatten().collect()
}

#[tokio::test]
async fn a_store_counts_what_it_does() {
    let mut server = RedisServer::start().await;
    let store = connect(&server).await;
    let claimed = claim(1);
    expect_stored(&*store, &claimed).await;
    expect_stored(&*store, &complete(&claimed, 2, b"yes")).await;
    let conflict = store.swap(claim(1)).await.unwrap();
    assert!(matches!(conflict, Swapped::Conflict(_)), "{conflict:?}");
    store.load(&key(1)).await.unwrap();
    let stats = store.stats();
    assert_eq!((stats.swaps, stats.conflicts, stats.loads), (3, 1, 1), "{stats:?}");
    assert_eq!((stats.connections, stats.waiting, stats.lost, stats.rejected), (1, 0, 0, 0));
    server.kill().await;
    while store.stats().rejected == 0 {
        store.swap(claim(3)).await.unwrap_err();
    }
    server.restart().await;
    while store.load(&key(1)).await.is_err() {}
    assert!(store.stats().connections > 1, "{:?}", store.stats());
}
