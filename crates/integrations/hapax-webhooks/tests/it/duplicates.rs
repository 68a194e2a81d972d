//! Further attempts, and manual resends.

use std::sync::Arc;
use std::time::Duration;

use axum::http::{HeaderValue, StatusCode};
use hapax_core::{Inspect, Key, OnUnknown};
use hapax_http::server::{RoutePolicy, ScopePart};
use hapax_operators::{
    Audit, Decider, Decision, DecisionChannel, OperatorRecords, OperatorVerdict,
};
use hapax_webhooks::WebhookLayer;

use crate::world::{
    NOW, STRIPE_SECRET, World, event, post, send, stripe_delivery, stripe_signature,
};

#[tokio::test]
async fn an_attempt_during_the_first_is_rejected_and_gets_the_same_answer_later() {
    let world = World::new();
    let receiver = world.receiver(world.stripe());
    world.handler.may_end.forget_permits(usize::MAX);
    let first = tokio::spawn({
        let receiver = receiver.clone();
        async move { send(&receiver, stripe_delivery(&event("evt_1"))).await }
    });
    world.handler.began.notified().await;
    let second = send(&receiver, stripe_delivery(&event("evt_1"))).await;
    second.is_rejected(409, "in-flight");
    assert!(second.header("retry-after").parse::<u64>().unwrap() >= 1);
    world.handler.may_end.add_permits(1);
    let first = first.await.unwrap();
    first.is_first(200, "execution 1");
    let third = send(&receiver, stripe_delivery(&event("evt_1"))).await;
    third.is_replay(200, "execution 1");
    assert_eq!(first.header("content-type"), third.header("content-type"));
    assert_eq!(world.handled().len(), 1);
}

#[tokio::test]
async fn a_manual_resend_is_replayed_whatever_its_signature_and_time() {
    let world = World::new();
    let receiver = world.receiver(world.stripe());
    send(&receiver, stripe_delivery(&event("evt_1"))).await.is_first(200, "execution 1");
    for days in 1..=30 {
        world.clock.advance(Duration::from_secs(24 * 60 * 60));
        let body = event("evt_1");
        let signature = stripe_signature(STRIPE_SECRET, NOW + days * 24 * 60 * 60, &body);
        let response = send(&receiver, post(&[("stripe-signature", &signature)], body)).await;
        response.is_replay(200, "execution 1");
    }
}

/// The headers that `hapax keys release evt_1 --scope 'webhook-source: stripe'` makes a scope of.
fn scope() -> [(ScopePart, HeaderValue); 1] {
    [("webhook-source".parse().unwrap(), HeaderValue::from_static("stripe"))]
}

#[tokio::test]
async fn a_resend_executes_after_an_operator_released_the_record() {
    let world = World::new();
    let receiver = world.receiver(world.stripe());
    send(&receiver, stripe_delivery(&event("evt_1"))).await.is_first(200, "execution 1");

    let folder = tempfile::tempdir().unwrap();
    let audit = Audit::new(folder.path().join("audit.jsonl"), "the receiver");
    let store = Arc::clone(&world.store) as Arc<dyn Inspect>;
    let records = OperatorRecords::new(world.engine.clone(), store, audit, Duration::from_secs(5));
    let id = records.id(&scope(), &Key::new("evt_1").unwrap());
    let fence = records.show(&id).await.unwrap().fence;
    let decision = Decision {
        fence,
        force: false,
        forget: true,
        any_kind: false,
        reason: "the handler had a bug".to_owned(),
        who: None,
        outcome: OperatorVerdict::DidNotHappen,
        status: None,
        headers: Vec::new(),
        body: None,
        body_base64: None,
    };
    let decider = Decider { who: "a test".into(), by: DecisionChannel::Cli, from: "a test".into() };
    records.resolve(&id, decision, decider).await.unwrap();
    send(&receiver, stripe_delivery(&event("evt_1"))).await.is_first(200, "execution 2");
    send(&receiver, stripe_delivery(&event("evt_1"))).await.is_replay(200, "execution 2");
}

#[tokio::test]
async fn a_4xx_of_the_handler_is_not_stored() {
    let world = World::new();
    let receiver = world.receiver(world.stripe());
    for (number, status) in [404, 409, 422, 400].into_iter().enumerate() {
        world.answer_with(StatusCode::from_u16(status).unwrap());
        let response = send(&receiver, stripe_delivery(&event("evt_1"))).await;
        response.is_first(status, &format!("execution {}", number + 1));
    }
    world.answer_with(StatusCode::OK);
    send(&receiver, stripe_delivery(&event("evt_1"))).await.is_first(200, "execution 5");
    send(&receiver, stripe_delivery(&event("evt_1"))).await.is_replay(200, "execution 5");
}

#[tokio::test]
async fn a_5xx_of_the_handler_executes_again_only_under_reexecute() {
    for (on_unknown, executions) in [(OnUnknown::Block, 1), (OnUnknown::Reexecute, 2)] {
        let world = World::new();
        let webhooks = world.stripe();
        let mut options = webhooks.route_options();
        options.policy.terms.on_unknown = on_unknown;
        let receiver = world.bare().layer(world.idempotency(options)).layer(webhooks);
        world.answer_with(StatusCode::INTERNAL_SERVER_ERROR);
        send(&receiver, stripe_delivery(&event("evt_1"))).await.is_first(500, "execution 1");
        world.answer_with(StatusCode::OK);
        let second = send(&receiver, stripe_delivery(&event("evt_1"))).await;
        match on_unknown {
            OnUnknown::Reexecute => second.is_first(200, "execution 2"),
            _ => second.is_rejected(409, "outcome-unknown"),
        }
        assert_eq!(world.handled().len(), executions);
    }
}

#[tokio::test]
async fn the_options_of_every_source_are_valid() {
    let world = World::new();
    let secret = "It's a Secret to Everybody";
    for layer in [world.stripe(), world.layer(WebhookLayer::github("github").secret(secret))] {
        RoutePolicy::new(hapax_webhooks::scope(), layer.route_options()).unwrap();
    }
    let fingerprint = world.stripe().route_options().fingerprint;
    assert_eq!(fingerprint.name().as_str(), "http/1;body=canonical;except=/pending_webhooks");
    let statuses = world.stripe().route_options().statuses;
    assert_eq!(statuses.retryable_statuses.len(), 1);
}
