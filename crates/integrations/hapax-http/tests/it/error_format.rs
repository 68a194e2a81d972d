//! How refusals are written.

use std::time::Duration;

use hapax_http::classify::OutcomeClass;
use hapax_http::error_format::{ErrorFormat, class, grpc_status};
use hapax_http::problem::{Code, Problem};
use http::HeaderMap;
use proptest::prelude::*;

fn asking(fields: &[(&'static str, &'static str)]) -> HeaderMap {
    fields.iter().map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap())).collect()
}

#[test]
fn wire_16_every_code_has_a_grpc_status() {
    let grpc = ErrorFormat::of(&asking(&[("content-type", "application/grpc+proto")]));
    for code in Code::ALL {
        let response = grpc.render(&Problem::new(code, "Why not."), None);
        assert_eq!(response.status(), 200);
        let status = response.headers()["grpc-status"].to_str().unwrap();
        assert_eq!(status, grpc_status(code).to_string());
        // Not ok, and not one that says that the method is missing or, without a reason, the caller unknown.
        assert!(!["0", "1", "5", "7", "12"].contains(&status));
        assert_eq!(status == "16", code == Code::InvalidToken);
        // Whatever executed nothing may be retried only where HTTP says 408, 409 or 503 too, or
        // never reached the upstream.
        let retry = ["10", "14"].contains(&status);
        let conflicts = [Code::InFlight, Code::Superseded, Code::UpstreamUnreachable];
        let http = conflicts.contains(&code) || [408, 503].contains(&code.status().as_u16());
        assert_eq!(retry, http, "{code:?}");
        assert!(response.body().is_empty());
    }
}

#[test]
fn wire_16_a_grpc_message_is_percent_encoded() {
    let grpc = ErrorFormat::of(&asking(&[("content-type", "application/grpc")]));
    let problem =
        Problem::new(Code::InFlight, "100 % of\nZażółć.").retry_after(Duration::from_millis(1500));
    let response = grpc.render(&problem, None);
    let message = response.headers()["grpc-message"].to_str().unwrap();
    assert_eq!(message, "in-flight: 100 %25 of%0AZa%C5%BC%C3%B3%C5%82%C4%87.");
    assert_eq!(response.headers()["grpc-retry-pushback-ms"], "2000");
    assert_eq!(response.headers().get("retry-after"), None);
}

proptest! {
    #[test]
    fn wire_16_any_detail_is_decoded_as_it_was_encoded(detail in any::<String>()) {
        let grpc = ErrorFormat::of(&asking(&[("content-type", "application/grpc")]));
        let response = grpc.render(&Problem::new(Code::InFlight, detail.clone()), None);
        let message = &response.headers()["grpc-message"];
        prop_assert!(message.as_bytes().iter().all(|byte| matches!(byte, b' '..=b'~')));
        let decoded = percent_encoding::percent_decode(message.as_bytes()).decode_utf8().unwrap();
        prop_assert_eq!(decoded, format!("in-flight: {detail}"));
    }
}

#[test]
fn wire_16_only_grpc_requests_get_grpc_statuses() {
    for kind in ["application/grpc-web+proto", "application/json", "application/grpcx", ""] {
        let error_format = ErrorFormat::of(&asking(&[("content-type", kind)]));
        let response = error_format.render(&Problem::new(Code::MissingKey, "No."), None);
        assert_eq!(response.status(), 400, "{kind}");
        assert_eq!(response.headers()["content-type"], "application/problem+json");
    }
}

/// What keeps answers for clients of its own is told what a refusal means; nobody else is.
#[test]
fn wire_21_a_rejection_states_its_outcome_class_for_a_gateway_in_front() {
    for kind in ["application/grpc", "application/json"] {
        for code in Code::ALL {
            let problem = Problem::new(code, "Why not.");
            let said = |fields: &[_]| ErrorFormat::of(&asking(fields)).render(&problem, None);
            let plain = said(&[("content-type", kind)]);
            assert!(!plain.headers().contains_key("idempotency-outcome"));
            let told = said(&[("content-type", kind), ("idempotency-fence", "7")]);
            assert_eq!(told.headers()["idempotency-outcome"], class(code).as_str());
            assert_eq!(told.body(), plain.body());
        }
    }
    let of = |class_of| Code::ALL.into_iter().filter(move |code| class(*code) == class_of);
    // What is kept for good is what nobody's retry could change.
    assert!(
        of(OutcomeClass::Final)
            .all(|code| code.status() == 400 || code == Code::ResponseNotRetained)
    );
    // Nothing that may have taken effect is given free.
    for may in [Code::OutcomeUnknown, Code::OutcomePending, Code::Superseded, Code::HandlerFailed] {
        assert!(of(OutcomeClass::Unknown).any(|code| code == may));
    }
    assert!(of(OutcomeClass::Retryable).any(|code| code == Code::InFlight));
}
