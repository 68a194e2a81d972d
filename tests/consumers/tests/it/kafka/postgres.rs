use hapax_consumers::BrokerKind;

use crate::each_message_has_one_effect;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_message_has_one_effect_in_every_mode() {
    Box::pin(each_message_has_one_effect(BrokerKind::Kafka)).await;
}
