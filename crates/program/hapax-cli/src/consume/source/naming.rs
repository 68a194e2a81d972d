//! Entry of a consumer in the register of the store: its source, and the rules by which its messages are named and ordered.

use std::collections::BTreeMap;

use hapax_core::Fingerprint;
use hapax_messages::IdRule;
use hapax_operators::ConsumerNaming;

use super::super::args::SourceArgs;

/// Returns what the register of the store has of this consumer. Two spellings of one URL have one naming.
pub(in crate::consume) fn naming(
    url: &str,
    args: &SourceArgs,
    consumer: &str,
    ids: &[IdRule],
) -> ConsumerNaming {
    let place = place(url);
    let mut sources = match (&args.stream, &args.queue) {
        (Some(stream), _) => vec![format!("nats://{stream}")],
        (None, Some(queue)) => vec![format!("amqp://{}/{queue}", virtual_host(place))],
        (None, None) => {
            let topics = place.unwrap_or_default().split(',');
            topics.map(|topic| format!("kafka://{topic}")).collect()
        }
    };
    sources.sort_unstable();
    let usual = [IdRule::Header("message-id".to_owned()), IdRule::CloudEvents];
    let ids = if ids.is_empty() { &usual[..] } else { ids };
    let ids = ids.iter().map(id_text).collect::<Vec<_>>().join(", ");
    // The case of a header's name is ignored.
    let order_by = args.order_by.as_deref().unwrap_or("none").to_ascii_lowercase();
    ConsumerNaming {
        consumer: consumer.to_owned(),
        sources,
        broker: broker_digest(url),
        mode: "claim".to_owned(),
        ids,
        order_by,
        later: BTreeMap::new(),
    }
}

/// Returns the path of a URL without its first slash: of RabbitMQ the virtual host, of Kafka the topics.
fn place(url: &str) -> Option<&str> {
    let (_, rest) = url.split_once("://")?;
    let (_, place) = rest.split(['?', '#']).next()?.split_once('/')?;
    Some(place)
}

/// Returns a virtual host of RabbitMQ in one spelling: with `%` and `/` percent-encoded, and no other character.
fn virtual_host(place: Option<&str>) -> String {
    let Some(place) = place else { return "%2F".to_owned() };
    let mut decoded = Vec::with_capacity(place.len());
    let mut rest = place.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        let digits = after.get(..2).filter(|_| *first == b'%');
        let digits = digits.and_then(|digits| std::str::from_utf8(digits).ok());
        let byte = digits.and_then(|digits| u8::from_str_radix(digits, 16).ok());
        decoded.push(byte.unwrap_or(*first));
        rest = if byte.is_some() { &after[2..] } else { after };
    }
    String::from_utf8_lossy(&decoded).replace('%', "%25").replace('/', "%2F")
}

/// Returns a digest of the addresses of a broker, without users and passwords.
fn broker_digest(url: &str) -> String {
    let scheme = crate::messages::scheme(url).unwrap_or_default();
    let port = match &*scheme {
        "nats" | "tls" => "4222",
        "amqp" => "5672",
        "amqps" => "5671",
        _ => "9092",
    };
    let rest = url.split_once("://").map_or(url, |(_, rest)| rest);
    let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
    // Servers of NATS are URLs, and brokers of Kafka have one path.
    let servers = if port == "4222" { url } else { authority };
    let address = |server: &str| {
        let server = server.split_once("://").map_or(server, |(_, rest)| rest);
        let server = server.split(['/', '?', '#']).next().unwrap_or_default();
        let host = server.rsplit('@').next().unwrap_or_default().to_ascii_lowercase();
        // An address of IPv6 has colons between its brackets.
        let has_port = host.rsplit(']').next().is_some_and(|end| end.contains(':'));
        if has_port { host } else { format!("{host}:{port}") }
    };
    let mut addresses: Vec<_> = servers.split(',').map(address).collect();
    addresses.sort_unstable();
    let mut digest = Fingerprint::builder("hapax 1 broker");
    for address in &addresses {
        digest.field(address.as_bytes());
    }
    let digest = digest.finish();
    digest.as_bytes()[..8].iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Returns a rule for ids as `--id` has it.
fn id_text(rule: &IdRule) -> String {
    match rule {
        IdRule::Header(name) => format!("header:{}", name.to_ascii_lowercase()),
        IdRule::CloudEvents => "cloudevents".to_owned(),
        IdRule::JsonPointers(pointers) => {
            format!("json:{}", pointers.iter().collect::<Vec<_>>().join(","))
        }
        IdRule::Position => "position".to_owned(),
        IdRule::PayloadHash => "payload-hash".to_owned(),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::messages::{BrokerArgs, PropertyArgs};

    /// Returns the naming of a consumer of the queue `orders`, of the stream `ORDERS`, or of topics.
    fn of(url: &str) -> ConsumerNaming {
        let scheme = crate::messages::scheme(url).unwrap();
        let args = SourceArgs {
            from: None,
            from_file: None,
            stream: matches!(&*scheme, "nats" | "tls").then(|| "ORDERS".to_owned()),
            subjects: Vec::new(),
            order_by: None,
            queue: scheme.starts_with("amqp").then(|| "orders".to_owned()),
            delivery_limit: None,
            consumer_timeout: None,
            start_at: None,
            properties: PropertyArgs { file: None },
            broker: BrokerArgs::default(),
        };
        naming(url, &args, "invoices", &[])
    }

    #[test]
    fn spellings_of_one_url_have_one_naming() {
        for (one, others) in [
            ("amqp://h", &["amqp://u:p@H:5672/%2F", "amqp://h/%2f", "amqp://h?heartbeat=5"][..]),
            ("amqp://h/a%2Fb", &["amqp://h:5672/%61%2fb"]),
            ("amqp://[::1]/v", &["amqp://[::1]:5672/v"]),
            ("amqps://h/v", &["amqps://h:5671/v"]),
            ("nats://h", &["nats://h:4222", "tls://u@h:4222/", "NATS://h"]),
            ("nats://a,b", &["nats://b:4222,nats://u:p@a:4222", "nats://b,tls://a"]),
            ("kafka://a,b/x,y", &["kafka://B:9092,a/y,x"]),
        ] {
            for other in others {
                assert_eq!(of(other), of(one), "{other}");
            }
        }
        let sources = of("kafka://a,b/x,y").sources;
        assert_eq!(sources, ["kafka://x", "kafka://y"]);
    }

    #[test]
    fn other_addresses_and_places_have_other_namings() {
        for (one, others) in [
            (
                "amqp://h",
                &["amqp://h/", "amqp://h/v", "amqp://i", "amqp://h:5673", "amqp://h/%252F"][..],
            ),
            ("nats://a,b", &["nats://a", "nats://a,c", "nats://a:4223,b"]),
            ("kafka://a/x", &["kafka://a/y", "kafka://a,b/x", "kafka://a:9093/x"]),
        ] {
            for other in others {
                assert_ne!(of(other), of(one), "{other}");
            }
        }
        let digest = of("nats://u:hidden@h").broker;
        assert_eq!((digest.len(), &digest), (16, &of("nats://h").broker));
    }
}
