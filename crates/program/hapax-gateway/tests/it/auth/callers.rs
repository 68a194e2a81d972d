//! What an auth answer says of the caller, and that nobody else can say it.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hapax_core::OnUnknown;
use http::Method;
use http::header::HeaderName;

use super::{USER, asking, auth, list, named_by, pay, refused, saying, with};
use crate::world::{Raw, Seen, Upstream, post, post_with, send, start, text};

#[tokio::test(flavor = "multi_thread")]
async fn a_header_of_the_auth_response_names_the_caller() {
    let upstream = Upstream::counting().await;
    let allowed =
        vec!["Bearer 1-alice", "Bearer 2-alice", "Bearer 1-bob", "Bearer 1-", "Bearer 1- "];
    let endpoint = list(&Arc::new(Mutex::new(allowed))).await;
    let mut config = asking(&upstream, &endpoint);
    named_by(&mut config, &[USER]);
    let gateway = start(config).await;
    assert_eq!(pay(&gateway, "k", "Bearer 1-alice").await.text(), "1");
    // The token was renewed between two attempts.
    let again = pay(&gateway, "k", "Bearer 2-alice").await;
    assert_eq!((again.text().as_str(), again.header("idempotency-replayed")), ("1", "true"));
    assert_eq!(pay(&gateway, "k", "Bearer 1-bob").await.text(), "2");
    // Bob cannot say that he is Alice.
    for name in ["x-user", "x_user", "X-User"] {
        let fields = [("idempotency-key", "k"), ("authorization", "Bearer 1-bob"), (name, "alice")];
        let answer = post_with(gateway.local_addr(), "/pay", &fields, "x").await;
        assert_eq!(answer.text(), "2", "{name}");
    }
    // And who is nobody shares nothing with others who are.
    let nobody = pay(&gateway, "k", "Bearer 1-").await;
    assert_eq!((nobody.status, nobody.code().as_str()), (503, "auth-unavailable"));
    assert_eq!(upstream.seen().len(), 2);

    // Operators name it as they would a header of the request.
    let json = [("content-type", "application/json")];
    let admin = gateway.admin_addr().unwrap();
    for (scope, status) in [(r#""alice""#, 200), (r#"[["X-User", "bob"]]"#, 200), (r#""eve""#, 404)]
    {
        let body = format!(r#"{{"key": "k", "scope": {scope}}}"#);
        let found = send(admin, "POST", "/api/keys/lookup", &json, &body).await;
        assert_eq!(found.status, status, "{scope}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_auth_response_without_the_scope_header_is_unusable() {
    let upstream = Upstream::counting().await;
    let says = Arc::new(AtomicUsize::new(0));
    let endpoint = {
        let says = Arc::clone(&says);
        saying(move || match says.load(Ordering::SeqCst) {
            0 => text(200, ""),
            1 => with(text(200, ""), &[("x-user", "")]),
            2 => with(text(200, ""), &[("x-user", "alice")]),
            _ => with(text(200, ""), &[("x-user", "alice"), ("x-tenant", "acme")]),
        })
        .await
    };
    let mut config = asking(&upstream, &endpoint);
    named_by(&mut config, &[USER, HeaderName::from_static("x-tenant")]);
    let gateway = start(config).await;
    for index in 0..3 {
        says.store(index, Ordering::SeqCst);
        let fields = [("idempotency-key", "k"), ("x-user", "eve"), ("x-tenant", "acme")];
        let answer = post_with(gateway.local_addr(), "/", &fields, "x").await;
        refused(&answer, &upstream, &index.to_string());
    }
    says.store(3, Ordering::SeqCst);
    assert_eq!(post(gateway.local_addr(), "/", "k", "x").await.status, 201);
}

#[tokio::test(flavor = "multi_thread")]
async fn copied_headers_are_taken_from_the_auth_response_only() {
    let upstream = Upstream::counting().await;
    let fields = [("x-user", "alice"), ("x-role", "a"), ("x-role", "b"), ("x-other", "1")];
    let endpoint = saying(move || with(text(200, ""), &fields)).await;
    let mut config = asking(&upstream, &endpoint);
    named_by(&mut config, &[USER]);
    auth(&mut config).copy = ["x-role", "x-level", "x-user"].map(HeaderName::from_static).to_vec();
    let gateway = start(config).await;
    let address = gateway.local_addr();
    let lies = [
        ("idempotency-key", "k"),
        ("x-user", "root"),
        ("x_user", "root"),
        ("x-role", "admin"),
        ("x-level", "9"),
        ("x_level", "9"),
    ];
    assert_eq!(post_with(address, "/", &lies, "x").await.status, 201);
    // Without a key nobody is asked; the lies stay behind all the same.
    assert_eq!(post_with(address, "/", &lies[1..], "x").await.status, 201);
    // In trailers too, with a key and without.
    for key in ["idempotency-key: l\r\n", ""] {
        let mut raw = Raw::connect(address).await;
        raw.send(format!(
            "POST / HTTP/1.1\r\nhost: a\r\n{key}trailer: x-user, x_level, x-fine\r\ntransfer-encoding: chunked\r\n\r\n\
             1\r\nx\r\n0\r\nx-user: root\r\nx_level: 9\r\nx-fine: 1\r\n\r\n"
        ))
        .await;
        assert_eq!(raw.answer().await.status, 201);
    }

    let seen = upstream.seen();
    let of = |seen: &Seen, name: &str| {
        let values = seen.headers.get_all(name).iter();
        values.map(|value| value.to_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    for name in ["x_user", "x-level", "x_level", "x-other"] {
        assert!(seen.iter().all(|seen| of(seen, name).is_empty()), "{name}");
    }
    for (index, user, roles) in [(0, &["alice"][..], &["a", "b"][..]), (1, &[], &[])] {
        assert_eq!(
            (of(&seen[index], "x-user"), of(&seen[index], "x-role")),
            (
                user.iter().map(ToString::to_string).collect(),
                roles.iter().map(ToString::to_string).collect(),
            )
        );
    }
    for seen in &seen[2..] {
        let trailers = seen.trailers.as_ref().expect("no trailers came");
        assert_eq!(trailers.keys().map(HeaderName::as_str).collect::<Vec<_>>(), ["x-fine"]);
    }
    // The lies are not in the questions either.
    assert!(endpoint.seen().iter().all(|question| question.header("x-user").is_empty()));

    // Nor can a client have them removed on the way.
    for name in ["x-user", "X-Level"] {
        let fields = [("idempotency-key", "m"), ("connection", name)];
        let answer = post_with(address, "/", &fields, "x").await;
        assert_eq!((answer.status, answer.code().as_str()), (400, "malformed-request"), "{name}");
    }
    assert_eq!(upstream.seen().len(), 4);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reconcile_request_has_the_scope_headers_of_the_auth_response() {
    let upstream = Upstream::start(|seen| async move {
        if seen.method == Method::GET { text(200, "paid") } else { text(500, "lost") }
    })
    .await;
    let endpoint = saying(|| with(text(200, ""), &[("x-user", "alice")])).await;
    let mut config = asking(&upstream, &endpoint);
    named_by(&mut config, &[USER]);
    config.policy.on_unknown = OnUnknown::Reconcile;
    config.policy.reconcile_url = Some(upstream.url());
    config.policy.upstream_timeout = Duration::from_secs(2);
    let gateway = start(config).await;
    let fields = [("idempotency-key", "k"), ("x-user", "eve")];
    assert_eq!(post_with(gateway.local_addr(), "/", &fields, "x").await.status, 500);
    assert_eq!(post_with(gateway.local_addr(), "/", &fields, "x").await.text(), "paid");
    assert_eq!(upstream.seen()[1].header("x-user"), "alice");
}
