//! What is left of a secret in the server's files, and how secrets change.

use std::path::Path;
use std::sync::Arc;

use hapax_core::{Idempotency, Key, KeyRing, Outcome, Policy, Scope, Secret, Store, StoreError};
use hapax_postgres::{PostgresConnectError, PostgresOptions, PostgresStore};
use hapax_testkit::servers::PostgresServer;

use super::support::{SameRequest, at, claim, complete, expect_stored, key};

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
    // Large enough for a table of its own, too.
    let body = format!("{{\"card\":\"{body}\",\"more\":\"{}\"}}", "x".repeat(20_000));
    lease.complete(Outcome::new("test/1", body), None).await.unwrap();
}

/// The canaries that are in the server's files after everything was written to them.
async fn found(server: &mut PostgresServer) -> Vec<&'static str> {
    server.sql("postgres", "CHECKPOINT").await;
    server.stop().await;
    let mut files = Vec::new();
    collect(&server.data(), &mut files);
    assert!(files.len() > 100, "tables, indexes and the log, in {} files", files.len());
    let in_files = |canary: &&str| files.iter().any(|bytes| contains(bytes, canary.as_bytes()));
    CANARIES.into_iter().filter(in_files).collect()
}

fn contains(bytes: &[u8], wanted: &[u8]) -> bool {
    bytes.iter().enumerate().any(|(at, byte)| *byte == wanted[0] && bytes[at..].starts_with(wanted))
}

fn collect(folder: &Path, files: &mut Vec<Vec<u8>>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            collect(&path, files);
        } else {
            files.push(std::fs::read(path).unwrap());
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_of_a_key_a_credential_or_a_body_is_in_the_files() {
    let secret = Secret::new([9; 32]);
    let later = KeyRing::unnamed(secret.clone()).sealing(secret.clone());
    for ring in [None, Some(KeyRing::new(secret)), Some(later)] {
        let mut server = PostgresServer::start().await;
        let options = ring.iter().fold(at(&server), |all, ring| all.key_ring(ring.clone()));
        let store = Arc::new(PostgresStore::connect(options).await.unwrap());
        live(&Idempotency::builder(store).namespace("").build().unwrap()).await;
        let found = found(&mut server).await;
        match ring {
            // Shows that the search finds what is there. Key and credential never are.
            None => assert_eq!(found, [CANARIES[2], CANARIES[3]]),
            Some(_) => assert!(found.is_empty(), "{found:?}"),
        }
    }
}

#[tokio::test]
async fn a_record_that_was_moved_or_changed_is_never_replayed() {
    let server = PostgresServer::start().await;
    let store = PostgresStore::connect(at(&server)).await.unwrap();
    for of in 1..=3 {
        let claimed = claim(of);
        expect_stored(&store, &claimed).await;
        expect_stored(&store, &complete(&claimed, of + 10, b"yes")).await;
    }
    let one = |of: u64| format!("key = '\\x{}'", key(of));
    for harm in [
        // Somebody else's answer; a bit of the record; a state that says something else.
        format!(
            "UPDATE hapax_cells SET sealed = (SELECT sealed FROM hapax_cells WHERE {})
            WHERE {}",
            one(3),
            one(1)
        ),
        format!(
            "UPDATE hapax_cells SET sealed = set_byte(sealed, 40, get_byte(sealed, 40) # 1)
            WHERE {}",
            one(2)
        ),
        format!("UPDATE hapax_cells SET state = 'released' WHERE {}", one(3)),
    ] {
        server.sql("postgres", &harm).await;
    }
    for of in 1..=3 {
        let loaded = store.load(&key(of)).await;
        assert!(matches!(loaded, Err(StoreError::Corrupt(_))), "{loaded:?}");
        let swapped = store.swap(claim(of + 20)).await;
        assert!(swapped.is_ok(), "{swapped:?}");
        let again = hapax_core::store::Swap { write_id: super::support::write_id(99), ..claim(of) };
        let swapped = store.swap(again).await;
        assert!(matches!(swapped, Err(StoreError::Corrupt(_))), "{swapped:?}");
    }
    // Operators see the others all the same.
    let page = hapax_core::Inspect::page(&store, None, std::num::NonZeroU32::MAX).await.unwrap();
    let damaged = page.records.iter().filter(|(_, stored)| stored.is_err()).count();
    assert_eq!((damaged, page.records.len()), (3, 6));
}

#[tokio::test]
async fn a_ring_without_a_name_is_for_a_store_that_began_without_a_secret() {
    let server = PostgresServer::start().await;
    let connect = async |options: PostgresOptions| PostgresStore::connect(options).await.map(drop);
    let secret = Secret::new([1; 32]);
    let first = KeyRing::unnamed(secret.clone());
    let second = first.clone().sealing(secret.clone());
    connect(at(&server)).await.unwrap();
    for ring in [&first, &second] {
        connect(at(&server).key_ring(ring.clone())).await.unwrap();
    }
    connect(at(&server)).await.unwrap();
    let refused = connect(at(&server).secret(secret.clone())).await.unwrap_err();
    assert!(matches!(refused, PostgresConnectError::OtherSecret), "{refused}");
    assert!(refused.to_string().contains("`name none`"), "{refused}");
    server.create_database("named").await;
    let named = || server.url("named").parse::<PostgresOptions>().unwrap();
    connect(named().secret(secret)).await.unwrap();
    for ring in [first, second] {
        let refused = connect(named().key_ring(ring)).await.unwrap_err();
        assert!(matches!(refused, PostgresConnectError::OtherSecret), "{refused}");
    }
}
