//! wire.md 14–16: what is kept.

use std::time::Duration;

use hapax_core::OnUnknown;
use hapax_http::Body;
use hapax_http::classify::{ClassifiedResponse, OutcomeClass, Profile};
use hapax_http::server::{ExecutionHandle, Observer, RequestEvent, RouteOptions};
use http::{HeaderValue, Request, Response};
use http_body::Frame;
use tokio::time::sleep;

use super::world::{
    Frames, LEASE, Mood, Runs, World, app_of, begin, pay, respond, send, with_policy,
};

/// What became of a key after the response that `first` makes: asked once more, a second run
/// answers 201.
async fn after(
    options: RouteOptions,
    first: impl Fn(Request<Body>) -> Response<Body> + Clone + Send + Sync + 'static,
) -> (World, &'static str) {
    let world = World::new();
    let runs = Runs::default();
    let count = runs.clone();
    let app = world.app(options, move |request| {
        let response = if count.next() == 1 { first(request) } else { respond(201, "again") };
        async { response }
    });
    send(&app, pay("k", "{}")).await;
    let second = send(&app, pay("k", "{}")).await;
    let kind = match (second.replayed(), &*second.code(), runs.count()) {
        (Some("true"), "", 1) => "final",
        (Some("false"), "", 2) => "runs again",
        (None, "outcome-unknown", 1) => "unknown",
        found => panic!("{found:?}"),
    };
    (world, kind)
}

/// Under *block*, unknown and retryable outcomes can be told apart.
fn block() -> RouteOptions {
    with_policy(|policy| policy.terms.on_unknown = OnUnknown::Block)
}

#[tokio::test(start_paused = true)]
async fn wire_14_a_panic_is_unknown_and_gets_a_response() {
    let world = World::new();
    let runs = Runs::default();
    let count = runs.clone();
    let app = world.app(block(), move |_| {
        count.next();
        async { panic!("on purpose") }
    });
    let answer = send(&app, pay("k", "{}")).await;
    assert_eq!((answer.status.as_u16(), &*answer.code()), (500, "handler-failed"));
    assert_eq!(send(&app, pay("k", "{}")).await.code(), "outcome-unknown");
    assert_eq!(runs.count(), 1);
}

#[tokio::test(start_paused = true)]
async fn wire_14_a_panic_before_the_first_await_gets_a_response() {
    let world = World::new();
    let app = world.app(block(), |request: Request<Body>| {
        assert!(request.uri().path().is_empty(), "on purpose");
        async { respond(201, "") }
    });
    assert_eq!(send(&app, pay("k", "{}")).await.code(), "handler-failed");
    assert_eq!(send(&app, pay("k", "{}")).await.code(), "outcome-unknown");
}

#[tokio::test(start_paused = true)]
async fn wire_14_a_response_that_breaks_off_is_unknown() {
    let (_, found) = after(block(), |_| {
        let frames = [Ok(Frame::data("half".into())), Err(std::io::Error::other("cut"))];
        Response::new(Body::new(Frames::new(frames)))
    })
    .await;
    assert_eq!(found, "unknown");
}

#[tokio::test(start_paused = true)]
async fn wire_14_a_panic_of_the_classifying_function_is_unknown() {
    let world = World::new();
    let runs = Runs::default();
    let count = runs.clone();
    let options = RouteOptions {
        classify: Some(std::sync::Arc::new(|head| panic!("on purpose, at {}", head.status))),
        ..block()
    };
    let app = world.app(options, move |_| {
        count.next();
        async { respond(200, "") }
    });
    let answer = send(&app, pay("k", "{}")).await;
    assert_eq!((answer.status.as_u16(), &*answer.code()), (500, "handler-failed"));
    // At once, not when the lease lapses: it was abandoned.
    assert_eq!(send(&app, pay("k", "{}")).await.code(), "outcome-unknown");
    assert_eq!(runs.count(), 1);
}

#[derive(Debug)]
struct Broken;

impl Observer for Broken {
    fn observe(&self, _: &str, event: RequestEvent) {
        panic!("on purpose, at {event:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn an_observer_that_panics_costs_no_outcome() {
    let world = World::new();
    let runs = Runs::default();
    let count = runs.clone();
    let layer = world.layer(block()).observer(std::sync::Arc::new(Broken));
    let app = app_of(&layer, move |request: Request<Body>| {
        let run = count.next();
        let large = request.uri().path() == "/large";
        async move { respond(201, if large { vec![b'x'; 2 << 20] } else { vec![run as u8] }) }
    });
    for replayed in ["false", "true"] {
        let answer = send(&app, pay("k", "{}")).await;
        assert_eq!((answer.replayed(), &*answer.body), (Some(replayed), &[1][..]));
    }
    let large = || {
        let mut request = pay("large", "{}");
        *request.uri_mut() = http::Uri::from_static("/large");
        request
    };
    assert_eq!(send(&app, large()).await.body.len(), 2 << 20);
    assert_eq!(send(&app, large()).await.code(), "response-not-retained");
    assert_eq!(send(&app, pay("k", "[]")).await.code(), "key-reused");
    assert_eq!(runs.count(), 2);
}

#[tokio::test(start_paused = true)]
async fn wire_15_unknown_is_blocked_by_default() {
    let (_, found) = after(RouteOptions::default(), |_| respond(500, "")).await;
    assert_eq!(found, "unknown");
}

#[tokio::test(start_paused = true)]
async fn wire_15_a_lapsed_execution_follows_the_policy() {
    for (policy, code) in [(OnUnknown::Reexecute, ""), (OnUnknown::Block, "outcome-unknown")] {
        let world = World::new();
        let runs = Runs::default();
        let count = runs.clone();
        let options = || with_policy(|it| it.terms.on_unknown = policy);
        let handler = move |_| {
            let run = count.next();
            async move {
                if run == 1 {
                    std::future::pending::<()>().await;
                }
                respond(201, "")
            }
        };
        // The process that executes does not take over from itself.
        let stuck = world.app(options(), handler.clone());
        let app = world.other_process().app(options(), handler);
        let _stuck = begin(&stuck, pay("k", "{}"));
        runs.reach(1).await;
        // As good as dead: it cannot renew.
        world.store.is(Mood::Down);
        sleep(LEASE * 2).await;
        world.store.is(Mood::Well);
        assert_eq!(send(&app, pay("k", "{}")).await.code(), code);
        assert_eq!(runs.count(), if code.is_empty() { 2 } else { 1 });
    }
}

#[tokio::test(start_paused = true)]
async fn wire_15_the_stricter_policy_applies() {
    let world = World::new();
    let runs = Runs::default();
    let app = |policy| {
        let count = runs.clone();
        let options = with_policy(|it| it.terms.on_unknown = policy);
        world.app(options, move |_| {
            count.next();
            async { respond(500, "") }
        })
    };
    let (strict, loose) = (app(OnUnknown::Block), app(OnUnknown::Reexecute));
    send(&strict, pay("a", "{}")).await;
    assert_eq!(send(&loose, pay("a", "{}")).await.code(), "outcome-unknown");
    send(&loose, pay("b", "{}")).await;
    assert_eq!(send(&strict, pay("b", "{}")).await.code(), "outcome-unknown");
    assert_eq!(runs.count(), 2);
}

#[tokio::test(start_paused = true)]
async fn wire_16_profiles() {
    for (profile, status, kind) in [
        (Profile::StripeV1, 500, "final"),
        (Profile::StripeV1, 429, "runs again"),
        (Profile::StripeV1, 409, "runs again"),
        (Profile::SuccessOnly, 201, "final"),
        (Profile::SuccessOnly, 404, "runs again"),
        (Profile::SuccessOnly, 500, "runs again"),
    ] {
        let options = RouteOptions { profile, ..block() };
        let (_, found) = after(options, move |_| respond(status, "")).await;
        assert_eq!(found, kind, "{profile} {status}");
    }
    // A panic is no status: it stays unknown.
    let world = World::new();
    let app = world.app(RouteOptions { profile: Profile::StripeV1, ..block() }, |_| async {
        panic!("on purpose")
    });
    send(&app, pay("k", "{}")).await;
    assert_eq!(send(&app, pay("k", "{}")).await.code(), "outcome-unknown");
}

fn marked(status: u16, name: &'static str, value: &'static str) -> Response<Body> {
    let mut response = respond(status, "");
    response.headers_mut().insert(name, HeaderValue::from_static(value));
    response
}

#[tokio::test(start_paused = true)]
async fn wire_16_override_headers_do_not_reach_the_client() {
    let world = World::new();
    let app = world.app(RouteOptions::default(), |_| async {
        let mut response = marked(201, "idempotency-outcome", "final");
        for name in ["idempotency-retention", "idempotency-replayed", "idempotency-made-up"] {
            response.headers_mut().insert(name, HeaderValue::from_static("60"));
        }
        response
    });
    for replayed in ["false", "true"] {
        let answer = send(&app, pay("k", "{}")).await;
        let ours: Vec<_> = answer
            .headers
            .keys()
            .filter(|name| name.as_str().starts_with("idempotency-"))
            .collect();
        assert_eq!(ours, ["idempotency-replayed"]);
        assert_eq!(answer.replayed(), Some(replayed));
    }
}

#[tokio::test(start_paused = true)]
async fn wire_23_an_invalid_override_is_ignored_and_counted() {
    let first = |_| marked(200, "idempotency-outcome", "maybe");
    let (world, kind) = after(block(), first).await;
    assert_eq!(kind, "final");
    let counted = world.events().iter().filter(|it| **it == RequestEvent::InvalidOverride).count();
    assert_eq!(counted, 1);
}

#[tokio::test(start_paused = true)]
async fn wire_16_a_function_overrides_the_profile_but_not_the_response() {
    let options = || RouteOptions {
        classify: Some(std::sync::Arc::new(|head| {
            (head.status == 200).then_some(OutcomeClass::Retryable)
        })),
        ..block()
    };
    assert_eq!(after(options(), |_| respond(200, "")).await.1, "runs again");
    assert_eq!(after(options(), |_| respond(201, "")).await.1, "final");
    let first = |_| marked(200, "idempotency-outcome", "final");
    assert_eq!(after(options(), first).await.1, "final");
}

#[tokio::test(start_paused = true)]
async fn wire_16_the_execution_handle_overrides_the_outcome_headers() {
    let say = |class, retention| {
        move |request: Request<Body>| {
            let execution = request.extensions().get::<ExecutionHandle>().unwrap();
            execution.outcome(class);
            execution.retention(retention);
            marked(200, "idempotency-outcome", "final")
        }
    };
    let hour = Duration::from_secs(3600);
    assert_eq!(after(block(), say(OutcomeClass::Unknown, hour)).await.1, "unknown");
    assert_eq!(after(block(), say(OutcomeClass::Retryable, hour)).await.1, "runs again");
    let (world, kind) = after(block(), say(OutcomeClass::Final, hour)).await;
    assert_eq!(kind, "final");
    let kept = world.events().into_iter().find_map(|event| match event {
        RequestEvent::Replayed { expires_in } => expires_in,
        _ => None,
    });
    assert_eq!(kept, Some(hour));
}

/// Zero would forget at once what just happened: like an invalid header, it is not said.
#[tokio::test(start_paused = true)]
async fn wire_16_a_retention_of_zero_is_ignored() {
    let first = |request: Request<Body>| {
        let execution = request.extensions().get::<ExecutionHandle>().unwrap();
        execution.retention(Duration::ZERO);
        marked(200, "idempotency-retention", "60")
    };
    let (world, kind) = after(block(), first).await;
    assert_eq!(kind, "final");
    let kept = world.events().into_iter().find_map(|event| match event {
        RequestEvent::Replayed { expires_in } => expires_in,
        _ => None,
    });
    assert_eq!(kept, Some(Duration::from_secs(60)));
}

#[tokio::test(start_paused = true)]
async fn wire_21_a_classified_response_of_a_proxy_overrides_profile_and_headers() {
    for (status, class, kind) in
        [(502, OutcomeClass::Retryable, "runs again"), (502, OutcomeClass::Unknown, "unknown")]
    {
        let first = move |_| {
            // No profile, and no header that an upstream never sent, may speak here.
            let mut response = marked(status, "idempotency-outcome", "final");
            response.extensions_mut().insert(ClassifiedResponse(class));
            response
        };
        let options = RouteOptions { profile: Profile::StripeV1, ..block() };
        assert_eq!(after(options, first).await.1, kind);
    }
}

/// The inner error type is untouched, and its meaning is *unknown*.
#[tokio::test(start_paused = true)]
async fn an_error_of_the_inner_service_is_passed_on_and_unknown() {
    use tower::{Layer, ServiceExt};
    #[derive(Debug, PartialEq)]
    struct Own(u8);
    let world = World::new();
    let app = world
        .layer(block())
        .layer(tower::service_fn(|_: Request<Body>| async { Err::<Response<Body>, _>(Own(7)) }));
    assert_eq!(app.clone().oneshot(pay("k", "{}")).await.unwrap_err(), Own(7));
    let answer = app.oneshot(pay("k", "{}")).await.unwrap();
    assert_eq!(answer.status(), 409);
}
