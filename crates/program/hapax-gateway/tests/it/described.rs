//! What records keep of requests.

use hapax_gateway::{ScopeConfig, StoreUrl};
use http::HeaderName;
use http::header::COOKIE;
use serde_json::{Value, json};

use crate::world::{Upstream, config, get, post_with, send, start, text};

const KEY: &str = "the-key-of-an-order";
const TENANT: &str = "acme-of-berlin";
const SESSION: &str = "session=0a1b2c3d4e5f";
const API_KEY: &str = "live-key-of-acme";
const QUERY: &str = "sig=of-the-query";

const FIELDS: [(&str, &str); 4] =
    [("idempotency-key", KEY), ("x-tenant", TENANT), ("cookie", SESSION), ("x-api-key", API_KEY)];

/// The API's answer to who asks by which hash records name this caller.
async fn hash_of(admin: std::net::SocketAddr, value: &str) -> (u16, Value) {
    let json = [("content-type", "application/json")];
    let body = json!({ "value": value }).to_string();
    let answer = send(admin, "POST", "/api/callers/hash", &json, &body).await;
    (answer.status, answer.json())
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_secret_no_description_is_stored() {
    let upstream = Upstream::start(|_| async { text(500, "broken") }).await;
    let mut config = config(upstream.url());
    let tenant = HeaderName::from_static("x-tenant");
    config.policy.scope = Some(ScopeConfig::headers([tenant, COOKIE]));
    let gateway = start(config).await;
    let admin = gateway.admin_addr().unwrap();
    let answer = post_with(gateway.local_addr(), "/pay", &FIELDS, "x").await;
    assert_eq!(answer.status, 500);
    for path in ["/api/keys", "/api/keys?state=unknown"] {
        let listed = get(admin, path).await;
        let page = listed.json();
        let record = &page["keys"][0];
        assert_eq!((&record["state"], &record["described"]), (&json!("unknown"), &Value::Null));
        for kept in [KEY, TENANT, SESSION, "/pay"] {
            assert!(!listed.text().contains(kept), "{kept} is in {}", listed.text());
        }
    }
    let (status, said) = hash_of(admin, SESSION).await;
    assert_eq!((status, &said["code"]), (400, &json!("no-secret")), "{said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_record_shows_a_tenant_and_hashes_of_credentials_and_all_of_it_is_sealed() {
    let upstream = Upstream::start(|_| async { text(500, "broken") }).await;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("hapax.db");
    let mut config = config(upstream.url());
    config.store = StoreUrl::File(path.clone());
    let [tenant, api_key] = ["x-tenant", "x-api-key"].map(HeaderName::from_static);
    let cookie = "cookie:session".parse().unwrap();
    config.policy.scope =
        Some(ScopeConfig::Parts(vec![tenant.into(), COOKIE.into(), api_key.into(), cookie]));
    let gateway = start(config).await;
    let admin = gateway.admin_addr().unwrap();
    let target = format!("/pay/now?{QUERY}");
    assert_eq!(post_with(gateway.local_addr(), &target, &FIELDS, "x").await.status, 500);

    let listed = get(admin, "/api/keys?state=unknown").await;
    let page = listed.json();
    let described = &page["keys"][0]["described"];
    assert_eq!(
        (&described["key"], &described["method"], &described["target"]),
        (&json!(KEY), &json!("POST"), &json!("/pay/now"))
    );
    let by = |header: &str| {
        let callers = described["caller"].as_array().unwrap();
        callers.iter().find(|caller| caller["header"] == header).cloned().unwrap()
    };
    assert_eq!(by("x-tenant"), json!({ "header": "x-tenant", "value": TENANT }));
    let session = SESSION.strip_prefix("session=").unwrap();
    for (header, value) in
        [("cookie", SESSION), ("x-api-key", API_KEY), ("cookie:session", session)]
    {
        let (status, said) = hash_of(admin, value).await;
        let hash = said["hash"].as_str().unwrap();
        assert!(status == 200 && hash.len() == 12, "{said}");
        assert!(hash.bytes().all(|digit| digit.is_ascii_hexdigit()), "{hash}");
        assert_eq!(by(header), json!({ "header": header, "hash": hash }));
    }
    for secret in [SESSION, API_KEY, QUERY] {
        assert!(!listed.text().contains(secret), "{secret} is in {}", listed.text());
    }

    gateway.shutdown().await;
    let file = std::fs::read(&path).unwrap();
    let file = String::from_utf8_lossy(&file);
    for sealed in [KEY, TENANT, SESSION, API_KEY, QUERY, "/pay/now"] {
        assert!(!file.contains(sealed), "{sealed} is in the file");
    }
}
