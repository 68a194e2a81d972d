//! wire.md 6–8: whose key, and for which request.

use std::sync::Arc;

use hapax_core::{Claim, Fingerprint, FingerprintScheme, Policy, Scope};
use hapax_http::server::{
    IdempotencyLayer, MissingScope, RouteOptions, RoutePolicy, ScopeError, ScopeSource, StoreOutage,
};
use http::header::{AUTHORIZATION, HeaderName, PROXY_AUTHORIZATION};
use http::{HeaderValue, Request};

use super::world::{App, Runs, Signal, World, app_of, begin, pay, reexecute, respond, send};
use hapax_http::Body;

fn scoped(world: &World, scope: ScopeSource) -> (impl App + use<>, Runs) {
    let runs = Runs::default();
    let count = runs.clone();
    let policy = RoutePolicy::new(scope, RouteOptions::default()).unwrap();
    let layer = IdempotencyLayer::new(world.engine.clone(), policy);
    let app = app_of(&layer, move |_| {
        let run = count.next();
        async move { respond(201, format!("run {run}")) }
    });
    (app, runs)
}

fn by(caller: &'static str) -> Request<Body> {
    let mut request = pay("k", "{}");
    request.headers_mut().insert(AUTHORIZATION, HeaderValue::from_static(caller));
    request
}

#[tokio::test(start_paused = true)]
async fn wire_06_scopes_have_separate_records() {
    let world = World::new();
    let (app, runs) = scoped(&world, ScopeSource::headers([AUTHORIZATION], MissingScope::Reject));
    for (caller, run, replayed) in [
        ("Bearer a", "run 1", "false"),
        ("Bearer b", "run 2", "false"),
        ("Bearer a", "run 1", "true"),
        ("Bearer b", "run 2", "true"),
        ("bearer a", "run 3", "false"),
    ] {
        let answer = send(&app, by(caller)).await;
        assert_eq!((&*answer.body, answer.replayed()), (run.as_bytes(), Some(replayed)));
    }
    assert_eq!(runs.count(), 3);
}

#[tokio::test(start_paused = true)]
async fn wire_06_scope_header_values_are_not_concatenated() {
    let world = World::new();
    let names = [HeaderName::from_static("x-a"), HeaderName::from_static("x-b")];
    let (app, runs) = scoped(&world, ScopeSource::headers(names, MissingScope::Shared));
    let scopes: [&[(&'static str, &'static str)]; 7] = [
        &[("x-a", "ab"), ("x-b", "c")],
        &[("x-a", "a"), ("x-b", "bc")],
        &[("x-a", "ab")],
        &[("x-b", "ab")],
        &[("x-a", "a"), ("x-a", "b")],
        &[("x-a", "a"), ("x-b", "")],
        &[],
    ];
    for (at, lines) in scopes.iter().enumerate() {
        let mut request = pay("k", "{}");
        for (name, value) in *lines {
            request.headers_mut().append(*name, HeaderValue::from_static(value));
        }
        send(&app, request).await;
        assert_eq!(runs.count(), at + 1, "{lines:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn wire_06_a_missing_scope_is_rejected_or_shared() {
    let world = World::new();
    let nobody = || {
        let mut request = pay("k", "{}");
        request.headers_mut().remove(AUTHORIZATION);
        request
    };
    let (strict, runs) =
        scoped(&world, ScopeSource::headers([AUTHORIZATION], MissingScope::Reject));
    let answer = send(&strict, nobody()).await;
    assert_eq!((answer.status.as_u16(), &*answer.code()), (400, "missing-scope"));
    assert_eq!((runs.count(), world.store.len()), (0, 0));

    let (shared, runs) =
        scoped(&world, ScopeSource::headers([AUTHORIZATION], MissingScope::Shared));
    send(&shared, nobody()).await;
    assert_eq!(send(&shared, nobody()).await.replayed(), Some("true"));
    assert_eq!(send(&shared, by("Bearer a")).await.replayed(), Some("false"));
    assert_eq!(runs.count(), 2);
}

#[tokio::test(start_paused = true)]
async fn wire_06_credentials_that_change_by_request_are_no_scope() {
    let world = World::new();
    let (app, runs) = scoped(&world, ScopeSource::headers([AUTHORIZATION], MissingScope::Reject));
    for credentials in [
        "Digest username=\"a\"",
        "AWS4-HMAC-SHA256 Credential=a",
        "AWS4-ECDSA-P256-SHA256 Credential=a",
        "Signature keyId=\"a\"",
        "DPoP abc",
        "dpop abc",
        "AWS AKIAIOSFODNN7EXAMPLE:frJIUN8DYpKDtOLCwo//yllqDzg=",
        "GOOG4-HMAC-SHA256 Credential=a",
        "HMAC-SHA256 Credential=a&SignedHeaders=b&Signature=c",
        "TC3-HMAC-SHA256 Credential=a",
        "HmacSHA256 a:b",
        "Hawk id=\"a\", ts=\"1\", nonce=\"b\", mac=\"c\"",
        "MAC id=\"a\", nonce=\"b\", mac=\"c\"",
        "SharedKey account:signature",
        "OAuth realm=\"a\",oauth_consumer_key=\"b\",oauth_nonce=\"c\",oauth_signature=\"d\"",
        "NTLM TlRMTVNTUAAB",
        "Negotiate YII",
        "SCRAM-SHA-256 data=a",
        "\tHawk id=\"a\"",
    ] {
        let answer = send(&app, by(credentials)).await;
        assert_eq!((answer.status.as_u16(), &*answer.code()), (400, "unstable-scope"));
    }
    assert_eq!((runs.count(), world.store.len()), (0, 0));
    for credentials in ["Basic YTpi", "Bearer hmac", "OAuth 2YotnFZFEjr1zCsicMWpAA", "token abc"] {
        assert_eq!(send(&app, by(credentials)).await.status, 201, "{credentials}");
    }
    let mut request = by("Bearer a");
    request.headers_mut().insert(PROXY_AUTHORIZATION, HeaderValue::from_static("Digest a"));
    let names = [AUTHORIZATION, PROXY_AUTHORIZATION];
    let (app, _) = scoped(&world, ScopeSource::headers(names, MissingScope::Reject));
    assert_eq!(send(&app, request).await.code(), "unstable-scope");
}

/// A proxy that sends the header of nobody must not put all of its callers into one scope.
#[tokio::test(start_paused = true)]
async fn wire_06_a_scope_without_content_is_missing() {
    let world = World::new();
    let (strict, runs) =
        scoped(&world, ScopeSource::headers([AUTHORIZATION], MissingScope::Reject));
    for empty in ["", " ", "\t"] {
        assert_eq!(send(&strict, by(empty)).await.code(), "missing-scope");
    }
    assert_eq!((runs.count(), world.store.len()), (0, 0));
    let (shared, runs) =
        scoped(&world, ScopeSource::headers([AUTHORIZATION], MissingScope::Shared));
    let mut nobody = by("");
    send(&shared, by("")).await;
    nobody.headers_mut().remove(AUTHORIZATION);
    assert_eq!(send(&shared, nobody).await.replayed(), Some("true"));
    assert_eq!(runs.count(), 1);
}

#[tokio::test(start_paused = true)]
async fn wire_06_a_function_may_return_the_scope() {
    let world = World::new();
    let scope = ScopeSource::function(|parts| {
        let user = parts.extensions.get::<&'static str>().ok_or(ScopeError::Missing)?;
        Ok(Scope::of([("user", *user)]))
    });
    let (app, _) = scoped(&world, scope);
    let by = |user: &'static str| {
        let mut request = pay("k", "{}");
        request.extensions_mut().insert(user);
        request
    };
    assert_eq!(send(&app, by("alice")).await.replayed(), Some("false"));
    assert_eq!(send(&app, by("bob")).await.replayed(), Some("false"));
    assert_eq!(send(&app, by("alice")).await.replayed(), Some("true"));
    assert_eq!(send(&app, pay("k", "{}")).await.code(), "missing-scope");
}

#[tokio::test(start_paused = true)]
async fn wire_07_equal_json_in_another_form_is_the_same_request() {
    let world = World::new();
    let (app, _) = scoped(&world, ScopeSource::shared());
    send(&app, pay("k", r#"{"amount":100,"to":"é"}"#)).await;
    let same = send(&app, pay("k", r#"{ "to" : "\u00e9", "amount":100 }"#)).await;
    assert_eq!(same.replayed(), Some("true"));
    let other = send(&app, pay("k", r#"{"amount":100.0,"to":"é"}"#)).await;
    assert_eq!(other.code(), "key-reused");
}

/// A request of a version with another scheme.
struct Newer;

impl hapax_core::OperationRequest for Newer {
    fn scheme(&self) -> FingerprintScheme {
        FingerprintScheme::new("http/9;body=semantic").unwrap()
    }

    fn fingerprint(&self, _: &FingerprintScheme) -> Option<Fingerprint> {
        Some(Fingerprint::builder("http/9").finish())
    }
}

#[tokio::test(start_paused = true)]
async fn wire_07_an_unknown_scheme_is_neither_executed_nor_replayed() {
    let world = World::new();
    let (scope, key) = (Scope::of([("authorization", b"Bearer alice")]), "k".parse().unwrap());
    let claimed = world.engine.claim(&scope, &key, &Newer, &Policy::default()).await;
    let Ok(Claim::Execute(lease)) = claimed else { panic!("{claimed:?}") };
    for store_outage in [StoreOutage::Closed, StoreOutage::Open] {
        let options = RouteOptions { store_outage, ..reexecute() };
        let app = world.app(options, |_| async { panic!("it was executed") });
        let answer = send(&app, pay("k", "{}")).await;
        assert_eq!((answer.status.as_u16(), &*answer.code()), (503, "store-unavailable"));
    }
    // Whoever knows the scheme is not disturbed.
    assert!(lease.complete(hapax_core::Outcome::new("test", "done"), None).await.is_ok());
    let replayed = world.engine.claim(&scope, &key, &Newer, &Policy::default()).await;
    assert!(matches!(replayed, Ok(Claim::Replay(_))), "{replayed:?}");
}

#[tokio::test(start_paused = true)]
async fn wire_07_a_function_may_return_the_target() {
    let world = World::new();
    let options = RouteOptions {
        target: Some(Arc::new(|parts| parts.extensions.get::<http::Uri>().unwrap().clone())),
        ..RouteOptions::default()
    };
    let app = world.app(options, |_| async { respond(201, "") });
    let at = |target: &'static str| {
        let mut request = pay("k", "{}");
        request.extensions_mut().insert(http::Uri::from_static(target));
        request
    };
    send(&app, at("/v1/payments")).await;
    assert_eq!(send(&app, at("/v1/payments")).await.replayed(), Some("true"));
    assert_eq!(send(&app, at("/v2/payments")).await.code(), "key-reused");
}

#[tokio::test(start_paused = true)]
async fn wire_08_reuse_is_422() {
    let world = World::new();
    let (runs, go) = (Runs::default(), Signal::new());
    let (count, gone) = (runs.clone(), go.clone());
    let app = world.app(reexecute(), move |_| {
        let (run, go) = (count.next(), gone.clone());
        async move {
            go.wait().await;
            respond(if run == 1 { 500 } else { 201 }, format!("run {run}"))
        }
    });
    let reuse = async |app: &_, state: &str| {
        let answer = send(app, pay("k", r#"{"amount":2}"#)).await;
        assert_eq!((answer.status.as_u16(), &*answer.code()), (422, "key-reused"), "{state}");
    };
    let first = begin(&app, pay("k", r#"{"amount":1}"#));
    runs.reach(1).await;
    reuse(&app, "in flight").await;
    go.give();
    assert_eq!(first.await.unwrap().status, 500);
    reuse(&app, "unknown").await;
    assert_eq!(send(&app, pay("k", r#"{"amount":1}"#)).await.status, 201);
    reuse(&app, "done").await;
    let replay = send(&app, pay("k", r#"{"amount":1}"#)).await;
    assert_eq!((replay.replayed(), &*replay.body), (Some("true"), &b"run 2"[..]));
    assert_eq!(runs.count(), 2);
}
