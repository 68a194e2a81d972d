//! Calls the functions and begins the sagas of the fixtures, for `make.py`: `sagas STORE SECRET`. It prints the
//! calls of the steps, and runs until it is killed.

#[path = "order.rs"]
mod order;

use std::sync::Arc;
use std::time::Duration;

use hapax_core::{Idempotency, Key, NaturalKey, Secret, Store};
use hapax_file::{FileOptions, FileStore, SecretSource};
use hapax_postgres::{PostgresOptions, PostgresStore};
use hapax_redis::{RedisOptions, RedisStore};
use hapax_saga::Sagas;

use order::{KILLED, PARKED, SCHEDULED, STUCK, Systems, order, scope};

#[tokio::main]
async fn main() {
    let [store, secret] = [1, 2].map(|place| std::env::args().nth(place).unwrap());
    let secret = Secret::from_hex(&secret).unwrap();
    let store: Arc<dyn Store> = if let Some(path) = store.strip_prefix("file:") {
        let options = FileOptions::new(path).secret(SecretSource::Secret(secret.clone()));
        Arc::new(FileStore::open(options).unwrap())
    } else if store.starts_with("redis") {
        let options = RedisOptions::new(store).secret(secret.clone());
        Arc::new(RedisStore::connect(options).await.unwrap())
    } else {
        let options = PostgresOptions::new(store.parse().unwrap()).secret(secret.clone());
        Arc::new(PostgresStore::connect(options).await.unwrap())
    };
    let systems = Systems { failing: true, ..Systems::default() };
    let order = order(&systems).unwrap();
    let engine = Idempotency::builder(Arc::clone(&store)).build().unwrap();
    let (natural, caller) = (NaturalKey::new("payment").part("order", "o-1"), "function".parse::<Key>().unwrap());
    let paid = engine.at_most_once(&natural, || async { Ok::<_, String>(17_u32) }).await.unwrap();
    assert!(!paid.replayed);
    let named = (scope(), caller, 1999_u32);
    let paid = engine.at_most_once(&named, || async { Ok::<_, String>("paid".to_owned()) }).await.unwrap();
    assert!(!paid.replayed);
    let lease = Duration::from_secs(1);
    let sagas = Sagas::builder(engine).register(&order).lease(lease).build().unwrap();
    let running = sagas.clone();
    let driver = tokio::spawn(async move {
        running.run(std::future::pending(), Duration::ZERO).await;
    });
    let key = |cents: u64| -> Key { format!("order-{cents}").parse().unwrap() };
    for cents in [PARKED, STUCK, KILLED] {
        let _ = sagas.start(&order, &scope(), &key(cents), &cents).await.unwrap();
    }
    // The calls reach their ends, and the records are written.
    tokio::time::sleep(Duration::from_secs(4)).await;
    driver.abort();
    // As a transaction does, when no process runs it.
    let entry = sagas.entry(&order, &scope(), &key(SCHEDULED), &SCHEDULED).unwrap();
    store.capabilities().schedule.unwrap().insert(entry).await.unwrap();
    let mut calls = systems.calls.lock().unwrap().clone();
    calls.sort();
    for (name, cents, key) in calls {
        println!("{name} {cents} {key}");
    }
    println!("ready");
    std::future::pending::<()>().await;
}
