//! Many copies of one request at once.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hapax_core::InFlight;
use hapax_gateway::{RunningGateway, StoreUrl};
use tokio::sync::Barrier;
use tokio::task::JoinSet;

use crate::world::{Answer, Raw, Upstream, config, request, start, text};

const COPIES: usize = 100;

/// An upstream that takes a moment, fails the first `failures` executions of each key, and
/// numbers them.
async fn upstream(failures: usize) -> (Upstream, Arc<Mutex<HashMap<String, usize>>>) {
    let executions = Arc::new(Mutex::new(HashMap::new()));
    let all = Arc::clone(&executions);
    let upstream = Upstream::start(move |seen| {
        let key = seen.header("idempotency-key").to_owned();
        let number = {
            let mut all = all.lock().unwrap();
            let number: &mut usize = all.entry(key.clone()).or_default();
            *number += 1;
            *number
        };
        async move {
            tokio::time::sleep(Duration::from_millis(10)).await;
            let status = if number <= failures { 429 } else { 201 };
            text(status, format!("{key} {number}"))
        }
    })
    .await;
    (upstream, executions)
}

/// `COPIES` clients send each of `keys` at the same moment, in turn to these addresses; their
/// answers by key.
async fn storm(addresses: &[SocketAddr], keys: usize) -> HashMap<usize, Vec<Answer>> {
    let barrier = Arc::new(Barrier::new(COPIES));
    let mut clients = JoinSet::new();
    for address in addresses.iter().copied().cycle().take(COPIES) {
        let barrier = Arc::clone(&barrier);
        clients.spawn(async move {
            let mut raw = Raw::connect(address).await;
            let mut answers = Vec::new();
            for key in 0..keys {
                let text = request("POST", "/", &[("idempotency-key", &key.to_string())], "x");
                barrier.wait().await;
                raw.send(text).await;
                answers.push((key, raw.answer().await));
            }
            answers
        });
    }
    let mut answers: HashMap<usize, Vec<Answer>> = HashMap::new();
    while let Some(client) = clients.join_next().await {
        for (key, answer) in client.unwrap() {
            answers.entry(key).or_default().push(answer);
        }
    }
    answers
}

/// How many keys are copied; `HAPAX_COPIED_KEYS` for a long run.
fn keys() -> usize {
    let said = std::env::var("HAPAX_COPIED_KEYS");
    said.map_or(20, |text| text.parse().expect("HAPAX_COPIED_KEYS is a number"))
}

fn first_answers(answers: &[Answer]) -> usize {
    let first = |it: &&Answer| it.status == 201 && it.header("idempotency-replayed") == "false";
    answers.iter().filter(first).count()
}

#[tokio::test(flavor = "multi_thread")]
async fn rejected_duplicates_get_409_or_the_same_bytes() {
    let (upstream, executions) = upstream(0).await;
    let gateway = start(config(upstream.url())).await;
    let answers = storm(&[gateway.local_addr()], keys()).await;
    let mut rejected = 0;
    for (key, answers) in &answers {
        assert_eq!(answers.len(), COPIES);
        assert_eq!(first_answers(answers), 1);
        for answer in answers {
            match answer.status {
                201 => assert_eq!(answer.text(), format!("{key} 1")),
                409 => {
                    assert_eq!(answer.code(), "in-flight");
                    assert_eq!(answer.header("retry-after"), "1");
                    rejected += 1;
                }
                other => panic!("{other}: {}", answer.text()),
            }
        }
    }
    assert!(rejected > keys(), "copies met an execution in progress: {rejected}");
    let executions = executions.lock().unwrap();
    assert_eq!(executions.len(), keys());
    assert!(executions.values().all(|count| *count == 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn waiting_duplicates_get_the_same_bytes() {
    waiting_copies_over(StoreUrl::Memory, 1).await;
}

/// The copies of each key come in by several gateways on one store.
async fn waiting_copies_over(store: StoreUrl, gateways: usize) {
    let (upstream, executions) = upstream(0).await;
    let mut running = Vec::new();
    for _ in 0..gateways {
        let mut config = config(upstream.url());
        config.store = store.clone();
        config.policy.in_flight = InFlight::Wait(Duration::from_secs(10));
        running.push(start(config).await);
    }
    let addresses: Vec<_> = running.iter().map(RunningGateway::local_addr).collect();
    let answers = storm(&addresses, keys()).await;
    for (key, answers) in &answers {
        assert_eq!((answers.len(), first_answers(answers)), (COPIES, 1));
        for answer in answers {
            assert_eq!((answer.status, answer.text()), (201, format!("{key} 1")));
        }
    }
    let executions = executions.lock().unwrap();
    assert_eq!(executions.len(), keys());
    assert!(executions.values().all(|count| *count == 1));
}

mod redis {
    use hapax_testkit::servers::RedisServer;

    #[tokio::test(flavor = "multi_thread")]
    async fn duplicates_at_two_gateways_execute_once() {
        let server = RedisServer::start().await;
        super::waiting_copies_over(server.url().parse().unwrap(), 2).await;
    }
}

mod postgres {
    use hapax_testkit::servers::PostgresServer;

    #[tokio::test(flavor = "multi_thread")]
    async fn duplicates_at_two_gateways_execute_once() {
        let server = PostgresServer::start().await;
        super::waiting_copies_over(server.url("postgres").parse().unwrap(), 2).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn after_the_owner_fails_exactly_one_waiter_executes() {
    let (upstream, executions) = upstream(1).await;
    let mut config = config(upstream.url());
    config.policy.in_flight = InFlight::Wait(Duration::from_secs(10));
    let gateway = start(config).await;
    let answers = storm(&[gateway.local_addr()], keys()).await;
    for (key, answers) in &answers {
        let failed = answers.iter().filter(|answer| answer.status == 429).count();
        assert_eq!((failed, first_answers(answers)), (1, 1), "key {key}");
        for answer in answers.iter().filter(|answer| answer.status != 429) {
            assert_eq!((answer.status, answer.text()), (201, format!("{key} 2")));
        }
    }
    assert!(executions.lock().unwrap().values().all(|count| *count == 2));
}

#[tokio::test(flavor = "multi_thread")]
async fn too_many_waiters_are_rejected_at_once() {
    let (upstream, _) = upstream(0).await;
    let mut config = config(upstream.url());
    config.policy.in_flight = InFlight::Wait(Duration::from_secs(10));
    config.max_waiters = 5;
    let gateway = start(config).await;
    let answers = &storm(&[gateway.local_addr()], 1).await[&0];
    assert!(answers.iter().any(|answer| answer.code() == "in-flight"));
    assert_eq!(first_answers(answers), 1);
}
