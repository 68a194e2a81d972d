//! RabbitMQ as the source of `hapax consume`.

use std::num::{NonZeroU16, NonZeroU32};
use std::time::Duration;

use hapax_rabbitmq::{RabbitLogin, RabbitOrderKey, RabbitSource, RabbitStartError};

use super::super::args::{DeliveryLimitArg, LimitArgs, SourceArgs};
use crate::exit::CliError;

/// Delivery limit of a quorum queue from RabbitMQ 4.0 on.
const USUAL_LIMIT: NonZeroU32 = NonZeroU32::MIN.saturating_add(19);

/// Settings of a consumer of a queue.
#[derive(Debug)]
pub(in crate::consume) struct RabbitPlan {
    login: Option<RabbitLogin>,
    queue: String,
    order_key: RabbitOrderKey,
    prefetch: NonZeroU16,
    delivery_limit: Option<NonZeroU32>,
    consumer_timeout: Option<Duration>,
    longest_handler: Duration,
}

impl RabbitPlan {
    pub(super) fn new(url: &str, args: &SourceArgs, limits: &LimitArgs) -> Result<Self, CliError> {
        let Some(queue) = &args.queue else {
            return Err(CliError::usage(
                "--queue: expected the queue of a RabbitMQ server, found none: add --queue NAME",
            ));
        };
        let order_key = match args.order_by.as_deref() {
            None => RabbitOrderKey::None,
            Some("routing-key") => RabbitOrderKey::RoutingKey,
            Some(text) => match text.split_once(':') {
                Some(("header", name)) if !name.is_empty() => {
                    RabbitOrderKey::Header(name.to_owned())
                }
                _ => {
                    return Err(CliError::usage(
                        "--order-by: expected routing-key or header:NAME, found another key",
                    ));
                }
            },
        };
        let most = u16::try_from(limits.max_unacknowledged.get()).unwrap_or(u16::MAX);
        Ok(Self {
            login: args.broker.rabbit(url, "--from")?,
            queue: queue.clone(),
            order_key,
            prefetch: NonZeroU16::new(most).unwrap_or(NonZeroU16::MIN),
            delivery_limit: match args.delivery_limit {
                None => Some(USUAL_LIMIT),
                Some(DeliveryLimitArg::None) => None,
                Some(DeliveryLimitArg::Deliveries(limit)) => Some(limit),
            },
            consumer_timeout: args.consumer_timeout,
            longest_handler: limits.timeout,
        })
    }

    pub(super) async fn open(self, url: &str) -> Result<RabbitSource, CliError> {
        let mut source = RabbitSource::builder(url, self.queue)
            .order_key(self.order_key)
            .prefetch(self.prefetch)
            .delivery_limit(self.delivery_limit)
            .longest_handler(self.longest_handler);
        if let Some(login) = self.login {
            source = source.login(login);
        }
        if let Some(timeout) = self.consumer_timeout {
            source = source.consumer_timeout(Some(timeout));
        }
        source.start().await.map_err(|error| match error {
            RabbitStartError::Url(_) => CliError::usage(format!("--from: {error}")),
            RabbitStartError::QueueName { .. } => CliError::usage(format!("--queue: {error}")),
            RabbitStartError::ConsumerTimeout { .. } => {
                CliError::usage(format!("--timeout, --consumer-timeout: {error}"))
            }
            error => CliError::unavailable(format!("--from: {error}")),
        })
    }
}
