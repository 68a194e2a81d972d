//! Responses over the wire, by the profile of their server.

use std::time::Duration;

use hapax_client::{SendError, Server};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpListener;

use crate::bank::{Act, Bank, answer};
use crate::world::{client, open};

pub(crate) fn problem(status: u16, code: &str, headers: &[&str]) -> Act {
    let body = format!(r#"{{"type":"urn:hapax:problem:{code}","code":"{code}"}}"#);
    let mut lines = vec!["content-type: application/problem+json"];
    lines.extend(headers);
    Act::Answer(answer(status, &lines, &body))
}

#[tokio::test]
async fn a_rejection_that_passes_is_tried_again_no_earlier_than_it_says() {
    let bank = Bank::start().await;
    bank.act([
        problem(409, "in-flight", &["retry-after: 1"]),
        problem(409, "superseded", &[]),
        problem(503, "outcome-pending", &[]),
        Act::Answer(answer(500, &["idempotency-replayed: false"], "broken")),
        Act::Answer(answer(429, &["retry-after: Sun, 06 Nov 1994 08:49:37 GMT"], "")),
    ]);
    let client = client(&bank, Server::hapax()).await;
    let begun = tokio::time::Instant::now();
    let sent = client.post(bank.url("/")).operation("n").send().await.unwrap();
    assert_eq!((sent.response.status.as_u16(), sent.tries), (201, 6));
    assert!(begun.elapsed() >= Duration::from_secs(1));
    let arrived = bank.arrived();
    assert!(arrived.iter().all(|it| *it == arrived[0]), "the same request each time");
}

#[tokio::test]
async fn a_response_ends_the_operation_whatever_its_status() {
    let bank = Bank::start().await;
    let client = client(&bank, Server::hapax()).await;
    for (number, status) in
        [200, 204, 301, 302, 303, 307, 308, 400, 404, 409, 418, 422, 501].into_iter().enumerate()
    {
        let elsewhere = format!("location: {}", bank.url("/elsewhere"));
        bank.act([Act::Answer(answer(status, &[&*elsewhere], ""))]);
        let send = || client.post(bank.url("/")).operation(format!("n/{status}")).send();
        let sent = send().await.unwrap();
        assert_eq!((sent.response.status.as_u16(), sent.tries), (status, 1));
        assert!(sent.response.headers.contains_key("location"));
        assert_eq!(send().await.unwrap().response, sent.response, "the kept one");
        assert_eq!(bank.arrived().len(), number + 1, "not followed: {status}");
    }
}

#[tokio::test]
async fn a_replayed_failure_is_the_response() {
    for (server, header) in [
        (Server::hapax(), "idempotency-replayed: true"),
        (Server::stripe(), "idempotent-replayed: true"),
    ] {
        let bank = Bank::start().await;
        bank.act([Act::Answer(answer(500, &[], "")), Act::Answer(answer(500, &[header], "again"))]);
        let client = client(&bank, server).await;
        let sent = client.post(bank.url("/")).operation("n").send().await.unwrap();
        assert_eq!((sent.response.status.as_u16(), sent.tries, sent.replayed), (500, 2, true));
    }
}

#[tokio::test]
async fn an_outcome_that_the_server_does_not_know_is_unknown_until_it_is_asked_again() {
    let bank = Bank::start().await;
    bank.act([
        problem(409, "outcome-unknown", &["retry-after: 0"]),
        problem(409, "outcome-unknown", &[]),
    ]);
    let client = client(&bank, Server::hapax()).await;
    let send = || client.post(bank.url("/")).operation("n").send();
    let end = send().await;
    assert!(matches!(end, Err(SendError::Unknown(_))), "{end:?}");
    assert_eq!(bank.arrived().len(), 2);
    let pending = client.pending().await.unwrap();
    assert!(pending[0].may_have_happened, "{pending:?}");
    assert_eq!(send().await.unwrap().response.status, 201);
}

#[tokio::test]
async fn a_key_that_the_server_has_for_another_request_is_never_tried_again() {
    let bank = Bank::start().await;
    bank.act([problem(422, "key-reused", &[])]);
    let client = client(&bank, Server::hapax()).await;
    for _ in 0..2 {
        let end = client.post(bank.url("/")).operation("n").send().await;
        assert!(matches!(end, Err(SendError::ReusedAtServer(_))), "{end:?}");
    }
    assert_eq!(bank.arrived().len(), 1);
}

/// Returns a response that says that nothing was executed.
fn marked(status: u16) -> Act {
    Act::Answer(answer(status, &["idempotency-outcome: retryable"], "no"))
}

#[tokio::test]
async fn a_name_is_free_after_a_response_with_which_nothing_happened() {
    let bare = |status| Act::Answer(answer(status, &[], "no"));
    let problems = ["missing-scope", "missing-key", "invalid-key"].map(|code| {
        let reject = || problem(400, code, &[]);
        (400, [reject(), reject()])
    });
    let statuses = [403, 413, 421].map(|status| (status, [bare(status), bare(status)]));
    let marked = [400, 404, 405].map(|status| (status, [marked(status), marked(status)]));
    for (status, acts) in statuses.into_iter().chain(problems).chain(marked) {
        let bank = Bank::start().await;
        bank.act(acts);
        let client = client(&bank, Server::hapax()).await;
        let post = |body| client.post(bank.url("/")).operation("n").body(body);
        for body in ["one", "one"] {
            let sent = post(body).send().await.unwrap();
            assert_eq!((sent.response.status.as_u16(), sent.replayed), (status, false));
        }
        assert_eq!(post("another").send().await.unwrap().response.status, 201);
        assert_eq!(bank.arrived().len(), 3);
        let end = post("one").send().await;
        assert!(matches!(end, Err(SendError::Reused)), "{end:?}");
    }
}

#[tokio::test]
async fn a_rejection_after_a_try_that_may_have_arrived_is_no_response() {
    let bare = |status| Act::Answer(answer(status, &[], ""));
    for (status, rejection, unauthorized) in [
        (403, bare(403), true),
        (413, bare(413), false),
        (404, marked(404), false),
        (400, problem(400, "missing-scope", &[]), false),
    ] {
        let bank = Bank::start().await;
        bank.act([Act::CutAnswer(10), rejection]);
        let client = client(&bank, Server::hapax()).await;
        let end = client.post(bank.url("/")).operation("n").send().await;
        match end {
            Err(SendError::Unauthorized) if unauthorized => {}
            Err(SendError::Unknown(_)) if !unauthorized => {}
            end => panic!("{status}: {end:?}"),
        }
        let sent = client.post(bank.url("/")).operation("n").send().await.unwrap();
        assert_eq!((sent.response.status.as_u16(), sent.replayed), (201, true));
        assert_eq!(bank.effects(), [1]);
    }
}

#[tokio::test]
async fn a_server_without_keys_gets_nothing_again_once_a_try_may_have_arrived() {
    let bank = Bank::start().await;
    bank.act([Act::CutAnswer(10)]);
    let client = client(&bank, Server::without_keys()).await;
    for _ in 0..3 {
        let end = client.post(bank.url("/")).operation("n").send().await;
        assert!(matches!(end, Err(SendError::Unknown(_))), "{end:?}");
    }
    let resumed = client.resume().await.unwrap();
    assert_eq!((resumed.pending, resumed.not_continued), (0, 1));
    assert_eq!(bank.arrived().len(), 1);
    assert_eq!(bank.arrived()[0].header("idempotency-key"), None);
    // A complete answer is the answer, also one that invites to try again.
    bank.act([Act::Answer(answer(503, &["retry-after: 1"], ""))]);
    let sent = client.post(bank.url("/")).operation("other").send().await.unwrap();
    assert_eq!(sent.response.status, 503);
}

#[tokio::test]
async fn the_key_has_the_form_and_the_header_of_its_server() {
    for (server, header, quote) in [
        (Server::hapax(), "idempotency-key", "\""),
        (Server::plain(), "idempotency-key", "\""),
        (Server::stripe(), "idempotency-key", ""),
        (
            Server::plain().key_header(http::HeaderName::from_static("paypal-request-id")),
            "paypal-request-id",
            "\"",
        ),
    ] {
        let bank = Bank::start().await;
        let client = client(&bank, server).await;
        client.post(bank.url("/")).operation("n").send().await.unwrap();
        let key = client.key("n").unwrap();
        let expected = format!("{quote}{}{quote}", key.as_str());
        assert_eq!(bank.arrived()[0].header(header), Some(&*expected));
    }
}

#[tokio::test]
async fn a_body_that_is_too_large_for_the_journal_reaches_the_caller_and_is_not_stored() {
    let bank = Bank::start().await;
    let large = "x".repeat((1 << 20) + 1);
    bank.act([Act::Execute(answer(201, &["idempotency-replayed: false"], &large))]);
    let client = client(&bank, Server::hapax()).await;
    let send = || client.post(bank.url("/")).operation("n").send();
    assert_eq!(send().await.unwrap().response.body.len(), large.len());
    let end = send().await;
    assert!(
        matches!(end, Err(SendError::ResponseNotRetained { status }) if status == 201),
        "{end:?}"
    );
    assert_eq!(bank.arrived().len(), 1);
    // One of exactly the limit is kept.
    let largest = "x".repeat(1 << 20);
    bank.act([Act::Execute(answer(201, &[], &largest))]);
    let send = || client.post(bank.url("/")).operation("other").send();
    assert_eq!(send().await.unwrap().response.body.len(), largest.len());
    assert_eq!(send().await.unwrap().response.body.len(), largest.len());
}

#[tokio::test]
async fn a_body_without_memory_does_not_reach_the_caller_and_the_memory_is_returned() {
    let bank = Bank::start().await;
    let (large, larger) = ("x".repeat(2 << 20), "x".repeat((2 << 20) + 1));
    // A body of 2 MiB has one of them beside the first, which is that of a stored response.
    let client = open(&bank, Server::hapax()).response_memory(1 << 20).build().await.unwrap();
    let send = async |name: &str, body: &str| {
        bank.act([Act::Execute(answer(201, &["idempotency-replayed: false"], body))]);
        client.post(bank.url("/")).operation(name).send().await
    };
    for name in ["one", "two", "three"] {
        assert_eq!(send(name, &large).await.unwrap().response.body.len(), large.len(), "{name}");
    }
    let end = send("four", &larger).await;
    let is_dropped = matches!(end, Err(SendError::ResponseNotRetained { status }) if status == 201);
    assert!(is_dropped, "{end:?}");
    assert_eq!(send("five", &large).await.unwrap().response.body.len(), large.len());
}

#[tokio::test]
async fn a_body_that_is_being_read_leaves_no_memory_to_another() {
    let (bank, slow) = (Bank::start().await, TcpListener::bind("127.0.0.1:0").await.unwrap());
    let origin = format!("http://{}", slow.local_addr().unwrap());
    let client = open(&bank, Server::hapax()).server(&*origin, Server::hapax());
    let client = client.response_memory(1 << 20).build().await.unwrap();
    let large = "x".repeat(2 << 20);
    let response = answer(201, &["idempotency-replayed: false"], &large);
    let held = tokio::spawn(client.post(origin).operation("held").send());
    let (mut stream, _) = slow.accept().await.unwrap();
    // The request has not to be read for a response.
    let (most, rest) = response.split_at(response.len() - 1);
    stream.write_all(most.as_bytes()).await.unwrap();
    // Until the client has read most of it, others have the memory.
    for number in 0.. {
        bank.act([Act::Execute(response.clone())]);
        match client.post(bank.url("/")).operation(format!("beside/{number}")).send().await {
            Ok(sent) => assert_eq!(sent.response.body.len(), large.len()),
            Err(SendError::ResponseNotRetained { .. }) => break,
            Err(error) => panic!("{error:?}"),
        }
    }
    stream.write_all(rest.as_bytes()).await.unwrap();
    assert_eq!(held.await.unwrap().unwrap().response.body.len(), large.len());
}

#[tokio::test]
async fn a_response_whose_body_breaks_off_is_none() {
    let bank = Bank::start().await;
    let chunked = "HTTP/1.1 201 Created\r\ntransfer-encoding: chunked\r\n\r\n5\r\npaid \r\n";
    bank.act([
        Act::Execute(
            "HTTP/1.1 201 Created\r\ncontent-length: 9\r\nconnection: close\r\n\r\npaid".into(),
        ),
        Act::Execute(chunked.into()),
    ]);
    let client = open(&bank, Server::hapax())
        .idle_timeout(Duration::from_millis(300))
        .build()
        .await
        .unwrap();
    let sent = client.post(bank.url("/")).operation("n").send().await.unwrap();
    assert_eq!((sent.tries, &sent.response.body[..]), (3, &b"paid 0"[..]));
    assert_eq!(bank.effects(), [1]);
}

#[tokio::test]
async fn stripe_says_whether_a_failure_is_tried_again() {
    let bank = Bank::start().await;
    bank.act([
        Act::Answer(answer(
            409,
            &[],
            r#"{"error":{"type":"idempotency_error","code":"idempotency_key_in_use"}}"#,
        )),
        Act::Answer(answer(400, &["stripe-should-retry: true"], "")),
        Act::Answer(answer(503, &["stripe-should-retry: false"], "down")),
    ]);
    let client = client(&bank, Server::stripe()).await;
    let sent = client.post(bank.url("/")).operation("n").send().await.unwrap();
    assert_eq!((sent.response.status.as_u16(), sent.tries), (503, 3));
}
