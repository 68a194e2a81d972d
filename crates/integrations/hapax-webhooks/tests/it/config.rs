//! Settings that are not valid, and what `Debug` shows.

use std::time::Duration;

use axum::http::HeaderName;
use hapax_webhooks::{
    DeliveryIdLocation, HmacScheme, SecretError, SignatureEncoding, WebhookConfigError,
    WebhookLayer,
};

use crate::world::{OTHER_SECRET, STRIPE_SECRET, standard_secret};

const SECRET: &str = "It's a Secret to Everybody";

fn error(built: Result<WebhookLayer, WebhookConfigError>) -> SecretError {
    match built {
        Err(WebhookConfigError::Secret { number: 1, error }) => error,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_source_has_a_plain_name() {
    let long = "x".repeat(65);
    for name in ["", " ", "a b", "é", "a\n", "a:b", "a/b", &long] {
        let error = WebhookLayer::github(name).secret(SECRET).build().unwrap_err();
        assert_eq!(error, WebhookConfigError::Source { found: name.to_owned() });
    }
    for name in ["stripe", "Stripe_2.test-eu", &long[1..]] {
        WebhookLayer::github(name).secret(SECRET).build().unwrap();
    }
}

#[test]
fn there_are_one_to_eight_secrets() {
    let none = WebhookLayer::github("github").build().unwrap_err();
    assert_eq!(none, WebhookConfigError::NoSecret);
    let with = |count| {
        let builder = WebhookLayer::github("github");
        (0..count).fold(builder, |builder, _| builder.secret(SECRET)).build()
    };
    with(8).unwrap();
    assert_eq!(with(9).unwrap_err(), WebhookConfigError::TooManySecrets { found: 9 });
}

#[test]
fn an_unusable_secret_is_rejected_with_its_number_and_without_its_text() {
    let github = |secret: &str| error(WebhookLayer::github("github").secret(secret).build());
    assert_eq!(github(""), SecretError::Empty);
    assert_eq!(github("fifteen letters"), SecretError::TooShort { found: 15, least: 16 });
    for spaced in [" sixteen letters!", "sixteen letters!\n", "\tsixteen letters!"] {
        assert_eq!(github(spaced), SecretError::WhiteSpace);
    }
    let stripe = |secret: &str| error(WebhookLayer::stripe("stripe").secret(secret).build());
    assert_eq!(stripe("sk_live_4f1c0d8e6b2a47c39d50"), SecretError::Prefix);
    let standard = |secret: &str| error(WebhookLayer::standard("other").secret(secret).build());
    assert_eq!(standard("MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"), SecretError::Prefix);
    assert_eq!(standard("whsec_no base64"), SecretError::Base64);
    assert_eq!(
        standard(&standard_secret(&[7; 23])),
        SecretError::TooShort { found: 23, least: 24 }
    );

    let second = WebhookLayer::stripe("stripe").secret(STRIPE_SECRET).secret("whsec_s3cr3t");
    let error = second.build().unwrap_err();
    assert_eq!(
        error.to_string(),
        "signing secret 2: expected at least 16 bytes, found 12: have the sender make a longer \
         secret"
    );
}

#[test]
fn a_limit_or_a_tolerance_of_zero_is_rejected() {
    let stripe = || WebhookLayer::stripe("stripe").secret(STRIPE_SECRET);
    assert_eq!(stripe().body_limit(0).build().unwrap_err(), WebhookConfigError::ZeroBodyLimit);
    let error = stripe().tolerance(Duration::ZERO).build().unwrap_err();
    assert_eq!(error, WebhookConfigError::ZeroTolerance);
    stripe().body_limit(1).tolerance(Duration::MAX).build().unwrap();
}

#[test]
fn a_tolerance_without_a_timestamp_is_rejected() {
    let github = WebhookLayer::github("github").secret(SECRET);
    let error = github.tolerance(Duration::from_secs(60)).build().unwrap_err();
    assert_eq!(error, WebhookConfigError::ToleranceWithoutTimestamp);
}

#[test]
fn an_id_without_a_pointer_is_rejected() {
    let id = DeliveryIdLocation::json([""; 0]).unwrap();
    let name = HeaderName::from_static("x-signature");
    let scheme = HmacScheme::new(name, SignatureEncoding::Hex, id);
    let error = WebhookLayer::hmac("other", scheme).secret(SECRET).build().unwrap_err();
    assert_eq!(error, WebhookConfigError::NoPointers);
    assert!(DeliveryIdLocation::json(["id"]).is_err());
}

#[test]
fn debug_shows_no_secret() {
    let builder = WebhookLayer::stripe("stripe").secret(STRIPE_SECRET).secret(OTHER_SECRET);
    let shown = [format!("{builder:?}"), format!("{:?}", builder.build().unwrap())];
    for shown in shown {
        assert!(shown.contains("stripe"), "{shown}");
        for secret in [STRIPE_SECRET, OTHER_SECRET] {
            assert!(!shown.contains(secret) && !shown.contains(&secret[6..]), "{shown}");
            assert!(!shown.contains(&format!("{:?}", secret.as_bytes())), "{shown}");
        }
    }
}
