//! Copies that wait in one process hear what happens in another.

use std::sync::LazyLock;
use std::time::Duration;

use hapax_core::{Claim, Idempotency, InFlight, Notify, OnUnknown, OperationId, Outcome, Policy};
use hapax_redis::RedisStore;
use hapax_testkit::faults::Polling;
use hapax_testkit::servers::RedisServer;
use tokio::time::{Instant, timeout};

use super::support::{
    at, claim, claim_key, complete, connect, connect_within, expect_stored, key, own, policy,
};

const SOON: Duration = Duration::from_secs(60);

/// The key that the tests write.
static ONE: LazyLock<OperationId> = LazyLock::new(|| key(1));

/// Waits until what is wanted is subscribed to: the first news is that.
async fn listen(store: &RedisStore, of: u64) {
    timeout(SOON, store.written(&key(of))).await.expect("it is subscribed to");
}

#[tokio::test]
async fn a_write_by_another_process_is_notified() {
    let server = RedisServer::start().await;
    let (here, there) = (connect(&server).await, connect(&server).await);
    listen(&here, 1).await;
    let claimed = claim(1);
    let written = here.written(&ONE);
    expect_stored(&*there, &claimed).await;
    expect_stored(&*there, &complete(&claimed, 2, b"yes")).await;
    // Polled only now: it counts from the call.
    timeout(SOON, written).await.expect("news");
}

#[tokio::test]
async fn notifications_continue_after_a_lost_connection() {
    let server = RedisServer::start().await;
    let (here, there) = (connect(&server).await, connect(&server).await);
    listen(&here, 1).await;
    let written = here.written(&ONE);
    server.command("CLIENT KILL TYPE pubsub").await;
    // What was missed in between cannot be told from nothing: it is news as well.
    timeout(SOON, written).await.expect("news of the new connection");
    let written = here.written(&ONE);
    let claimed = claim(1);
    expect_stored(&*there, &claimed).await;
    expect_stored(&*there, &complete(&claimed, 2, b"yes")).await;
    timeout(SOON, written).await.expect("news");
}

#[tokio::test]
async fn channels_without_waiters_are_unsubscribed() {
    let server = RedisServer::start().await;
    let store = connect(&server).await;
    for of in 0..20 {
        listen(&store, of).await;
    }
    let channels = || async { server.command("PUBSUB CHANNELS *").await };
    timeout(SOON, async { while channels().await != "*0" {} }).await.expect("all given up");
}

#[tokio::test]
async fn channels_are_unsubscribed_while_others_are_subscribed() {
    const OFTEN: Duration = Duration::from_millis(20);
    let server = RedisServer::start().await;
    // Looked after every 100 ms, which is less often than somebody comes.
    let options = at(server.port()).timeout(Duration::from_millis(400));
    let store = connect_within(options).await;
    listen(&store, 0).await;
    let first = format!("hapax:{}", key(0));
    let coming = async {
        let mut paced = tokio::time::interval(OFTEN);
        for of in 1.. {
            paced.tick().await;
            listen(&store, of).await;
        }
    };
    let given_up = async { while server.command("PUBSUB CHANNELS *").await.contains(&first) {} };
    tokio::select! {
        () = coming => panic!("they do not end"),
        given_up = timeout(SOON, given_up) => given_up.expect("the first is given up"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_notified_waiter_is_answered_before_its_next_poll() {
    const ROUNDS: u64 = 15;
    let server = RedisServer::start().await;
    let here = Idempotency::builder(connect(&server).await).namespace("").build().unwrap();
    // This process gets no notifications and polls four times a second.
    let polling =
        Idempotency::builder(Polling(connect(&server).await)).namespace("").build().unwrap();
    let there = Idempotency::builder(connect(&server).await).namespace("").build().unwrap();
    let patient = Policy { in_flight: InFlight::Wait(SOON), ..policy(OnUnknown::Block) };
    let (mut waited, mut polled) = (Duration::ZERO, Duration::ZERO);
    for of in 0..ROUNDS {
        let lease = own(&here, of, &patient).await;
        let [copy, other] = [&there, &polling].map(|process| {
            let process = process.clone();
            tokio::spawn(async move { (claim_key(&process, of, &patient).await, Instant::now()) })
        });
        timeout(SOON, async {
            while there.stats().waiting == 0 || polling.stats().waiting == 0 {
                tokio::task::yield_now().await
            }
        })
        .await
        .expect("it waits");
        let channel = format!(
            "hapax:{}",
            there.operation_id(&hapax_core::Scope::shared(), &super::support::named(of))
        );
        let subscribed =
            async { while !server.command("PUBSUB CHANNELS *").await.contains(&channel) {} };
        timeout(SOON, subscribed).await.expect("it listens");
        let completed = Instant::now();
        lease.complete(Outcome::new("test/1", "yes"), None).await.unwrap();
        for (copy, sum) in [(copy, &mut waited), (other, &mut polled)] {
            let (told, at) = copy.await.unwrap();
            assert!(matches!(told, Claim::Replay(_)), "{told:?}");
            *sum += at - completed;
        }
    }
    // A busy machine delays both alike; polling costs an eighth of a second on average.
    assert!(waited < polled, "{waited:?} with notifications, {polled:?} by polling");
}
