//! What holds on which path, and how that changes.

use std::num::NonZeroU32;
use std::time::Duration;

use hapax_core::OnUnknown;
use hapax_gateway::{
    Config, Cors, Origins, PolicyConfig, ReloadError, RouteConfig, RouteMode, ScopeConfig, StoreUrl,
};
use hapax_http::problem::DocsUrl;
use hapax_http::server::KeyRule;
use http::HeaderName;
use tokio::sync::Semaphore;

use crate::world::{
    Answer, Raw, Upstream, config, get, post, post_with, request, start, text, until,
};

fn route(config: &Config, path: &str, change: impl FnOnce(&mut PolicyConfig)) -> RouteConfig {
    let mut policy = config.policy.clone();
    change(&mut policy);
    RouteConfig::new(path, policy)
}

#[tokio::test]
async fn each_route_applies_its_own_policy() {
    let upstream = Upstream::counting().await;
    let mut config = config(upstream.url());
    let docs = |text: &str| Some(DocsUrl::new(text).unwrap());
    config.policy.docs_url = docs("https://docs.example/all");
    let strict = route(&config, "/strict/{*rest}", |policy| {
        policy.key = KeyRule::Required;
        policy.docs_url = docs("https://docs.example/strict");
        policy.scope = Some(ScopeConfig::headers([HeaderName::from_static("x-user")]));
        policy.scope_missing = None;
        policy.max_request_body = 4;
        policy.methods = vec![http::Method::PUT, http::Method::POST];
    });
    let mut open = route(&config, "/open", |_| {});
    open.handling = RouteMode::Pass;
    let blocked = route(&config, "/blocked/{*rest}", |policy| policy.on_unknown = OnUnknown::Block);
    config.routes = vec![strict, open, blocked];
    let gateway = start(config).await;
    let address = gateway.local_addr();

    // The policy for all.
    assert_eq!(post(address, "/", "k", "x").await.header("idempotency-replayed"), "false");
    assert_eq!(post(address, "/", "k", "x").await.header("idempotency-replayed"), "true");
    let reused = post(address, "/", "k", "y").await;
    assert_eq!(reused.json()["type"], "https://docs.example/all#key-reused");
    assert_eq!(post_with(address, "/", &[], "x").await.status, 201);

    // The strict route, however its path is written.
    for path in ["/strict/a", "/%73trict/a", "//strict/a", "/strict/", "/STRICT"] {
        let refused = post_with(address, path, &[], "x").await;
        assert_eq!(refused.json()["type"], "https://docs.example/strict#missing-key", "{path}");
        assert_eq!(refused.header("link"), "<https://docs.example/strict>; rel=\"describedby\"");
        assert_eq!(post(address, path, "k", "x").await.code(), "missing-scope", "{path}");
    }
    let fields = [("idempotency-key", "k"), ("x-user", "alice")];
    assert_eq!(post_with(address, "/strict/a", &fields, "12345").await.code(), "body-too-large");
    let first = post_with(address, "/strict/%61", &fields, "x").await;
    assert_eq!((first.status, first.header("idempotency-replayed")), (201, "false"));
    // As it came, byte for byte.
    assert_eq!(upstream.seen().last().unwrap().uri, "/strict/%61");
    let mut put = Raw::connect(address).await;
    put.send(request("PUT", "/strict/%61", &[], "x")).await;
    assert_eq!(put.answer().await.code(), "missing-key");

    // The open route.
    for _ in 0..2 {
        let answer = post(address, "/open", "k", "x").await;
        assert_eq!((answer.status, answer.header("idempotency-replayed")), (201, ""));
    }
    // Whichever of the two handlers it would be, no one policy holds what both do: callers are told
    // apart by another header.
    for path in ["/open/..%2fstrict/a", "/x/../strict/a", "/strict;v=1", "/strict.json"] {
        let ambiguous = post(address, path, "k", "x").await;
        assert_eq!((ambiguous.status, ambiguous.code().as_str()), (400, "malformed-request"));
    }
    let text = get(gateway.admin_addr().unwrap(), "/metrics").await.text();
    for line in [
        "hapax_replays_total 1",
        "hapax_refusals_total{route=\"/strict/{*rest}\",code=\"missing-key\"} 6",
        "hapax_executions_total{route=\"/strict/{*rest}\",class=\"final\",recorded=\"stored\"} 1",
    ] {
        assert!(text.lines().any(|it| it == line), "{line} is not in\n{text}");
    }
    gateway.shutdown().await;
}

/// Many frameworks write methods in capitals before they look, and browsers send `patch` as it was
/// written.
#[tokio::test]
async fn a_protected_method_in_other_case_is_rejected() {
    let upstream = Upstream::counting().await;
    let gateway = start(config(upstream.url())).await;
    for (method, status) in
        [("post", 400), ("Patch", 400), ("pATCH", 400), ("get", 201), ("PUT", 201)]
    {
        let mut raw = Raw::connect(gateway.local_addr()).await;
        raw.send(request(method, "/", &[("idempotency-key", "k")], "x")).await;
        let answer = raw.answer().await;
        assert_eq!(answer.status, status, "{method}");
        assert!(status != 400 || answer.code() == "malformed-request", "{method}");
    }
    assert_eq!(upstream.seen().len(), 2);
    gateway.shutdown().await;
}

/// On one connection, the guard counts requests by those that were asked about, whatever became of
/// them.
#[tokio::test]
async fn a_rejected_ambiguous_path_does_not_shift_later_rejections() {
    let upstream = Upstream::counting().await;
    let mut config = config(upstream.url());
    config.policy.on_unknown = OnUnknown::Reexecute;
    let strict = route(&config, "/strict/{*rest}", |policy| policy.key = KeyRule::Required);
    let blocked = route(&config, "/blocked/{*rest}", |policy| policy.on_unknown = OnUnknown::Block);
    config.routes = vec![strict, blocked];
    let gateway = start(config).await;
    let address = gateway.local_addr();
    let ambiguous = "/blocked/..%2fstrict";
    let fine = request("POST", "/", &[], "x");
    let field =
        |name, value| request("POST", ambiguous, &[("idempotency-key", "k"), (name, value)], "x");

    // What its head says is wrong comes first, and nothing is served after either.
    for (second, says) in [
        (field("x", "y"), "can be read in several ways"),
        (field("content-length", "1"), "Content-Length"),
    ] {
        let mut raw = Raw::connect(address).await;
        let after = request("POST", "/", &[], "x");
        raw.send([&fine[..], &second, &after].concat()).await;
        assert_eq!(raw.answer().await.status, 201);
        let refused = raw.answer().await;
        assert_eq!((refused.status, refused.code().as_str()), (400, "malformed-request"));
        assert!(refused.text().contains(says), "{}", refused.text());
        assert_eq!(refused.header("connection"), "close");
        assert_eq!(raw.rest().await, b"");
    }
    // A gRPC client is told in gRPC.
    let fields = [("idempotency-key", "k"), ("content-type", "application/grpc")];
    let refused = post_with(address, ambiguous, &fields, "x").await;
    assert_eq!((refused.status, refused.header("grpc-status")), (200, "3"));
    assert_eq!(upstream.seen().len(), 2);
    gateway.shutdown().await;
}

#[tokio::test]
async fn operators_find_keys_of_every_scope() {
    let upstream = Upstream::counting().await;
    let mut config = config(upstream.url());
    let user = route(&config, "/user", |policy| {
        policy.scope = Some(ScopeConfig::headers([HeaderName::from_static("x-user")]));
    });
    config.routes = vec![user];
    let gateway = start(config).await;
    let (address, admin) = (gateway.local_addr(), gateway.admin_addr().unwrap());
    post_with(address, "/user", &[("idempotency-key", "k"), ("x-user", "alice")], "x").await;
    let fields = [("content-type", "application/json")];
    let lookup =
        |body: &'static str| crate::world::send(admin, "POST", "/api/keys/lookup", &fields, body);
    let found = lookup(r#"{"key":"k","scope":[["x-user","alice"]]}"#).await;
    assert_eq!(found.json()["state"], "done", "{}", found.text());
    // The value alone is that of any header that names callers.
    assert_eq!(lookup(r#"{"key":"k","scope":"alice"}"#).await.json()["state"], "done");
    assert_eq!(lookup(r#"{"key":"k","scope":"bob"}"#).await.status, 404);
    gateway.shutdown().await;
}

#[tokio::test]
async fn a_reload_applies_completely_and_to_new_requests_only() {
    let gate = std::sync::Arc::new(Semaphore::new(0));
    let opened = std::sync::Arc::clone(&gate);
    let slow = Upstream::start(move |_| {
        let gate = std::sync::Arc::clone(&opened);
        async move {
            gate.acquire().await.unwrap().forget();
            text(500, "slow")
        }
    })
    .await;
    let other = Upstream::counting().await;
    let mut config = config(slow.url());
    config.policy.docs_url = Some(DocsUrl::new("https://docs.example/old").unwrap());
    let gateway = start(config.clone()).await;
    let address = gateway.local_addr();
    let mut in_progress = Raw::connect(address).await;
    in_progress.send(request("POST", "/", &[("idempotency-key", "k")], "x")).await;
    until("it is in progress", || slow.seen().len() == 1).await;

    let mut next = config.clone();
    next.upstream = other.url();
    next.policy.key = KeyRule::Required;
    next.policy.on_unknown = OnUnknown::Block;
    next.policy.docs_url = Some(DocsUrl::new("https://docs.example/new").unwrap());
    gateway.reload(next.clone()).unwrap();
    // New requests, on a new connection, and on the old one.
    assert_eq!(post(address, "/", "new", "x").await.status, 201);
    let missing = post_with(address, "/", &[], "x").await;
    assert_eq!(missing.json()["type"], "https://docs.example/new#missing-key");
    // The one in progress ends as it began, and its record has the terms of its claim.
    gate.add_permits(1);
    assert_eq!(in_progress.answer().await.status, 500);
    in_progress.send(request("POST", "/", &[("idempotency-key", "k")], "x")).await;
    // Of the two policies for what is unknown the stricter counts.
    assert_eq!(in_progress.answer().await.code(), "outcome-unknown");
    assert_eq!((slow.seen().len(), other.seen().len()), (1, 1));

    // What cannot be changes nothing, not even what could.
    let mut bad = next.clone();
    bad.policy.key = KeyRule::Optional;
    bad.policy.methods.clear();
    assert!(matches!(gateway.reload(bad), Err(ReloadError::Config(_))));
    let mut restart = next.clone();
    restart.policy.key = KeyRule::Optional;
    restart.listen = "127.0.0.1:1".parse().unwrap();
    restart.store = StoreUrl::File("elsewhere".into());
    restart.limits.connections = 7;
    restart.policy.max_response_body *= 2;
    let error = gateway.reload(restart).unwrap_err();
    assert_eq!(
        error.to_string(),
        "`listen`, `store`, `max_connections`, `max_response_body` (above the largest at the \
         start) cannot change without a restart"
    );
    let mut restart = next.clone();
    restart.transport.streams += 1;
    restart.transport.trusted.clear();
    restart.transport.connect_timeout *= 2;
    restart.transport.upstream_idle *= 2;
    let error = gateway.reload(restart).unwrap_err().to_string();
    let named = "`max_streams`, `trust_forwarded`, `connect_timeout`, `upstream_idle` cannot change \
                 without a restart";
    assert_eq!(error, named);
    assert_eq!(post_with(address, "/", &[], "x").await.code(), "missing-key");
    gateway.shutdown().await;
}

#[tokio::test]
async fn a_drain_cuts_off_requests_of_an_earlier_configuration() {
    let hangs = Upstream::start(|_| std::future::pending()).await;
    let other = Upstream::counting().await;
    let mut config = config(hangs.url());
    config.drain_timeout = Duration::from_secs(60);
    let gateway = start(config.clone()).await;
    let mut raw = Raw::connect(gateway.local_addr()).await;
    raw.send(request("POST", "/", &[("idempotency-key", "k")], "x")).await;
    until("it is in progress", || hangs.seen().len() == 1).await;
    config.upstream = other.url();
    config.drain_timeout = Duration::from_millis(50);
    gateway.reload(config).unwrap();
    let ended = gateway.shutdown().await;
    assert_eq!(ended.cut_off, 1);
    assert_eq!(raw.answer().await.code(), "upstream-broken");
}

#[tokio::test]
async fn the_limit_of_keys_in_flight_affects_one_caller_only() {
    let gate = std::sync::Arc::new(Semaphore::new(0));
    let opened = std::sync::Arc::clone(&gate);
    let upstream = Upstream::start(move |_| {
        let gate = std::sync::Arc::clone(&opened);
        async move {
            gate.acquire().await.unwrap().forget();
            text(201, "made")
        }
    })
    .await;
    let mut config = config(upstream.url());
    config.policy.max_in_flight_per_scope = NonZeroU32::new(2);
    let gateway = start(config).await;
    let address = gateway.local_addr();
    let mut first = Raw::connect(address).await;
    let mut second = Raw::connect(address).await;
    let send = |key: &str, caller: &str| {
        request("POST", "/", &[("idempotency-key", key), ("authorization", caller)], "x")
    };
    first.send(send("1", "Bearer a")).await;
    second.send(send("2", "Bearer a")).await;
    until("both are in progress", || upstream.seen().len() == 2).await;
    let ask = async |key: &str, caller: &str| {
        post_with(address, "/", &[("idempotency-key", key), ("authorization", caller)], "x").await
    };
    let refused = ask("3", "Bearer a").await;
    assert_eq!((refused.status, refused.code().as_str()), (429, "too-many-in-flight"));
    assert_eq!(refused.header("retry-after"), "1");
    // A copy takes nothing.
    assert_eq!(ask("1", "Bearer a").await.code(), "in-flight");
    let mut another = Raw::connect(address).await;
    another.send(send("3", "Bearer b")).await;
    until("another caller's is too", || upstream.seen().len() == 3).await;
    // A client that hangs up does not free its place: its request goes on.
    drop(first);
    assert_eq!(ask("3", "Bearer a").await.status, 429);
    gate.add_permits(4);
    assert_eq!(second.answer().await.status, 201);
    assert_eq!(another.answer().await.status, 201);
    let answered: Answer = loop {
        let answer = ask("3", "Bearer a").await;
        if answer.status != 429 {
            break answer;
        }
    };
    assert_eq!(answered.status, 201);
    gateway.shutdown().await;
}

#[tokio::test]
async fn wire_30_cors_headers_are_those_of_the_route() {
    let upstream = Upstream::start(|seen| async move {
        let mut answer = text(201, seen.method.as_str().to_owned());
        let theirs = http::HeaderValue::from_static("https://upstream.example");
        answer.headers_mut().insert("access-control-allow-origin", theirs);
        answer
    })
    .await;
    let mut config = config(upstream.url());
    let shop = route(&config, "/shop", |policy| {
        let origins = vec!["https://a.example".to_owned(), "https://b.example".to_owned()];
        let mut cors = Cors::new(Origins::List(origins));
        cors.credentials = true;
        cors.max_age = Some(Duration::from_secs(600));
        cors.expose = vec![HeaderName::from_static("x-total")];
        policy.cors = Some(cors);
        policy.key = KeyRule::Required;
    });
    let other = route(&config, "/other", |policy| {
        policy.cors = Some(Cors::new(Origins::List(vec!["https://a.example".to_owned()])));
        policy.key_header = HeaderName::from_static("x-idempotency-key");
        let names = ["x-tenant", "authorization"].map(HeaderName::from_static);
        policy.scope = Some(ScopeConfig::headers(names.to_vec()));
    });
    config.routes = vec![shop, other];
    let gateway = start(config).await;
    let address = gateway.local_addr();
    let options = async |path: &str, fields: &[(&str, &str)]| {
        let mut raw = Raw::connect(address).await;
        raw.send(request("OPTIONS", path, fields, "")).await;
        raw.answer().await
    };
    let preflight = [("origin", "https://a.example"), ("access-control-request-method", "POST")];
    let answer = options("/shop", &preflight).await;
    assert_eq!(answer.status, 200);
    assert_eq!(answer.header("access-control-allow-origin"), "https://a.example");
    assert_eq!(answer.header("access-control-allow-credentials"), "true");
    assert_eq!(answer.header("access-control-max-age"), "600");
    assert!(answer.header("access-control-allow-headers").contains("idempotency-key"));
    assert!(answer.header("access-control-allow-methods").contains("POST"));
    // The key header and the scope headers are allowed without being named, each once.
    let answer = options("/other", &preflight).await;
    let mut allowed: Vec<_> = answer.header("access-control-allow-headers").split(',').collect();
    allowed.sort_unstable();
    assert_eq!(allowed, ["authorization", "content-type", "x-idempotency-key", "x-tenant"]);
    assert!(upstream.seen().is_empty());
    // No preflight, and no route with CORS: the upstream's to answer.
    assert_eq!(options("/shop", &[]).await.text(), "OPTIONS");
    assert_eq!(options("/", &preflight).await.text(), "OPTIONS");
    assert_eq!(upstream.seen().len(), 2);

    let page = async |origin: &str, key: Option<&str>| {
        let mut fields = vec![("origin", origin)];
        fields.extend(key.map(|key| ("idempotency-key", key)));
        post_with(address, "/shop", &fields, "x").await
    };
    for (origin, key, allowed, replayed) in [
        ("https://a.example", Some("k"), "https://a.example", "false"),
        // The same answer, for another page.
        ("https://b.example", Some("k"), "https://b.example", "true"),
        ("https://evil.example", Some("k"), "", "true"),
        // A refusal.
        ("https://b.example", None, "https://b.example", ""),
    ] {
        let answer = page(origin, key).await;
        assert_eq!(answer.header("access-control-allow-origin"), allowed, "{origin}");
        assert_eq!(answer.header("idempotency-replayed"), replayed, "{origin}");
        let exposed = answer.header("access-control-expose-headers");
        for name in ["idempotency-replayed", "idempotency-recorded", "retry-after", "x-total"] {
            assert!(exposed.contains(name), "{name} is not in {exposed}");
        }
        assert!(answer.header("vary").contains("origin"));
    }
    // Without CORS, the upstream's word stands.
    let plain = post_with(address, "/", &[("origin", "https://a.example")], "x").await;
    assert_eq!(plain.header("access-control-allow-origin"), "https://upstream.example");
    gateway.shutdown().await;
}
