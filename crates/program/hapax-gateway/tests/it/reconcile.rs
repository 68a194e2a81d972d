//! Asking what became of a request.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use hapax_core::OnUnknown;
use hapax_core::diagnose::Severity;
use hapax_gateway::{Config, Gateway, ScopeConfig};
use hapax_http::Body;
use http::header::{AUTHORIZATION, HOST, HeaderName, HeaderValue};
use http::{Method, Response};

use crate::world::{Answer, Seen, Upstream, config, did_not_happen, get, post_with, start, text};

/// An upstream that answers POST with 500, and GET of /outcome with what `says` is.
async fn upstream(says: impl Fn(&Seen) -> Response<Body> + Send + Sync + 'static) -> Upstream {
    Upstream::start(move |seen| {
        let response = match seen.method {
            Method::GET => says(&seen),
            _ if seen.header("idempotency-attempt") == "1" => text(500, "lost"),
            _ => text(201, "again"),
        };
        async move { response }
    })
    .await
}

fn reconciling(upstream: &Upstream) -> Config {
    let mut config = config(upstream.url());
    config.policy.on_unknown = OnUnknown::Reconcile;
    let url = format!("http://{}/outcome?of=this", upstream.address);
    config.policy.reconcile_url = Some(url.parse().unwrap());
    let tenant = HeaderName::from_static("x-tenant");
    let [session, device] = ["cookie:session", "cookie:device"].map(|it| it.parse().unwrap());
    let parts = vec![AUTHORIZATION.into(), session, tenant.into(), device, HOST.into()];
    config.policy.scope = Some(ScopeConfig::Parts(parts));
    config.policy.upstream_timeout = Duration::from_secs(60);
    config
}

async fn send(gateway: &hapax_gateway::RunningGateway) -> Answer {
    let fields = [
        ("idempotency-key", "\"k\""),
        ("authorization", "Bearer a"),
        ("x-tenant", "acme"),
        ("cookie", "_ga=1; device=d; session=s"),
        ("x-other", "1"),
    ];
    post_with(gateway.local_addr(), "/pay", &fields, "x").await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reconciled_response_is_replayed() {
    let upstream = upstream(|_| {
        let mut response = text(200, "paid");
        response.headers_mut().insert("idempotency-status", HeaderValue::from_static("201"));
        response.headers_mut().insert("x-kept", HeaderValue::from_static("yes"));
        response
    })
    .await;
    let gateway = start(reconciling(&upstream)).await;
    assert_eq!(send(&gateway).await.status, 500);
    for _ in 0..2 {
        let answer = send(&gateway).await;
        assert_eq!((answer.status, answer.text().as_str()), (201, "paid"));
        assert_eq!(answer.header("idempotency-replayed"), "true");
        assert_eq!(answer.header("idempotency-status"), "");
        assert_eq!(answer.header("x-kept"), "yes");
    }
    let seen = upstream.seen();
    assert_eq!(seen.len(), 2, "one execution, one question");
    let (execution, question) = (&seen[0], &seen[1]);
    assert_eq!(question.uri, "/outcome?of=this");
    assert_eq!(question.headers.get_all("host").iter().count(), 1);
    assert_eq!(question.header("host"), upstream.address.to_string());
    assert_eq!(question.header("x-forwarded-host"), "shop.example");
    // Of the cookies only those that name the caller.
    assert_eq!(
        question.headers.get_all("cookie").iter().collect::<Vec<_>>(),
        ["session=s; device=d"]
    );
    assert_eq!(question.header("idempotency-key"), "\"k\"");
    for name in ["idempotency-fence", "idempotency-attempt", "idempotency-operation-id"] {
        assert_eq!(question.header(name), execution.header(name), "{name}");
        assert_ne!(question.header(name), "", "{name}");
    }
    assert_eq!(question.header("authorization"), "Bearer a");
    assert_eq!(question.header("x-tenant"), "acme");
    assert_eq!(question.header("x-other"), "");
}

#[tokio::test(flavor = "multi_thread")]
async fn wire_29_the_key_is_in_the_header_of_the_route() {
    let upstream = upstream(|_| text(200, "paid")).await;
    let mut config = reconciling(&upstream);
    config.policy.key_header = HeaderName::from_static("paypal-request-id");
    config.policy.scope = None;
    let gateway = start(config).await;
    let fields = [("PayPal-Request-Id", "k"), ("authorization", "Bearer a")];
    assert_eq!(post_with(gateway.local_addr(), "/pay", &fields, "x").await.status, 500);
    let answer = post_with(gateway.local_addr(), "/pay", &fields, "x").await;
    assert_eq!((answer.status, answer.text().as_str()), (200, "paid"));
    for seen in upstream.seen() {
        assert_eq!(seen.header("paypal-request-id"), "k");
        assert_eq!(seen.header("idempotency-key"), "");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn after_did_not_happen_the_retry_executes() {
    let upstream = upstream(|_| did_not_happen()).await;
    let gateway = start(reconciling(&upstream)).await;
    assert_eq!(send(&gateway).await.status, 500);
    let answer = send(&gateway).await;
    assert_eq!((answer.status, answer.text().as_str()), (201, "again"));
    assert_eq!(answer.header("idempotency-replayed"), "false");
    let seen = upstream.seen();
    let fence = |index: usize| seen[index].header("idempotency-fence").parse::<u64>().unwrap();
    assert_eq!(fence(1), fence(0));
    assert!(fence(2) > fence(0));
}

/// Routers and proxies answer 404 as well, for a path that they do not know.
#[tokio::test(flavor = "multi_thread")]
async fn a_404_without_the_marker_is_no_verdict() {
    let values: Arc<Mutex<Vec<&'static str>>> = Arc::default();
    let upstream = {
        let values = Arc::clone(&values);
        upstream(move |_| {
            let mut response = text(404, "");
            for value in values.lock().unwrap().iter() {
                let value = HeaderValue::from_static(value);
                response.headers_mut().append("idempotency-outcome", value);
            }
            response
        })
        .await
    };
    let mut config = reconciling(&upstream);
    config.admin = Some("127.0.0.1:0".parse().unwrap());
    let gateway = start(config).await;
    assert_eq!(send(&gateway).await.status, 500);
    for said in [&[][..], &["retryable"], &["Did-Not-Happen"], &["did-not-happen"; 2]] {
        *values.lock().unwrap() = said.to_vec();
        let answer = send(&gateway).await;
        assert_eq!((answer.status, answer.code().as_str()), (409, "outcome-unknown"), "{said:?}");
        assert_eq!(answer.header("retry-after"), "1");
    }
    *values.lock().unwrap() = vec!["did-not-happen"];
    assert_eq!(send(&gateway).await.text(), "again");
    answered(&gateway, &[("not-found", 4), ("did-not-happen", 1), ("happened", 0)]).await;
}

/// Asserts how often the reconcile URL gave answers of these kinds.
async fn answered(gateway: &hapax_gateway::RunningGateway, kinds: &[(&str, u32)]) {
    let metrics = get(gateway.admin_addr().unwrap(), "/metrics").await.text();
    for (kind, count) in kinds {
        let line = format!("hapax_reconcile_total{{answer=\"{kind}\"}} {count}");
        assert!(metrics.lines().any(|it| it == line), "{line} is not in\n{metrics}");
    }
}

/// Waits until the upstream was probed so often.
async fn probed(upstream: &Upstream, times: usize) -> Vec<Seen> {
    while upstream.probes().len() < times {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    upstream.probes()
}

#[tokio::test(flavor = "multi_thread")]
async fn wire_26_the_url_is_probed_at_start_and_on_reload() {
    let upstream = upstream(|_| did_not_happen()).await;
    let config = reconciling(&upstream);
    let gateway = start(config.clone()).await;
    let first = probed(&upstream, 1).await.remove(0);
    gateway.reload(config).unwrap();
    let second = probed(&upstream, 2).await.remove(1);
    for probe in [&first, &second] {
        assert_eq!(
            (&probe.method, probe.uri.to_string().as_str()),
            (&Method::GET, "/outcome?of=this")
        );
        assert_eq!(probe.header("idempotency-operation-id").len(), 64);
        assert_eq!(probe.header("authorization"), "");
    }
    for name in ["idempotency-key", "idempotency-operation-id"] {
        assert_ne!(first.header(name), second.header(name));
    }
    assert!(upstream.seen().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_probe_takes_only_the_marked_404() {
    let says = Arc::new(Mutex::new(200));
    let upstream = {
        let says = Arc::clone(&says);
        Upstream::probed(move |_| match *says.lock().unwrap() {
            0 => did_not_happen(),
            status => text(status, ""),
        })
        .await
    };
    let config = reconciling(&upstream);
    for (said, severity, found) in [
        (0, Severity::Fine, "answers 404 with the marker"),
        (404, Severity::Broken, "answered 404 without `Idempotency-Outcome: did-not-happen`"),
        (200, Severity::Broken, "its answer would be replayed"),
        (401, Severity::Broken, "answered 401"),
        (503, Severity::Broken, "answered 503"),
    ] {
        *says.lock().unwrap() = said;
        let [finding] = &Gateway::probe(&config).await.unwrap()[..] else { panic!("not one URL") };
        assert_eq!(finding.severity, severity, "{finding}");
        assert!(finding.found.contains(found), "{finding}");
        // The query may be secret.
        let url = format!("http://{}/outcome ", upstream.address);
        assert!(finding.found.starts_with(&url), "{finding}");
    }
    let gone = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let mut config = config;
    config.policy.reconcile_url = Some(format!("http://{gone}/").parse().unwrap());
    let [finding] = &Gateway::probe(&config).await.unwrap()[..] else { panic!("not one URL") };
    assert!(finding.found.contains("could not be reached"), "{finding}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unusable_reconcile_response_leaves_the_outcome_unknown() {
    let says = Arc::new(Mutex::new((503, 0, "")));
    let upstream = {
        let says = Arc::clone(&says);
        upstream(move |_| {
            let (status, size, named) = *says.lock().unwrap();
            let mut response = text(status, vec![b'x'; size]);
            if !named.is_empty() {
                let named = HeaderValue::from_static(named);
                response.headers_mut().insert("idempotency-status", named);
            }
            response
        })
        .await
    };
    let gateway = start(reconciling(&upstream)).await;
    assert_eq!(send(&gateway).await.status, 500);
    // Not yet; a redirect, which is not followed; an answer too large to keep; a made-up status.
    for said in [(503, 0, ""), (302, 0, ""), (401, 0, ""), (200, 2 << 20, ""), (200, 0, "20")] {
        *says.lock().unwrap() = said;
        let answer = send(&gateway).await;
        assert_eq!((answer.status, answer.code().as_str()), (409, "outcome-unknown"), "{said:?}");
    }
    *says.lock().unwrap() = (200, 4, "");
    assert_eq!(send(&gateway).await.text(), "xxxx");
    answered(&gateway, &[("other", 3), ("unusable", 2), ("happened", 1), ("no-answer", 0)]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unreachable_reconcile_url_leaves_the_outcome_unknown() {
    let upstream = upstream(|_| text(200, "")).await;
    let gone = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let mut config = reconciling(&upstream);
    config.policy.reconcile_url = Some(format!("http://{gone}/").parse().unwrap());
    let gateway = start(config).await;
    assert_eq!(send(&gateway).await.status, 500);
    assert_eq!(send(&gateway).await.code(), "outcome-unknown");
    answered(&gateway, &[("no-answer", 1), ("other", 0), ("unusable", 0)]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reconciled_response_may_have_no_body() {
    let upstream = upstream(|_| {
        let mut response = text(200, "nothing to see");
        response.headers_mut().insert("idempotency-status", HeaderValue::from_static("204"));
        response
    })
    .await;
    let gateway = start(reconciling(&upstream)).await;
    assert_eq!(send(&gateway).await.status, 500);
    for _ in 0..2 {
        let answer = send(&gateway).await;
        assert_eq!((answer.status, answer.header("content-length")), (204, ""));
    }
}
