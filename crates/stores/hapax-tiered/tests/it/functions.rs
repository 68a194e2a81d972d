//! Functions over a cache in front of a store.

use std::sync::Arc;

use hapax_core::{Idempotency, MemoryStore};
use hapax_file::{FileStore, SecretSource};
use hapax_testkit::functions;
use hapax_tiered::{MemoryCache, Tiered, TieredOptions};

/// Two processes with a cache each, over one store.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn functions_have_their_guarantees_with_separate_caches() {
    let store = Arc::new(MemoryStore::default());
    let engine = || {
        let tiered = Tiered::new(Arc::clone(&store), Arc::new(MemoryCache::default()));
        Idempotency::builder(Arc::new(tiered)).build().unwrap()
    };
    functions::rules(&[engine(), engine()]).await;
}

/// Two over one cache, in front of a file.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn functions_have_their_guarantees_with_a_shared_cache() {
    let folder = tempfile::tempdir().unwrap();
    let options = hapax_file::FileOptions::new(folder.path().join("hapax.db"));
    let store = Arc::new(FileStore::open(options.secret(SecretSource::None)).unwrap());
    let cache = Arc::new(MemoryCache::default());
    let engine = || {
        let tiered = Tiered::with(Arc::clone(&store), cache.clone(), TieredOptions::default());
        Idempotency::builder(Arc::new(tiered)).build().unwrap()
    };
    functions::rules(&[engine(), engine()]).await;
}
