//! What is left of a secret in the server's files, and how secrets change.

use std::path::Path;
use std::time::Duration;

use hapax_core::{Idempotency, Key, KeyRing, Outcome, Policy, Scope, Secret, Store, StoreError};
use hapax_redis::{RedisConnectError, RedisOptions, RedisStore};
use hapax_testkit::servers::{RedisServer, RedisServerOptions};
use tokio::time::{sleep, timeout};

use super::support::{SameRequest, at, claim, connect_within, expect_stored, key};

const SOON: Duration = Duration::from_secs(120);

const CANARIES: [&str; 4] =
    ["canary-key-4f1e", "Bearer canary-credential-77", "4111111111111111", "canary-checkpoint-9"];

/// A whole life of an operation, with a canary in each of its parts.
async fn live(process: &Idempotency) {
    let [name, credential, body, checkpoint] = CANARIES;
    let scope = Scope::of([("authorization", credential)]);
    let claim =
        process.claim(&scope, &Key::new(name).unwrap(), &SameRequest, &Policy::default()).await;
    let hapax_core::Claim::Execute(lease) = claim.unwrap() else { panic!("it is new") };
    lease.handle().save(checkpoint.into()).await.unwrap();
    lease.complete(Outcome::new("test/1", format!("{{\"card\":\"{body}\"}}")), None).await.unwrap();
}

/// The canaries that are in the server's files after everything was written to them.
async fn found(server: &mut RedisServer) -> Vec<&'static str> {
    // Into a snapshot as well: compression would hide what it holds.
    assert_eq!(server.command("SAVE").await, "+OK");
    server.stop().await;
    let mut bytes = Vec::new();
    let mut files = 0;
    collect(server.folder(), &mut bytes, &mut files);
    assert!(files >= 3, "a snapshot and an append-only file, in {files} files");
    let found = |canary: &&str| bytes.windows(canary.len()).any(|part| part == canary.as_bytes());
    CANARIES.into_iter().filter(found).collect()
}

fn collect(folder: &Path, bytes: &mut Vec<u8>, files: &mut u32) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            collect(&path, bytes, files);
        } else {
            bytes.extend(std::fs::read(path).unwrap());
            *files += 1;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_of_a_key_a_credential_or_a_body_is_in_the_files() {
    let options = RedisServerOptions::new().set("rdbcompression", "no");
    let secret = Secret::new([9; 32]);
    let later = KeyRing::unnamed(secret.clone()).sealing(secret.clone());
    for ring in [None, Some(KeyRing::new(secret)), Some(later)] {
        let mut server = RedisServer::start_with(options.clone()).await;
        let mut store = at(server.port());
        if let Some(ring) = &ring {
            store = store.key_ring(ring.clone());
        }
        let store = std::sync::Arc::new(RedisStore::connect(store).await.unwrap());
        live(&Idempotency::builder(store).namespace("").build().unwrap()).await;
        let found = found(&mut server).await;
        match ring {
            // Shows that the search finds what is there. Key and credential never are.
            None => assert_eq!(found, [CANARIES[2], CANARIES[3]]),
            Some(_) => assert!(found.is_empty(), "{found:?}"),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn processes_with_different_secrets_do_not_share_a_server() {
    let server = RedisServer::start().await;
    let [first, second, third] = [1, 2, 3].map(|byte| Secret::new([byte; 32]));
    // At once, so that each may find nothing: one of them is first.
    let mut starting = tokio::task::JoinSet::new();
    for secret in [first.clone(), second.clone()] {
        let options = at(server.port()).secret(secret);
        starting.spawn(async move { RedisStore::connect(options).await });
    }
    let started = starting.join_all().await;
    let refused = started.iter().filter(|one| matches!(one, Err(RedisConnectError::OtherSecret)));
    assert_eq!((refused.count(), started.iter().filter(|one| one.is_ok()).count()), (1, 1));
    let connect = async |options: RedisOptions| RedisStore::connect(options).await.map(drop);
    let was_first = connect(at(server.port()).secret(first.clone())).await.is_ok();
    let known = if was_first { first } else { second };
    for options in [at(server.port()), at(server.port()).secret(third.clone())] {
        let refused = connect(options).await.unwrap_err();
        assert!(matches!(refused, RedisConnectError::OtherSecret), "{refused}");
    }
    // Another prefix is another place.
    connect(at(server.port()).prefix("other:")).await.unwrap();
    let refused = connect(at(server.port()).prefix("other:").secret(known.clone())).await;
    assert!(matches!(refused, Err(RedisConnectError::OtherSecret)), "{refused:?}");
    // Whoever names keys by the one in use may seal under another, beside those who do not.
    let both = at(server.port()).key_ring(KeyRing::new(known.clone()).sealing(third.clone()));
    connect(both).await.unwrap();
    connect(at(server.port()).secret(known)).await.unwrap();
    let alone = connect(at(server.port()).secret(third)).await;
    assert!(matches!(alone, Err(RedisConnectError::OtherSecret)), "{alone:?}");
}

#[tokio::test]
async fn a_read_only_store_writes_nothing_and_claims_nothing() {
    let server = RedisServer::start().await;
    let [first, second] = [1, 2].map(|byte| Secret::new([byte; 32]));
    let looking = RedisStore::connect(at(server.port()).make(false)).await.unwrap();
    assert_eq!(looking.load(&key(1)).await.unwrap().stored, None);
    let claimed = looking.swap(claim(1)).await;
    let Err(StoreError::Unavailable(why)) = claimed else { panic!("{claimed:?}") };
    assert!(why.to_string().contains("opened for writing"), "{why}");
    assert_eq!(server.command("DBSIZE").await, ":0");
    // So the first who works here is free to choose.
    RedisStore::connect(at(server.port()).secret(first.clone())).await.unwrap();
    let other = RedisStore::connect(at(server.port()).secret(second).make(false)).await;
    assert!(matches!(other, Err(RedisConnectError::OtherSecret)), "{other:?}");
    RedisStore::connect(at(server.port()).secret(first).make(false)).await.unwrap();
}

#[tokio::test]
async fn a_server_with_another_secret_is_rejected_at_reconnection() {
    emptied_and_taken(true).await;
}

#[tokio::test]
async fn a_server_with_another_secret_is_rejected_by_the_periodic_check() {
    emptied_and_taken(false).await;
}

async fn emptied_and_taken(disconnect: bool) {
    let server = RedisServer::start().await;
    let [first, second] = [1, 2].map(|byte| Secret::new([byte; 32]));
    // It is looked at again after thirty of them.
    let options = at(server.port()).timeout(Duration::from_millis(500));
    let store = connect_within(options.secret(first)).await;
    expect_stored(&store, &claim(1)).await;
    server.command("FLUSHALL").await;
    RedisStore::connect(at(server.port()).secret(second)).await.unwrap();
    if disconnect {
        server.command("CLIENT KILL TYPE normal").await;
    }
    let refused = async {
        loop {
            match store.swap(claim(2)).await {
                Err(StoreError::Unavailable(why)) => break why.to_string(),
                // The end of the connection, or an answer from before it.
                Err(StoreError::Ambiguous(_)) | Ok(_) => sleep(Duration::from_millis(50)).await,
                Err(other) => panic!("{other:?}"),
            }
        }
    };
    let why = timeout(SOON, refused).await.expect("it is refused");
    assert!(why.contains("another secret"), "{why}");
    server.command("FLUSHALL").await;
    let back = async { while store.swap(claim(3)).await.is_err() {} };
    timeout(SOON, back).await.expect("it is free again");
}

#[tokio::test]
async fn a_ring_without_a_name_is_for_a_store_that_began_without_a_secret() {
    let server = RedisServer::start().await;
    let connect = async |options: RedisOptions| RedisStore::connect(options).await.map(drop);
    let secret = Secret::new([1; 32]);
    let first = KeyRing::unnamed(secret.clone());
    let second = first.clone().sealing(secret.clone());
    connect(at(server.port())).await.unwrap();
    for ring in [&first, &second] {
        connect(at(server.port()).key_ring(ring.clone())).await.unwrap();
    }
    connect(at(server.port())).await.unwrap();
    let refused = connect(at(server.port()).secret(secret.clone())).await.unwrap_err();
    assert!(matches!(refused, RedisConnectError::OtherSecret), "{refused}");
    assert!(refused.to_string().contains("`name none`"), "{refused}");
    let named = || at(server.port()).prefix("named:");
    connect(named().secret(secret)).await.unwrap();
    for ring in [first, second] {
        let refused = connect(named().key_ring(ring)).await.unwrap_err();
        assert!(matches!(refused, RedisConnectError::OtherSecret), "{refused}");
    }
}
