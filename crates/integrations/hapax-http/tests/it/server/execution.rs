//! wire.md 9–13: how a request executes.

use std::sync::{Arc, Mutex};

use hapax_core::OnUnknown;
use hapax_http::Body;
use hapax_http::server::{ExecutionHandle, RouteOptions};
use http::{HeaderValue, Request};
use tokio::time::{Duration, sleep};
use tower::ServiceExt;

use super::world::{
    LEASE, Mood, Runs, Signal, World, begin, pay, reexecute, respond, send, with_policy,
};

#[tokio::test(start_paused = true)]
async fn wire_09_of_100_duplicates_in_two_processes_one_executes() {
    let world = World::new();
    let other = world.other_process();
    let (runs, go) = (Runs::default(), Signal::new());
    let app = |world: &World| {
        let (runs, go) = (runs.clone(), go.clone());
        world.app(RouteOptions::default(), move |_| {
            let (run, go) = (runs.next(), go.clone());
            async move {
                go.wait().await;
                respond(201, format!("run {run}"))
            }
        })
    };
    let (here, there) = (app(&world), app(&other));
    let copies: Vec<_> = (0..50)
        .flat_map(|_| [begin(&here, pay("k", "{}")), begin(&there, pay("k", "{}"))])
        .collect();
    runs.reach(1).await;
    // The one that runs is the only one that is not answered yet.
    sleep(Duration::from_secs(1)).await;
    assert_eq!(copies.iter().filter(|copy| !copy.is_finished()).count(), 1);
    go.give();
    let mut codes = Vec::new();
    for copy in copies {
        codes.push(copy.await.unwrap().code());
    }
    assert_eq!(codes.iter().filter(|code| *code == "in-flight").count(), 99);
    assert_eq!(runs.count(), 1);
    for app in [&here, &there] {
        let replay = send(app, pay("k", "{}")).await;
        assert_eq!((replay.replayed(), &*replay.body), (Some("true"), &b"run 1"[..]));
    }
}

/// At every await of the client's future, one after the other.
#[tokio::test(start_paused = true)]
async fn wire_10_a_disconnect_at_any_await_leaves_no_claim_without_an_execution() {
    for polls in 0..40 {
        let world = World::new();
        let runs = Runs::default();
        let count = runs.clone();
        let app = world.app(RouteOptions::default(), move |_| {
            count.next();
            async {
                tokio::task::yield_now().await;
                respond(201, "")
            }
        });
        let mut client = Box::pin(app.clone().oneshot(pay("k", "{}")));
        for _ in 0..polls {
            let done = std::future::poll_fn(|cx| {
                std::task::Poll::Ready(client.as_mut().poll(cx).is_ready())
            });
            if done.await {
                break;
            }
            tokio::task::yield_now().await;
        }
        drop(client);
        // Well within a lease: what was claimed is executed or released by then.
        sleep(Duration::from_secs(5)).await;
        let answer = send(&app, pay("k", "{}")).await;
        assert_eq!((answer.status.as_u16(), runs.count()), (201, 1), "after {polls} polls");
    }
}

#[tokio::test(start_paused = true)]
async fn wire_11_the_response_is_sent_after_the_outcome_is_recorded() {
    let world = World::new();
    let (runs, go) = (Runs::default(), Signal::new());
    let handler = (runs.clone(), go.clone());
    let app = world.app(RouteOptions::default(), move |_| {
        let (runs, go) = handler.clone();
        async move {
            runs.next();
            go.wait().await;
            respond(201, "")
        }
    });
    let client = begin(&app, pay("k", "{}"));
    runs.reach(1).await;
    world.store.is(Mood::Slow);
    go.give();
    sleep(Duration::from_secs(1)).await;
    assert!(!client.is_finished());
    world.store.is(Mood::Well);
    let answer = client.await.unwrap();
    assert_eq!((answer.status.as_u16(), answer.replayed()), (201, Some("false")));
    assert_eq!(answer.header("idempotency-recorded"), None);
}

type Seen = Arc<Mutex<Vec<(u64, u32)>>>;

#[tokio::test(start_paused = true)]
async fn wire_13_the_handler_gets_fence_and_attempt() {
    let world = World::new();
    let seen = Seen::default();
    let note = Arc::clone(&seen);
    let app = world.app(reexecute(), move |request: Request<Body>| {
        let execution = request.extensions().get::<ExecutionHandle>().unwrap();
        let attempt = execution.attempt();
        note.lock().unwrap().push((execution.fence().get(), attempt));
        assert_eq!(request.headers()["idempotency-key"], "k");
        assert_eq!(request.headers().get("idempotency-fence"), None);
        assert_eq!(request.headers().get("idempotency-attempt"), None);
        async move { respond([500, 503, 201][attempt as usize - 1], "") }
    });
    for status in [500, 503, 201] {
        let mut request = pay("k", "{}");
        for name in ["idempotency-fence", "idempotency-attempt"] {
            request.headers_mut().insert(name, HeaderValue::from_static("999"));
        }
        assert_eq!(send(&app, request).await.status, status);
    }
    let seen = seen.lock().unwrap().clone();
    assert_eq!(seen.iter().map(|(_, attempt)| *attempt).collect::<Vec<_>>(), [1, 2, 3]);
    assert!(seen.is_sorted_by(|(one, _), (next, _)| one < next), "{seen:?}");
}

#[tokio::test(start_paused = true)]
async fn an_execution_is_notified_that_its_lease_was_lost() {
    for (first_status, policy) in [(201, OnUnknown::Reexecute), (500, OnUnknown::Reexecute)] {
        let world = World::new();
        let (runs, go, told) = (Runs::default(), Signal::new(), Signal::new());
        let handler = (runs.clone(), go.clone(), told.clone());
        let options = || with_policy(|it| it.terms.on_unknown = policy);
        let handler = move |request: Request<Body>| {
            let (runs, go, told) = handler.clone();
            async move {
                let execution = request.extensions().get::<ExecutionHandle>().unwrap().clone();
                if runs.next() > 1 {
                    return respond(201, "second");
                }
                execution.lost().await;
                assert!(execution.is_lost());
                told.give();
                go.wait().await;
                respond(first_status, "first")
            }
        };
        let app = world.app(options(), handler.clone());
        let heir = world.other_process().app(options(), handler);
        let first = begin(&app, pay("k", "{}"));
        runs.reach(1).await;
        // The owner cannot renew for longer than its lease, and then somebody is quicker.
        world.store.is(Mood::Down);
        sleep(LEASE * 2).await;
        world.store.is(Mood::Well);
        let second = send(&heir, pay("k", "{}")).await;
        assert_eq!((second.replayed(), &*second.body), (Some("false"), &b"second"[..]));
        told.wait().await;
        go.give();
        let first = first.await.unwrap();
        assert_eq!((first.status.as_u16(), &*first.code()), (409, "superseded"));
        let replay = send(&app, pay("k", "{}")).await;
        assert_eq!((replay.replayed(), &*replay.body), (Some("true"), &b"second"[..]));
        assert_eq!(runs.count(), 2);
    }
}

#[tokio::test(start_paused = true)]
async fn debug_of_an_execution_shows_no_checkpoint() {
    const POINT: &[u8] = b"s3cr3t";
    let world = World::new();
    let app = world.app(reexecute(), |request: Request<Body>| async move {
        let execution = request.extensions().get::<ExecutionHandle>().unwrap();
        if execution.attempt() == 1 {
            execution.save(bytes::Bytes::from_static(POINT)).await.unwrap();
            return respond(500, "");
        }
        assert_eq!(execution.checkpoint().unwrap(), POINT);
        respond(201, format!("{execution:?}"))
    });
    send(&app, pay("k", "{}")).await;
    let printed = String::from_utf8(send(&app, pay("k", "{}")).await.body.to_vec()).unwrap();
    assert!(printed.contains("checkpoint_bytes: Some(6)"), "{printed}");
    assert!(!printed.contains("s3cr3t"), "{printed}");
}
