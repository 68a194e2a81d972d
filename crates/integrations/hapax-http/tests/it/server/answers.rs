//! wire.md 17, 18, 21–23: what a client gets.

use std::time::Duration;

use bytes::Bytes;
use hapax_core::{InFlight, OnUnknown};
use hapax_http::Body;
use hapax_http::problem::DocsUrl;
use hapax_http::server::{RequestEvent, RouteOptions};
use hapax_http::stored_response::Cookies;
use http::header::HeaderMap;
use http::{HeaderValue, Response};
use http_body::Frame;
use tokio::time::sleep;

use super::world::{
    Answer, App, Frames, LEASE, Runs, Signal, World, app_of, begin, pay, respond, send, with_policy,
};

/// First answer and replay of a response, which must be the same but for the mark.
async fn twice(
    options: RouteOptions,
    response: impl Fn() -> Response<Body> + Clone + Send + Sync + 'static,
) -> (Answer, Answer) {
    let world = World::new();
    let app = world.app(options, move |_| {
        let response = response();
        async { response }
    });
    let first = send(&app, pay("k", "{}")).await;
    let replay = send(&app, pay("k", "{}")).await;
    assert_eq!((first.replayed(), replay.replayed()), (Some("false"), Some("true")));
    (first, replay)
}

fn lines(answer: &Answer) -> Vec<(String, Vec<u8>)> {
    let lines = answer.headers.iter().filter(|(name, _)| *name != "idempotency-replayed");
    lines.map(|(name, value)| (name.to_string(), value.as_bytes().to_vec())).collect()
}

#[tokio::test(start_paused = true)]
async fn wire_17_replays_are_exact() {
    let responses: [fn() -> Response<Body>; 6] = [
        || {
            let mut response = respond(200, (0..=255).collect::<Vec<u8>>());
            let value = HeaderValue::from_bytes(b"caf\xe9 \xff").unwrap();
            response.headers_mut().insert("x-opaque", value);
            response
        },
        || respond(204, ""),
        || {
            let mut response = respond(304, "");
            response.headers_mut().insert("content-length", HeaderValue::from_static("17"));
            response.headers_mut().insert("etag", HeaderValue::from_static("\"a\""));
            response
        },
        || {
            let mut response = respond(303, "see there");
            response.headers_mut().insert("location", HeaderValue::from_static("/a?b#c"));
            response
        },
        || {
            let mut response = respond(404, "");
            for value in ["2", "1", "", "1"] {
                response.headers_mut().append("x-many", HeaderValue::from_static(value));
                response.headers_mut().append("link", HeaderValue::from_static("<a>"));
            }
            response
        },
        || respond(599, ""),
    ];
    for response in responses {
        let options = RouteOptions {
            profile: hapax_http::classify::Profile::StripeV1,
            ..RouteOptions::default()
        };
        let (first, replay) = twice(options, response).await;
        assert_eq!(replay.status, first.status);
        assert_eq!(replay.body, first.body);
        assert_eq!(lines(&replay), lines(&first));
        assert_eq!(lines(&first).len(), response().headers().len());
    }
}

#[tokio::test(start_paused = true)]
async fn wire_17_trailers_are_replayed() {
    let (first, replay) = twice(RouteOptions::default(), || {
        let mut trailers = HeaderMap::new();
        trailers.append("x-sum", HeaderValue::from_static("1"));
        trailers.append("x-sum", HeaderValue::from_static("2"));
        let frames = [
            Ok(Frame::data(Bytes::from_static(b"a"))),
            Ok(Frame::data(Bytes::from_static(b"bc"))),
            Ok(Frame::trailers(trailers)),
        ];
        Response::new(Body::new(Frames::new(frames)))
    })
    .await;
    assert_eq!((&*first.body, &*replay.body), (&b"abc"[..], &b"abc"[..]));
    assert_eq!(first.trailers.as_ref().unwrap().get_all("x-sum").iter().count(), 2);
    assert_eq!(first.trailers, replay.trailers);
}

#[tokio::test(start_paused = true)]
async fn wire_17_cookies_and_dates_are_not_replayed() {
    let response = || {
        let mut response = respond(200, "");
        for (name, value) in
            [("set-cookie", "a=1"), ("set-cookie", "b=2"), ("date", "then"), ("x-kept", "1")]
        {
            response.headers_mut().append(name, HeaderValue::from_static(value));
        }
        response
    };
    let (first, replay) = twice(RouteOptions::default(), response).await;
    assert_eq!(first.headers.get_all("set-cookie").iter().count(), 2);
    assert_eq!(first.header("date"), Some("then"));
    assert_eq!(lines(&replay), [("x-kept".into(), b"1".to_vec())]);
    let options = RouteOptions { cookies: Cookies::Keep, ..RouteOptions::default() };
    let (_, replay) = twice(options, response).await;
    assert_eq!(replay.headers.get_all("set-cookie").iter().count(), 2);
}

/// A handler that waits for a signal, and then answers with these statuses in turn.
fn waiting(
    world: &World,
    options: RouteOptions,
    statuses: &'static [u16],
) -> (impl App, Runs, Signal) {
    let (runs, go) = (Runs::default(), Signal::new());
    let handler = (runs.clone(), go.clone());
    let app = world.app(options, move |_| {
        let (runs, go) = handler.clone();
        async move {
            let run = runs.next();
            go.wait().await;
            respond(statuses[run - 1], format!("run {run}"))
        }
    });
    (app, runs, go)
}

#[tokio::test(start_paused = true)]
async fn wire_18_in_flight_has_retry_after() {
    let world = World::new();
    let (app, runs, _go) = waiting(&world, RouteOptions::default(), &[201]);
    let _first = begin(&app, pay("k", "{}"));
    runs.reach(1).await;
    // Elapsed while that is smaller, then what remains of a lease that is renewed every 10 s.
    for (pause, seconds) in [(0, 1..=1), (5, 5..=6), (9, 14..=15), (986, 20..=30)] {
        sleep(Duration::from_secs(pause)).await;
        let answer = send(&app, pay("k", "{}")).await;
        assert_eq!((answer.status.as_u16(), &*answer.code()), (409, "in-flight"));
        let after: u64 = answer.header("retry-after").unwrap().parse().unwrap();
        assert!(seconds.contains(&after), "{after} not in {seconds:?}");
        assert_eq!(answer.problem()["retry_after"], after);
    }
}

fn wait_for(seconds: u64) -> RouteOptions {
    with_policy(|policy| {
        policy.in_flight = InFlight::Wait(Duration::from_secs(seconds));
        policy.terms.on_unknown = OnUnknown::Reexecute;
    })
}

#[tokio::test(start_paused = true)]
async fn wire_18_one_waiter_is_promoted_when_the_owner_releases() {
    for status in [503, 500] {
        let world = World::new();
        let statuses: &'static [u16] = if status == 503 { &[503, 201] } else { &[500, 201] };
        let (app, runs, go) = waiting(&world, wait_for(5), statuses);
        let copies: Vec<_> = (0..20).map(|_| begin(&app, pay("k", "{}"))).collect();
        runs.reach(1).await;
        sleep(Duration::from_secs(1)).await;
        go.give();
        let mut counts = (0, 0, 0);
        for copy in copies {
            let answer = copy.await.unwrap();
            match (answer.status.as_u16(), answer.replayed()) {
                (201, Some("false")) => counts.0 += 1,
                (201, Some("true")) => counts.1 += 1,
                (given, Some("false")) if given == status => counts.2 += 1,
                found => panic!("{found:?}"),
            }
        }
        assert_eq!((counts, runs.count()), ((1, 18, 1), 2));
    }
}

#[tokio::test(start_paused = true)]
async fn wire_18_the_promotion_of_a_disconnected_waiter_passes_to_the_next() {
    let world = World::new();
    let (app, runs, go) = waiting(&world, wait_for(20), &[503, 201]);
    let first = begin(&app, pay("k", "{}"));
    runs.reach(1).await;
    let gone: Vec<_> = (0..5).map(|_| begin(&app, pay("k", "{}"))).collect();
    sleep(Duration::from_secs(1)).await;
    let stays = begin(&app, pay("k", "{}"));
    sleep(Duration::from_secs(1)).await;
    for copy in gone {
        copy.abort();
    }
    go.give();
    assert_eq!(first.await.unwrap().status, 503);
    let answer = stays.await.unwrap();
    assert_eq!((answer.status.as_u16(), answer.replayed()), (201, Some("false")));
    assert_eq!(runs.count(), 2);
}

#[tokio::test(start_paused = true)]
async fn wire_18_at_most_100_duplicates_of_a_key_wait() {
    let world = World::new();
    let (app, runs, go) = waiting(&world, wait_for(20), &[201]);
    let _first = begin(&app, pay("k", "{}"));
    runs.reach(1).await;
    let copies: Vec<_> = (0..120).map(|_| begin(&app, pay("k", "{}"))).collect();
    sleep(Duration::from_secs(1)).await;
    assert_eq!(copies.iter().filter(|copy| copy.is_finished()).count(), 20);
    assert_eq!(world.engine.stats().waiting, 100);
    go.give();
    let mut replayed = 0;
    for copy in copies {
        replayed += usize::from(copy.await.unwrap().replayed() == Some("true"));
    }
    assert_eq!(replayed, 100);
}

#[tokio::test(start_paused = true)]
async fn wire_21_rejections_are_problems_and_counted() {
    let world = World::new();
    let docs = DocsUrl::new("https://docs.example/idempotency").unwrap();
    let layer = world.layer(RouteOptions::default()).docs(docs);
    let app = app_of(&layer, |_| async { respond(201, "") });
    send(&app, pay("k", "1")).await;
    world.events();
    let answer = send(&app, pay("k", "2")).await;
    assert_eq!(answer.header("content-type"), Some("application/problem+json"));
    assert_eq!(
        answer.header("link"),
        Some("<https://docs.example/idempotency>; rel=\"describedby\"")
    );
    let problem = answer.problem();
    assert_eq!(problem["type"], "https://docs.example/idempotency#key-reused");
    assert_eq!(problem["code"], "key-reused");
    for member in ["title", "detail"] {
        assert!(problem[member].as_str().is_some_and(|text| !text.is_empty()));
    }
    assert_eq!(world.events(), [RequestEvent::Rejected(hapax_http::problem::Code::KeyReused)]);
}

#[tokio::test(start_paused = true)]
async fn after_the_retention_the_key_executes_again() {
    let world = World::new();
    let options = with_policy(|policy| policy.terms.retention = LEASE * 4);
    let (app, runs, go) = waiting(&world, options, &[201, 201]);
    go.give();
    send(&app, pay("k", "1")).await;
    sleep(LEASE * 4 - Duration::from_secs(1)).await;
    assert_eq!(send(&app, pay("k", "1")).await.replayed(), Some("true"));
    sleep(Duration::from_secs(2)).await;
    assert_eq!(send(&app, pay("k", "2")).await.replayed(), Some("false"));
    assert_eq!(runs.count(), 2);
}
