//! Attempts in batch mode, over the end of a process.

use hapax_core::store::BoxFuture;
use hapax_messages::{Attempts, BatchItem, MessageFailure};
use hapax_testkit::messages::MemoryBroker;

use super::batch::*;

#[tokio::test]
async fn a_message_that_failed_often_before_its_process_was_restarted_is_tried_again() {
    let (server, broker) = (with_effects().await, MemoryBroker::default());
    send(&broker, "m-1");
    let max = Attempts::default().max;
    let failing = run_with(&server, &broker, max, failing);
    let failed = async || {
        let failed = "SELECT coalesce(max(attempts) FILTER (WHERE error IS NOT NULL), 0) > 5 \
                      FROM hapax_attempts";
        server.sql("postgres", failed).await == "t"
    };
    until("it failed more often than it may crash", failed).await;
    failing.stop().await;
    assert_eq!(server.sql("postgres", "SELECT error FROM hapax_attempts").await, "an outage");
    broker.redeliver();
    let running = run_with(&server, &broker, max, write);
    broker.emptied().await;
    assert_eq!(summary(&server).await, "1|1");
    assert_eq!(server.sql("postgres", DEAD_LETTER).await, "");
    running.stop().await;
}

fn failing<'a>(
    _: &'a mut Connection,
    _: &'a [BatchItem],
) -> BoxFuture<'a, Result<(), MessageFailure>> {
    Box::pin(std::future::ready(Err(MessageFailure::retry("an outage"))))
}
