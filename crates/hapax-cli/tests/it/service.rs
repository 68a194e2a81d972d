//! `hapax keys` on the file of a service that mounts the operators' API.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use hapax::{
    Claim, Fingerprint, Idempotency, Inspect, Key, OnUnknown, Policy, Request, Scheme, Scope,
    Store, SystemEntropy, Terms,
};
use hapax_embedded::{EmbeddedStore, Options};
use hapax_operators::{AdminToken, Audit, Census, Operators};
use serde_json::Value;
use tokio::net::TcpListener;

use crate::world::{ok, store};

struct Payment;

impl Request for Payment {
    fn scheme(&self) -> Scheme {
        Scheme::new("http/test").unwrap()
    }

    fn fingerprint(&self, _: &Scheme) -> Option<Fingerprint> {
        Some(Fingerprint::from_bytes([1; 32]))
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unknown_record_of_a_service_is_listed_and_resolved_while_the_service_runs() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("hapax.db");
    let file = Arc::new(EmbeddedStore::open(Options::new(&path)).unwrap());
    let census = Arc::new(Census::default());
    let engine = Idempotency::builder(census.watch(Arc::clone(&file) as Arc<dyn Store>))
        .secret(file.secret().unwrap().clone())
        .store_timeout(Duration::from_secs(60))
        .build();
    let token = AdminToken::default_path(Some(&path));
    let token = AdminToken::read_or_make(&token, &SystemEntropy).unwrap();
    let audit = Audit::new(Audit::default_path(Some(&path)), "a service");
    let operators = Operators::builder(engine.clone(), Arc::clone(&file) as Arc<dyn Inspect>)
        .census(census)
        .build(token, audit);
    let admin = TcpListener::bind("127.0.0.1:0").await.unwrap();
    file.set_admin(Some(admin.local_addr().unwrap())).unwrap();
    let api = operators.router().into_make_service_with_connect_info::<SocketAddr>();
    let serving = tokio::spawn(async move { axum::serve(admin, api).await });

    let terms = Terms {
        lease: Duration::from_secs(60),
        retention: Duration::from_secs(3600),
        on_unknown: OnUnknown::Block,
    };
    let policy = Policy { terms, ..Policy::default() };
    let scope = Scope::of([("authorization", "Bearer a")]);
    let key: Key = "k".parse().unwrap();
    let claim = async || engine.claim(&scope, &key, &Payment, &policy).await.unwrap();
    let Claim::Execute(lease) = claim().await else { panic!() };
    lease.abandon(None).await.unwrap();
    assert!(matches!(claim().await, Claim::Unknown { .. }));

    let at = ["--store", &*store(folder.path())].map(str::to_owned);
    let keys = async |words: &[&str]| {
        let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
        let at = at.clone();
        let run = move || {
            let all: Vec<&str> = ["keys"]
                .into_iter()
                .chain(words.iter().map(String::as_str))
                .chain(at.iter().map(String::as_str))
                .collect();
            ok(&all)
        };
        tokio::task::spawn_blocking(run).await.unwrap()
    };
    let listed = keys(&["list", "--state", "unknown", "--json"]).await;
    let listed: Value = serde_json::from_str(&listed).unwrap();
    assert_eq!(listed["keys"].as_array().unwrap().len(), 1, "{listed}");
    let resolve = ["resolve", "k", "--scope", "Bearer a", "--outcome", "happened", "--reason", "r"];
    keys(&resolve).await;
    assert!(matches!(claim().await, Claim::Replay(_)));
    let audit = std::fs::read_to_string(Audit::default_path(Some(&path))).unwrap();
    assert_eq!(audit.lines().count(), 2, "{audit}");
    serving.abort();
}
