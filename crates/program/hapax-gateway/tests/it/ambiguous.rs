//! Requests that can be read in two ways: refused before anything is claimed or forwarded.

use crate::world::{Raw, Upstream, config, post, request, start};

/// What each of these says in its head, after the request line.
const HEADS: [(&str, &str); 60] = [
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
    ("two hosts that agree", "host: a\r\nhost: a\r\ncontent-length: 1\r\n\r\nx"),
    ("a list of hosts", "host: a, b\r\ncontent-length: 1\r\n\r\nx"),
    ("a host with a query", "host: a?b\r\ncontent-length: 1\r\n\r\nx"),
    ("a host with a fragment", "host: a#b\r\ncontent-length: 1\r\n\r\nx"),
    ("a host with two ports", "host: a:1:2\r\ncontent-length: 1\r\n\r\nx"),
    ("half an address for a host", "host: [::1\r\ncontent-length: 1\r\n\r\nx"),
    ("a folded host", "host: a\r\n b\r\ncontent-length: 1\r\n\r\nx"),
    ("a negative length", "host: a\r\ncontent-length: -1\r\n\r\nx"),
    ("a hexadecimal length", "host: a\r\ncontent-length: 0x1\r\n\r\nx"),
    ("a fractional length", "host: a\r\ncontent-length: 1.0\r\n\r\nx"),
    ("a length with a space", "host: a\r\ncontent-length: 1 0\r\n\r\nx"),
    ("a length with an underscore", "host: a\r\ncontent-length: 1_0\r\n\r\nx"),
    ("an empty length", "host: a\r\ncontent-length:\r\n\r\nx"),
    ("a length in quotes", "host: a\r\ncontent-length: \"1\"\r\n\r\nx"),
    ("a length beyond all", "host: a\r\ncontent-length: 18446744073709551616\r\n\r\nx"),
    ("a length beyond a signed number", "host: a\r\ncontent-length: 9223372036854775808\r\n\r\nx"),
    ("the largest number", "host: a\r\ncontent-length: 18446744073709551615\r\n\r\nx"),
    ("a length and an empty one", "host: a\r\ncontent-length: 1\r\ncontent-length:\r\n\r\nx"),
    ("lengths in other letters", "host: a\r\nContent-Length: 1\r\nCONTENT-LENGTH: 0\r\n\r\nx"),
    ("a length with a tab before its colon", "host: a\r\ncontent-length\t: 1\r\n\r\nx"),
    ("a length behind a carriage return", "host: a\r\nx: \rcontent-length: 1\r\n\r\nx"),
    ("a vertical tab before a length", "host: a\r\n\x0bcontent-length: 1\r\n\r\nx"),
    ("a null in a length", "host: a\r\ncontent-length: 1\0\r\n\r\nx"),
    ("a null in a name", "host: a\r\ncontent\0-length: 1\r\n\r\nx"),
    ("identity", "host: a\r\ntransfer-encoding: identity\r\ncontent-length: 1\r\n\r\nx"),
    ("identity alone", "host: a\r\ntransfer-encoding: identity\r\n\r\nx"),
    ("chunked and more", "host: a\r\ntransfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n"),
    ("chunked in quotes", "host: a\r\ntransfer-encoding: \"chunked\"\r\n\r\n0\r\n\r\n"),
    ("chunked with a parameter", "host: a\r\ntransfer-encoding: chunked;q=1\r\n\r\n0\r\n\r\n"),
    ("chunked and a comma", "host: a\r\ntransfer-encoding: chunked,\r\n\r\n0\r\n\r\n"),
    ("chunked behind a vertical tab", "host: a\r\ntransfer-encoding: \x0bchunked\r\n\r\n0\r\n\r\n"),
    ("chunked on a line of its own", "host: a\r\ntransfer-encoding:\r\n chunked\r\n\r\n0\r\n\r\n"),
    ("an empty coding", "host: a\r\ntransfer-encoding:\r\n\r\n0\r\n\r\n"),
    (
        "a coding with a space before its colon",
        "host: a\r\ntransfer-encoding : chunked\r\n\r\n0\r\n\r\n",
    ),
    (
        "a coding and another's",
        "host: a\r\ntransfer-encoding: chunked\r\ntransfer-encoding: gzip\r\n\r\n0\r\n\r\n",
    ),
    ("a bare line feed at the end", "host: a\r\ncontent-length: 1\n\r\nx"),
    ("an empty line of a bare line feed", "host: a\r\ncontent-length: 1\r\n\nx"),
    ("a field without a colon", "host: a\r\nnonsense\r\ncontent-length: 1\r\n\r\nx"),
    ("a field without a name", "host: a\r\n: b\r\ncontent-length: 1\r\n\r\nx"),
    ("a name with a bracket", "host: a\r\nx[y]: b\r\ncontent-length: 1\r\n\r\nx"),
];

#[tokio::test(flavor = "multi_thread")]
async fn an_ambiguous_head_is_rejected_and_neither_claimed_nor_forwarded() {
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
async fn a_target_that_is_neither_path_nor_url_is_rejected() {
    let upstream = Upstream::counting().await;
    let gateway = start(config(upstream.url())).await;
    for target in ["*", "a", "a.example:80", "ftp://a/", "mailto:a@b", "?x"] {
        let mut raw = Raw::connect(gateway.local_addr()).await;
        raw.send(request("POST", target, &[("idempotency-key", "k")], "x")).await;
        assert_eq!(raw.answer().await.code(), "malformed-request", "{target}");
    }
    assert_eq!(upstream.seen().len(), 0);
}

/// Request lines that are none, or not ours.
const LINES: [&str; 20] = [
    "POST  /a HTTP/1.1",
    "POST /a  HTTP/1.1",
    " POST /a HTTP/1.1",
    "POST\t/a HTTP/1.1",
    "POST /a HTTP/1.1 ",
    "POST /a b HTTP/1.1",
    "POST /a",
    "POST /a HTTP/2.0",
    "POST /a HTTP/0.9",
    "POST /a HTTP/1.2",
    "POST /a HTTP/1.10",
    "POST /a http/1.1",
    "POST /a HTTPS/1.1",
    "POST /a#b HTTP/1.1",
    "POST /a\0 HTTP/1.1",
    "POST a HTTP/1.1",
    "PO(ST /a HTTP/1.1",
    "PRI * HTTP/2.0",
    "CONNECT a:443 HTTP/1.1",
    "POST ftp://a/ HTTP/1.1",
];

#[tokio::test(flavor = "multi_thread")]
async fn an_invalid_request_line_is_rejected() {
    let upstream = Upstream::counting().await;
    let gateway = start(config(upstream.url())).await;
    for line in LINES {
        let mut raw = Raw::connect(gateway.local_addr()).await;
        raw.send(format!("{line}\r\nhost: a\r\nidempotency-key: k\r\ncontent-length: 1\r\n\r\nx"))
            .await;
        let answer = raw.answer().await;
        assert_eq!((answer.status, answer.code().as_str()), (400, "malformed-request"), "{line}");
        assert_eq!(raw.rest().await, b"", "{line}");
    }
    assert_eq!(upstream.seen().len(), 0);
}

/// What is odd and still says one thing: each of these is one request here and one behind.
#[tokio::test(flavor = "multi_thread")]
async fn an_unusual_but_unambiguous_request_is_one_request_for_gateway_and_upstream() {
    let chunked = "POST /a HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n";
    let cases = [
        "\r\n\r\nPOST /a HTTP/1.1\r\nhost: a\r\ncontent-length: 3\r\n\r\nabc".to_owned(),
        "POST /a HTTP/1.1\r\nhost:\r\ncontent-length: 003\r\n\r\nabc".into(),
        "POST /a HTTP/1.1\r\nhost:a\r\ncontent-length:\t 3\t \r\n\r\nabc".into(),
        "POST http://a/a HTTP/1.1\r\nhost: b\r\ncontent-length: 3\r\n\r\nabc".into(),
        "POST /a HTTP/1.1\r\nhost: a\r\ncontent_length: 9\r\ncontent-length: 3\r\n\r\nabc".into(),
        "POST /a HTTP/1.1\r\nhost: a\r\ntransfer_encoding: chunked\r\ncontent-length: 3\r\n\r\nabc"
            .into(),
        "POST /a HTTP/1.1\r\nhost: a\r\nx: y, content-length: 9\r\ncontent-length: 3\r\n\r\nabc"
            .into(),
        "POST /a HTTP/1.1\r\nhost: a\r\nconnection: content-length\r\ncontent-length: 3\r\n\r\nabc"
            .into(),
        format!("{chunked}3\r\nabc\r\n0\r\n\r\n"),
        format!("{chunked}0000003\r\nabc\r\n000\r\n\r\n"),
        format!("{chunked}1;a=b\r\na\r\n2 ;c=\"d\"\r\nbc\r\n0;e\r\n\r\n"),
        format!("{chunked}3\r\nabc\r\n0\r\nx: y\r\n\r\n"),
        format!("{chunked}3\r\nabc\r\n0\r\ncontent-length: 9\r\ntransfer-encoding: gzip\r\n\r\n"),
        format!("{chunked}3\r\nabc\r\n0\r\nidempotency-key: l\r\nhost: b\r\n\r\n"),
    ];
    for bytes in cases {
        let upstream = Upstream::counting().await;
        let gateway = start(config(upstream.url())).await;
        let mut raw = Raw::connect(gateway.local_addr()).await;
        // A second one right behind shows where the first one ended.
        raw.send(format!("{bytes}{}", request("POST", "/next", &[], "next"))).await;
        assert_eq!((raw.answer().await.status, raw.answer().await.status), (201, 201), "{bytes:?}");
        let seen = upstream.seen();
        let bodies: Vec<_> = seen.iter().map(|seen| (seen.uri.path(), &seen.body[..])).collect();
        assert_eq!(bodies, [("/a", &b"abc"[..]), ("/next", b"next")], "{bytes:?}");
    }
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
async fn a_rejected_request_does_not_affect_responses_to_earlier_requests() {
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
async fn a_connection_header_that_names_key_or_scope_is_rejected() {
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
    for body in [
        "1\r\nxx\r\n0\r\n\r\n",
        "x\r\n",
        "1\nx\r\n0\r\n\r\n",
        "fffffffffffffffff\r\n",
        "+1\r\nx\r\n0\r\n\r\n",
        "-1\r\nx\r\n0\r\n\r\n",
        "0x1\r\nx\r\n0\r\n\r\n",
        " 1\r\nx\r\n0\r\n\r\n",
        "1_\r\nx\r\n0\r\n\r\n",
        "1\r\nx0\r\n\r\n",
        "1\r\nx\n0\r\n\r\n",
        "1\rx\r\n0\r\n\r\n",
        "1;a\nb\r\nx\r\n0\r\n\r\n",
        "\r\n1\r\nx\r\n0\r\n\r\n",
        "0\r\nx: y\n\r\n",
        "0\r\nx: y\rz\r\n\r\n",
        "0\r\n\n",
    ] {
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
async fn a_head_in_many_small_pieces_is_read() {
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
async fn an_endless_head_is_rejected() {
    let upstream = Upstream::counting().await;
    let gateway = start(config(upstream.url())).await;
    let mut raw = Raw::connect(gateway.local_addr()).await;
    raw.send(format!("POST /a HTTP/1.1\r\nhost: a\r\nx: {}\r\n", "y".repeat(40_000))).await;
    assert_eq!(raw.answer().await.code(), "malformed-request");
}
