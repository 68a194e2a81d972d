//! Scenarios of statements 6–8 and 35–37: scope and fingerprint.

use hapax_core::{JsonPointers, OnUnknown};
use hapax_http::fingerprint::{BodyForm, HttpFingerprintScheme, JsonParts};
use hapax_http::server::MissingScope;
use http::{HeaderName, Method};
use serde_json::{Value, json};

use crate::http::{
    ExecutionCount, HandlerGate, ScenarioContext, ScenarioPolicy, ScenarioScope, TestInstance,
    TestIssuer, TestRequest, counting, handler, reply,
};

fn by(names: &[&'static str], missing: MissingScope) -> ScenarioPolicy {
    let parts = names.iter().map(|name| name.parse().unwrap()).collect();
    ScenarioPolicy { callers: ScenarioScope::Parts(parts, missing), ..ScenarioPolicy::default() }
}

pub async fn w06_two_scopes_have_separate_records(arena: ScenarioContext) {
    let runs = ExecutionCount::new();
    let stage = arena.start(ScenarioPolicy::default(), counting(&runs)).await;
    stage.send(stage.post("k")).await.is_first(201, "1");
    let other = arena.unique("Basic other");
    let other = stage.post("k").header("authorization", other);
    // The second caller gets neither the first one's outcome nor a sign that the key was used.
    stage.send(other.clone().body("{}")).await.is_first(201, "2");
    stage.send(other.body("{}")).await.is_replay(201, "2");
    stage.send(stage.post("k")).await.is_replay(201, "1");
}

pub async fn w32_two_namespaces_have_separate_records(arena: ScenarioContext) {
    let of = |word: &str| ScenarioPolicy {
        namespace: Some(arena.namespace(word)),
        on_unknown: OnUnknown::Block,
        ..ScenarioPolicy::default()
    };
    let (orders, invoices) = (ExecutionCount::new(), ExecutionCount::new());
    let stage = arena.start(of("orders"), counting(&orders)).await;
    stage.send(stage.post("k")).await.is_first(201, "1");
    tokio::time::timeout(crate::http::TIMEOUT, stage.instance().drain()).await.unwrap();
    drop(stage);
    // Another body: a key of another service is neither replayed nor rejected as reused.
    let stage = arena.start(of("invoices"), counting(&invoices)).await;
    stage.send(stage.post("k").body("{}")).await.is_first(201, "1");
    stage.send(stage.post("k").body("{}")).await.is_replay(201, "1");
    tokio::time::timeout(crate::http::TIMEOUT, stage.instance().drain()).await.unwrap();
    drop(stage);
    let stage = arena.start(of("orders"), counting(&orders)).await;
    stage.send(stage.post("k")).await.is_replay(201, "1");
    assert_eq!((orders.count(), invoices.count()), (1, 1));
}

pub async fn w06_scope_and_key_are_not_concatenated(arena: ScenarioContext) {
    let runs = ExecutionCount::new();
    let policy = by(&["x-tenant", "x-user"], MissingScope::Shared);
    let stage = arena.start(policy, counting(&runs)).await;
    let key = arena.unique("k");
    let of = |tenant: &str, user: &str| {
        stage.post(&key).header("x-tenant", tenant).header("x-user", user)
    };
    let callers = [
        of("ab", "c"),
        of("a", "bc"),
        of("a", "b").more("x-user", "c"),
        of("abc", "c").without("x-user"),
        of("abc", "abc").without("x-tenant"),
    ];
    for (at, post) in callers.iter().enumerate() {
        stage.send(post.clone()).await.is_first(201, &(at + 1).to_string());
    }
    for (at, post) in callers.iter().enumerate() {
        stage.send(post.clone()).await.is_replay(201, &(at + 1).to_string());
    }
}

pub async fn w06_a_missing_scope_is_rejected(arena: ScenarioContext) {
    let runs = ExecutionCount::new();
    let stage = arena.start(by(&["x-tenant"], MissingScope::Reject), counting(&runs)).await;
    stage.send(stage.post("k")).await.is_rejected(400, "missing-scope");
    let empty = stage.post("k").header("x-tenant", "");
    stage.send(empty).await.is_rejected(400, "missing-scope");
    assert_eq!(runs.count(), 0);
    let tenant = arena.unique("tenant");
    stage.send(stage.post("k").header("x-tenant", &tenant)).await.is_first(201, "1");
}

pub async fn w36_one_cookie_may_name_the_caller(arena: ScenarioContext) {
    let runs = ExecutionCount::new();
    let stage = arena.start(by(&["cookie:session"], MissingScope::Reject), counting(&runs)).await;
    let (anna, ben) = (arena.unique("anna"), arena.unique("ben"));
    let with = |cookies: String| stage.post("k").header("cookie", cookies);
    stage.send(with(format!("theme=dark; session={anna}; _ga=1"))).await.is_first(201, "1");
    // Other cookies, their order and lines do not count.
    stage.send(with(format!("session={anna}"))).await.is_replay(201, "1");
    let lines = with("_ga=2;mysession=x".to_owned()).more("cookie", format!("session={anna}"));
    stage.send(lines).await.is_replay(201, "1");
    stage.send(with(format!("session={ben}; _ga=1"))).await.is_first(201, "2");
    for missing in ["theme=dark", "session=", "Session=x", "session"] {
        stage.send(with(missing.to_owned())).await.is_rejected(400, "missing-scope");
    }
    stage.send(stage.post("k")).await.is_rejected(400, "missing-scope");
    let twice = with(format!("session={ben}; session={anna}"));
    stage.send(twice).await.is_rejected(400, "malformed-request");
    let lines = with(format!("session={ben}")).more("cookie", format!("session={ben}"));
    stage.send(lines).await.is_rejected(400, "malformed-request");
    assert_eq!(runs.count(), 2);
}

pub async fn w36_a_cookie_and_a_header_name_the_caller_together(arena: ScenarioContext) {
    let runs = ExecutionCount::new();
    let parts = ["x-tenant", "cookie:session"];
    let stage = arena.start(by(&parts, MissingScope::Shared), counting(&runs)).await;
    let tenant = arena.unique("tenant");
    let of = |cookies: &str| {
        let post = stage.post("k").header("x-tenant", &tenant);
        if cookies.is_empty() { post } else { post.header("cookie", cookies) }
    };
    for (cookies, run) in [("session=a", "1"), ("session=b", "2"), ("", "3")] {
        stage.send(of(cookies)).await.is_first(201, run);
        stage.send(of(cookies)).await.is_replay(201, run);
    }
    stage.send(of("x=1")).await.is_replay(201, "3");
}

pub async fn w36_a_claim_of_a_verified_token_may_name_the_caller(arena: ScenarioContext) {
    let (runs, issuer) = (ExecutionCount::new(), TestIssuer::of_scenarios());
    let stage = arena.start(by(&["jwt:sub"], MissingScope::Reject), counting(&runs)).await;
    let (anna, ben) = (arena.unique("anna"), arena.unique("ben"));
    let with = |token: String| stage.post("k").header("authorization", format!("Bearer {token}"));
    let of = |sub: &str, jti: u32| with(issuer.token(&json!({ "sub": sub, "jti": jti })));
    stage.send(of(&anna, 1)).await.is_first(201, "1");
    // The token was renewed.
    stage.send(of(&anna, 2)).await.is_replay(201, "1");
    stage.send(of(&ben, 1)).await.is_first(201, "2");
    let scheme = issuer.token(&json!({ "sub": ben }));
    let lower = stage.post("k").header("authorization", format!("bearer  {scheme}"));
    stage.send(lower).await.is_replay(201, "2");
    for claims in [json!({}), json!({ "sub": "" }), json!({ "Sub": anna })] {
        stage.send(with(issuer.token(&claims))).await.is_rejected(400, "missing-scope");
    }
    stage.send(stage.post("k").without("authorization")).await.is_rejected(400, "missing-scope");
    stage
        .send(stage.post("k").header("authorization", "Basic YTpi"))
        .await
        .is_rejected(400, "missing-scope");
    let second = format!("Bearer {}", issuer.token(&json!({ "sub": ben })));
    let twice = of(&anna, 1).more("authorization", second);
    stage.send(twice).await.is_rejected(400, "malformed-request");
    assert_eq!(runs.count(), 2);
}

pub async fn w36_a_token_that_does_not_verify_is_rejected_and_claims_nothing(
    arena: ScenarioContext,
) {
    let (runs, issuer) = (ExecutionCount::new(), TestIssuer::of_scenarios());
    let stage = arena.start(by(&["jwt:sub"], MissingScope::Reject), counting(&runs)).await;
    let claims = json!({ "sub": arena.unique("anna") });
    let with = |token: &str| stage.post("k").header("authorization", format!("Bearer {token}"));
    let invalid = [
        TestIssuer::new("scenarios", 2).token(&claims),
        issuer.token_of(&json!({ "alg": "none" }), &claims),
        issuer.token(&json!({ "sub": claims["sub"], "exp": 1_000_000_000 })),
        "opaque".to_owned(),
    ];
    let rejected = async || {
        for token in &invalid {
            let response = stage.send(with(token)).await;
            response.is_rejected(401, "invalid-token");
            assert_eq!(response.header("www-authenticate"), "Bearer error=\"invalid_token\"");
        }
    };
    rejected().await;
    assert_eq!(runs.count(), 0);
    stage.send(with(&issuer.token(&claims))).await.is_first(201, "1");
    // Nor is anything replayed, or rejected as reused.
    rejected().await;
    stage.send(with(&issuer.token(&claims))).await.is_replay(201, "1");
    assert_eq!(runs.count(), 1);
}

pub async fn w36_a_claim_and_a_header_name_the_caller_together(arena: ScenarioContext) {
    let (runs, issuer) = (ExecutionCount::new(), TestIssuer::of_scenarios());
    let parts = ["x-tenant", "jwt:sub", "jwt:https://shop.example/number"];
    let stage = arena.start(by(&parts, MissingScope::Shared), counting(&runs)).await;
    let (tenant, key) = (arena.unique("tenant"), arena.unique("k"));
    let of = |claims: &Value| {
        let token = format!("Bearer {}", issuer.token(claims));
        stage.post(&key).header("x-tenant", &tenant).header("authorization", token)
    };
    let number = "https://shop.example/number";
    let callers = [
        json!({ "sub": "7" }),
        json!({ "sub": 7 }),
        json!({ "sub": "=7" }),
        json!({ number: "7" }),
        json!({ number: 7, "sub": "7" }),
        json!({}),
    ];
    for (at, claims) in callers.iter().enumerate() {
        let run = (at + 1).to_string();
        stage.send(of(claims)).await.is_first(201, &run);
        stage.send(of(claims)).await.is_replay(201, &run);
    }
    stage.send(of(&json!({})).without("authorization")).await.is_replay(201, "6");
}

pub async fn w06_a_missing_scope_may_be_a_shared_scope(arena: ScenarioContext) {
    let runs = ExecutionCount::new();
    let stage = arena.start(by(&["x-tenant"], MissingScope::Shared), counting(&runs)).await;
    let key = arena.unique("k");
    stage.send(stage.post(&key)).await.is_first(201, "1");
    let other = stage.post(&key).header("authorization", "Bearer somebody");
    stage.send(other).await.is_replay(201, "1");
    stage.send(stage.post(&key).header("x-tenant", "t")).await.is_first(201, "2");
}

pub async fn w06_one_global_scope(arena: ScenarioContext) {
    let runs = ExecutionCount::new();
    let policy = ScenarioPolicy { callers: ScenarioScope::Shared, ..ScenarioPolicy::default() };
    let stage = arena.start(policy, counting(&runs)).await;
    let key = arena.unique("k");
    stage.send(stage.post(&key)).await.is_first(201, "1");
    stage.send(stage.post(&key).without("authorization")).await.is_replay(201, "1");
}

pub async fn w06_credentials_that_change_with_each_request_are_rejected(arena: ScenarioContext) {
    let runs = ExecutionCount::new();
    let stage = arena.start(ScenarioPolicy::default(), counting(&runs)).await;
    for credentials in [
        "Digest username=\"a\", nonce=\"1\"",
        "AWS4-HMAC-SHA256 Credential=a/20250101/eu/s3/aws4_request",
        "Signature keyId=\"a\"",
        "DPoP abc",
    ] {
        let post = stage.post("k").header("authorization", credentials);
        stage.send(post).await.is_rejected(400, "unstable-scope");
    }
    assert_eq!(runs.count(), 0);
}

/// Returns whether `retry` is the same request as `first`.
async fn same(stage: &TestInstance, key: &str, first: &TestRequest, retry: &TestRequest) -> bool {
    let key = format!("\"{key}\"");
    let (first, retry) = (first.clone(), retry.clone());
    let first = stage.send(first.header("idempotency-key", &key)).await;
    assert_eq!(first.header("idempotency-replayed"), "false", "{first:?}");
    let retry = stage.send(retry.header("idempotency-key", &key)).await;
    if retry.status == 422 {
        retry.is_rejected(422, "key-reused");
        return false;
    }
    retry.is_replay(201, first.text());
    true
}

/// Checks for each pair whether the second is the same request as the first.
async fn compare(
    arena: &ScenarioContext,
    policy: ScenarioPolicy,
    pairs: &[(&str, &str, bool)],
    kind: &str,
) {
    let stage = arena.start(policy, counting(&ExecutionCount::new())).await;
    for (at, (first, retry, expected)) in pairs.iter().enumerate() {
        let [first, retry] =
            [first, retry].map(|body| stage.plain().kind(kind).body(body.to_string()));
        let found = same(&stage, &format!("{kind} {at}"), &first, &retry).await;
        assert_eq!(found, *expected, "{first:?} {retry:?}");
    }
    stage.end().await;
}

const JSON: &str = "application/json";

pub async fn w07_json_members_in_any_order_are_the_same_request(arena: ScenarioContext) {
    let pairs = [
        (r#"{"a":1,"b":{"c":2,"d":3}}"#, r#"{"b":{"d":3,"c":2},"a":1}"#, true),
        (r#"{"é":1,"z":2,"𝄞":3}"#, r#"{"𝄞":3,"z":2,"é":1}"#, true),
        (r#"{"a":[1,2]}"#, r#"{"a":[2,1]}"#, false),
        (r#"{"a":1,"b":2}"#, r#"{"a":2,"b":1}"#, false),
    ];
    compare(&arena, ScenarioPolicy::default(), &pairs, JSON).await;
    compare(
        &arena,
        ScenarioPolicy::default(),
        &pairs[..1],
        "application/merge-patch+json; charset=utf-8",
    )
    .await;
}

pub async fn w07_json_white_space_and_escapes_do_not_count(arena: ScenarioContext) {
    let pairs = [
        ("{\"a\": [1, 2]}", "\n{\t\"a\":[1,2] }\r\n", true),
        (r#"{"a":"é/"}"#, r#"{"\u0061":"\u00e9\/"}"#, true),
        (r#"{"a":"a b"}"#, r#"{"a":"ab"}"#, false),
        (r#"{"a":"\u0000"}"#, r#"{"a":""}"#, false),
    ];
    compare(&arena, ScenarioPolicy::default(), &pairs, JSON).await;
}

pub async fn w07_json_numbers_count_as_written(arena: ScenarioContext) {
    let pairs = [
        (r#"{"a":1}"#, r#"{"a":1.0}"#, false),
        (r#"{"a":9007199254740992}"#, r#"{"a":9007199254740993}"#, false),
        (r#"{"a":1e2}"#, r#"{"a":100}"#, false),
        (r#"{"a":0.1}"#, r#"{ "a" : 0.1 }"#, true),
    ];
    compare(&arena, ScenarioPolicy::default(), &pairs, JSON).await;
}

pub async fn w07_json_without_a_canonical_form_is_compared_by_its_bytes(arena: ScenarioContext) {
    let deep = "[".repeat(129) + &"]".repeat(129);
    let odd = [r#"{"a":1,"a":1}"#, r#"["\ud800"]"#, "\u{feff}[1]", "{", &deep];
    let mut pairs = Vec::new();
    let spaced = odd.map(|text| format!("{text} "));
    for (text, spaced) in odd.iter().zip(&spaced) {
        pairs.push((*text, *text, true));
        pairs.push((*text, spaced.as_str(), false));
    }
    let full = "[".repeat(128) + &"]".repeat(128);
    let wide = format!(" {full}");
    pairs.push((&full, &wide, true));
    compare(&arena, ScenarioPolicy::default(), &pairs, JSON).await;
}

pub async fn w07_other_bodies_count_by_their_bytes(arena: ScenarioContext) {
    let pairs = [("a=1&b=2", "a=1&b=2", true), ("a=1&b=2", "b=2&a=1", false), ("", " ", false)];
    for kind in ["application/x-www-form-urlencoded", "text/plain", "application/octet-stream"] {
        compare(&arena, ScenarioPolicy::default(), &pairs, kind).await;
    }
}

pub async fn w37_form_data_is_compared_by_its_decoded_pairs_in_order(arena: ScenarioContext) {
    let pairs = [
        ("to=a+b&cents=%31", "to=a%20b&cents=1", true),
        ("cents=1%2B1", "cents=1+1", false),
        ("note=", "note", false),
        ("a=1&b=2", "b=2&a=1", false),
        ("a+b=%", "a%20b=%", false),
    ];
    compare(&arena, ScenarioPolicy::default(), &pairs, "application/x-www-form-urlencoded").await;
}

pub async fn w37_form_data_of_another_charset_is_compared_by_its_bytes(arena: ScenarioContext) {
    let pairs = [("to=a+b", "to=a+b", true), ("to=a+b", "to=a%20b", false)];
    let kind = "application/x-www-form-urlencoded; charset=iso-8859-1";
    compare(&arena, ScenarioPolicy::default(), &pairs, kind).await;
}

pub async fn w07_canonical_and_raw_are_separate_domains(arena: ScenarioContext) {
    let stage = arena.start(ScenarioPolicy::default(), counting(&ExecutionCount::new())).await;
    let json = stage.plain().body(r#"{"a":1}"#);
    assert!(!same(&stage, "k", &json, &json.clone().kind("text/plain")).await);
}

pub async fn w07_method_path_and_query_count(arena: ScenarioContext) {
    let stage = arena.start(ScenarioPolicy::default(), counting(&ExecutionCount::new())).await;
    let first = stage.plain().to("/pay/a%20b?x=1");
    assert!(same(&stage, "same", &first, &first).await);
    for (at, retry) in [
        first.clone().method(Method::PATCH),
        first.clone().to("/pay/a%20c?x=1"),
        first.clone().to("/pay/%61%20b?x=1"),
        first.clone().to("/pay/a%20b/?x=1"),
        first.clone().to("/pay/a%20b?x=2"),
        first.clone().to("/pay/a%20b"),
        first.clone().to("/pay/a%20b?x=1&y"),
    ]
    .iter()
    .enumerate()
    {
        assert!(!same(&stage, &format!("k-{at}"), &first, retry).await, "{retry:?}");
    }
}

/// The service may mount one router at both paths: see [`crate::http::HttpFixture`].
pub async fn w35_the_target_that_the_client_sent_is_compared(arena: ScenarioContext) {
    let stage = arena.start(ScenarioPolicy::default(), counting(&ExecutionCount::new())).await;
    let to = |target: &str| stage.plain().to(target);
    let payment = to("/mounted/payments/confirm?x=1");
    assert!(same(&stage, "same", &payment, &payment).await);
    assert!(!same(&stage, "mount", &payment, &to("/mounted/refunds/confirm?x=1")).await);
    assert!(!same(&stage, "inner", &payment, &to("/confirm?x=1")).await);
}

pub async fn w07_query_pairs_are_sorted_by_name(arena: ScenarioContext) {
    let stage = arena.start(ScenarioPolicy::default(), counting(&ExecutionCount::new())).await;
    let to = |target: &str| stage.plain().to(target);
    for (at, (first, retry, expected)) in [
        ("/p?b=1&a=2", "/p?a=2&b=1", true),
        ("/p?a=1&b=0&a=2", "/p?a=1&a=2&b=0", true),
        ("/p?a=1&a=2", "/p?a=2&a=1", false),
        ("/p?%61=1&a=2", "/p?a=1&a=2", false),
    ]
    .into_iter()
    .enumerate()
    {
        let found = same(&stage, &format!("k-{at}"), &to(first), &to(retry)).await;
        assert_eq!(found, expected, "{first} {retry}");
    }
}

pub async fn w07_only_chosen_headers_are_compared(arena: ScenarioContext) {
    let stage = arena.start(ScenarioPolicy::default(), counting(&ExecutionCount::new())).await;
    let (one, two) = (stage.plain().header("x-mode", "1"), stage.plain().header("x-mode", "2"));
    assert!(same(&stage, "none", &one, &two).await);
    stage.end().await;
    let fingerprint =
        HttpFingerprintScheme::new(BodyForm::Canonical, [HeaderName::from_static("x-mode")]);
    let policy = ScenarioPolicy { fingerprint: fingerprint.unwrap(), ..ScenarioPolicy::default() };
    let stage = arena.start(policy, counting(&ExecutionCount::new())).await;
    assert!(same(&stage, "same", &one, &one.clone().header("x-other", "1")).await);
    assert!(!same(&stage, "other", &one, &two).await);
    assert!(!same(&stage, "more", &one, &one.clone().more("x-mode", "1")).await);
    assert!(!same(&stage, "fewer", &one, &one.clone().without("x-mode")).await);
}

fn form(boundary: &str, parts: &[&str]) -> String {
    let mut body = String::new();
    for part in parts {
        let head = "Content-Disposition: form-data; name=\"a\"; filename=\"a.bin\"";
        body += &format!("--{boundary}\r\n{head}\r\n\r\n{part}\r\n");
    }
    body + &format!("--{boundary}--\r\n")
}

/// A POST that names another method in a header is another request.
pub async fn w07_a_method_override_is_compared(arena: ScenarioContext) {
    let stage = arena.start(ScenarioPolicy::default(), counting(&ExecutionCount::new())).await;
    for name in ["x-http-method-override", "x-http-method", "x-method-override"] {
        let put = stage.plain().header(name, "PUT");
        assert!(same(&stage, &format!("{name}-1"), &put, &put).await);
        assert!(!same(&stage, &format!("{name}-2"), &put, &stage.plain()).await);
        let delete = stage.plain().header(name, "DELETE");
        assert!(!same(&stage, &format!("{name}-3"), &put, &delete).await);
    }
}

pub async fn w07_form_data_is_compared_without_its_boundary(arena: ScenarioContext) {
    let stage = arena.start(ScenarioPolicy::default(), counting(&ExecutionCount::new())).await;
    let post = |boundary: &str, parts: &[&str]| {
        let kind = format!("multipart/form-data; boundary=\"{boundary}\"");
        stage.plain().kind(&kind).body(form(boundary, parts))
    };
    let first = post("----one", &["1", "two\r\nlines"]);
    assert!(same(&stage, "same", &first, &post("other 2", &["1", "two\r\nlines"])).await);
    assert!(!same(&stage, "order", &first, &post("----one", &["two\r\nlines", "1"])).await);
    assert!(!same(&stage, "part", &first, &post("other", &["1", "two\r\nline"])).await);
    // As widespread clients send it: characters of a token, and an empty line before the body.
    let kind = "multipart/form-data; boundary=*****1763641234567*****";
    let body = form("*****1763641234567*****", &["1", "two\r\nlines"]);
    let starred = stage.plain().kind(kind).body(format!("\r\n{body}"));
    assert!(same(&stage, "stars", &first, &starred).await);
    // With two types, readers may disagree on which one counts: compared by its bytes.
    let two = |boundary: &str| post(boundary, &["1"]).more("content-type", "text/plain");
    assert!(!same(&stage, "two", &two("x"), &two("y")).await);
    // The limit of parts in a form, and one more.
    let many = vec!["1"; 4096];
    assert!(same(&stage, "many", &post("x", &many), &post("y", &many)).await);
    let more = vec!["1"; 4097];
    assert!(!same(&stage, "more", &post("x", &more), &post("y", &more)).await);
    // A body with more than parts in it is compared by its bytes, the boundary included.
    let odd =
        |boundary: &str| post(boundary, &["1"]).body(format!("odd\r\n{}", form(boundary, &["1"])));
    assert!(same(&stage, "odd", &odd("x"), &odd("x")).await);
    assert!(!same(&stage, "odd other", &odd("x"), &odd("y")).await);
}

fn counts(body: BodyForm, json: JsonParts) -> ScenarioPolicy {
    let fingerprint = HttpFingerprintScheme::new(body, []).unwrap().json(json).unwrap();
    ScenarioPolicy { fingerprint, ..ScenarioPolicy::default() }
}

fn pointers(texts: &[&str]) -> JsonPointers {
    JsonPointers::new(texts).unwrap()
}

pub async fn w07_bodies_may_be_compared_by_their_bytes(arena: ScenarioContext) {
    let pairs = [(r#"{"a":1}"#, r#"{"a":1}"#, true), (r#"{"a":1}"#, r#"{"a": 1}"#, false)];
    compare(&arena, counts(BodyForm::Raw, JsonParts::All), &pairs, JSON).await;
}

pub async fn w07_bodies_may_be_ignored(arena: ScenarioContext) {
    let pairs = [(r#"{"a":1}"#, "another", true), ("", "x", true)];
    compare(&arena, counts(BodyForm::Ignored, JsonParts::All), &pairs, JSON).await;
}

pub async fn w07_only_selected_json_members_may_be_compared(arena: ScenarioContext) {
    let only = JsonParts::Only(pointers(&["/amount", "/to/iban", "/a~1b"]));
    let pairs = [
        (
            r#"{"amount":5,"to":{"iban":"X","name":"a"}}"#,
            r#"{"to":{"iban":"X"},"amount":5,"n":1}"#,
            true,
        ),
        (r#"{"amount":5}"#, r#"{"amount":5,"to":{"iban":null}}"#, false),
        (r#"{"amount":5}"#, r#"{"amount":6}"#, false),
        (r#"{"a/b":1}"#, r#"{"a/b":2}"#, false),
    ];
    compare(&arena, counts(BodyForm::Canonical, only), &pairs, JSON).await;
}

pub async fn w07_selected_json_members_may_be_ignored(arena: ScenarioContext) {
    let except = JsonParts::Except(pointers(&["/sent_at", "/meta/trace"]));
    let pairs = [
        (
            r#"{"amount":5,"sent_at":1,"meta":{"trace":"a"}}"#,
            r#"{"amount":5,"sent_at":2,"meta":{}}"#,
            true,
        ),
        (r#"{"amount":5,"sent_at":1}"#, r#"{"amount":6,"sent_at":1}"#, false),
        (r#"{"meta":{"x":1}}"#, r#"{"meta":{"x":2}}"#, false),
    ];
    compare(&arena, counts(BodyForm::Canonical, except), &pairs, JSON).await;
}

pub async fn w07_a_changed_configuration_makes_no_false_422(arena: ScenarioContext) {
    let runs = ExecutionCount::new();
    let x_mode = [HeaderName::from_static("x-mode")];
    let raw = HttpFingerprintScheme::new(BodyForm::Raw, x_mode).unwrap();
    let before = ScenarioPolicy { fingerprint: raw, ..ScenarioPolicy::default() };
    let stage = arena.start(before, counting(&runs)).await;
    let old = stage.post("old").header("x-mode", "1").body(r#"{"a": 1}"#);
    stage.send(old.clone()).await.is_first(201, "1");
    stage.end().await;

    let except = JsonParts::Except(pointers(&["/at"]));
    let stage = arena.start(counts(BodyForm::Canonical, except), counting(&runs)).await;
    // A recorded request is compared by its recorded scheme, a new one by the present scheme.
    stage.send(old.clone()).await.is_replay(201, "1");
    stage.send(old.clone().body(r#"{"a":1}"#)).await.is_rejected(422, "key-reused");
    stage.send(old.header("x-mode", "2")).await.is_rejected(422, "key-reused");
    let new = stage.post("new").body(r#"{"a": 1, "at": 1}"#);
    stage.send(new.clone()).await.is_first(201, "2");
    stage.send(new.body(r#"{"a":1,"at":2}"#)).await.is_replay(201, "2");
    assert_eq!(runs.count(), 2);
}

pub async fn w08_reuse_of_a_finished_key_is_422(arena: ScenarioContext) {
    let runs = ExecutionCount::new();
    let stage = arena.start(ScenarioPolicy::default(), counting(&runs)).await;
    stage.send(stage.post("k")).await.is_first(201, "1");
    stage.send(stage.post("k").body("{}")).await.is_rejected(422, "key-reused");
    stage.send(stage.post("k")).await.is_replay(201, "1");
    assert_eq!(runs.count(), 1);
}

pub async fn w08_reuse_of_a_key_in_flight_is_422(arena: ScenarioContext) {
    let (runs, gate) = (ExecutionCount::new(), HandlerGate::closed());
    let held = (runs.clone(), gate.clone());
    let hold = handler(move |_| {
        let (runs, gate) = held.clone();
        async move {
            runs.next();
            gate.pass().await;
            reply(201, "done")
        }
    });
    let stage = arena.start(ScenarioPolicy::default(), hold).await;
    let first = stage.begin(stage.post("k"));
    runs.reach(1).await;
    stage.send(stage.post("k").body("{}")).await.is_rejected(422, "key-reused");
    gate.open();
    first.await.unwrap().is_first(201, "done");
    assert_eq!(runs.count(), 1);
}

pub async fn w08_reuse_of_a_key_with_an_unknown_outcome_is_422(arena: ScenarioContext) {
    let runs = ExecutionCount::new();
    let count = runs.clone();
    let fail = handler(move |_| {
        count.next();
        async { reply(500, "failed") }
    });
    let policy =
        ScenarioPolicy { on_unknown: hapax_core::OnUnknown::Block, ..ScenarioPolicy::default() };
    let stage = arena.start(policy, fail).await;
    stage.send(stage.post("k")).await.is_first(500, "failed");
    stage.send(stage.post("k").body("{}")).await.is_rejected(422, "key-reused");
    stage.send(stage.post("k")).await.is_rejected(409, "outcome-unknown");
    assert_eq!(runs.count(), 1);
}
