//! Scenarios of statement 17: replays.

use std::sync::Arc;

use hapax_http::stored_response::Cookies;
use http::header::{
    CONNECTION, CONTENT_LENGTH, DATE, HeaderMap, HeaderName, HeaderValue, SET_COOKIE,
    TRANSFER_ENCODING,
};

use super::outcomes::dictated;
use crate::http::shapes::{self, ResponseSample};
use crate::http::{
    ExecutionCount, Protocol, ScenarioContext, ScenarioPolicy, TestResponse, handler, reply,
};

/// Returns all lines, by the order in which their names first came; values of one name in their
/// order. A header map does not contain the order between lines of different names.
fn lines<'a>(
    headers: &'a HeaderMap,
    but: &[HeaderName],
) -> Vec<(&'a HeaderName, Vec<&'a HeaderValue>)> {
    let names = headers.keys().filter(|name| !but.contains(name));
    names.map(|name| (name, headers.get_all(name).iter().collect())).collect()
}

/// Returns the lines without an order across names, which a proxy may change (RFC 9110, 5.3).
fn sorted<'a>(
    headers: &'a HeaderMap,
    but: &[HeaderName],
) -> Vec<(&'a HeaderName, Vec<&'a HeaderValue>)> {
    let mut lines = lines(headers, but);
    lines.sort_by(|one, other| one.0.as_str().cmp(other.0.as_str()));
    lines
}

/// Checks a sample's response, first or replayed: all of it, and nothing else except what the
/// server adds.
fn check(
    answer: &TestResponse,
    shape: &ResponseSample,
    first: Option<&TestResponse>,
    cookies: Cookies,
) {
    let replayed = if first.is_some() { "true" } else { "false" };
    let name = &shape.name;
    // The body of a problem says why.
    let start = String::from_utf8_lossy(&answer.body[..answer.body.len().min(1000)]);
    assert_eq!(answer.status, shape.status, "{name}: {:?} {start}", answer.headers);
    assert_eq!(answer.header("idempotency-replayed"), replayed, "{name}");
    assert!(answer.body == shape.body, "{name}: {} bytes", answer.body.len());
    assert_eq!(answer.trailers, shape.trailers, "{name}");
    let mut but = vec![
        DATE,
        CONTENT_LENGTH,
        TRANSFER_ENCODING,
        CONNECTION,
        HeaderName::from_static("keep-alive"),
        HeaderName::from_static("idempotency-replayed"),
        HeaderName::from_static("idempotency-operation-id"),
    ];
    if replayed == "true" && cookies == Cookies::Drop {
        assert!(!answer.headers.contains_key(SET_COOKIE), "{name}");
        but.push(SET_COOKIE);
    }
    assert_eq!(sorted(&answer.headers, &but), sorted(&shape.headers, &but), "{name}");
    if let Some(first) = first {
        assert_eq!(lines(&answer.headers, &but), lines(&first.headers, &but), "{name}");
    }
    let said = answer.headers.get(CONTENT_LENGTH);
    // In HTTP/2, servers' libraries write a zero if there is no length, and may omit that of a 304,
    // which is the length of another response (RFC 9110, 8.6).
    let theirs = said.filter(|length| *length == "0");
    let given = shape.headers.contains_key(CONTENT_LENGTH);
    let length = match shape.status.as_u16() {
        204 => theirs.cloned(),
        // HTTP/2 may omit the length of an empty body.
        _ if said.is_none() && shape.body.is_empty() && !given => None,
        304 => said.and(theirs.or(shape.headers.get(CONTENT_LENGTH))).cloned(),
        _ if shape.trailers.is_some() => None,
        _ => Some(HeaderValue::from(shape.body.len())),
    };
    assert_eq!(said, length.as_ref(), "{name}");
    let date = answer.headers.get_all(DATE).iter().collect::<Vec<_>>();
    assert_eq!(date.len(), 1, "{name}");
    if first.is_some() {
        // The replay has its own date, even if the handler set one.
        assert!(!shape.headers.get_all(DATE).iter().any(|given| given == date[0]), "{name}");
    }
}

async fn replay_all(arena: ScenarioContext, cookies: Cookies) {
    let all = Arc::new(shapes::all());
    assert!(all.len() >= 40, "{} shapes", all.len());
    let (runs, given) = (ExecutionCount::new(), Arc::clone(&all));
    let count = runs.clone();
    let give = handler(move |call| {
        count.next();
        let name = call.uri.path().trim_start_matches("/shapes/").to_owned();
        let shape = given.iter().find(|shape| shape.name == name).unwrap().response();
        async move { shape }
    });
    // Some responses are large, and this does not test speed.
    let store_timeout = crate::http::TIMEOUT;
    let policy = ScenarioPolicy {
        cookies,
        max_response_body: 8 << 20,
        store_timeout,
        ..ScenarioPolicy::default()
    };
    let stage = arena.start(policy, give).await;
    for shape in &*all {
        let post = stage.post(&shape.name).to(&format!("/shapes/{}", shape.name));
        // HTTP/1.1 sends trailers only to clients that request them.
        let post = post.header("te", "trailers");
        let first = stage.send(post.clone()).await;
        check(&first, shape, None, cookies);
        for _ in 0..2 {
            check(&stage.send(post.clone()).await, shape, Some(&first), cookies);
        }
    }
    assert_eq!(runs.count(), all.len());
}

pub async fn w17_replays_of_all_shapes_are_exact(arena: ScenarioContext) {
    replay_all(arena, Cookies::Drop).await;
}

pub async fn w17_cookies_are_replayed_if_the_route_enables_it(arena: ScenarioContext) {
    replay_all(arena, Cookies::Keep).await;
}

pub async fn w17_a_replay_has_its_own_date(arena: ScenarioContext) {
    let runs = ExecutionCount::new();
    let stage = arena.start(ScenarioPolicy::default(), dictated(&runs)).await;
    let said =
        "201\nDate: Tue, 15 Nov 1994 08:12:31 GMT\nLast-Modified: Tue, 15 Nov 1994 08:12:31 GMT";
    let post = stage.post("k").kind("text/plain").body(said);
    stage.send(post.clone()).await.is_first(201, "1");
    let replay = stage.send(post).await;
    replay.is_replay(201, "1");
    assert!(!replay.header("date").contains("1994"), "{replay:?}");
    assert_eq!(replay.header("last-modified"), "Tue, 15 Nov 1994 08:12:31 GMT");
}

pub async fn w17_hop_by_hop_headers_are_not_replayed(arena: ScenarioContext) {
    let runs = ExecutionCount::new();
    let stage = arena.start(ScenarioPolicy::default(), dictated(&runs)).await;
    let said = match arena.protocol() {
        Protocol::Http1 => "201\nConnection: x-hop\nX-Hop: 1\nKeep-Alive: timeout=5\nX-End: 1",
        // In HTTP/2 a handler cannot send hop-by-hop headers.
        Protocol::Http2 => "201\nProxy-Authenticate: Basic\nX-End: 1",
    };
    let post = stage.post("k").kind("text/plain").body(said);
    stage.send(post.clone()).await.is_first(201, "1");
    let replay = stage.send(post).await;
    replay.is_replay(201, "1");
    for name in ["connection", "x-hop", "keep-alive", "proxy-authenticate"] {
        assert_eq!(replay.header(name), "", "{replay:?}");
    }
    assert_eq!(replay.header("x-end"), "1");
}

pub async fn w17_a_replay_has_idempotency_replayed(arena: ScenarioContext) {
    let stage =
        arena.start(ScenarioPolicy::default(), handler(|_| async { reply(200, "yes") })).await;
    stage.send(stage.post("k")).await.is_first(200, "yes");
    stage.send(stage.post("k")).await.is_replay(200, "yes");
}
