//! More than there is room for.

use std::time::Duration;

use hapax_gateway::{Config, ServerLimits};
use tokio::task::JoinSet;

use crate::world::{Raw, Upstream, config, post, request, start, text};

/// As little room as can be; how large bodies are of which so many have room at a time.
fn room(config: &mut Config, at_a_time: usize) -> usize {
    config.limits.connections = 16;
    config.limits.memory =
        ServerLimits::PROGRAM + 16 * ServerLimits::PER_CONNECTION + (32 << 20) + 8;
    config.policy.max_response_body = 64 << 10;
    // Bodies have half of it, requests three eighths of that.
    config.policy.max_request_body = (6 << 20) / at_a_time;
    config.policy.max_request_body
}

#[tokio::test(flavor = "multi_thread")]
async fn bodies_wait_for_memory_and_all_are_served() {
    let upstream =
        Upstream::start(|seen| async move { text(200, seen.body.len().to_string()) }).await;
    let mut config = config(upstream.url());
    let size = room(&mut config, 2);
    let gateway = start(config).await;
    let body = "x".repeat(size);
    let mut clients = JoinSet::new();
    for key in 0..12 {
        let (address, body) = (gateway.local_addr(), body.clone());
        clients.spawn(async move { post(address, "/", &key.to_string(), &body).await });
    }
    while let Some(answer) = clients.join_next().await {
        let answer = answer.unwrap();
        assert_eq!((answer.status, answer.text().as_str()), (200, size.to_string().as_str()));
    }
    assert_eq!(upstream.seen().len(), 12);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_below_the_minimum_rate_releases_its_memory() {
    let upstream = Upstream::counting().await;
    let mut config = config(upstream.url());
    // A little less than all, or the gateway would be refused.
    let size = room(&mut config, 1) - (1 << 20);
    config.policy.max_request_body = size;
    config.limits.stall = Duration::from_secs(5);
    let gateway = start(config).await;
    let mut slow = Raw::connect(gateway.local_addr()).await;
    slow.send(format!(
        "POST / HTTP/1.1\r\nhost: a\r\nidempotency-key: slow\r\ncontent-length: {size}\r\n\r\n"
    ))
    .await;
    let trickle = tokio::spawn(async move {
        while slow.try_send("x").await {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        slow.answer().await
    });
    // Without a key there is nothing to hold.
    let mut plain = Raw::connect(gateway.local_addr()).await;
    plain.send(request("POST", "/", &[], "x")).await;
    assert_eq!(plain.answer().await.status, 201);
    assert!(!trickle.is_finished());
    // With one it waits, until the slow one is given up.
    let large = "x".repeat(size);
    assert_eq!(post(gateway.local_addr(), "/", "k", &large).await.status, 201);
    let given_up = trickle.await.unwrap();
    assert_eq!((given_up.status, given_up.code().as_str()), (408, "request-timeout"));
    assert_eq!(upstream.seen().len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_over_its_limit_is_rejected_in_every_framing() {
    let upstream = Upstream::counting().await;
    let gateway = start(config(upstream.url())).await;
    let mut sized = Raw::connect(gateway.local_addr()).await;
    sized
        .send("POST / HTTP/1.1\r\nhost: a\r\nidempotency-key: k\r\ncontent-length: 1073741824\r\n\r\n")
        .await;
    assert_eq!(sized.answer().await.code(), "body-too-large");

    let mut chunked = Raw::connect(gateway.local_addr()).await;
    chunked
        .send("POST / HTTP/1.1\r\nhost: a\r\nidempotency-key: k\r\ntransfer-encoding: chunked\r\n\r\n")
        .await;
    let chunk = format!("10000\r\n{}\r\n", "x".repeat(0x10000));
    // A gibibyte, if it is let.
    let mut sent = 0;
    while sent < 16 * 1024 && chunked.try_send(&chunk).await {
        sent += 1;
    }
    assert!(sent < 16 * 1024, "all of it was taken");
    let answer = chunked.answer().await;
    assert_eq!((answer.status, answer.code().as_str()), (413, "body-too-large"));
    assert_eq!(upstream.seen().len(), 0);
    assert_eq!(post(gateway.local_addr(), "/", "k", "x").await.status, 201);
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_over_their_limit_wait() {
    let upstream = Upstream::counting().await;
    let mut config = config(upstream.url());
    config.limits.connections = 2;
    let gateway = start(config).await;
    let mut one = Raw::connect(gateway.local_addr()).await;
    let mut two = Raw::connect(gateway.local_addr()).await;
    for used in [&mut one, &mut two] {
        used.send(request("POST", "/", &[], "x")).await;
        assert_eq!(used.answer().await.status, 201);
    }
    let mut three = Raw::connect(gateway.local_addr()).await;
    three.send(request("POST", "/", &[], "x")).await;
    let early = tokio::time::timeout(Duration::from_millis(200), three.answer()).await;
    assert!(early.is_err(), "a third connection was served");
    drop(one);
    assert_eq!(three.answer().await.status, 201);
}
