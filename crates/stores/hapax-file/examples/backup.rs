//! A backup of a closed store, and a store restored from it.
//!
//!     cargo run -p hapax-file --example backup

use hapax_file::{FileOptions, FileStore, SecretSource, backup_closed, restore};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let folder = tempfile::tempdir()?;
    let [path, copy, restored] =
        ["orders.db", "copy.db", "restored.db"].map(|it| folder.path().join(it));
    let store = FileStore::open(FileOptions::new(&path))?;
    let secret = store.secret().cloned().ok_or("a new store makes its secret")?;
    store.close().await;

    backup_closed(&path, &copy)?;
    let secret = SecretSource::Secret(secret);
    let report = restore(&copy, &restored, &secret)?;
    println!("restored {} records, {} of them unknown", report.records, report.unknown);
    FileStore::open(FileOptions::new(&restored).secret(secret))?.close().await;
    Ok(())
}
