//! Attempts in batch mode, over the end of a process.

use hapax_core::store::BoxFuture;
use hapax_messages::{Attempts, BatchItem, MessageFailure};
use hapax_testkit::messages::MemoryBroker;
use hapax_testkit::servers::PostgresServer;

use super::batch::*;

/// Stops the handler of a message when it has failed more often than it may crash, and then begins
/// attempts of it, in each of which the process ends.
async fn failures_and_crashes(crashes: u32) -> (PostgresServer, MemoryBroker) {
    let (server, broker) = (with_effects().await, MemoryBroker::default());
    send(&broker, "m-1");
    let failing = run_with(&server, &broker, Attempts::default().max, failing);
    let failed = async || {
        let failed = "SELECT coalesce(max(attempts) FILTER (WHERE ended = attempts), 0) > 5 \
                      FROM hapax_attempts";
        server.sql("postgres", failed).await == "t"
    };
    until("it failed more often than it may crash", failed).await;
    failing.stop().await;
    assert_eq!(server.sql("postgres", "SELECT error FROM hapax_attempts").await, "an outage");
    for _ in 0..crashes {
        server.sql("postgres", "SELECT hapax_inbox_attempt('orders', 'm-1')").await;
    }
    broker.redeliver();
    (server, broker)
}

#[tokio::test]
async fn a_message_that_failed_often_before_its_process_was_restarted_or_ended_is_tried_again() {
    // The last attempt is that of the process which handles the message.
    for crashes in [0, Attempts::default().max_crashes.get() - 1] {
        let (server, broker) = failures_and_crashes(crashes).await;
        let running = run_with(&server, &broker, Attempts::default().max, write);
        broker.emptied().await;
        assert_eq!(summary(&server).await, "1|1", "{crashes} crashes");
        assert_eq!(server.sql("postgres", DEAD_LETTER).await, "", "{crashes} crashes");
        running.stop().await;
    }
}

#[tokio::test]
async fn a_message_whose_process_ended_in_consecutive_attempts_is_parked_whatever_was_before() {
    let max_crashes = Attempts::default().max_crashes.get();
    let (server, broker) = failures_and_crashes(max_crashes).await;
    let failed = "SELECT ended FROM hapax_attempts";
    let failed: u32 = server.sql("postgres", failed).await.parse().unwrap();
    let running = run_with(&server, &broker, Attempts::default().max, write);
    broker.emptied().await;
    assert_eq!(summary(&server).await, "0|0");
    let parked =
        "SELECT reason, attempts, error LIKE '%its process ended%' FROM hapax_dead_letters";
    let expected = format!("attempts|{}|t", failed + max_crashes);
    assert_eq!(server.sql("postgres", parked).await, expected);
    running.stop().await;
}

fn failing<'a>(
    _: &'a mut Connection,
    _: &'a [BatchItem],
) -> BoxFuture<'a, Result<(), MessageFailure>> {
    Box::pin(std::future::ready(Err(MessageFailure::retry("an outage"))))
}
