//! Each test has its own server.

mod login;
mod search;
mod sink;
mod source;
mod suite;
mod unreadable;

use std::num::NonZeroUsize;

use async_nats::jetstream::{Context, stream};
use hapax_testkit::servers::NatsServer;

const MANY: NonZeroUsize = NonZeroUsize::new(100).unwrap();

/// Returns a context of the server, with the stream `ORDERS` of the subjects `orders.>`.
async fn context(server: &NatsServer) -> Context {
    let client = async_nats::connect(server.url()).await.unwrap();
    let context = async_nats::jetstream::new(client);
    let config = stream::Config {
        name: "ORDERS".to_owned(),
        subjects: vec!["orders.>".to_owned()],
        ..stream::Config::default()
    };
    context.get_or_create_stream(config).await.unwrap();
    context
}
