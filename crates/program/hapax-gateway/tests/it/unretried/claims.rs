//! Callers that a claim of a token names.

use hapax_gateway::{JwtConfig, JwtKeys, ScopeConfig};
use hapax_http::server::MissingScope;
use hapax_testkit::http::TestIssuer;

use super::*;

/// A gateway on a file whose callers are a tenant and the claim `sub`.
fn by_claim(upstream: &Upstream, folder: &Path) -> Config {
    let keys = folder.join("keys.json");
    std::fs::write(&keys, TestIssuer::of_scenarios().key_set()).unwrap();
    let mut config = on_file(upstream, folder, NEVER);
    let parts = ["x-tenant", "jwt:sub"].map(|part| part.parse().unwrap());
    config.policy.scope = Some(ScopeConfig::Parts(parts.to_vec()));
    config.policy.scope_missing = Some(MissingScope::Shared);
    config.jwt = JwtConfig {
        keys: Some(JwtKeys::File(keys)),
        issuer: Some(TestIssuer::ISSUER.to_owned()),
        audience: Some(TestIssuer::AUDIENCE.to_owned()),
    };
    config
}

async fn ids(gateway: &RunningGateway) -> Vec<String> {
    let page = get(gateway.admin_addr().unwrap(), "/api/keys").await.json();
    let keys = page["keys"].as_array().unwrap();
    keys.iter().map(|key| key["id"].as_str().unwrap().to_owned()).collect()
}

/// A retry has the token, also one without the claim, so a request in place of a retry needs other credentials.
#[tokio::test(flavor = "multi_thread")]
async fn a_token_is_replaced_although_its_claim_is_shown_or_is_missing() {
    let upstream = upstream(|_| did_not_happen()).await;
    let folder = tempfile::tempdir().unwrap();
    let mut config = by_claim(&upstream, folder.path());
    config.policy.reconcile_authorization = None;
    let gateway = start(config.clone()).await;
    // One claim is shown, one is not, and one is missing.
    for (key, claims) in
        [("a", json!({ "sub": "ann" })), ("b", json!({ "sub": "jürgen" })), ("c", json!({}))]
    {
        let bearer = format!("Bearer {}", TestIssuer::of_scenarios().token(&claims));
        let fields = [("idempotency-key", key), ("authorization", &bearer), ("x-tenant", "acme")];
        let answer = post_with(gateway.local_addr(), "/pay", &fields, "x").await;
        assert_eq!(answer.status, 500, "{}", answer.text());
    }
    let left = ids(&gateway).await;
    assert_eq!(left.len(), 3);
    for id in &left {
        assert_eq!(reconcile(&gateway, id).await, "no-authorization");
    }
    gateway.shutdown().await;
    let file = folder.path().join("authorization");
    std::fs::write(&file, "Bearer of-the-gateway\n").unwrap();
    config.policy.reconcile_authorization = Some(ReconcileAuthorization::File(file));
    let gateway = start(config).await;
    for id in &left {
        assert_eq!(reconcile(&gateway, id).await, "did-not-happen");
    }
    let asked = asked(&upstream);
    assert_eq!(asked.len(), 3);
    for request in asked {
        assert_eq!(request.header("authorization"), "Bearer of-the-gateway");
        assert_eq!(request.header("x-tenant"), "acme");
    }
}
