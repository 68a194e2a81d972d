//! The flags of `hapax consume`.

use std::num::{NonZeroU32, NonZeroUsize};
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use hapax_core::{JsonPointers, Namespace, Timestamp};
use hapax_gateway::{ByteSize, StoreUrl, UrlText};
use hapax_messages::IdRule;

use crate::admin::{self, AdminAddr};
use crate::logging::FormatArg;
use crate::messages::{BrokerArgs, HiddenUrl, PropertyArgs, SchemaSelector};
use crate::proxies::ProxyArg;
use crate::store::RequiredStoreArg;

/// Post the messages of a broker to a service, which accepts each once
///
/// Each message is claimed under its id, posted in the form of Standard Webhooks, and acknowledged
/// after the store has the record that the service accepted it. A duplicate is not posted. If this
/// process dies, or an answer is lost, the message is posted again under the same webhook-id: the
/// service checks that id, or is behind `hapax gateway`.
///
/// A 2xx accepts the message. After 408, 409, 425, 429, a status that is no 4xx, or no answer, the
/// message is posted again, not before Retry-After. A message with 401, 403, 404, 405, 406 or 415,
/// which a wrong path or secret causes, is posted again for two hours until the service has accepted
/// a message, and then becomes a dead letter after ten attempts. After another 4xx a message becomes a
/// dead letter, and so does one whose attempts are exhausted: `hapax messages` lists, redrives and
/// drops it. Messages with one order key are posted in their order; those behind a dead letter become
/// dead letters too.
#[derive(Debug, Args)]
#[command(after_long_help = AFTER)]
pub(crate) struct ConsumeArgs {
    #[command(flatten)]
    pub(super) source: SourceArgs,
    /// The service: http://HOST/PATH or https://HOST/PATH
    #[arg(long, value_name = "URL")]
    pub(super) to: HiddenUrl,
    /// Name of the consumer, at the broker and in records and dead letters: two consumers of a message
    /// both post it
    #[arg(long, value_name = "NAME")]
    pub(super) consumer: String,
    /// Store of the records of ids: postgres://USER@HOST/DB, redis://HOST or rediss://HOST, the same
    /// for all processes of the consumer; or file:PATH, for one process
    #[arg(long, value_name = "URL", env = "HAPAX_STORE", hide_env_values = true)]
    pub(super) store: UrlText<StoreUrl>,
    /// The namespace of the consumer. Services that share a store or the database of the dead letters need
    /// different ones, or consumers with one name share their records and dead letters [default: the empty one]
    #[arg(long, value_name = "NAME", env = "HAPAX_NAMESPACE")]
    pub(super) namespace: Option<Namespace>,
    /// The file of the store's secrets [default: PATH.secret beside a file: store, else none]
    #[arg(long, value_name = "PATH", env = "HAPAX_SECRET_FILE")]
    pub(super) secret_file: Option<PathBuf>,
    #[command(flatten)]
    pub(super) required: RequiredStoreArg,
    /// The database of the dead letters: postgres://USER@HOST/DB [default: that of --store]
    #[arg(long, value_name = "URL", env = "HAPAX_DATABASE", hide_env_values = true)]
    pub(super) database: Option<HiddenUrl>,
    #[command(flatten)]
    pub(super) schema: SchemaSelector,
    /// File of the signing secrets, one a line, each whsec_ and base64 [default: messages are not
    /// signed]
    #[arg(long, value_name = "PATH", env = "HAPAX_SIGNING_SECRET_FILE")]
    pub(super) signing_secret_file: Option<PathBuf>,
    /// The file of the root certificates to trust, in PEM [default: the system's]
    #[arg(long, value_name = "PATH")]
    pub(super) to_ca: Option<PathBuf>,
    #[command(flatten)]
    pub(super) proxy: ProxyArg,
    /// Rule for the id of a message: header:NAME, cloudevents, json:/POINTER,…, position or
    /// payload-hash. May be repeated: the first one that applies gives the id. The command ends with an
    /// error if none applies to any of the first ten messages. Fewer without an id become dead letters
    /// after half a minute [default: header:message-id, then cloudevents]
    #[arg(long = "id", value_name = "RULE", value_parser = id_rule)]
    pub(super) ids: Vec<IdRule>,
    #[command(flatten)]
    pub(super) limits: LimitArgs,
    /// Address that serves /metrics, /healthz and /readyz, or off
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:9095", value_parser = admin::admin)]
    pub(super) admin: AdminAddr,
    /// The format of the log
    #[arg(long, value_enum, default_value_t = FormatArg::Text)]
    pub(super) log_format: FormatArg,
    /// The level of the log: error, warn, info, debug, trace, off, or TARGET=LEVEL
    #[arg(long, value_name = "LEVEL", default_value = "info")]
    pub(super) log_level: String,
}

const AFTER: &str = "\
A URL with a password is not accepted on the command line, where other users of the machine see it:
set HAPAX_BROKER, HAPAX_STORE and HAPAX_DATABASE, or name a file in --from-file.

  hapax consume --from nats://127.0.0.1 --stream ORDERS --consumer invoices \\
      --store postgres://app@127.0.0.1/orders --to http://127.0.0.1:8000/invoices";

/// The broker, and what is received from it. A flag of one broker is rejected with another one.
#[derive(Debug, Args)]
pub(super) struct SourceArgs {
    /// The broker: nats://HOST, tls://HOST, amqp://HOST/VHOST, amqps://HOST/VHOST, or
    /// kafka://HOST[:PORT],…/TOPIC,… if this program was built with the feature kafka
    #[arg(
        long,
        value_name = "URL",
        env = "HAPAX_BROKER",
        hide_env_values = true,
        required_unless_present = "from_file"
    )]
    pub(super) from: Option<HiddenUrl>,
    /// File of the URL of the broker
    #[arg(long, value_name = "PATH", conflicts_with = "from")]
    pub(super) from_file: Option<PathBuf>,
    /// NATS: the stream. Its durable consumer has the name of --consumer, and is created unless it
    /// exists
    #[arg(long, value_name = "NAME")]
    pub(super) stream: Option<String>,
    /// NATS: receive only messages of this subject, which may have wildcards. May be repeated. Only for
    /// a durable consumer that is created [default: all subjects of the stream]
    #[arg(long = "subject", value_name = "SUBJECT")]
    pub(super) subjects: Vec<String>,
    /// The order key of a message: header:NAME; of NATS also subject, and its consumer then has one
    /// message at a time; of RabbitMQ also routing-key, and its queue must have the argument
    /// x-single-active-consumer; of Kafka only key, the key of the record [default: messages have no order]
    #[arg(long, value_name = "KEY")]
    pub(super) order_by: Option<String>,
    /// RabbitMQ: the queue, which must exist
    #[arg(long, value_name = "NAME")]
    pub(super) queue: Option<String>,
    /// RabbitMQ: the delivery limit that the queue has, which the server does not tell: a number, or none
    /// for a classic queue and for a quorum queue without a limit [default: 20, that of a quorum queue
    /// from RabbitMQ 4.0 on]
    #[arg(long, value_name = "N")]
    pub(super) delivery_limit: Option<DeliveryLimitArg>,
    /// RabbitMQ: the consumer_timeout that the queue has, which the server does not tell: time for which
    /// a message may be unacknowledged [default: 30m, as the server's]
    #[arg(long, value_name = "DUR", value_parser = crate::duration)]
    pub(super) consumer_timeout: Option<Duration>,
    /// Kafka: where a new group begins: earliest, latest, or a time in UTC such as 2026-11-28T00:00:00Z, at the first
    /// record at or after it. A partition with a committed offset continues there. Records older than --retention end
    /// a new group with exit code 64, since each would become a dead letter [default: earliest]
    #[arg(long, value_name = "WHERE")]
    pub(super) start_at: Option<StartAtArg>,
    #[command(flatten)]
    pub(super) broker: BrokerArgs,
    #[command(flatten)]
    pub(super) properties: PropertyArgs,
}

/// Where a new group of Kafka begins.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum StartAtArg {
    Earliest,
    Latest,
    Time(Timestamp),
}

impl std::str::FromStr for StartAtArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let expected = "expected earliest, latest, or a time in UTC such as 2026-11-28T00:00:00Z";
        match text {
            "earliest" => Ok(Self::Earliest),
            "latest" => Ok(Self::Latest),
            text => utc_time(text).map(Self::Time).ok_or_else(|| expected.to_owned()),
        }
    }
}

/// Parses `YYYY-MM-DDThh:mm:ssZ`, from 1970 on.
fn utc_time(text: &str) -> Option<Timestamp> {
    let number = |from: usize, to: usize| text.get(from..to)?.parse::<u64>().ok();
    let (year, month, day) = (number(0, 4)?, number(5, 7)?, number(8, 10)?);
    let (hour, minute, second) = (number(11, 13)?, number(14, 16)?, number(17, 19)?);
    // Years are counted from March, so that the leap day is a year's last.
    let (years, months) =
        if month > 2 { (year, month - 3) } else { (year.checked_sub(1)?, month + 9) };
    let days = 365 * years + years / 4 - years / 100 + years / 400 + (153 * months + 2) / 5 + day;
    let days = days.checked_sub(719_469)?;
    let time =
        Timestamp::from_micros((days * 86_400 + hour * 3600 + minute * 60 + second) * 1_000_000);
    // A month, day or hour that does not exist gives another text.
    (time.to_string().replace(".000Z", "Z") == text).then_some(time)
}

/// A limit of deliveries.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum DeliveryLimitArg {
    None,
    Deliveries(NonZeroU32),
}

impl std::str::FromStr for DeliveryLimitArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "none" => Ok(Self::None),
            text => text
                .parse()
                .map(Self::Deliveries)
                .map_err(|_| "expected a number of at least 1, or none".to_owned()),
        }
    }
}

/// The limits.
#[derive(Debug, Args)]
pub(super) struct LimitArgs {
    /// Largest number of requests at a time, each on a connection of its own
    #[arg(long, value_name = "N", default_value = "16")]
    pub(super) in_flight: NonZeroUsize,
    /// Largest number of messages that are received and not acknowledged. A Kafka source reads up to twice as
    /// many of each partition
    #[arg(long, value_name = "N", default_value = "256")]
    pub(super) max_unacknowledged: NonZeroUsize,
    /// Total size of these messages at which no more are received. The last ones received may exceed it. A Kafka
    /// source reads up to twice as many bytes of each partition
    #[arg(long, value_name = "SIZE", default_value = "64MiB", value_parser = size)]
    pub(super) max_unacknowledged_bytes: NonZeroUsize,
    /// Largest payload; a message with a larger one becomes a dead letter
    #[arg(long, value_name = "SIZE", default_value = "16MiB", value_parser = size)]
    pub(super) max_body: NonZeroUsize,
    /// Bytes of the body of a response that are read
    #[arg(long, value_name = "SIZE", default_value = "64KiB", value_parser = size)]
    pub(super) max_response: NonZeroUsize,
    /// Time for the service to answer, from the connection to the end of the response
    #[arg(long, value_name = "DUR", default_value = "20s", value_parser = crate::duration)]
    pub(super) timeout: Duration,
    /// Attempts after which a message that the service does not accept becomes a dead letter: with the
    /// default pauses two hours on average
    #[arg(long, value_name = "N", default_value = "60")]
    pub(super) attempts: NonZeroU32,
    /// Consecutive attempts in which this process ended, after which a message becomes a dead letter
    #[arg(long, value_name = "N", default_value = "5")]
    pub(super) crashes: NonZeroU32,
    /// Longest pause between two attempts, also of a Retry-After. The first pause is at most 1 s, and
    /// its bound doubles after each attempt
    #[arg(long, value_name = "DUR", default_value = "5m", value_parser = crate::duration)]
    pub(super) longest_pause: Duration,
    /// Time after which the messages of a process that died are posted by another one. It is also the
    /// ack_wait of a NATS consumer that is created
    #[arg(long, value_name = "DUR", default_value = "30s", value_parser = crate::duration)]
    pub(super) lease: Duration,
    /// Time for which ids are known after the service accepted their messages, longer than the broker or
    /// a producer may send a message again
    #[arg(long, value_name = "DUR", default_value = "30d", value_parser = crate::duration)]
    pub(super) retention: Duration,
    /// Time for requests in progress to end in a shutdown, at least --timeout
    #[arg(long, value_name = "DUR", default_value = "25s", value_parser = crate::duration)]
    pub(super) drain_timeout: Duration,
}

fn size(text: &str) -> Result<NonZeroUsize, String> {
    let size: ByteSize = text.parse().map_err(|error| format!("{error}"))?;
    NonZeroUsize::new(size.0).ok_or_else(|| "expected at least 1B, found 0".to_owned())
}

/// Parses a rule for ids.
fn id_rule(text: &str) -> Result<IdRule, String> {
    let expected = || {
        "expected header:NAME, cloudevents, json:/POINTER,…, position or payload-hash".to_owned()
    };
    match (text, text.split_once(':')) {
        ("cloudevents", _) => Ok(IdRule::CloudEvents),
        ("position", _) => Ok(IdRule::Position),
        ("payload-hash", _) => Ok(IdRule::PayloadHash),
        (_, Some(("header", name))) if !name.is_empty() => Ok(IdRule::Header(name.to_owned())),
        (_, Some(("json", pointers))) if !pointers.is_empty() => {
            let pointers = JsonPointers::new(pointers.split(','));
            pointers.map(IdRule::JsonPointers).map_err(|error| error.to_string())
        }
        _ => Err(expected()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_start_is_earliest_latest_or_a_time_that_exists() {
        assert_eq!("earliest".parse(), Ok(StartAtArg::Earliest));
        assert_eq!("latest".parse(), Ok(StartAtArg::Latest));
        for (text, seconds) in [
            ("1970-01-01T00:00:00Z", 0),
            ("2024-02-29T23:59:59Z", 1_709_251_199),
            ("2026-11-28T12:34:56Z", 1_795_869_296),
        ] {
            let time = Timestamp::from_micros(seconds * 1_000_000);
            assert_eq!(text.parse(), Ok(StartAtArg::Time(time)), "{text}");
        }
        for text in [
            "",
            "now",
            "2026-11-28",
            "2026-02-29T00:00:00Z",
            "2026-13-01T00:00:00Z",
            "2026-00-01T00:00:00Z",
            "2026-01-01T24:00:00Z",
            "2026-01-01T00:00:00+01:00",
            "2026-01-01T00:00:00.5Z",
            "1969-12-31T23:59:59Z",
            "0000-01-01T00:00:00Z",
            "2026-1\u{e4}-01T00:00:00Z",
        ] {
            assert!(text.parse::<StartAtArg>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_rule_for_ids_is_a_header_pointers_or_a_name() {
        assert_eq!(id_rule("header:x-id"), Ok(IdRule::Header("x-id".to_owned())));
        assert_eq!(id_rule("cloudevents"), Ok(IdRule::CloudEvents));
        assert_eq!(id_rule("position"), Ok(IdRule::Position));
        assert_eq!(id_rule("payload-hash"), Ok(IdRule::PayloadHash));
        let pointers = JsonPointers::new(["/order", "/line"]).unwrap();
        assert_eq!(id_rule("json:/order,/line"), Ok(IdRule::JsonPointers(pointers)));
        for wrong in ["", "header", "header:", "json:", "json:order", "Position", "id"] {
            assert!(id_rule(wrong).is_err(), "{wrong}");
        }
    }
}
