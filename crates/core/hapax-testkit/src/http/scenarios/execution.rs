//! Scenarios of statements 9–13: execution.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use hapax_core::{Clock, OnUnknown, SystemClock};
use http::Method;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::http::{
    ExecutionCount, Handler, HandlerGate, HandlerRequest, Protocol, Raw2, ScenarioContext,
    ScenarioPolicy, counting, handler, reply,
};

/// Returns a handler that counts an execution, waits for the gate, and answers with the execution's
/// number.
pub(super) fn held(runs: &ExecutionCount, gate: &HandlerGate) -> Handler {
    let held = (runs.clone(), gate.clone());
    handler(move |_| {
        let (runs, gate) = held.clone();
        async move {
            let run = runs.next();
            gate.pass().await;
            reply(201, run.to_string())
        }
    })
}

pub async fn w09_of_100_duplicates_one_executes(arena: ScenarioContext) {
    let (runs, gate) = (ExecutionCount::new(), HandlerGate::closed());
    // Many requests arrive at once, and this does not test the store's speed.
    let policy =
        ScenarioPolicy { store_timeout: crate::http::TIMEOUT, ..ScenarioPolicy::default() };
    let stage = arena.start(policy, held(&runs, &gate)).await;
    let copies: Vec<_> = (0..100).map(|_| stage.begin(stage.post("k"))).collect();
    runs.reach(1).await;
    // A duplicate during the execution is rejected; one that arrives later gets a replay.
    stage.send(stage.post("k")).await.is_rejected(409, "in-flight");
    gate.open();
    let mut first = 0;
    for copy in copies {
        let answer = copy.await.unwrap();
        match answer.header("idempotency-replayed") {
            "" => answer.is_rejected(409, "in-flight"),
            "true" => answer.is_replay(201, "1"),
            _ => {
                answer.is_first(201, "1");
                first += 1;
            }
        }
    }
    assert_eq!((first, runs.count()), (1, 1));
}

pub async fn w10_a_client_that_disconnects_neither_cancels_nor_loses_the_execution(
    arena: ScenarioContext,
) {
    let (runs, gate) = (ExecutionCount::new(), HandlerGate::closed());
    let stage = arena.start(ScenarioPolicy::default(), held(&runs, &gate)).await;
    let client = stage.begin(stage.post("k"));
    runs.reach(1).await;
    client.abort();
    assert!(client.await.unwrap_err().is_cancelled());
    stage.send(stage.post("k")).await.is_rejected(409, "in-flight");
    gate.open();
    stage.until(&stage.post("k"), |answer| answer.status != 409).await.is_replay(201, "1");
    assert_eq!(runs.count(), 1);
}

/// A request executes only if all of it has arrived.
pub async fn w10_a_client_that_disconnects_during_its_request_executes_nothing(
    arena: ScenarioContext,
) {
    let runs = ExecutionCount::new();
    let stage = arena.start(ScenarioPolicy::default(), counting(&runs)).await;
    let (client, caller) = (stage.client(), arena.unique("caller"));
    match arena.protocol() {
        Protocol::Http1 => {
            let head = format!(
                "POST /payments HTTP/1.1\r\nhost: a\r\nauthorization: {caller}\r\nidempotency-key: k\r\n"
            );
            for rest in [
                "content-length: 9\r\n\r\nhalf",
                "transfer-encoding: chunked\r\n\r\n4\r\nhalf\r\n",
                "transfer-encoding: chunked\r\n\r\n4\r\nhalf\r\n0\r\n",
            ] {
                let mut stream = TcpStream::connect(client.address).await.unwrap();
                stream.write_all(format!("{head}{rest}").as_bytes()).await.unwrap();
                stream.shutdown().await.unwrap();
                // Waits until the server is done with it: it answers, or closes.
                let mut said = Vec::new();
                let read =
                    tokio::time::timeout(crate::http::TIMEOUT, stream.read_to_end(&mut said));
                drop(read.await.expect("no end in time"));
                assert!(!said.starts_with(b"HTTP/1.1 2"), "{rest:?}");
            }
        }
        Protocol::Http2 => {
            let fields = [
                (":method", "POST"),
                (":scheme", "http"),
                (":authority", "shop.example"),
                (":path", "/payments"),
                ("authorization", caller.as_str()),
                ("idempotency-key", "k"),
            ];
            // No error, `CANCEL`, or no reset at all.
            for reason in [Some(0), Some(8), None] {
                let mut raw = Raw2::connect(client).await;
                raw.head(1, &fields, false).await;
                raw.data(1, b"half", false).await;
                raw.wait_until_read().await;
                if let Some(reason) = reason {
                    raw.reset(1, reason).await;
                    raw.wait_until_read().await;
                }
            }
        }
    }
    // The key was not claimed, or is released soon.
    let post = stage.post("k").header("authorization", &caller);
    let answer = stage.until(&post, |answer| answer.status != 409).await;
    answer.is_first(201, "1");
    // After this, all requests in progress have ended.
    stage.end().await;
    assert_eq!(runs.count(), 1);
}

pub async fn w12_a_handler_may_take_many_times_the_lease(arena: ScenarioContext) {
    let runs = ExecutionCount::new();
    let count = runs.clone();
    let lease = Duration::from_secs(4);
    let slow = handler(move |_| {
        let run = count.next();
        async move {
            // The scenario needs an execution that outlasts its lease.
            tokio::time::sleep(lease * 3).await;
            reply(201, run.to_string())
        }
    });
    let stage = arena.start(ScenarioPolicy { lease, ..ScenarioPolicy::default() }, slow).await;
    let first = stage.begin(stage.post("k"));
    runs.reach(1).await;
    let copy = stage.until(&stage.post("k"), |answer| answer.status != 409).await;
    copy.is_replay(201, "1");
    first.await.unwrap().is_first(201, "1");
    assert_eq!(runs.count(), 1);
}

/// Returns a handler that answers 429, which is retryable, on its first execution, else 201; it
/// notes the requests.
fn noting(calls: &Arc<Mutex<Vec<HandlerRequest>>>) -> Handler {
    let calls = Arc::clone(calls);
    handler(move |call| {
        let mut calls = calls.lock().unwrap();
        calls.push(call);
        let status = if calls.len() == 1 { 429 } else { 201 };
        async move { reply(status, "") }
    })
}

pub async fn w13_every_execution_has_a_larger_fence_and_its_attempt(arena: ScenarioContext) {
    let calls = Arc::default();
    let stage = arena.start(ScenarioPolicy::default(), noting(&calls)).await;
    stage.send(stage.post("k")).await.is_first(429, "");
    stage.send(stage.post("k")).await.is_first(201, "");
    stage.send(stage.post("k")).await.is_replay(201, "");
    let calls = calls.lock().unwrap();
    let [first, second] = &calls[..] else { panic!("{} runs", calls.len()) };
    assert_eq!((first.attempt, second.attempt), (Some(1), Some(2)));
    assert!(first.fence.unwrap() < second.fence.unwrap());
}

pub async fn w13_a_reused_key_has_a_larger_fence(arena: ScenarioContext) {
    let calls: Arc<Mutex<Vec<HandlerRequest>>> = Arc::default();
    let noted = Arc::clone(&calls);
    let note = handler(move |call| {
        noted.lock().unwrap().push(call);
        async { reply(201, "") }
    });
    let (lease, retention) = (Duration::from_secs(1), Duration::from_secs(1));
    let stage =
        arena.start(ScenarioPolicy { lease, retention, ..ScenarioPolicy::default() }, note).await;
    stage.send(stage.post("k")).await.is_first(201, "");
    let anew =
        |answer: &crate::http::TestResponse| answer.header("idempotency-replayed") == "false";
    stage.until(&stage.post("k"), anew).await;
    let calls = calls.lock().unwrap();
    let [first, second] = &calls[..] else { panic!("{} runs", calls.len()) };
    assert_eq!((first.attempt, second.attempt), (Some(1), Some(1)));
    assert!(first.fence.unwrap() < second.fence.unwrap());
}

pub async fn w13_the_clients_own_key_reaches_the_handler(arena: ScenarioContext) {
    let calls = Arc::default();
    let stage = arena.start(ScenarioPolicy::default(), noting(&calls)).await;
    stage.send(stage.post("\"my key\"")).await.is_first(429, "");
    assert_eq!(calls.lock().unwrap()[0].headers["idempotency-key"], "\"my key\"");
}

pub async fn w13_a_fence_that_a_client_sends_is_dropped(arena: ScenarioContext) {
    let calls = Arc::default();
    let stage = arena.start(ScenarioPolicy::default(), noting(&calls)).await;
    let post = stage.post("k").header("idempotency-fence", "9".repeat(19));
    let post = post.more("idempotency-fence", "8").header("idempotency-attempt", "77");
    stage.send(post).await.is_first(429, "");
    let calls = calls.lock().unwrap();
    assert_eq!(calls[0].attempt, Some(1));
    for name in ["idempotency-fence", "idempotency-attempt"] {
        let lines = calls[0].headers.get_all(name);
        assert!(
            lines.iter().all(|line| line != "8" && line != "77" && line.len() < 19),
            "{lines:?}"
        );
        assert!(lines.iter().count() <= 1, "{lines:?}");
    }
}

/// A handler of an unprotected route that received the header would take it for one of ours.
pub async fn w13_a_fence_that_a_client_sends_reaches_no_unprotected_handler(
    arena: ScenarioContext,
) {
    let calls = Arc::default();
    let stage = arena.start(ScenarioPolicy::default(), noting(&calls)).await;
    let forged = |post: crate::http::TestRequest| {
        post.header("idempotency-fence", "7").header("idempotency-attempt", "7")
    };
    stage.send(forged(stage.plain())).await.is_unmarked(429, "");
    stage.send(forged(stage.post("k").method(Method::PUT))).await.is_unmarked(201, "");
    let calls = calls.lock().unwrap();
    assert_eq!(calls.len(), 2);
    for call in &*calls {
        assert_eq!((call.fence, call.attempt), (None, None));
        for name in ["idempotency-fence", "idempotency-attempt"] {
            assert!(!call.headers.contains_key(name), "{call:?}");
        }
    }
}

/// A library has no upstream, and sends no deadline.
pub async fn w38_a_request_to_an_upstream_carries_its_deadline_and_none_that_a_client_sends(
    arena: ScenarioContext,
) {
    let calls = Arc::default();
    let stage = arena.start(ScenarioPolicy::default(), noting(&calls)).await;
    let forged = |post: crate::http::TestRequest| {
        post.header("idempotency-deadline", "@1").more("idempotency-deadline", "@2")
    };
    let seconds = || SystemClock.now().as_micros() / 1_000_000;
    let begin = seconds();
    stage.send(forged(stage.post("k"))).await.is_first(429, "");
    stage.send(forged(stage.post("k"))).await.is_first(201, "");
    stage.send(forged(stage.plain())).await.is_unmarked(201, "");
    let end = seconds();
    let calls = calls.lock().unwrap();
    let [first, second, unprotected] = &calls[..] else { panic!("{} runs", calls.len()) };
    for call in [first, second] {
        let lines: Vec<_> = call.headers.get_all("idempotency-deadline").iter().collect();
        if !call.headers.contains_key("idempotency-fence") {
            assert!(lines.is_empty(), "{lines:?}");
            continue;
        }
        let [line] = lines[..] else { panic!("{lines:?}") };
        let at: u64 = line.to_str().unwrap().strip_prefix('@').unwrap().parse().unwrap();
        // The upstream timeout of the gateways that play it.
        assert!((begin + 1..=end + 121).contains(&at), "{at}, between {begin} and {end}");
    }
    assert!(!unprotected.headers.contains_key("idempotency-deadline"), "{unprotected:?}");
}

pub async fn w24_the_operation_id_is_derived_from_scope_and_key(arena: ScenarioContext) {
    let calls = Arc::default();
    let policy = ScenarioPolicy { on_unknown: OnUnknown::Reexecute, ..ScenarioPolicy::default() };
    let stage = arena.start(policy, noting(&calls)).await;
    let forged = "f".repeat(64);
    let post = || stage.post("k").header("idempotency-operation-id", &forged);
    stage.send(post()).await.is_first(429, "");
    stage.send(post()).await.is_first(201, "");
    let other = arena.unique("Bearer other");
    stage.send(post().header("authorization", other)).await.is_first(201, "");
    stage.send(stage.post("l")).await.is_first(201, "");
    stage.send(post().method(Method::PUT)).await.is_unmarked(201, "");
    let calls = calls.lock().unwrap();
    let ids: Vec<_> = calls.iter().map(|call| call.operation.clone()).collect();
    let [Some(first), Some(second), Some(other), Some(another), None] = &ids[..] else {
        panic!("{ids:?}");
    };
    assert_eq!(first, second);
    assert!(first != other && first != another && other != another, "{ids:?}");
    for id in [first, other, another] {
        assert!(id.bytes().all(|byte| byte.is_ascii_hexdigit()) && *id != forged, "{id}");
    }
    for call in &*calls {
        let lines = call.headers.get_all("idempotency-operation-id");
        assert!(lines.iter().all(|line| *line != forged), "{call:?}");
    }
}

/// Group `several`: two processes on one store.
pub async fn w09_of_duplicates_at_two_processes_one_executes(arena: ScenarioContext) {
    let (runs, gate) = (ExecutionCount::new(), HandlerGate::closed());
    let policy =
        ScenarioPolicy { store_timeout: crate::http::TIMEOUT, ..ScenarioPolicy::default() };
    let here = arena.start(policy.clone(), held(&runs, &gate)).await;
    let there = arena.start(policy, held(&runs, &gate)).await;
    let copies: Vec<_> =
        (0..50).flat_map(|_| [here.begin(here.post("k")), there.begin(there.post("k"))]).collect();
    runs.reach(1).await;
    here.send(here.post("k")).await.is_rejected(409, "in-flight");
    there.send(there.post("k")).await.is_rejected(409, "in-flight");
    gate.open();
    for copy in copies {
        let answer = copy.await.unwrap();
        assert!(matches!(answer.status.as_u16(), 201 | 409), "{answer:?}");
    }
    there.send(there.post("k")).await.is_replay(201, "1");
    assert_eq!(runs.count(), 1);
}

/// Group `outages`: there is no response before the store has the outcome.
pub async fn w11_there_is_no_response_before_its_outcome_is_recorded(arena: ScenarioContext) {
    let (runs, gate) = (ExecutionCount::new(), HandlerGate::closed());
    // The timeout of the store is longer than this scenario.
    let policy =
        ScenarioPolicy { store_timeout: crate::http::TIMEOUT, ..ScenarioPolicy::default() };
    let stage = arena.start(policy, held(&runs, &gate)).await;
    let mut first = stage.begin(stage.post("k"));
    runs.reach(1).await;
    stage.cut().await;
    gate.open();
    // A layer that answers first and writes later would have answered by now.
    let early = tokio::time::timeout(Duration::from_secs(1), &mut first).await;
    assert!(early.is_err(), "{early:?}");
    stage.mend().await;
    let answer = first.await.unwrap();
    answer.is_first(201, "1");
    assert_eq!(answer.header("idempotency-recorded"), "");
    stage.send(stage.post("k")).await.is_replay(201, "1");
}

/// Group `crashes`: the outcome of a response survives a crash right after it.
pub async fn w11_the_outcome_of_a_sent_response_is_recorded(arena: ScenarioContext) {
    let runs = ExecutionCount::new();
    for round in 1..=5 {
        let key = format!("k-{round}");
        let stage = arena.start(ScenarioPolicy::default(), counting(&runs)).await;
        stage.send(stage.post(&key)).await.is_first(201, &round.to_string());
        stage.instance().kill().await;
        drop(stage);
        let stage = arena.start(ScenarioPolicy::default(), counting(&runs)).await;
        stage.send(stage.post(&key)).await.is_replay(201, &round.to_string());
        stage.instance().kill().await;
    }
    assert_eq!(runs.count(), 5);
}

/// Groups `outages` and `several`: an owner is cut off for longer than its lease, and taken over.
pub async fn w13_an_owner_that_was_taken_over_is_superseded(arena: ScenarioContext) {
    let (runs, gate) = (ExecutionCount::new(), HandlerGate::closed());
    let policy = ScenarioPolicy {
        lease: Duration::from_secs(1),
        store_timeout: Duration::from_secs(1),
        on_unknown: OnUnknown::Reexecute,
        ..ScenarioPolicy::default()
    };
    let lost = arena.start(policy.clone(), held(&runs, &gate)).await;
    let heir = arena.start(policy, counting(&runs)).await;
    let first = lost.begin(lost.post("k"));
    runs.reach(1).await;
    lost.cut().await;
    // Retries until the lease has lapsed.
    let taken = heir.until(&heir.post("k"), |answer| answer.status == 201).await;
    taken.is_first(201, "2");
    lost.mend().await;
    gate.open();
    first.await.unwrap().is_rejected(409, "superseded");
    heir.send(heir.post("k")).await.is_replay(201, "2");
}

/// Without a secret the id is a plain hash of caller and key, by which they could be guessed.
pub async fn w34_responses_after_a_claim_have_the_operation_id_if_there_is_a_secret(
    arena: ScenarioContext,
) {
    let (runs, gate) = (ExecutionCount::new(), HandlerGate::closed());
    let calls: Arc<Mutex<Vec<HandlerRequest>>> = Arc::default();
    let (count, held, noted) = (runs.clone(), gate.clone(), Arc::clone(&calls));
    let handle = handler(move |call| {
        let (path, is_protected) = (call.uri.path().to_owned(), call.operation.is_some());
        noted.lock().unwrap().push(call);
        count.next();
        let held = held.clone();
        async move {
            if path == "/held" {
                held.pass().await;
            }
            let mut response = reply(if path == "/fails" { 500 } else { 201 }, "");
            if is_protected {
                let forged = http::HeaderValue::from_static("of-the-service");
                response.headers_mut().insert("idempotency-operation-id", forged);
            }
            response
        }
    });
    let stage = arena.start(ScenarioPolicy::default(), handle).await;
    let (pays, fails, holds) =
        (stage.post("k"), stage.post("l").to("/fails"), stage.post("m").to("/held"));
    let executed = stage.send(pays.clone()).await;
    executed.is_first(201, "");
    let replayed = stage.send(pays.clone()).await;
    replayed.is_replay(201, "");
    let reused = stage.send(pays.clone().body("{}")).await;
    reused.is_rejected(422, "key-reused");
    let failed = stage.send(fails.clone()).await;
    failed.is_first(500, "");
    let unknown = stage.send(fails.clone()).await;
    unknown.is_rejected(409, "outcome-unknown");
    let first = stage.begin(holds.clone());
    runs.reach(3).await;
    let in_flight = stage.send(holds.clone()).await;
    in_flight.is_rejected(409, "in-flight");
    gate.open();
    let first = first.await.unwrap();
    let ids: Vec<_> =
        calls.lock().unwrap().iter().map(|call| call.operation.clone().unwrap()).collect();
    let [pay, fail, hold] = &ids[..] else { panic!("{ids:?}") };
    for (answer, id) in [
        (&executed, pay),
        (&replayed, pay),
        (&reused, pay),
        (&failed, fail),
        (&unknown, fail),
        (&in_flight, hold),
        (&first, hold),
    ] {
        let found: Vec<_> = answer.headers.get_all("idempotency-operation-id").iter().collect();
        match arena.has_secret() {
            true => assert_eq!(found, [id.as_str()], "{answer:?}"),
            false => assert!(found.is_empty(), "{answer:?}"),
        }
    }
    // Before a claim there is no operation.
    let rejected = stage.send(stage.post("")).await;
    rejected.is_rejected(400, "invalid-key");
    assert_eq!(rejected.header("idempotency-operation-id"), "");
    stage.send(pays.method(Method::PUT)).await.is_unmarked(201, "");
}
