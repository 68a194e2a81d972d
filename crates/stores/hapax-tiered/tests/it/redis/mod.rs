//! The cache that processes share.

mod emptied;
mod postgres;

use std::sync::Arc;
use std::time::Duration;

use hapax_core::{
    Claim, Fingerprint, Idempotency, Key, MemoryStore, OperationRequest, Outcome, Policy,
};
use hapax_core::{FingerprintScheme, Scope, Secret};
use hapax_redis::{RedisCache, RedisOptions};
use hapax_testkit::faults::FaultProxy;
use hapax_testkit::servers::RedisServer;
use hapax_tiered::Tiered;

struct Same;

impl OperationRequest for Same {
    fn scheme(&self) -> FingerprintScheme {
        FingerprintScheme::new("same/1").unwrap()
    }

    fn fingerprint(&self, _: &FingerprintScheme) -> Option<Fingerprint> {
        Some(Fingerprint::from_bytes([1; 32]))
    }
}

async fn ask(process: &Idempotency, of: u32) -> Claim {
    let key = Key::new(format!("key-{of}")).unwrap();
    process.claim(&Scope::shared(), &key, &Same, &Policy::default()).await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_process_uses_entries_of_another_and_continues_without_the_cache() {
    let server = RedisServer::start().await;
    let proxy = FaultProxy::before(server.address(), 1).await.unwrap();
    let secret = Secret::new([3; 32]);
    let authority = Arc::new(MemoryStore::default().secret(secret.clone()));
    let mut processes = Vec::new();
    for _ in 0..2 {
        let options = RedisOptions::new(format!("redis://127.0.0.1:{}", proxy.address().port()));
        let cache = Arc::new(RedisCache::connect(options).await.unwrap());
        let store = Tiered::with(
            Arc::clone(&authority),
            cache,
            hapax_tiered::TieredOptions::default().secret(&secret),
        );
        let process = Idempotency::builder(store.clone()).namespace("").build().unwrap();
        processes.push((store, process));
    }
    let [(one, first), (two, second)] = processes.try_into().unwrap_or_else(|_| panic!("two"));
    for of in 0..20 {
        let Claim::Execute(lease) = ask(&first, of).await else { panic!("{of} is new") };
        lease.complete(Outcome::new("test/1", format!("canary-{of}")), None).await.unwrap();
        assert!(matches!(ask(&first, of).await, Claim::Replay(_)));
    }
    while one.stats().puts < 20 || server.command("DBSIZE").await != ":20" {
        tokio::task::yield_now().await;
    }
    // The first is from the authority, which says what time it is.
    for of in 0..20 {
        let Claim::Replay(replay) = ask(&second, of).await else { panic!("{of} is done") };
        assert_eq!(replay.outcome.bytes(), format!("canary-{of}").as_bytes());
    }
    assert_eq!(two.stats().hits, 19, "{:?}", two.stats());
    server.command("CONFIG SET appendonly no").await;
    for file in std::fs::read_dir(server.folder().join("appendonlydir")).into_iter().flatten() {
        let bytes = std::fs::read(file.unwrap().path()).unwrap();
        assert!(!bytes.windows(7).any(|part| part == b"canary-"), "the cache can be read");
    }

    proxy.freeze();
    for of in 0..20 {
        assert!(matches!(ask(&second, of).await, Claim::Replay(_)), "{of}");
    }
    assert!(two.stats().failures > 0, "{:?}", two.stats());
    proxy.thaw();
    let before = two.stats().hits;
    while two.stats().hits == before {
        assert!(matches!(ask(&second, 1).await, Claim::Replay(_)));
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}
