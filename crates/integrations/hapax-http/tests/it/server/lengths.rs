//! A body that is not as long as its message says is no body: nothing is made of it, either way.

use std::time::Duration;

use bytes::Bytes;
use hapax_core::OnUnknown;
use hapax_core::machine::HookTiming;
use hapax_core::machine::Verdict;
use hapax_http::Body;
use hapax_http::server::{ReconcileRequest, ReconciledResponse, RouteOptions};
use http::{HeaderMap, HeaderValue, Method, Request, Response};
use http_body::{Frame, SizeHint};

use super::world::{Frames, Runs, World, pay, respond, send, with_policy};

/// Frames whose hint says that there are this many bytes.
struct Hinted(Frames, u64);

impl http_body::Body for Hinted {
    type Data = Bytes;
    type Error = std::io::Error;

    fn poll_frame(
        mut self: std::pin::Pin<&mut Self>,
        cx: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<std::io::Result<Frame<Bytes>>>> {
        std::pin::Pin::new(&mut self.0).poll_frame(cx)
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.1)
    }
}

fn block() -> RouteOptions {
    with_policy(|policy| policy.terms.on_unknown = OnUnknown::Block)
}

/// A body of four bytes in two frames, in a message with these lengths.
fn four(lengths: &[&'static str], hint: Option<u64>) -> (HeaderMap, Body) {
    let mut headers = HeaderMap::new();
    for length in lengths {
        headers.append("content-length", HeaderValue::from_static(length));
    }
    let frames = Frames::of(2, 2);
    let body = match hint {
        Some(hint) => Body::new(Hinted(frames, hint)),
        None => Body::new(frames),
    };
    (headers, body)
}

const LIES: &[(&[&str], Option<u64>)] = &[
    (&["5"], None),
    (&["3"], None),
    (&["1"], None),
    (&["4", "5"], None),
    (&["four"], None),
    (&[], Some(5)),
    (&[], Some(3)),
    (&["4"], Some(5)),
];

#[tokio::test(start_paused = true)]
async fn wire_14_a_response_of_another_length_than_declared_is_unknown() {
    for (lengths, hint) in LIES {
        let world = World::new();
        let runs = Runs::default();
        let count = runs.clone();
        let app = world.app(block(), move |_| {
            count.next();
            async move {
                let (headers, body) = four(lengths, *hint);
                let mut response = respond(201, "").map(|_| body);
                *response.headers_mut() = headers;
                response
            }
        });
        assert_eq!(send(&app, pay("k", "{}")).await.code(), "upstream-broken", "{lengths:?}");
        assert_eq!(send(&app, pay("k", "{}")).await.code(), "outcome-unknown", "{lengths:?}");
        assert_eq!(runs.count(), 1);
    }
}

/// Longer than it says, and than may be kept: it is not streamed to the client either.
#[tokio::test(start_paused = true)]
async fn wire_14_a_too_large_response_of_another_length_is_broken() {
    let world = World::new();
    let options = RouteOptions { max_response_body: 3, ..block() };
    let app = world.app(options, |_| async {
        let (headers, body) = four(&["1"], None);
        let mut response = respond(201, "").map(|_| body);
        *response.headers_mut() = headers;
        response
    });
    assert_eq!(send(&app, pay("k", "{}")).await.code(), "upstream-broken");
}

#[tokio::test(start_paused = true)]
async fn wire_03_a_request_of_another_length_than_declared_claims_nothing() {
    for (lengths, hint) in LIES {
        let world = World::new();
        let runs = Runs::default();
        let count = runs.clone();
        let app = world.app(RouteOptions::default(), move |_| {
            let run = count.next();
            async move { respond(201, run.to_string()) }
        });
        let (headers, body) = four(lengths, *hint);
        let mut request = pay("k", "").map(|_| body);
        request.headers_mut().extend(headers);
        let answer = send(&app, request).await;
        assert_eq!((answer.status.as_u16(), &*answer.code()), (400, "malformed-request"));
        assert_eq!((runs.count(), world.store.len()), (0, 0), "{lengths:?}");
        // The key is as free as it was.
        assert_eq!(send(&app, pay("k", "whole")).await.status, 201);
    }
}

#[tokio::test(start_paused = true)]
async fn wire_17_content_length_of_a_bodiless_response_is_replayed_unless_204() {
    for (method, status, length) in [
        (Method::POST, 304, Some("17")),
        (Method::POST, 204, None),
        (Method::HEAD, 200, Some("17")),
    ] {
        let world = World::new();
        let options = RouteOptions { methods: vec![method.clone()], ..RouteOptions::default() };
        let app = world.app(options, move |_| async move {
            let mut response = respond(status, "").map(|_| Body::new(Hinted(Frames::of(0, 0), 17)));
            response.headers_mut().insert("content-length", HeaderValue::from_static("17"));
            response
        });
        for replayed in ["false", "true"] {
            let mut request = pay("k", "");
            *request.method_mut() = method.clone();
            let answer = send(&app, request).await;
            assert_eq!((answer.status.as_u16(), answer.replayed()), (status, Some(replayed)));
            assert_eq!(answer.header("content-length"), length, "{status}");
        }
    }
}

fn sum() -> HeaderMap {
    let mut trailers = HeaderMap::new();
    trailers.insert("x-sum", HeaderValue::from_static("7"));
    trailers
}

/// After a length HTTP/1.1 has no place for trailers.
#[tokio::test(start_paused = true)]
async fn wire_22_a_response_with_trailers_has_no_content_length() {
    let with = || Body::whole(Bytes::from_static(b"four"), Some(sum()));
    let world = World::new();
    let app = world.app(RouteOptions::default(), move |request: Request<Body>| {
        let length = request.headers().contains_key("content-length");
        async move {
            assert!(!length);
            let mut response = respond(201, "").map(|_| with());
            response.headers_mut().insert("content-length", HeaderValue::from_static("4"));
            response
        }
    });
    for replayed in ["false", "true"] {
        let mut request = pay("k", "").map(|_| with());
        request.headers_mut().insert("content-length", HeaderValue::from_static("4"));
        let answer = send(&app, request).await;
        assert_eq!((answer.replayed(), answer.header("content-length")), (Some(replayed), None));
        assert_eq!((&*answer.body, answer.trailers), (&b"four"[..], Some(sum())));
    }
}

#[tokio::test(start_paused = true)]
async fn wire_15_a_reconciled_response_of_another_length_is_no_verdict() {
    for (length, happened) in [("4", true), ("5", false), ("3", false), ("", false)] {
        let world = World::new();
        let options = with_policy(|policy| {
            policy.terms.on_unknown = OnUnknown::Reconcile;
            let timeout = Duration::from_secs(5);
            policy.hook = Some(HookTiming { after: timeout, timeout });
        });
        let hook = move |_: ReconcileRequest| async move {
            let response = Response::builder().header("content-length", length);
            Verdict::Happened(ReconciledResponse::from(
                response.body(Bytes::from_static(b"four")).unwrap(),
            ))
        };
        let options = RouteOptions { reconcile: Some(std::sync::Arc::new(hook)), ..options };
        let app = world.app(options, |_| async { respond(500, "") });
        send(&app, pay("k", "{}")).await;
        let retry = send(&app, pay("k", "{}")).await;
        if happened {
            assert_eq!((retry.replayed(), &*retry.body), (Some("true"), &b"four"[..]));
        } else {
            assert_eq!(retry.code(), "outcome-unknown", "{length:?}");
        }
    }
}
