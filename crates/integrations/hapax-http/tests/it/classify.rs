use std::time::Duration;

use hapax_core::OnUnknown;
use hapax_http::classify::{
    HeaderOverride, OutcomeClass, Profile, classify_grpc, is_grpc, is_redirect,
};
use http::StatusCode;
use http::header::{HeaderMap, HeaderValue};

fn classes(profile: Profile, class: OutcomeClass, on_unknown: OnUnknown) -> Vec<u16> {
    (200..600).filter(|status| profile.classify(code(*status), on_unknown) == class).collect()
}

fn code(status: u16) -> StatusCode {
    StatusCode::from_u16(status).unwrap()
}

#[test]
fn wire_14_the_standard_table() {
    let standard = |class, on_unknown| classes(Profile::Standard, class, on_unknown);
    let retryable = vec![401, 403, 408, 413, 421, 425, 429];
    let kept: Vec<_> = (200..500).filter(|status| !retryable.contains(status)).collect();
    for on_unknown in [OnUnknown::Block, OnUnknown::Reconcile] {
        assert_eq!(standard(OutcomeClass::Retryable, on_unknown), retryable);
        assert_eq!(standard(OutcomeClass::Unknown, on_unknown), Vec::from_iter(500..600));
        assert_eq!(standard(OutcomeClass::Final, on_unknown), kept);
    }
    let with_503 = [&retryable[..], &[503]].concat();
    assert_eq!(standard(OutcomeClass::Retryable, OnUnknown::Reexecute), with_503);
    assert_eq!(standard(OutcomeClass::Final, OnUnknown::Reexecute), kept);
}

#[test]
fn under_stripe_v1_all_but_409_and_429_are_final() {
    assert_eq!(classes(Profile::StripeV1, OutcomeClass::Retryable, OnUnknown::Block), [409, 429]);
    assert_eq!(classes(Profile::StripeV1, OutcomeClass::Unknown, OnUnknown::Block), [0; 0]);
}

#[test]
fn a_redirect_is_a_307_or_308_with_a_location() {
    let mut headers = HeaderMap::new();
    assert!((200..600).all(|status| !is_redirect(code(status), &headers)));
    headers.insert("location", HeaderValue::from_bytes("/café".as_bytes()).unwrap());
    let redirects = (200..600).filter(|status| is_redirect(code(*status), &headers));
    assert_eq!(redirects.collect::<Vec<_>>(), [307, 308]);
}

#[test]
fn under_success_only_2xx_is_final() {
    let kept = classes(Profile::SuccessOnly, OutcomeClass::Final, OnUnknown::Block);
    assert_eq!(kept, Vec::from_iter(200..300));
    assert_eq!(classes(Profile::SuccessOnly, OutcomeClass::Unknown, OnUnknown::Block), [0; 0]);
}

#[test]
fn profile_names_are_parsed_as_they_are_written() {
    for profile in [Profile::Standard, Profile::StripeV1, Profile::SuccessOnly] {
        assert_eq!(profile.to_string().parse(), Ok(profile));
    }
    assert!("Standard".parse::<Profile>().is_err());
}

fn said(lines: &[(&'static str, &'static str)]) -> HeaderOverride {
    let mut headers = HeaderMap::new();
    for (name, value) in lines {
        headers.append(*name, HeaderValue::from_static(value));
    }
    HeaderOverride::from_headers(&headers)
}

#[test]
fn wire_16_a_response_overrides_by_headers() {
    for class in [OutcomeClass::Final, OutcomeClass::Retryable, OutcomeClass::Unknown] {
        let found = said(&[("idempotency-outcome", class.as_str())]);
        assert_eq!(found, HeaderOverride { class: Some(class), ..HeaderOverride::default() });
    }
    let found = said(&[("idempotency-retention", "3600")]);
    let hour = Some(Duration::from_secs(3600));
    assert_eq!(found, HeaderOverride { retention: hour, ..HeaderOverride::default() });
}

#[test]
fn wire_23_an_invalid_override_is_ignored_and_counted() {
    for value in ["", "Final", "final, final", "final;x"] {
        let found = said(&[("idempotency-outcome", value)]);
        assert_eq!(found, HeaderOverride { invalid: 1, ..HeaderOverride::default() }, "{value}");
    }
    for value in ["", "0", "-1", "+1", "1.5", "1h", "99999999999", " 1x"] {
        let found = said(&[("idempotency-retention", value)]);
        assert_eq!(found, HeaderOverride { invalid: 1, ..HeaderOverride::default() }, "{value}");
    }
    let twice = said(&[("idempotency-outcome", "final"), ("idempotency-outcome", "final")]);
    assert_eq!(twice, HeaderOverride { invalid: 1, ..HeaderOverride::default() });
}

#[test]
fn wire_16_grpc_is_classified_by_grpc_status() {
    let with = |status: &'static str| {
        let mut map = HeaderMap::new();
        map.insert("grpc-status", HeaderValue::from_static(status));
        map
    };
    let none = HeaderMap::new();
    let block = OnUnknown::Block;
    for (status, on_unknown) in (0..17u8)
        .flat_map(|status| [(status, block), (status, OnUnknown::Reconcile)])
        .chain([(13, OnUnknown::Reexecute), (14, OnUnknown::Reexecute)])
    {
        let expected = match (status, on_unknown) {
            (8, _) | (14, OnUnknown::Reexecute) => OutcomeClass::Retryable,
            (2 | 4 | 13 | 14 | 15, _) => OutcomeClass::Unknown,
            _ => OutcomeClass::Final,
        };
        let status: &'static str = status.to_string().leak();
        assert_eq!(classify_grpc(&none, Some(&with(status)), on_unknown), expected, "{status}");
        assert_eq!(classify_grpc(&with(status), None, on_unknown), expected, "{status}");
    }
    assert_eq!(classify_grpc(&none, None, block), OutcomeClass::Unknown);
    for unreadable in ["", "00", "17", "-1", "99", "ok", "0, 0", "5 ", "256"] {
        let class = classify_grpc(&none, Some(&with(unreadable)), block);
        assert_eq!(class, OutcomeClass::Unknown, "{unreadable}");
    }
    for (kind, grpc) in [
        ("application/grpc", true),
        ("application/grpc+proto", true),
        ("application/grpc;x", true),
        ("Application/GRPC+proto", true),
        ("application/grpc-web", false),
        ("application/json", false),
    ] {
        let mut headers = HeaderMap::new();
        headers.insert("content-type", HeaderValue::from_static(kind));
        assert_eq!(is_grpc(&headers), grpc, "{kind}");
    }
}
