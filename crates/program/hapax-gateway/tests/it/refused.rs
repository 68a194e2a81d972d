//! What is refused before anything starts, and what scopes refuse.

use std::time::Duration;

use hapax_core::{InFlight, OnUnknown};
use hapax_gateway::{Config, ForwardAuth, Gateway, ScopeConfig, StartError, StoreUrl};
use hapax_http::server::{MissingScope, StoreOutage};
use http::Method;
use http::header::{AUTHORIZATION, CONNECTION, HeaderName};

use crate::world::{Upstream, config, post, post_with, start};

#[tokio::test(flavor = "multi_thread")]
async fn a_contradictory_configuration_is_rejected_at_start() {
    type Change = fn(&mut Config);
    let cases: [(&str, Change); 35] = [
        ("`upstream` must be a URL", |it| it.upstream = "/path".parse().unwrap()),
        ("`upstream` must be a URL", |it| it.upstream = "ftp://a".parse().unwrap()),
        ("`upstream` must be a URL", |it| it.upstream = "http://u@a".parse().unwrap()),
        ("`upstream` must be a URL", |it| it.upstream = "http://a:65536".parse().unwrap()),
        ("`upstream` must be a URL", |it| it.upstream = "http://a:99999".parse().unwrap()),
        ("`upstream` must be a URL", |it| it.upstream = "http://a:0".parse().unwrap()),
        ("`upstream` must be a URL", |it| it.upstream = "http://a:".parse().unwrap()),
        ("`upstream` must be a URL", |it| it.upstream = "http://[::1]:70000".parse().unwrap()),
        ("`reconcile_url` must be", |it| {
            it.policy.reconcile_url = Some("http://a:65536/x".parse().unwrap());
        }),
        ("has no effect without", |it| {
            it.policy.reconcile_url = Some("http://a/x".parse().unwrap())
        }),
        ("would call itself", |it| it.listen = "127.0.0.1:1".parse().unwrap()),
        ("`admin` is `listen` (127.0.0.1:7)", |it| {
            it.listen = "127.0.0.1:7".parse().unwrap();
            it.admin = Some(it.listen);
        }),
        ("`admin` is `listen` (127.0.0.1:7)", |it| {
            it.listen = "127.0.0.1:7".parse().unwrap();
            it.admin = Some("0.0.0.0:7".parse().unwrap());
        }),
        ("would call itself", |it| {
            it.policy.scope = Some(ScopeConfig::Everyone);
            it.listen = "0.0.0.0:1".parse().unwrap();
        }),
        ("would call itself", |it| {
            it.upstream = "http://LocalHost:81".parse().unwrap();
            it.listen = "127.0.0.1:81".parse().unwrap();
        }),
        ("cannot be CONNECT", |it| it.policy.methods.push(Method::CONNECT)),
        ("longer than ten years", |it| it.policy.retention = Duration::from_secs(400_000_000)),
        ("no duplicate could wait", |it| {
            it.policy.in_flight = InFlight::Wait(Duration::from_secs(1));
            it.max_waiters = 0;
        }),
        ("`store_outage` open contradicts", |it| {
            it.policy.on_unknown = OnUnknown::Reconcile;
            it.policy.reconcile_url = Some("http://a/x".parse().unwrap());
            it.policy.store_outage = StoreOutage::Open;
        }),
        ("must not have a path", |it| it.upstream = "http://a/b".parse().unwrap()),
        ("names no header", |it| it.policy.scope = Some(ScopeConfig::headers([]))),
        ("strips that header", |it| it.policy.scope = Some(ScopeConfig::headers([CONNECTION]))),
        ("strips that header", |it| {
            it.policy.scope =
                Some(ScopeConfig::headers([HeaderName::from_static("idempotency-key")]));
        }),
        ("`key_header` cannot be `authorization`", |it| it.policy.key_header = AUTHORIZATION),
        ("`key_header` cannot be `idempotency-fence`", |it| {
            it.policy.key_header = HeaderName::from_static("idempotency-fence");
        }),
        ("`key_header` cannot be `x-user`", |it| {
            it.policy.key_header = HeaderName::from_static("x-user");
            it.policy.scope = Some(ScopeConfig::headers([HeaderName::from_static("x-user")]));
        }),
        ("expected at least one method", |it| it.policy.methods.clear()),
        ("lease is zero", |it| it.policy.lease = Duration::ZERO),
        ("shorter than the lease", |it| it.policy.retention = Duration::from_secs(1)),
        ("needs `reconcile_url`", |it| it.policy.on_unknown = OnUnknown::Reconcile),
        ("`reconcile_url` must be", |it| it.policy.reconcile_url = Some("/x".parse().unwrap())),
        // Without `on_unknown`: the default contradicts it.
        ("set `on_unknown` reexecute", |it| it.policy.store_outage = StoreOutage::Open),
        ("`upstream_timeout` is zero", |it| it.policy.upstream_timeout = Duration::ZERO),
        ("`wait_for` is zero", |it| it.policy.in_flight = InFlight::Wait(Duration::ZERO)),
        ("`max_memory`", |it| it.limits.memory = 1 << 20),
    ];
    for (says, change) in cases {
        let mut config = config("http://127.0.0.1:1".parse().unwrap());
        change(&mut config);
        let error = Gateway::start(config).await.unwrap_err();
        assert!(matches!(error, StartError::Config(_)), "{error:?}");
        assert!(error.to_string().contains(says), "{says:?} is not in {error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_contradictory_auth_configuration_is_rejected_at_start() {
    type Change = fn(&mut Config, &mut ForwardAuth);
    let user = || vec![HeaderName::from_static("x-user")];
    let cases: [(&str, Change); 10] = [
        ("`auth_url` must be", |_, auth| auth.url = "/check".parse().unwrap()),
        ("`auth_url` must be", |_, auth| auth.url = "ftp://a/check".parse().unwrap()),
        ("`auth_url` must be", |_, auth| auth.url = "http://u:p@a/check".parse().unwrap()),
        ("would call itself", |config, auth| {
            config.listen = "127.0.0.1:82".parse().unwrap();
            auth.url = "http://localhost:82/check".parse().unwrap();
        }),
        ("`auth_timeout` is zero", |_, auth| auth.timeout = Duration::ZERO),
        ("contradicts `scope`:", |config, _| config.policy.scope = Some(ScopeConfig::Everyone)),
        ("contradicts `scope_missing`", |config, _| {
            config.policy.scope_missing = Some(MissingScope::Shared);
        }),
        ("`auth_scope` cannot be `set-cookie`", |_, auth| {
            auth.scope.push(HeaderName::from_static("set-cookie"));
        }),
        ("`auth_copy` cannot be `authorization`", |_, auth| auth.copy.push(AUTHORIZATION)),
        ("`auth_copy` cannot be `idempotency_fence`", |_, auth| {
            auth.copy.push(HeaderName::from_static("idempotency_fence"));
        }),
    ];
    for (says, change) in cases {
        let mut config = config("http://127.0.0.1:1".parse().unwrap());
        config.policy.scope_missing = None;
        let mut auth = ForwardAuth::new("http://127.0.0.1:2/check".parse().unwrap());
        auth.scope = user();
        change(&mut config, &mut auth);
        config.auth = Some(auth);
        let error = Gateway::start(config).await.unwrap_err();
        assert!(matches!(error, StartError::Config(_)), "{error:?}");
        assert!(error.to_string().contains(says), "{says:?} is not in {error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_without_its_scope_header_is_rejected_on_every_listener() {
    let upstream = Upstream::counting().await;
    for listen in ["127.0.0.1:0", "0.0.0.0:0", "[::1]:0"] {
        let mut config = config(upstream.url());
        config.policy.scope_missing = None;
        config.listen = listen.parse().unwrap();
        let gateway = start(config).await;
        let mut address = gateway.local_addr();
        if address.ip().is_unspecified() {
            address.set_ip([127, 0, 0, 1].into());
        }
        // Cookies and API keys are no scope unless the configuration names them.
        for fields in [
            &[("idempotency-key", "k")][..],
            &[("idempotency-key", "k"), ("authorization", "")],
            &[("idempotency-key", "k"), ("cookie", "session=1"), ("x-api-key", "secret")],
        ] {
            let answer = post_with(address, "/", fields, "x").await;
            assert_eq!((answer.status, answer.code().as_str()), (400, "missing-scope"), "{listen}");
            let detail = answer.json()["detail"].as_str().unwrap().to_owned();
            for says in ["`authorization`", "`scope`", "`scope_missing`", "`shared`", "`none`"] {
                assert!(detail.contains(says), "{says} is not in {detail}");
            }
        }
        assert_eq!(upstream.seen().len(), 0);
    }
    let mut of_all = config(upstream.url());
    of_all.policy.scope = Some(ScopeConfig::Everyone);
    of_all.policy.scope_missing = None;
    let of_all = start(of_all).await;
    assert_eq!(post(of_all.local_addr(), "/", "k", "x").await.status, 201);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_header_that_does_not_name_the_caller_is_rejected_as_scope() {
    for name in [
        "forwarded",
        "x-forwarded-for",
        "x_forwarded_user",
        "x-original-url",
        "via",
        "trailer",
        "date",
        "te",
        "expect",
        "idempotency_key",
    ] {
        let mut config = config("http://127.0.0.1:1".parse().unwrap());
        config.policy.scope = Some(ScopeConfig::headers([AUTHORIZATION, name.parse().unwrap()]));
        let error = Gateway::start(config).await.unwrap_err().to_string();
        assert!(error.contains("strips that header") && error.contains(name), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_file_that_holds_no_token_is_rejected_and_not_shown() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = config("http://127.0.0.1:1".parse().unwrap());
    let path = folder.path().join("token");
    for text in ["sesame", "open sesame, open sesame"] {
        std::fs::write(&path, text).unwrap();
        config.admin_token_file = Some(path.clone());
        for error in [
            Gateway::check(&config).await.unwrap_err(),
            Gateway::start(config.clone()).await.unwrap_err(),
        ] {
            assert!(matches!(error, StartError::AdminToken { .. }), "{error:?}");
            let said = error.to_string();
            assert!(said.starts_with("--admin-token-file: ") && !said.contains("sesame"), "{said}");
        }
    }
    config.admin_token_file = Some(folder.path().join("missing").join("token"));
    let error = Gateway::start(config.clone()).await.unwrap_err().to_string();
    assert!(error.contains("cannot be made"), "{error}");
    // Without an admin listener there is no token.
    config.admin = None;
    start(config).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_address_or_file_in_use_ends_the_start_without_traces() {
    let upstream = Upstream::counting().await;
    let first = start(config(upstream.url())).await;
    let mut second = config(upstream.url());
    second.listen = first.local_addr();
    let error = Gateway::start(second).await.unwrap_err();
    assert!(matches!(error, StartError::Listen { .. }), "{error:?}");

    let folder = tempfile::tempdir().unwrap();
    let mut file = config(upstream.url());
    file.store = StoreUrl::File(folder.path().join("hapax.db"));
    let holder = start(file.clone()).await;
    let listen = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    file.listen = listen;
    let error = Gateway::start(file.clone()).await.unwrap_err().to_string();
    assert!(error.contains(&format!("process {}", std::process::id())), "{error}");
    assert!(error.contains(&holder.admin_addr().unwrap().to_string()), "{error}");
    // Its listener went with it; and once the holder has ended, the file is free.
    holder.shutdown().await;
    assert_eq!(start(file).await.local_addr(), listen);
}

#[tokio::test(flavor = "multi_thread")]
async fn callers_with_the_same_key_have_separate_records() {
    let upstream = Upstream::counting().await;
    let gateway = start(config(upstream.url())).await;
    let address = gateway.local_addr();
    let of = |caller: &'static str| async move {
        let fields = [("idempotency-key", "k"), ("authorization", caller)];
        post_with(address, "/", &fields, caller).await.text()
    };
    assert_eq!(of("Bearer a").await, "1");
    assert_eq!(of("Bearer b").await, "2");
    assert_eq!(post(address, "/", "k", "nobody").await.text(), "3");
    assert_eq!(of("Bearer a").await, "1");
    assert_eq!(post(address, "/", "k", "nobody").await.text(), "3");
}

#[tokio::test(flavor = "multi_thread")]
async fn credentials_that_change_with_each_request_are_rejected() {
    let upstream = Upstream::counting().await;
    let mut strict = config(upstream.url());
    strict.policy.scope = Some(ScopeConfig::headers([AUTHORIZATION]));
    let strict = start(strict).await;
    for credentials in ["Digest a", "AWS4-HMAC-SHA256 a", "Signature a", "DPoP a"] {
        let fields = [("idempotency-key", "k"), ("authorization", credentials)];
        let answer = post_with(strict.local_addr(), "/", &fields, "x").await;
        assert_eq!(answer.code(), "unstable-scope", "{credentials}");
        let detail = answer.json()["detail"].as_str().unwrap().to_owned();
        for says in ["`authorization`", "`scope`", "`auth_scope`", "another caller"] {
            assert!(detail.contains(says), "{says} is not in {detail}");
        }
    }
    assert_eq!(upstream.seen().len(), 0);

    let mut shared = config(upstream.url());
    shared.policy.scope = Some(ScopeConfig::headers([AUTHORIZATION]));
    shared.policy.scope_missing = Some(MissingScope::Shared);
    let shared = start(shared).await;
    assert_eq!(post(shared.local_addr(), "/", "k", "x").await.status, 201);
}
