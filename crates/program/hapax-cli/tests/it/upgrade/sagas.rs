//! Values of functions, and sagas in progress.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use hapax_core::{Idempotency, Key, NaturalKey, RunError, Store};
use hapax_gateway::StoreOpener;
use hapax_saga::{SagaHandle, Sagas};
use hapax_testkit::servers::{PostgresServer, RedisServer};
use tokio::task::block_in_place;

use super::order::{KILLED, PARKED, SCHEDULED, STUCK, Systems, order, scope};
use super::{Upgraded, fixture, words};
use crate::world::ok;

async fn sagas_of_an_earlier_release_continue(store: &Upgraded) {
    let (at, audit) = (store.at(), store.path("audit.jsonl"));
    let saga = |what: &[&str]| {
        block_in_place(|| ok(&words(&[&["saga"], what, &["--namespace", ""]].concat(), &at)))
    };
    let stuck = ["--key", "order-200", "--definition", "place-order", "--scope", "customer: c"];
    let shown = saga(&[&["show"], &stuck[..]].concat());
    for line in ["state        stuck", "unknown in charge since 20", "the bank did not answer"] {
        assert!(shown.contains(line), "{line}\n{shown}");
    }
    let listed = saga(&["list"]);
    for key in ["order-100", "order-200", "order-300"] {
        assert!(listed.contains(&format!("place-order version 1  key {key}")), "{key}\n{listed}");
    }
    let result = ["--outcome", "happened", "--result", "\"paid by hand\"", "--reason", "a test"];
    let own = ["--audit-file", &audit];
    let said = saga(&[&["resolve"], &stuck[..], &result, &own].concat());
    assert_eq!(said, "resolved: the step happened, and the saga continues\n");

    let mut opener = StoreOpener::new(store.store.parse().unwrap());
    opener.secret_file = Some(PathBuf::from(store.path("secret")));
    let opened = opener.open().await.unwrap();
    let systems = Systems::default();
    let order = order(&systems).unwrap();
    let engine = Idempotency::builder(Arc::clone(&opened.store) as Arc<dyn Store>);
    let engine = engine.namespace("").build().unwrap();
    functions_are_replayed(&engine).await;
    let sagas = Sagas::builder(engine).register(&order).build().unwrap();
    let (end, ended) = tokio::sync::oneshot::channel::<()>();
    let running = sagas.clone();
    let driver = tokio::spawn(async move {
        let ended = async {
            let _ = ended.await;
        };
        running.run(ended, Duration::from_secs(60)).await
    });
    let handle = async |cents: u64| -> SagaHandle<String, String> {
        let key: Key = format!("order-{cents}").parse().unwrap();
        sagas.start(&order, &scope(), &key, &cents).await.unwrap()
    };
    assert_eq!(handle(STUCK).await.outcome().await.unwrap(), "paid by hand");
    assert_eq!(handle(KILLED).await.outcome().await.unwrap(), "paid 300");
    assert_eq!(handle(SCHEDULED).await.outcome().await.unwrap(), "paid 400");
    let parked = handle(PARKED).await;
    assert!(parked.poll_outcome().await.unwrap().is_none());
    assert!(parked.signal("approval", &()).await.unwrap());
    assert_eq!(parked.outcome().await.unwrap(), "paid 100");
    end.send(()).unwrap();
    assert!(driver.await.unwrap());
    opened.close().await;

    // Of each saga, the steps that had no result; the notice of the killed one under the key of its first try.
    let mut calls = systems.calls.lock().unwrap().clone();
    calls.sort_unstable();
    let seen: Vec<_> = calls.iter().map(|(name, cents, _)| (*name, *cents)).collect();
    let charges = [("charge", PARKED), ("charge", SCHEDULED)];
    let notices = [PARKED, STUCK, KILLED, SCHEDULED].map(|cents| ("notify", cents));
    assert_eq!(seen, [&charges[..], &notices, &[("reserve", SCHEDULED)]].concat());
    let (name, cents, key) = &calls[4];
    let earlier = fixture("sagas.calls");
    assert!(earlier.lines().any(|line| line == format!("{name} {cents} {key}")), "{earlier}");
}

/// A bare natural key identified a call alone; now that is written.
async fn functions_are_replayed(engine: &Idempotency) {
    let natural = NaturalKey::new("payment").part("order", "o-1");
    let again = || async { Ok::<_, String>(18_u32) };
    let paid = engine.at_most_once(&natural.clone().identifies_alone(), again).await.unwrap();
    assert_eq!((paid.value, paid.replayed), (17, true));
    let reused = engine.at_most_once(&(natural, 1999_u32), again).await;
    assert!(matches!(reused, Err(RunError::KeyReused)), "{reused:?}");
    let key: Key = "function".parse().unwrap();
    let again = || async { Ok::<_, String>("paid again".to_owned()) };
    let paid = engine.at_most_once(&(scope(), key.clone(), 1999_u32), again).await.unwrap();
    assert_eq!((&*paid.value, paid.replayed), ("paid", true));
    let reused = engine.at_most_once(&(scope(), key, 2000_u32), again).await;
    assert!(matches!(reused, Err(RunError::KeyReused)), "{reused:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn sagas_in_a_file_of_an_earlier_release_continue() {
    sagas_of_an_earlier_release_continue(&Upgraded::file()).await;
}

mod redis {
    use super::*;

    #[tokio::test(flavor = "multi_thread")]
    async fn sagas_of_an_earlier_release_continue() {
        let server = RedisServer::start().await;
        let store = Upgraded::redis(&server).await;
        super::sagas_of_an_earlier_release_continue(&store).await;
    }
}

mod postgres {
    use super::*;

    #[tokio::test(flavor = "multi_thread")]
    async fn sagas_of_an_earlier_release_continue() {
        let server = PostgresServer::start().await;
        let store = Upgraded::postgres(&server).await;
        super::sagas_of_an_earlier_release_continue(&store).await;
    }
}
