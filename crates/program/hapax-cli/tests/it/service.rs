//! `hapax keys` on the file of a service that mounts the operators' API.

use std::io::Write;
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use hapax_core::{
    Claim, Fingerprint, FingerprintScheme, Idempotency, Inspect, Key, OnUnknown, OperationRequest,
    Outcome, Policy, Scope, Store, SystemEntropy, Terms,
};
use hapax_file::{FileOptions, FileStore};
use hapax_operators::{AdminToken, Audit, Census, Operators};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio::task::JoinSet;

use crate::world::{Answer, ok, receive, refused, store};

/// A call under this scheme.
struct Asked(&'static str);

impl OperationRequest for Asked {
    fn scheme(&self) -> FingerprintScheme {
        FingerprintScheme::new(self.0).unwrap()
    }

    fn fingerprint(&self, _: &FingerprintScheme) -> Option<Fingerprint> {
        Some(Fingerprint::from_bytes([1; 32]))
    }
}

/// A service with its own file store, and the operators' API.
struct Service {
    folder: TempDir,
    engine: Idempotency,
    admin: SocketAddr,
    asked: Asked,
}

impl Service {
    /// Its calls are of this scheme.
    async fn start(scheme: &'static str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("hapax.db");
        let file = Arc::new(FileStore::open(FileOptions::new(&path)).unwrap());
        let census = Arc::new(Census::default());
        let engine = Idempotency::builder(census.watch(Arc::clone(&file) as Arc<dyn Store>))
            .store_timeout(Duration::from_secs(60))
            .build()
            .unwrap();
        let token = AdminToken::default_path(Some(&path));
        let token = AdminToken::read_or_make(&token, &SystemEntropy).unwrap();
        let audit = Audit::new(Audit::default_path(Some(&path)), "a service");
        let operators = Operators::builder(engine.clone(), Arc::clone(&file) as Arc<dyn Inspect>)
            .census(census)
            .build(token, audit);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let admin = listener.local_addr().unwrap();
        file.set_admin(Some(admin)).unwrap();
        let api = operators.router().into_make_service_with_connect_info::<SocketAddr>();
        tokio::spawn(async move { axum::serve(listener, api).await });
        Self { folder, engine, admin, asked: Asked(scheme) }
    }

    async fn claim(&self, key: &str) -> Claim {
        let terms = Terms {
            lease: Duration::from_secs(60),
            retention: Duration::from_secs(3600),
            on_unknown: OnUnknown::Block,
        };
        let policy = Policy { terms, ..Policy::default() };
        let scope = Scope::of([("authorization", "Bearer a")]);
        let key: Key = key.parse().unwrap();
        self.engine.claim(&scope, &key, &self.asked, &policy).await.unwrap()
    }

    /// Leaves a record whose outcome is unknown.
    async fn doubt(&self, key: &str) {
        let Claim::Execute(lease) = self.claim(key).await else { panic!() };
        lease.abandon(None).await.unwrap();
        assert!(matches!(self.claim(key).await, Claim::Unknown { .. }));
    }

    /// The arguments of `hapax keys` with these words on the store.
    fn arguments(&self, words: &[&str]) -> Vec<String> {
        let mut all = vec!["keys".to_owned()];
        all.extend(words.iter().map(|word| (*word).to_owned()));
        all.extend(["--store".to_owned(), store(self.folder.path())]);
        all
    }

    /// What `hapax keys` with these words prints.
    async fn keys(&self, words: &[&str]) -> String {
        aside(self.arguments(words), ok).await
    }

    /// With which code and line it is refused.
    async fn keys_refused(&self, words: &[&str]) -> (i32, String) {
        aside(self.arguments(words), refused).await
    }

    /// Sends a decision to the API.
    async fn decide(&self, path: String, decision: Value) -> Answer {
        let token = AdminToken::default_path(Some(&self.folder.path().join("hapax.db")));
        let token = std::fs::read_to_string(token).unwrap();
        let admin = self.admin;
        let post = move || {
            let (token, body) = (token.trim(), decision.to_string());
            let mut stream = TcpStream::connect(admin).unwrap();
            let head = format!(
                "POST {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {token}\r\n\
                 content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
                body.len()
            );
            stream.write_all(head.as_bytes()).unwrap();
            receive(&stream).unwrap()
        };
        tokio::task::spawn_blocking(post).await.unwrap()
    }
}

/// Runs the program off the threads that serve the API.
async fn aside<T: Send + 'static>(arguments: Vec<String>, run: fn(&[&str]) -> T) -> T {
    let run = move || run(&arguments.iter().map(String::as_str).collect::<Vec<_>>());
    tokio::task::spawn_blocking(run).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unknown_record_of_a_service_is_listed_and_resolved_while_the_service_runs() {
    let service = Service::start("http/test").await;
    service.doubt("k").await;
    let listed = service.keys(&["list", "--state", "unknown", "--json"]).await;
    let listed: Value = serde_json::from_str(&listed).unwrap();
    assert_eq!(listed["keys"].as_array().unwrap().len(), 1, "{listed}");
    let resolve = ["resolve", "k", "--scope", "Bearer a", "--outcome", "happened", "--reason", "r"];
    service.keys(&resolve).await;
    assert!(matches!(service.claim("k").await, Claim::Replay(_)));
    let audit = Audit::default_path(Some(&service.folder.path().join("hapax.db")));
    let audit = std::fs::read_to_string(audit).unwrap();
    assert_eq!(audit.lines().count(), 2, "{audit}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_record_of_another_kind_is_released_only_with_any_kind() {
    let service = Service::start("function/test").await;
    service.doubt("by-command").await;
    service.doubt("by-request").await;

    let release = ["release", "by-command", "--scope", "Bearer a", "--reason", "r"];
    let (code, line) = service.keys_refused(&release).await;
    assert!(code == 1 && line.ends_with("(--any-kind)"), "{code} {line}");
    assert!(matches!(service.claim("by-command").await, Claim::Unknown { .. }));
    service.keys(&[&release[..], &["--any-kind"]].concat()).await;
    assert!(matches!(service.claim("by-command").await, Claim::Execute(_)));

    let show = ["show", "by-request", "--scope", "Bearer a", "--json"];
    let shown: Value = serde_json::from_str(&service.keys(&show).await).unwrap();
    let path = format!("/api/keys/{}/release", shown["id"].as_str().unwrap());
    let mut decision = json!({ "fence": shown["fence"], "reason": "r" });
    for any_kind in [Value::Null, false.into()] {
        if any_kind.is_boolean() {
            decision["any_kind"] = any_kind;
        }
        let rejected = service.decide(path.clone(), decision.clone()).await;
        assert_eq!((rejected.status, &*rejected.code()), (409, "other-kind"), "{rejected:?}");
    }
    assert!(matches!(service.claim("by-request").await, Claim::Unknown { .. }));
    decision["any_kind"] = true.into();
    let released = service.decide(path, decision).await;
    assert_eq!(released.status, 200, "{released:?}");
    assert!(matches!(service.claim("by-request").await, Claim::Execute(_)));
}

/// Makes 12,000 records, of which every two hundredth is completed.
async fn fill(service: &Arc<Service>) {
    let mut filling = JoinSet::new();
    for part in 0..200 {
        let service = Arc::clone(service);
        filling.spawn(async move {
            for number in 0..60 {
                let Claim::Execute(lease) = service.claim(&format!("{part}-{number}")).await else {
                    return false;
                };
                let outcome = Outcome::new("test/1", "done");
                if part == 0 && lease.complete(outcome, None).await.is_err() {
                    return false;
                }
            }
            true
        });
    }
    assert!(filling.join_all().await.iter().all(|is_filled| *is_filled));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_list_goes_on_until_its_limit_or_the_end_of_the_store() {
    let service = Arc::new(Service::start("http/test").await);
    fill(&service).await;
    let list = async |more: &[&str]| {
        let list = ["list", "--json", "--state", "done", "--limit"];
        let listed = service.keys(&[&list[..], more].concat()).await;
        let listed: Value = serde_json::from_str(&listed).unwrap();
        let keys = listed["keys"].as_array().unwrap().iter();
        let ids: Vec<_> = keys.map(|key| key["id"].as_str().unwrap().to_owned()).collect();
        (ids, listed["next"].as_str().map(str::to_owned))
    };
    // One call looks at 10,000 records.
    let (all, next) = list(&["1000"]).await;
    assert_eq!((all.len(), next), (60, None));
    let (first, next) = list(&["59"]).await;
    assert_eq!(first, all[..59]);
    let (last, next) = list(&["59", "--after", &next.unwrap()]).await;
    assert_eq!((&*last, next), (&all[59..], None));
    assert!(all.is_sorted());
}
