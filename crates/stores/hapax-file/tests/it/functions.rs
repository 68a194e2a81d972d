//! Functions over a file: two engines in the one process that has it.

use std::sync::Arc;

use hapax_core::Idempotency;
use hapax_file::{FileOptions, FileStore};
use hapax_testkit::functions;

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn functions_have_their_guarantees() {
    let folder = tempfile::tempdir().unwrap();
    let options = FileOptions::new(folder.path().join("hapax.db"));
    let store = Arc::new(FileStore::open(options).unwrap());
    let engine = || Idempotency::builder(Arc::clone(&store)).build().unwrap();
    functions::rules(&[engine(), engine()]).await;
}
