//! Requests that would be one thing for the layer and another one for the upstream.

use hapax_gateway::{IpNetwork, RouteConfig, RouteMode, ScopeConfig};
use hapax_http::fingerprint::{BodyForm, HttpFingerprintScheme};
use http::HeaderName;

use crate::two::{Two, is_refused};
use crate::world::{Raw, Upstream, config, post_with, request, start};

fn callers(name: &'static str) -> Option<ScopeConfig> {
    Some(ScopeConfig::headers([HeaderName::from_static(name)]))
}

#[tokio::test(flavor = "multi_thread")]
async fn the_target_host_can_be_the_scope() {
    let upstream = Upstream::counting().await;
    let mut config = config(upstream.url());
    config.policy.scope = callers("host");
    let gateway = start(config).await;
    let mut raw = Raw::connect(gateway.local_addr()).await;
    let mut ask = async |target: &str, host: &str| {
        let head = format!("POST {target} HTTP/1.1\r\nhost: {host}\r\nidempotency-key: k\r\n");
        raw.send(format!("{head}content-length: 0\r\n\r\n")).await;
        raw.answer().await.text()
    };
    // The target's host is the one that counts, as it does upstream.
    assert_eq!(ask("http://Tenant-b/abs", "tenant-a").await, "1");
    assert_eq!(ask("/abs", "tenant-b").await, "1");
    assert_eq!(ask("/abs", "TENANT-B").await, "1");
    assert_eq!(ask("/abs", "tenant-a").await, "2");
    assert_eq!(ask("http://tenant-a/abs", "tenant-b").await, "2");
    let two = Two::connect(gateway.local_addr()).await;
    // Its host is another one.
    assert_eq!(two.post("/abs", "k", "").await.text(), "3");
    let hosts: Vec<_> = upstream.seen().iter().map(|it| it.header("host").to_owned()).collect();
    assert_eq!(hosts, ["tenant-b", "tenant-a", "shop.example"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_scope_or_key_header_with_an_underscore_is_rejected() {
    let upstream = Upstream::counting().await;
    let mut config = config(upstream.url());
    config.policy.scope = callers("x-user");
    let gateway = start(config).await;
    let mut fields = vec![("idempotency-key", "k"), ("X-User", "alice"), ("x_other", "1")];
    fields.push(("Content_Length", "9"));
    assert_eq!(post_with(gateway.local_addr(), "/", &fields, "x").await.status, 201);
    let seen = upstream.seen();
    assert_eq!((seen[0].header("x-user"), seen[0].header("x_other")), ("alice", "1"));
    assert!(!seen[0].headers.contains_key("content_length"));
    for (other, name) in [("X_User", "x-user"), ("Idempotency_Key", "idempotency-key")] {
        let fields = [&fields[..], &[(other, "bob")]].concat();
        let answer = post_with(gateway.local_addr(), "/", &fields, "x").await;
        assert_eq!((answer.status, answer.code().as_str()), (400, "malformed-request"), "{other}");
        let detail = answer.json()["detail"].as_str().unwrap().to_owned();
        assert!(detail.contains(&format!("`{name}` is expected")), "{detail}");
        // Where nothing is protected there is nothing to reject, and the service does not see it.
        let mut raw = Raw::connect(gateway.local_addr()).await;
        raw.send(request("GET", "/", &fields, "")).await;
        assert_eq!(raw.answer().await.status, 201);
    }
    let seen = upstream.seen();
    assert_eq!(seen.len(), 3);
    assert!(!seen.iter().any(|seen| seen.headers.contains_key("x_user")));
    assert!(!seen.iter().any(|seen| seen.headers.contains_key("idempotency_key")));
}

#[tokio::test(flavor = "multi_thread")]
async fn http2_values_with_surrounding_white_space_are_rejected() {
    let upstream = Upstream::counting().await;
    let gateway = start(config(upstream.url())).await;
    let sound = [(":method", "GET"), (":scheme", "http"), (":authority", "a"), (":path", "/")];
    for value in ["Bearer x ", " Bearer x", "Bearer x\t", "\tBearer x", " "] {
        let fields = [&sound[..], &[("authorization", value)]].concat();
        assert!(is_refused(gateway.local_addr(), &fields, b"").await, "{value:?}");
    }
    assert_eq!(upstream.seen().len(), 0);
    let fields = [&sound[..], &[("authorization", "Bearer x"), ("x", "")]].concat();
    assert!(!is_refused(gateway.local_addr(), &fields, b"").await);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_http2_request_may_name_its_host_by_the_host_field() {
    let upstream = Upstream::counting().await;
    let gateway = start(config(upstream.url())).await;
    let request = [(":method", "GET"), (":scheme", "http"), (":path", "/"), ("host", "a.example")];
    assert!(!is_refused(gateway.local_addr(), &request, b"").await);
    assert_eq!(upstream.seen()[0].header("host"), "a.example");
    assert!(is_refused(gateway.local_addr(), &request[..3], b"").await);
}

#[tokio::test(flavor = "multi_thread")]
async fn headers_that_name_another_target_are_dropped() {
    let upstream = Upstream::counting().await;
    let gateway = start(config(upstream.url())).await;
    let fields = [("x-original-url", "/payments"), ("X_Rewrite_Url", "/payments")];
    assert_eq!(post_with(gateway.local_addr(), "/open", &fields, "").await.status, 201);
    let seen = upstream.seen();
    assert!(!seen[0].headers.keys().any(|name| name.as_str().ends_with("url")), "{seen:?}");
}

/// What may be dropped on its way to the layer names nobody there.
#[tokio::test]
async fn a_dropped_header_cannot_be_scope_or_fingerprint() {
    for name in ["x-real-ip", "x-forwarded-host", "x_original_url", "forwarded"] {
        let name: HeaderName = name.parse().unwrap();
        let plain = config("http://127.0.0.1:1".parse().unwrap());
        let mut scope = plain.clone();
        scope.policy.scope = Some(ScopeConfig::headers([name.clone()]));
        let error = hapax_gateway::Gateway::start(scope).await.unwrap_err().to_string();
        assert!(error.contains("`scope` cannot be"), "{error}");
        let mut fingerprint = plain;
        fingerprint.policy.fingerprint =
            HttpFingerprintScheme::new(BodyForm::Canonical, [name]).unwrap();
        let error = hapax_gateway::Gateway::start(fingerprint).await.unwrap_err().to_string();
        assert!(error.contains("`fingerprint_headers` cannot have"), "{error}");
    }
}

/// Where it is not certain what the method in the header would be protected by, it may be.
#[tokio::test]
async fn a_method_override_is_rejected_on_an_ambiguous_path() {
    let upstream = Upstream::counting().await;
    let mut config = config(upstream.url());
    let route = |path: &str, header: &'static str| {
        let mut policy = config.policy.clone();
        policy.scope = callers(header);
        RouteConfig::new(path, policy)
    };
    let mut open = RouteConfig::new("/{*rest}", config.policy.clone());
    open.handling = RouteMode::Pass;
    config.routes = vec![open, route("/payments", "x-a"), route("/payments/{id}", "x-b")];
    let gateway = start(config).await;
    for (path, other, status) in [
        ("/payments%2f7%5c..", "POST", 400),
        ("/payments%2f7%5c..", "DELETE", 201),
        ("/elsewhere", "POST", 201),
    ] {
        let mut raw = Raw::connect(gateway.local_addr()).await;
        raw.send(request("GET", path, &[("x-http-method-override", other)], "")).await;
        assert_eq!(raw.answer().await.status, status, "{path} {other}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_override_header_with_a_protected_method_is_rejected() {
    let upstream = Upstream::counting().await;
    let gateway = start(config(upstream.url())).await;
    let mut asked = 0;
    for name in ["x-http-method-override", "X-HTTP-Method", "x_method_override"] {
        for (method, other, passes) in [
            ("GET", "POST", false),
            ("GET", "patch", false),
            ("PUT", "Post", false),
            ("GET", "DELETE, POST", false),
            ("GET", "DELETE", true),
            ("POST", "PATCH", true),
            ("POST", "DELETE", true),
        ] {
            let mut raw = Raw::connect(gateway.local_addr()).await;
            raw.send(request(method, "/", &[(name, other)], "")).await;
            let answer = raw.answer().await;
            let wanted = if passes { 201 } else { 400 };
            assert_eq!(answer.status, wanted, "{method} {name}: {other}");
            if !passes {
                assert_eq!(answer.code(), "malformed-request");
            }
            asked += usize::from(passes);
        }
    }
    assert_eq!(upstream.seen().len(), asked);
}

#[tokio::test(flavor = "multi_thread")]
async fn forwarding_headers_of_an_untrusted_peer_are_dropped() {
    let given = ["x-forwarded-port", "x-forwarded-ssl", "x-forwarded-prefix", "x-real-ip"];
    let fields: Vec<_> = given.iter().map(|name| (*name, "1")).collect();
    for believed in [true, false] {
        let upstream = Upstream::counting().await;
        let mut config = config(upstream.url());
        if !believed {
            config.transport.trusted = vec!["192.0.2.1".parse::<IpNetwork>().unwrap()];
        }
        let gateway = start(config).await;
        assert_eq!(post_with(gateway.local_addr(), "/", &fields, "").await.status, 201);
        let seen = upstream.seen();
        for name in given {
            assert_eq!(seen[0].headers.contains_key(name), believed, "{name}");
        }
        assert_eq!(seen[0].header("x-forwarded-for"), "127.0.0.1");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn reserved_fields_are_removed_from_trailers() {
    let upstream = Upstream::counting().await;
    let mut config = config(upstream.url());
    config.policy.scope = callers("x-user");
    let gateway = start(config).await;
    for key in ["", "idempotency-key: k\r\nx-user: alice\r\n"] {
        let trailers =
            ["x-user", "x_user", "x-forwarded-for", "x-real-ip", "authorization", "x-sum"];
        let lines: String = trailers.iter().map(|name| format!("{name}: 1\r\n")).collect();
        let mut raw = Raw::connect(gateway.local_addr()).await;
        raw.send(format!(
            "POST / HTTP/1.1\r\nhost: a\r\n{key}transfer-encoding: chunked\r\ntrailer: {}\r\n\r\n\
             1\r\nx\r\n0\r\n{lines}\r\n",
            trailers.join(", ")
        ))
        .await;
        assert_eq!(raw.answer().await.status, 201);
        let seen = upstream.seen().pop().unwrap().trailers.unwrap();
        assert_eq!(seen.keys().map(HeaderName::as_str).collect::<Vec<_>>(), ["x-sum"]);
    }
}
