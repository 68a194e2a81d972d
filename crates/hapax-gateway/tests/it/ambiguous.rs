//! Requests that can be read in two ways: refused before anything is claimed or forwarded.

use crate::world::{Raw, Upstream, config, post, request, start};

/// What each of these says in its head, after the request line.
const HEADS: [(&str, &str); 20] = [
    ("two lengths that agree", "host: a\r\ncontent-length: 1\r\ncontent-length: 1\r\n\r\nx"),
    ("two lengths that do not", "host: a\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nxx"),
    ("a list of lengths", "host: a\r\ncontent-length: 1, 1\r\n\r\nx"),
    ("a signed length", "host: a\r\ncontent-length: +1\r\n\r\nx"),
    (
        "a length before a coding",
        "host: a\r\ncontent-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    ),
    (
        "a length after a coding",
        "host: a\r\ntransfer-encoding: chunked\r\ncontent-length: 4\r\n\r\n0\r\n\r\n",
    ),
    ("two codings", "host: a\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n"),
    (
        "the same coding twice",
        "host: a\r\ntransfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    ),
    ("an unknown coding", "host: a\r\ntransfer-encoding: xchunked\r\n\r\n0\r\n\r\n"),
    ("a folded field", "host: a\r\nx: a\r\n b\r\ncontent-length: 1\r\n\r\nx"),
    ("a fold before any field", " x: a\r\nhost: a\r\ncontent-length: 1\r\n\r\nx"),
    ("a space before a colon", "host: a\r\ncontent-length : 1\r\n\r\nx"),
    ("a bare line feed", "host: a\ncontent-length: 1\r\n\r\nx"),
    ("a bare carriage return", "host: a\r\nx: a\rcontent-length: 9\r\ncontent-length: 1\r\n\r\nx"),
    ("a null", "host: a\r\nx: \0\r\ncontent-length: 1\r\n\r\nx"),
    ("no host", "content-length: 1\r\n\r\nx"),
    ("a host with a path", "host: a/b\r\ncontent-length: 1\r\n\r\nx"),
    ("a host with a user", "host: u@a\r\ncontent-length: 1\r\n\r\nx"),
    ("a host with a word for a port", "host: a:http\r\ncontent-length: 1\r\n\r\nx"),
    ("two hosts", "host: a\r\nhost: b\r\ncontent-length: 1\r\n\r\nx"),
];

#[tokio::test(flavor = "multi_thread")]
async fn each_is_refused_and_nothing_is_claimed_or_forwarded() {
    let upstream = Upstream::counting().await;
    let gateway = start(config(upstream.url())).await;
    for (name, head) in HEADS {
        for key in ["", "idempotency-key: k\r\n"] {
            let mut raw = Raw::connect(gateway.local_addr()).await;
            raw.send(format!("POST /a HTTP/1.1\r\n{key}{head}")).await;
            let answer = raw.answer().await;
            assert_eq!(
                (answer.status, answer.code().as_str()),
                (400, "malformed-request"),
                "{name}"
            );
            assert_eq!(answer.header("connection"), "close", "{name}");
            assert_eq!(raw.rest().await, b"", "{name}: nothing is served after it");
        }
    }
    assert_eq!(upstream.seen().len(), 0);
    // The key was not touched by any of them.
    let answer = post(gateway.local_addr(), "/a", "k", "x").await;
    assert_eq!((answer.status, answer.header("idempotency-replayed")), (201, "false"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_target_that_is_neither_path_nor_url_is_refused() {
    let upstream = Upstream::counting().await;
    let gateway = start(config(upstream.url())).await;
    for target in ["*", "a", "a.example:80", "ftp://a/", "mailto:a@b", "?x"] {
        let mut raw = Raw::connect(gateway.local_addr()).await;
        raw.send(request("POST", target, &[("idempotency-key", "k")], "x")).await;
        assert_eq!(raw.answer().await.code(), "malformed-request", "{target}");
    }
    assert_eq!(upstream.seen().len(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_smuggled_behind_one_is_not_served() {
    let upstream = Upstream::counting().await;
    let gateway = start(config(upstream.url())).await;
    let mut raw = Raw::connect(gateway.local_addr()).await;
    raw.send(
        "POST /a HTTP/1.1\r\nhost: a\r\ncontent-length: 4\r\ntransfer-encoding: chunked\r\n\r\n\
         0\r\n\r\nPOST /smuggled HTTP/1.1\r\nhost: a\r\ncontent-length: 0\r\n\r\n",
    )
    .await;
    assert_eq!(raw.answer().await.status, 400);
    assert_eq!(raw.rest().await, b"");
    assert_eq!(upstream.seen().len(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_to_earlier_requests_of_the_connection_are_not_disturbed() {
    let upstream = Upstream::counting().await;
    let gateway = start(config(upstream.url())).await;
    let mut raw = Raw::connect(gateway.local_addr()).await;
    let first = request("POST", "/1", &[("idempotency-key", "k")], "one");
    let second = request("POST", "/2", &[], "two");
    let bad = "POST /3 HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\ncontent-length: 1\r\n\r\nx";
    raw.send(format!("{first}{second}\r\n{bad}{first}")).await;
    assert_eq!(raw.answer().await.text(), "1");
    assert_eq!(raw.answer().await.text(), "2");
    assert_eq!(raw.answer().await.code(), "malformed-request");
    assert_eq!(raw.rest().await, b"");
    assert_eq!(upstream.seen().len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn connection_may_not_name_the_key_or_the_caller() {
    let upstream = Upstream::counting().await;
    let gateway = start(config(upstream.url())).await;
    for name in ["Idempotency-Key", "close, authorization", "AUTHORIZATION"] {
        let fields =
            [("idempotency-key", "k"), ("authorization", "Bearer a"), ("connection", name)];
        let answer = crate::world::post_with(gateway.local_addr(), "/", &fields, "x").await;
        assert_eq!((answer.status, answer.code().as_str()), (400, "malformed-request"), "{name}");
    }
    assert_eq!(upstream.seen().len(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broken_chunk_ends_the_connection_and_nothing_is_forwarded() {
    let upstream = Upstream::counting().await;
    let gateway = start(config(upstream.url())).await;
    for body in ["1\r\nxx\r\n0\r\n\r\n", "x\r\n", "1\nx\r\n0\r\n\r\n", "fffffffffffffffff\r\n"] {
        let mut raw = Raw::connect(gateway.local_addr()).await;
        raw.send(format!(
            "POST / HTTP/1.1\r\nhost: a\r\nidempotency-key: k\r\ntransfer-encoding: chunked\r\n\r\n\
             {body}"
        ))
        .await;
        // An answer is not owed; success would be wrong.
        if let Some(answer) = raw.answer_to(false).await {
            assert_eq!(answer.status, 400, "{body:?}");
        }
    }
    assert_eq!(upstream.seen().len(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_head_is_read_however_slowly_it_comes() {
    let upstream = Upstream::counting().await;
    let gateway = start(config(upstream.url())).await;
    let mut raw = Raw::connect(gateway.local_addr()).await;
    for byte in request("POST", "/a", &[("idempotency-key", "k")], "xyz").into_bytes() {
        raw.send([byte]).await;
        tokio::task::yield_now().await;
    }
    assert_eq!(raw.answer().await.status, 201);
    assert_eq!(upstream.seen()[0].body, "xyz");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_endless_head_is_refused() {
    let upstream = Upstream::counting().await;
    let gateway = start(config(upstream.url())).await;
    let mut raw = Raw::connect(gateway.local_addr()).await;
    raw.send(format!("POST /a HTTP/1.1\r\nhost: a\r\nx: {}\r\n", "y".repeat(40_000))).await;
    assert_eq!(raw.answer().await.code(), "malformed-request");
}
