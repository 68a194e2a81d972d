//! Gateways that share a store: namespaces, and the register of the processes that use it.

use hapax_gateway::{
    Config, ConfigError, Gateway, PolicyConfig, ReloadError, RouteConfig, ScopeConfig, StartError,
    StoreOpener, StoreUrl,
};
use hapax_operators::RegisterError;
use hapax_testkit::servers::{PostgresServer, RedisServer};

use crate::world::{Upstream, config, get, post, start};

fn on(url: &str, upstream: &Upstream, namespace: &str) -> Config {
    let mut config = config(upstream.url());
    config.store = url.parse().unwrap();
    config.namespace = Some(namespace.parse().unwrap());
    config
}

fn scoped(mut config: Config, header: &'static str) -> Config {
    config.policy.scope = Some(ScopeConfig::headers([http::HeaderName::from_static(header)]));
    config
}

#[test]
fn a_store_on_a_server_needs_a_namespace() {
    for store in ["postgres://127.0.0.1/x", "redis://127.0.0.1"] {
        let mut config = Config::new("http://127.0.0.1:1".parse().unwrap());
        config.store = store.parse().unwrap();
        let error = config.check().unwrap_err();
        assert_eq!(error, ConfigError::NoNamespace);
        let text = error.to_string();
        assert!(
            text.contains("set an empty name (\"\") if the store has records of this service"),
            "{text}"
        );
        config.namespace = Some("".parse().unwrap());
        config.check().unwrap();
    }
    let mut file = Config::new("http://127.0.0.1:1".parse().unwrap());
    file.store = StoreUrl::File("./hapax.db".into());
    file.check().unwrap();
}

async fn two_services_on_one_server_get_their_own_responses(url: &str) {
    let (orders, invoices) = (Upstream::counting().await, Upstream::counting().await);
    let first = start(on(url, &orders, "orders")).await;
    let second = start(on(url, &invoices, "invoices")).await;
    let replica = start(on(url, &orders, "orders")).await;
    for gateway in [&first, &second] {
        let [new, again] = [
            post(gateway.local_addr(), "/", "k", "x").await,
            post(gateway.local_addr(), "/", "k", "x").await,
        ];
        assert_eq!(new.header("idempotency-replayed"), "false");
        assert_eq!(again.header("idempotency-replayed"), "true");
    }
    let again = post(replica.local_addr(), "/", "k", "x").await;
    assert_eq!(again.header("idempotency-replayed"), "true");
    assert_eq!((orders.seen().len(), invoices.seen().len()), (1, 1));
    // The register is no operation.
    let listed = get(first.admin_addr().unwrap(), "/api/keys").await.text();
    assert_eq!(listed.matches("\"id\"").count(), 2, "{listed}");
}

async fn gateways_that_differ_cannot_share_a_namespace(url: &str) {
    let upstream = Upstream::counting().await;
    let first = start(on(url, &upstream, "shop")).await;
    let other = scoped(on(url, &upstream, "shop"), "x-user");
    let error = Gateway::start(other.clone()).await.unwrap_err();
    let StartError::Register(RegisterError::Difference(difference)) = &error else {
        panic!("{error}")
    };
    assert_eq!((difference.setting, &*difference.theirs), ("scope", "authorization"));
    assert!(error.to_string().contains(&first.local_addr().to_string()), "{error}");
    for change in [
        |policy: &mut PolicyConfig| policy.key_header = http::HeaderName::from_static("x-key"),
        |policy: &mut PolicyConfig| {
            let raw = hapax_http::fingerprint::BodyForm::Raw;
            let scheme = hapax_http::fingerprint::HttpFingerprintScheme::new(raw, []);
            policy.fingerprint = scheme.unwrap();
        },
    ] {
        let mut other = on(url, &upstream, "shop");
        change(&mut other.policy);
        let error = Gateway::start(other).await.unwrap_err();
        assert!(matches!(error, StartError::Register(RegisterError::Difference(_))), "{error}");
    }

    // A new route, another service or another namespace is no difference.
    let mut more = on(url, &Upstream::counting().await, "shop");
    more.routes = vec![RouteConfig::new("/new", PolicyConfig::default())];
    let replica = start(more).await;
    let apart = start(scoped(on(url, &upstream, "bank"), "x-user")).await;
    let found = StoreOpener::new(url.parse().unwrap()).diagnose().await.unwrap();
    let found = found.iter().filter(|it| it.subject == "namespaces");
    let text: String = found.map(|it| format!("{it}\n")).collect();
    assert!(text.contains("\"shop\" has 2 processes") && text.contains("two upstreams"), "{text}");

    // A reload is compared with the processes of the last write, which is three seconds old at most.
    let error = replica.reload(other.clone()).unwrap_err();
    assert!(matches!(error, ReloadError::Shared(_)), "{error}");
    replica.shutdown().await;
    apart.shutdown().await;
    first.shutdown().await;
    // Each has removed its entry.
    start(other).await.shutdown().await;
}

mod postgres {
    use super::*;

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn two_services_on_one_server_get_their_own_responses() {
        let server = PostgresServer::start().await;
        Box::pin(super::two_services_on_one_server_get_their_own_responses(
            &server.url("postgres"),
        ))
        .await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn gateways_that_differ_cannot_share_a_namespace() {
        let server = PostgresServer::start().await;
        Box::pin(super::gateways_that_differ_cannot_share_a_namespace(&server.url("postgres")))
            .await;
    }
}

mod redis {
    use super::*;

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn two_services_on_one_server_get_their_own_responses() {
        let server = RedisServer::start().await;
        Box::pin(super::two_services_on_one_server_get_their_own_responses(&server.url())).await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn gateways_that_differ_cannot_share_a_namespace() {
        let server = RedisServer::start().await;
        Box::pin(super::gateways_that_differ_cannot_share_a_namespace(&server.url())).await;
    }
}
