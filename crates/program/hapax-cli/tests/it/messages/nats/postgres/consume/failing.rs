//! Messages that fail again and again, and others.

use super::*;

impl Consume {
    /// Publishes messages that the service rejects, each time.
    async fn publish_failing(&self, count: u32) {
        for number in 0..count {
            let id = format!("failing-{number}");
            self.service.reply(&id, &[Reply::Rejected(500)]);
            self.publish(&id, None, None).await;
        }
    }

    /// Waits until a metric of a process has a value of at least `value`.
    async fn until_metric(&self, process: &ConsumeProcess, name: &str, value: u64) {
        while blocking(|| process.metric(name)) < value {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn more_messages_that_fail_than_a_consumer_may_have_keep_no_other_from_being_posted() {
    let (socket, address) = Service::bind();
    let consume = Consume::start(address).await;
    let url = consume.world.database.url("postgres");
    let consume = consume.with(&["--store", &url]);
    consume.service.serve(socket);
    // Of --max-unacknowledged 32.
    consume.publish_failing(100).await;
    let process = consume.process();
    for number in 0..20 {
        consume.publish(&format!("m-{number}"), None, None).await;
    }
    consume.until(|service| service.effects().len() == 20).await;
    consume.until_metric(&process, "delayed_total", 32).await;
    let failing = consume.service.received().into_iter().filter(|it| it.id.starts_with("failing"));
    assert!(failing.count() >= 32);
    let ready = blocking(|| get_with(process.admin, "/readyz", ""));
    let full = blocking(|| process.metric(r#"limit_full{limit="max_unacknowledged"}"#));
    assert_eq!((ready.status, full), (200, 0), "{ready:?}");
    blocking(|| process.end());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_limit_of_the_broker_that_is_full_of_messages_that_fail_is_a_metric() {
    const FULL: &str = r#"limit_full{limit="source"}"#;
    let (socket, address) = Service::bind();
    let consume = Consume::start(address).await;
    let url = consume.world.database.url("postgres");
    let consume = consume.with(&["--store", &url, "--longest-pause", "2s"]);
    consume.service.serve(socket);
    let source = NatsSource::builder(consume.world.context.clone(), "ORDERS", "invoices");
    source.ack_wait(Duration::from_secs(1)).max_ack_pending(4).start().await.unwrap();
    consume.publish_failing(8).await;
    let process = consume.process();
    consume.until_metric(&process, FULL, 1).await;
    // It is not ready only once that has lasted.
    let ready = blocking(|| get_with(process.admin, "/readyz", ""));
    assert_eq!(ready.status, 200, "{ready:?}");
    for number in 0..8 {
        consume.service.reply(&format!("failing-{number}"), &[]);
    }
    consume.until(|service| service.effects().len() == 8).await;
    consume.until_empty().await;
    while blocking(|| process.metric(FULL)) != 0 {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    blocking(|| process.end());
}
