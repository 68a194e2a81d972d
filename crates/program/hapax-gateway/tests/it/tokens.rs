//! wire.md 36: callers who are named by a claim of their token.

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hapax_gateway::{
    Config, ForwardAuth, Gateway, JwtConfig, JwtKeys, NamesSettings, RouteConfig, RouteMode,
    RunningGateway, ScopeConfig, StartError, StoreUrl,
};
use hapax_testkit::http::TestIssuer;
use serde_json::{Value, json};
use tokio::sync::Notify;

use crate::world::{Answer, Upstream, config, get, post_with, send, start, text};

fn issuer() -> TestIssuer {
    TestIssuer::new("first", 1)
}

/// A gateway's configuration in which `jwt:sub` names the caller.
fn named(upstream: &Upstream) -> Config {
    let mut config = config(upstream.url());
    config.policy.scope_missing = None;
    config.policy.scope = Some(ScopeConfig::Parts(vec!["jwt:sub".parse().unwrap()]));
    config
}

fn verifying(upstream: &Upstream, keys: JwtKeys) -> Config {
    let mut config = named(upstream);
    config.jwt = JwtConfig {
        keys: Some(keys),
        issuer: Some(TestIssuer::ISSUER.to_owned()),
        audience: Some(TestIssuer::AUDIENCE.to_owned()),
    };
    config
}

/// The configuration with `/pay` as an observed route.
fn observed(mut config: Config) -> Config {
    let mut route = RouteConfig::new("/pay", config.policy.clone());
    route.handling = RouteMode::Observe;
    config.routes.push(route);
    config
}

/// A URL with a set of keys that can be replaced; without one it answers 500.
struct KeyServer {
    server: Upstream,
    set: Arc<Mutex<Option<String>>>,
}

impl KeyServer {
    async fn start(set: Option<String>) -> Self {
        let set = Arc::new(Mutex::new(set));
        let shown = Arc::clone(&set);
        let server = Upstream::start(move |_| {
            let set = shown.lock().unwrap().clone();
            async move { set.map_or_else(|| text(500, "down"), |set| text(200, set)) }
        })
        .await;
        Self { server, set }
    }

    fn keys(&self) -> JwtKeys {
        JwtKeys::Url(format!("http://{}/keys?realm=a", self.server.address).parse().unwrap())
    }

    fn replace(&self, set: Option<String>) {
        *self.set.lock().unwrap() = set;
    }
}

/// A payment with this token, on a fresh connection.
async fn pay(gateway: &RunningGateway, key: &str, token: &str) -> Answer {
    let bearer = format!("Bearer {token}");
    let fields = [("idempotency-key", key), ("authorization", &*bearer)];
    post_with(gateway.local_addr(), "/pay", &fields, "x").await
}

/// A token of this caller, which differs from every other one.
fn token(issuer: &TestIssuer, sub: &str, jti: u32) -> String {
    issuer.token(&json!({ "sub": sub, "jti": jti }))
}

#[track_caller]
fn executed(answer: &Answer, body: &str) {
    let found = (answer.status, answer.text(), answer.header("idempotency-replayed").to_owned());
    assert_eq!(found, (201, body.to_owned(), "false".to_owned()));
}

#[track_caller]
fn replayed(answer: &Answer, body: &str) {
    let found = (answer.status, answer.text(), answer.header("idempotency-replayed").to_owned());
    assert_eq!(found, (201, body.to_owned(), "true".to_owned()));
}

#[track_caller]
fn invalid(answer: &Answer) {
    assert_eq!((answer.status, answer.code().as_str()), (401, "invalid-token"));
    assert_eq!(answer.header("www-authenticate"), "Bearer error=\"invalid_token\"");
}

async fn metric(gateway: &RunningGateway, line: &str) -> bool {
    let metrics = get(gateway.admin_addr().unwrap(), "/metrics").await.text();
    metrics.lines().any(|it| it == line)
}

#[tokio::test(flavor = "multi_thread")]
async fn w36_a_renewed_token_of_a_caller_gets_the_replay() {
    let upstream = Upstream::counting().await;
    let (issuer, folder) = (issuer(), tempfile::tempdir().unwrap());
    let file = folder.path().join("keys.json");
    std::fs::write(&file, issuer.key_set()).unwrap();
    let gateway = start(verifying(&upstream, JwtKeys::File(file.clone()))).await;
    executed(&pay(&gateway, "k", &token(&issuer, "anna", 1)).await, "1");
    replayed(&pay(&gateway, "k", &token(&issuer, "anna", 2)).await, "1");
    executed(&pay(&gateway, "k", &token(&issuer, "ben", 1)).await, "2");
    // The service gets the token as it was sent.
    assert!(upstream.seen()[0].header("authorization").starts_with("Bearer ey"));

    let expired = issuer.token(&json!({ "sub": "anna", "exp": 1 }));
    let other = issuer.token(&json!({ "sub": "anna", "iss": "https://other.example" }));
    let elsewhere = issuer.token(&json!({ "sub": "anna", "aud": "https://other.example" }));
    let wrong = issuer.token(&json!({ "sub": ["anna"] }));
    let stranger = token(&TestIssuer::new("first", 2), "anna", 1);
    for token in [&expired, &other, &elsewhere, &wrong, &stranger, "opaque"] {
        for key in ["k", "new"] {
            invalid(&pay(&gateway, key, token).await);
        }
    }
    assert_eq!(upstream.seen().len(), 2);
    let listed = get(gateway.admin_addr().unwrap(), "/api/keys").await.json();
    assert_eq!(listed["keys"].as_array().unwrap().len(), 2, "{listed}");
    assert!(metric(&gateway, "hapax_tokens_total{outcome=\"verified\"} 3").await);
    assert!(metric(&gateway, "hapax_tokens_total{outcome=\"invalid\"} 12").await);
    assert!(metric(&gateway, "hapax_refusals_total{code=\"invalid-token\"} 12").await);

    // Without a key nothing is verified: the service does it.
    let fields = [("authorization", "Bearer opaque")];
    assert_eq!(post_with(gateway.local_addr(), "/pay", &fields, "x").await.status, 201);

    // A reload reads the file again.
    let second = TestIssuer::new("second", 3);
    std::fs::write(&file, second.key_set()).unwrap();
    gateway.reload(verifying(&upstream, JwtKeys::File(file.clone()))).unwrap();
    invalid(&pay(&gateway, "k", &token(&issuer, "anna", 1)).await);
    replayed(&pay(&gateway, "k", &token(&second, "anna", 3)).await, "1");
    std::fs::write(&file, "{}").unwrap();
    let error = gateway.reload(verifying(&upstream, JwtKeys::File(file.clone()))).unwrap_err();
    let error = error.describe(&str::to_owned);
    assert!(error.starts_with("jwt_keys: ") && error.contains("expected a JWK Set"), "{error}");
    replayed(&pay(&gateway, "k", &token(&second, "anna", 4)).await, "1");
}

#[tokio::test(flavor = "multi_thread")]
async fn w36_keys_that_are_not_there_at_the_start_are_awaited() {
    let upstream = Upstream::counting().await;
    let (issuer, keys) = (issuer(), KeyServer::start(None).await);
    let gateway = start(verifying(&upstream, keys.keys())).await;
    let away = pay(&gateway, "k", &token(&issuer, "anna", 1)).await;
    assert_eq!((away.status, away.code().as_str()), (503, "auth-unavailable"));
    assert_eq!(away.header("retry-after"), "1");
    assert_eq!(upstream.seen().len(), 0);
    let admin = gateway.admin_addr().unwrap();
    let ready = get(admin, "/readyz").await;
    assert!(ready.status == 200 && ready.text().contains("jwt_keys"), "{}", ready.text());
    assert!(metric(&gateway, "hapax_jwt_keys_up 0").await);
    // Other requests are served.
    assert_eq!(post_with(gateway.local_addr(), "/pay", &[], "x").await.status, 201);

    keys.replace(Some(issuer.key_set()));
    let paid = loop {
        let answer = pay(&gateway, "k", &token(&issuer, "anna", 2)).await;
        if answer.status != 503 {
            break answer;
        }
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    };
    executed(&paid, "2");
    assert!(metric(&gateway, "hapax_jwt_keys_up 1").await);
    assert_eq!(get(admin, "/readyz").await.text(), "ready\n");
    let asked = &keys.server.seen()[0];
    assert_eq!(
        (asked.uri.to_string().as_str(), asked.header("authorization")),
        ("/keys?realm=a", "")
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn w36_a_new_key_of_the_issuer_is_fetched() {
    let upstream = Upstream::counting().await;
    let (issuer, keys) = (issuer(), KeyServer::start(Some(issuer().key_set())).await);
    let gateway = start(verifying(&upstream, keys.keys())).await;
    executed(&pay(&gateway, "k", &token(&issuer, "anna", 1)).await, "1");
    let fetched = keys.server.seen().len();

    let second = TestIssuer::new("second", 2);
    let both = json!({ "keys": [issuer.key(), second.key()] }).to_string();
    keys.replace(Some(both));
    replayed(&pay(&gateway, "k", &token(&second, "anna", 2)).await, "1");
    assert_eq!(keys.server.seen().len(), fetched + 1);
    // Tokens of a stranger do not have them fetched again so soon.
    let stranger = TestIssuer::new("third", 3);
    for jti in 0..5 {
        invalid(&pay(&gateway, "k", &token(&stranger, "anna", jti)).await);
    }
    assert_eq!(keys.server.seen().len(), fetched + 1);
    // The server is gone: the keys stay in force.
    drop(keys);
    replayed(&pay(&gateway, "k", &token(&second, "anna", 3)).await, "1");
    // A reload of the same URL keeps them as well.
    assert_eq!(upstream.seen().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn w36_with_an_auth_url_its_server_verifies_the_token() {
    let upstream = Upstream::counting().await;
    let issuers = [issuer(), TestIssuer::new("other", 2)];
    let known = issuers.clone();
    let auth = Upstream::start(move |seen| {
        let token = seen.header("authorization").trim_start_matches("Bearer ").to_owned();
        let is_known = known.iter().any(|issuer| issuer.verify(&token).is_some());
        async move { if is_known { text(204, "") } else { text(401, "who?") } }
    })
    .await;
    let mut config = named(&upstream);
    let url = format!("http://{}/check", auth.address);
    config.auth = Some(ForwardAuth::new(url.parse().unwrap()));
    let gateway = start(config.clone()).await;
    let [one, two] = &issuers;
    executed(&pay(&gateway, "k", &token(one, "anna", 1)).await, "1");
    replayed(&pay(&gateway, "k", &token(one, "anna", 2)).await, "1");
    // The same name from another issuer is another caller.
    let other =
        |jti: u32| two.token(&json!({ "sub": "anna", "iss": "https://b.example", "jti": jti }));
    executed(&pay(&gateway, "k", &other(1)).await, "2");
    replayed(&pay(&gateway, "k", &other(2)).await, "2");
    // What the server denies, it answers.
    let denied = pay(&gateway, "k", &token(&TestIssuer::new("x", 9), "anna", 1)).await;
    assert_eq!((denied.status, denied.text().as_str()), (401, "who?"));

    // With keys as well, the gateway verifies what the server allows.
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("keys.json");
    std::fs::write(&file, one.key_set()).unwrap();
    config.jwt = verifying(&upstream, JwtKeys::File(file)).jwt;
    let gateway = start(config).await;
    executed(&pay(&gateway, "k", &token(one, "anna", 1)).await, "3");
    invalid(&pay(&gateway, "k", &other(3)).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn w36_two_tokens_are_rejected_before_the_body_is_read() {
    let upstream = Upstream::counting().await;
    let keys = KeyServer::start(Some(issuer().key_set())).await;
    let gateway = start(verifying(&upstream, keys.keys())).await;
    let bearer = format!("Bearer {}", token(&issuer(), "anna", 1));
    let fields =
        [("idempotency-key", "k"), ("authorization", &*bearer), ("authorization", &*bearer)];
    let twice = post_with(gateway.local_addr(), "/pay", &fields, "x").await;
    assert_eq!((twice.status, twice.code().as_str()), (400, "malformed-request"));
    assert_eq!(upstream.seen().len(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn w36_an_observed_route_verifies_tokens_and_passes_all_requests() {
    let (upstream, folder) = (Upstream::counting().await, tempfile::tempdir().unwrap());
    let file = folder.path().join("keys.json");
    std::fs::write(&file, issuer().key_set()).unwrap();
    let gateway = start(observed(verifying(&upstream, JwtKeys::File(file)))).await;
    for (jti, caller) in [(1, issuer()), (2, issuer()), (3, TestIssuer::new("first", 9))] {
        assert_eq!(pay(&gateway, "k", &token(&caller, "anna", jti)).await.status, 201);
    }
    let line = "hapax_would_refuse_total{route=\"/pay\",code=\"invalid-token\"} 1";
    assert!(metric(&gateway, line).await);
    let line = "hapax_would_total{route=\"/pay\",outcome=\"replay\"} 1";
    // The copy of a request passes through the layer on a task.
    for _ in 0..1000 {
        if metric(&gateway, line).await {
            return;
        }
    }
    panic!("no replay was counted");
}

#[tokio::test(flavor = "multi_thread")]
async fn w36_a_request_that_is_observed_does_not_wait_for_keys() {
    let upstream = Upstream::counting().await;
    let silent = Upstream::start(|_| std::future::pending()).await;
    let keys = format!("http://{}/keys", silent.address).parse().unwrap();
    let mut config = observed(verifying(&upstream, JwtKeys::Url(keys)));
    // Its timeout is that of the keys, too.
    let mut auth = ForwardAuth::new("http://127.0.0.1:1/".parse().unwrap());
    auth.timeout = Duration::from_secs(3600);
    config.auth = Some(auth);
    let gateway = start(config).await;
    assert_eq!(pay(&gateway, "k", &token(&issuer(), "anna", 1)).await.status, 201);
    let line = "hapax_would_refuse_total{route=\"/pay\",code=\"auth-unavailable\"} 1";
    assert!(metric(&gateway, line).await);
}

/// Requests of the configuration before have its keys fetched as long as they are in progress.
#[tokio::test(flavor = "multi_thread")]
async fn w36_keys_that_a_reload_has_replaced_are_not_counted() {
    let (held, release) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let (arrived, ending) = (Arc::clone(&held), Arc::clone(&release));
    let upstream = Upstream::start(move |_| {
        let (arrived, ending) = (Arc::clone(&arrived), Arc::clone(&ending));
        async move {
            arrived.notify_one();
            ending.notified().await;
            text(201, "paid")
        }
    })
    .await;
    let (keys, folder) = (KeyServer::start(None).await, tempfile::tempdir().unwrap());
    let file = folder.path().join("keys.json");
    std::fs::write(&file, issuer().key_set()).unwrap();
    let gateway = start(verifying(&upstream, keys.keys())).await;
    let address = gateway.local_addr();
    let before = tokio::spawn(async move { post_with(address, "/other", &[], "x").await });
    held.notified().await;
    while !metric(&gateway, "hapax_jwt_keys_up 0").await {}
    gateway.reload(verifying(&upstream, JwtKeys::File(file))).unwrap();
    // The keys before are requested on behalf of the request, and are still down.
    let fetched = keys.server.seen().len();
    while keys.server.seen().len() < fetched + 2 {
        assert!(metric(&gateway, "hapax_jwt_keys_up 1").await);
    }
    release.notify_one();
    assert_eq!(before.await.unwrap().status, 201);
    assert!(metric(&gateway, "hapax_jwt_keys_up 1").await);
}

/// Operators name the caller by issuer and claim, and see both.
#[tokio::test(flavor = "multi_thread")]
async fn w36_operators_find_the_caller_of_a_token() {
    let upstream = Upstream::start(|_| async { text(500, "broken") }).await;
    let folder = tempfile::tempdir().unwrap();
    let keys = KeyServer::start(Some(issuer().key_set())).await;
    let mut config = verifying(&upstream, keys.keys());
    config.store = StoreUrl::File(folder.path().join("hapax.db"));
    let gateway = start(config).await;
    let admin = gateway.admin_addr().unwrap();
    assert_eq!(pay(&gateway, "k", &token(&issuer(), "anna", 1)).await.status, 500);
    let caller = format!("{} anna", TestIssuer::ISSUER);
    let record = get(admin, "/api/keys?state=unknown").await.json()["keys"][0].clone();
    let described = &record["described"]["caller"][0];
    assert_eq!(*described, json!({ "header": "jwt:sub", "value": caller }));
    let lookup = async |scope: Value| {
        let body = json!({ "key": "k", "scope": scope }).to_string();
        let fields = [("content-type", "application/json")];
        send(admin, "POST", "/api/keys/lookup", &fields, &body).await
    };
    for scope in [json!(caller), json!([["jwt:sub", caller]])] {
        let found = lookup(scope).await;
        assert_eq!((found.status, &found.json()["id"]), (200, &record["id"]), "{}", found.text());
    }
    let other = lookup(json!([["jwt:sub", format!("{} =7", TestIssuer::ISSUER)]])).await;
    assert_eq!(other.status, 404);
    // Neither the token nor a part of it is kept.
    gateway.shutdown().await;
    let file = std::fs::read(folder.path().join("hapax.db")).unwrap();
    assert!(!String::from_utf8_lossy(&file).contains("anna"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_renewed_token_that_is_the_scope_is_counted() {
    let upstream = Upstream::counting().await;
    let mut config = config(upstream.url());
    config.routes.push(RouteConfig::new("/pay", config.policy.clone()));
    let gateway = start(config).await;
    let line =
        |count: u32| format!("hapax_same_request_other_caller_total{{route=\"/pay\"}} {count}");
    executed(&pay(&gateway, "k", &token(&issuer(), "anna", 1)).await, "1");
    replayed(&pay(&gateway, "k", &token(&issuer(), "anna", 1)).await, "1");
    assert!(!metric(&gateway, &line(1)).await);
    executed(&pay(&gateway, "k", &token(&issuer(), "anna", 2)).await, "2");
    assert!(metric(&gateway, &line(1)).await);
    // Another key, or another request, is no sign of that.
    executed(&pay(&gateway, "l", &token(&issuer(), "anna", 3)).await, "3");
    let bearer = format!("Bearer {}", token(&issuer(), "anna", 4));
    let fields = [("idempotency-key", "k"), ("authorization", &*bearer)];
    executed(&post_with(gateway.local_addr(), "/pay", &fields, "y").await, "4");
    assert!(metric(&gateway, &line(1)).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn settings_of_tokens_that_contradict_each_other_are_rejected() {
    let upstream = Upstream::counting().await;
    let file = || JwtKeys::File("keys.json".into());
    let all = || verifying(&upstream, file());
    let error = |change: &dyn Fn(&mut Config)| {
        let mut config = all();
        change(&mut config);
        config.check().unwrap_err().to_string()
    };
    all().check().unwrap();
    let url = |text: &str| Some(JwtKeys::Url(text.parse().unwrap()));
    type Case<'a> = (&'a dyn Fn(&mut Config), &'a str);
    let cases: [Case<'_>; 9] = [
        (
            &|it| it.jwt = JwtConfig::default(),
            "`scope` jwt:CLAIM needs `jwt_keys`, `jwt_issuer` and",
        ),
        (&|it| it.jwt.keys = None, "`jwt_issuer` needs `jwt_keys`: a token is"),
        (&|it| it.jwt.audience = None, "`jwt_keys` needs `jwt_audience`: a token is"),
        (&|it| it.policy.scope = None, "`jwt_keys` needs `scope` jwt:CLAIM"),
        (&|it| it.jwt.issuer = Some("two words".to_owned()), "`jwt_issuer`: expected an issuer"),
        (&|it| it.jwt.audience = Some(String::new()), "`jwt_audience`: expected an audience"),
        (&|it| it.jwt.keys = url("ftp://a/b"), "`jwt_keys` must be a file, or a URL"),
        (
            &|it| {
                it.listen = "127.0.0.1:8080".parse().unwrap();
                it.jwt.keys = url("http://localhost:8080/keys");
            },
            "`jwt_keys` is `listen` (127.0.0.1:8080)",
        ),
        (
            &|it| {
                it.auth = Some(ForwardAuth::new("http://127.0.0.1:1/".parse().unwrap()));
                it.jwt = JwtConfig::default();
                let mut route = RouteConfig::new("/a", it.policy.clone());
                route.handling = RouteMode::Observe;
                it.routes.push(route);
            },
            "route /a: `observe` with `scope` jwt:CLAIM needs `jwt_keys`",
        ),
    ];
    for (change, expected) in cases {
        let error = error(change);
        assert!(error.starts_with(expected), "{error}");
    }
    let missing = Gateway::start(all()).await.unwrap_err();
    assert!(matches!(missing, StartError::JwtKeys(_)), "{missing}");
    assert!(missing.to_string().contains("keys.json"), "{missing}");
    assert!(!Path::new("keys.json").exists());
}
