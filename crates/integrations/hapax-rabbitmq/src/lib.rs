//! RabbitMQ as [`MessageSource`](hapax_messages::MessageSource) and
//! [`MessageSink`](hapax_messages::MessageSink), over AMQP 0.9.1.

mod delivery;
mod link;
mod properties;
mod settings;
mod sink;
mod source;

pub use link::RabbitUrlError;
pub use settings::{RabbitOrderKey, RabbitStartError};
pub use sink::{RabbitSink, RabbitSinkBuilder};
pub use source::{RabbitSource, RabbitSourceBuilder};
