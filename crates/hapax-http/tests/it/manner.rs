//! How refusals are written.

use std::time::Duration;

use hapax_http::manner::{Cors, Manner, grpc_status};
use hapax_http::problem::{Code, Problem};
use http::{HeaderMap, HeaderValue};
use proptest::prelude::*;

fn asking(fields: &[(&'static str, &'static str)]) -> HeaderMap {
    fields.iter().map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap())).collect()
}

#[test]
fn wire_16_a_grpc_refusal_has_a_status_for_every_code() {
    let grpc = Manner::of(&asking(&[("content-type", "application/grpc+proto")]), None);
    for code in Code::ALL {
        let response = grpc.refuse(&Problem::new(code, "Why not."), None);
        assert_eq!(response.status(), 200);
        let status = response.headers()["grpc-status"].to_str().unwrap();
        assert_eq!(status, grpc_status(code).to_string());
        // Not ok, and not one that says that the method is missing or the caller unknown.
        assert!(!["0", "1", "5", "7", "12", "16"].contains(&status));
        // Whatever executed nothing may be retried only where HTTP says 409 or 503 too, or never
        // reached the upstream.
        let retry = ["10", "14"].contains(&status);
        let http = [Code::InFlight, Code::Superseded, Code::UpstreamUnreachable].contains(&code)
            || code.status() == 503;
        assert_eq!(retry, http, "{code:?}");
        assert!(response.body().is_empty());
    }
}

#[test]
fn wire_16_a_grpc_message_is_percent_encoded() {
    let grpc = Manner::of(&asking(&[("content-type", "application/grpc")]), None);
    let problem =
        Problem::new(Code::InFlight, "100 % of\nZażółć.").retry_after(Duration::from_millis(1500));
    let response = grpc.refuse(&problem, None);
    let message = response.headers()["grpc-message"].to_str().unwrap();
    assert_eq!(message, "in-flight: 100 %25 of%0AZa%C5%BC%C3%B3%C5%82%C4%87.");
    assert_eq!(response.headers()["grpc-retry-pushback-ms"], "2000");
    assert_eq!(response.headers().get("retry-after"), None);
}

proptest! {
    #[test]
    fn wire_16_any_detail_survives_its_encoding(detail in any::<String>()) {
        let grpc = Manner::of(&asking(&[("content-type", "application/grpc")]), None);
        let response = grpc.refuse(&Problem::new(Code::InFlight, detail.clone()), None);
        let message = &response.headers()["grpc-message"];
        prop_assert!(message.as_bytes().iter().all(|byte| matches!(byte, b' '..=b'~')));
        let decoded = percent_encoding::percent_decode(message.as_bytes()).decode_utf8().unwrap();
        prop_assert_eq!(decoded, format!("in-flight: {detail}"));
    }
}

#[test]
fn wire_16_only_grpc_is_answered_so() {
    for kind in ["application/grpc-web+proto", "application/json", "application/grpcx", ""] {
        let manner = Manner::of(&asking(&[("content-type", kind)]), None);
        let response = manner.refuse(&Problem::new(Code::MissingKey, "No."), None);
        assert_eq!(response.status(), 400, "{kind}");
        assert_eq!(response.headers()["content-type"], "application/problem+json");
    }
}

#[test]
fn wire_21_any_origin_may_read_without_credentials() {
    let cors = Cors::any();
    for asking in [asking(&[]), asking(&[("origin", "https://a.example")])] {
        let manner = Manner::of(&asking, Some(&cors));
        let response = manner.refuse(&Problem::new(Code::MissingKey, "No."), None);
        let headers = response.headers();
        assert_eq!(headers["access-control-allow-origin"], "*");
        assert!(!headers.contains_key("access-control-allow-credentials"));
        assert!(!headers.contains_key("vary"));
    }
}

#[test]
fn wire_21_listed_origins_may_read() {
    let cors = Cors::origins(["https://a.example", "http://localhost:3000"], false).unwrap();
    let said = |origin: &'static str| -> HeaderMap {
        let manner = Manner::of(&asking(&[("origin", origin)]), Some(&cors));
        manner.refuse(&Problem::new(Code::MissingKey, "No."), None).headers().clone()
    };
    for origin in ["https://a.example", "http://localhost:3000"] {
        assert_eq!(said(origin)["access-control-allow-origin"], origin);
        assert_eq!(said(origin).get("access-control-allow-credentials"), None);
    }
    for origin in ["http://a.example", "https://a.example.evil", "null", "https://a.example:443"] {
        assert_eq!(said(origin).get("access-control-allow-origin"), None, "{origin}");
        // Caches must not give this answer to the others.
        assert_eq!(said(origin)["vary"], HeaderValue::from_static("origin"));
    }
}

#[test]
fn wire_21_what_is_no_origin_is_refused_at_the_start() {
    for text in [
        "",
        "*",
        "a.example",
        "https://",
        "https://a.example/",
        "https://a.example/x",
        "https://A.example",
        "https://user@a.example",
        "HTTPS://a.example",
        "https://a.example\n",
    ] {
        let error = Cors::origins([text], true).unwrap_err().to_string();
        assert!(error.starts_with(&format!("{text:?} is no origin")), "{error}");
    }
}
