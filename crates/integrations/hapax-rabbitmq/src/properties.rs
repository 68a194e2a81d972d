//! Properties and headers of AMQP, and headers of messages.
//!
//! AMQP limits short strings, such as properties and names of headers, to 255 bytes, and has each header
//! once. A longer id is sent in a header, and a header that occurs repeatedly as an array.

use bytes::Bytes;
use hapax_core::Timestamp;
use hapax_messages::{DeadLetter, Message, OutgoingMessage, PublishError};
use lapin::BasicProperties;
use lapin::types::{AMQPValue, FieldArray, FieldTable, LongString, ShortString};

use crate::connection::short;
use crate::frames;
use crate::native::{self, NativeProperties};
use crate::wrapped;

/// Header with the order key of a message.
pub(crate) const ORDER_KEY: &str = "message-order-key";

/// Header with the routing key of a message that comes from a delay queue.
pub(crate) const ROUTING_KEY: &str = "hapax-routing-key";

/// Header with the time at which a message was redriven, from which its age counts: it keeps the property `timestamp`.
const REDRIVEN_AT: &str = "hapax-redriven-at";
/// Header of the server with the first queue that a message left by expiry or rejection.
const FIRST_QUEUE: &str = "x-first-death-queue";

const MESSAGE_ID: &str = "message-id";
const CONTENT_TYPE: &str = "content-type";
const CONTENT_ENCODING: &str = "content-encoding";
const CORRELATION_ID: &str = "correlation-id";

/// Persistent.
const PERSISTENT: u8 = 2;

/// Returns whether the broker sets or interprets a header: `CC` adds queues to which a message is routed, and
/// by `x-death` the broker detects cycles, whose messages it drops.
fn is_brokers_own(name: &str) -> bool {
    let starts =
        |start: &str| name.get(..start.len()).is_some_and(|name| name.eq_ignore_ascii_case(start));
    ["CC", "BCC"].iter().any(|own| name.eq_ignore_ascii_case(own))
        || ["x-death", "x-first-death-", "x-last-death-"].iter().any(|own| starts(own))
        || ["x-delivery-count", "x-acquired-count"].iter().any(|own| name.eq_ignore_ascii_case(own))
}

/// Returns whether a header is one that the sink or a delay queue adds, and that a message has not.
fn is_added(name: &str) -> bool {
    [ROUTING_KEY, REDRIVEN_AT].iter().any(|own| name.eq_ignore_ascii_case(own))
}

/// Returns the properties of a message to publish.
pub(crate) fn outgoing(
    message: &OutgoingMessage,
    now: Timestamp,
) -> Result<BasicProperties, PublishError> {
    if let Some(native) = message.native.as_ref().and_then(NativeProperties::of_native) {
        return Ok(wrapped::to_publish(&redriven(message, native, now).encode()));
    }
    let mut properties =
        BasicProperties::default().with_delivery_mode(PERSISTENT).with_timestamp(seconds(now));
    let mut headers: Vec<(&str, Vec<AMQPValue>)> = Vec::new();
    match short(message.id.as_str()) {
        Some(id) => properties = properties.with_message_id(id),
        None => headers.push((MESSAGE_ID, vec![long_string(message.id.as_str().as_bytes())])),
    }
    if let Some(key) = &message.key {
        headers.push((ORDER_KEY, vec![long_string(key.as_bytes())]));
    }
    let is_own = |name: &str| {
        name.eq_ignore_ascii_case(MESSAGE_ID)
            || is_added(name)
            || (message.key.is_some() && name.eq_ignore_ascii_case(ORDER_KEY))
            || is_brokers_own(name)
    };
    for (name, value) in message.headers.iter().filter(|(name, _)| !is_own(name)) {
        if name.is_empty() || short(name).is_none() || name.contains('\0') {
            return Err(PublishError::rejected(format!(
                "expected a header's name of 1 to 255 bytes without zero bytes, found {name:?} of {} \
                 bytes: change it where the message is written",
                name.len()
            )));
        }
        match headers.iter_mut().find(|(other, _)| *other == name) {
            Some((_, values)) => values.push(long_string(value)),
            None => headers.push((name, vec![long_string(value)])),
        }
    }
    let mut table = FieldTable::default();
    for (name, mut values) in headers {
        let Some(short) = short(name) else { continue };
        if name == CONTENT_TYPE && values.len() == 1 {
            // Where consumers in other languages look for it.
            if let Some(value) = short_string(&values[0]) {
                properties = properties.with_content_type(value);
                continue;
            }
        }
        let value = match values.len() {
            1 => values.remove(0),
            _ => AMQPValue::FieldArray(FieldArray::from(values)),
        };
        table.insert(short, value);
    }
    Ok(properties.with_headers(table))
}

/// Returns the properties of a redriven message: those that it had, its id, and the headers with its dead letter and the
/// time of the redrive. It is persistent.
fn redriven(
    message: &OutgoingMessage,
    native: NativeProperties,
    now: Timestamp,
) -> NativeProperties {
    let id = message.id.as_str();
    let redrive = message.headers.iter().filter(|(name, _)| name == DeadLetter::REDRIVE_HEADER);
    let mut added: Vec<_> =
        redrive.map(|(name, value)| (&**name, native::long_string(value))).collect();
    added.push((REDRIVEN_AT, native::timestamp(seconds(now))));
    let short_id = short(id);
    if short_id.is_none() {
        added.push((MESSAGE_ID, native::long_string(id.as_bytes())));
    }
    let is_other_id = |name: &Bytes, value: &Bytes| {
        name.eq_ignore_ascii_case(MESSAGE_ID.as_bytes())
            && native_value(value).as_deref() != Some(id.as_bytes())
    };
    let mut properties = kept(native, is_other_id, added);
    // The property is read before the header: another one would hide the id.
    properties.values[frames::MESSAGE_ID] = short_id.map(|id| native::property(&id));
    properties
}

/// Returns the value of a header as bytes.
fn native_value(value: &Bytes) -> Option<Bytes> {
    let headers = vec![(Bytes::from("v"), value.clone())];
    let encoded = NativeProperties { headers, ..NativeProperties::default() }.encode();
    let properties = wrapped::read(&encoded);
    let (_, value) = properties.headers().as_ref()?.into_iter().next()?;
    header_value(value)
}

fn seconds(time: Timestamp) -> u64 {
    time.as_micros() / 1_000_000
}

fn long_string(bytes: &[u8]) -> AMQPValue {
    AMQPValue::LongString(LongString::from(bytes))
}

fn short_string(value: &AMQPValue) -> Option<ShortString> {
    let AMQPValue::LongString(value) = value else { return None };
    std::str::from_utf8(value.as_bytes()).ok().and_then(short)
}

/// Returns the origin of a message: `amqp://QUEUE/ROUTING-KEY`, with `%` and `/` of the queue's name
/// percent-encoded.
fn origin(queue: &str, routing_key: &str) -> String {
    let queue = queue.replace('%', "%25").replace('/', "%2F");
    format!("amqp://{queue}/{routing_key}")
}

/// Returns the queue of a message that was received, of its origin `amqp://QUEUE/ROUTING-KEY`; `None` if it
/// came from another broker.
#[must_use]
pub fn queue_of_origin(origin: &str) -> Option<String> {
    let (queue, _) = origin.strip_prefix("amqp://")?.split_once('/')?;
    Some(queue.replace("%2F", "/").replace("%25", "%"))
}

/// Returns a message that was received from a queue.
pub(crate) fn incoming(
    queue: &str,
    routing_key: &str,
    properties: &BasicProperties,
    payload: Vec<u8>,
) -> Message {
    let routing_key = original_routing_key(routing_key, properties);
    let mut message = Message::new(origin(queue, &routing_key), payload);
    let properties_as_headers = [
        (MESSAGE_ID, properties.message_id()),
        (CONTENT_TYPE, properties.content_type()),
        (CONTENT_ENCODING, properties.content_encoding()),
        (CORRELATION_ID, properties.correlation_id()),
        ("type", properties.kind()),
        ("reply-to", properties.reply_to()),
        ("app-id", properties.app_id()),
    ];
    for (name, value) in properties_as_headers {
        if let Some(value) = value {
            let value = Bytes::copy_from_slice(value.as_str().as_bytes());
            message.headers.push((name.to_owned(), value));
        }
    }
    for (name, value) in properties.headers().iter().flatten() {
        let name = name.as_str();
        if is_added(name) || is_brokers_own(name) {
            continue;
        }
        match value {
            AMQPValue::FieldArray(values) => {
                let values = values.as_slice().iter().filter_map(header_value);
                message.headers.extend(values.map(|value| (name.to_owned(), value)));
            }
            value => {
                let value = header_value(value);
                message.headers.extend(value.map(|value| (name.to_owned(), value)));
            }
        }
    }
    if let Some(seconds) = published_at(properties) {
        message = message.published_at(Timestamp::from_micros(seconds.saturating_mul(1_000_000)));
    }
    message
}

/// Returns the time of the last redrive, or else of the publication, in seconds since 1970.
fn published_at(properties: &BasicProperties) -> Option<u64> {
    let headers = properties.headers().as_ref();
    let redriven_at = match headers.and_then(|headers| headers.inner().get(REDRIVEN_AT)) {
        Some(AMQPValue::Timestamp(seconds)) => Some(*seconds),
        _ => None,
    };
    redriven_at.max(*properties.timestamp())
}

/// Returns the routing key under which a message was published first. A longer header than a routing key can be is of a
/// producer.
pub(crate) fn original_routing_key(delivered: &str, properties: &BasicProperties) -> String {
    let headers = properties.headers().as_ref();
    let original = headers.and_then(|headers| headers.inner().get(ROUTING_KEY));
    match original {
        Some(AMQPValue::LongString(original)) if original.as_bytes().len() <= 255 => {
            original.to_string()
        }
        _ => delivered.to_owned(),
    }
}

/// Returns whether a message comes from a delay queue, whose names have this beginning: it has its routing key, which was
/// added to it, and the server says that it left such a queue.
pub(crate) fn was_delayed(properties: &BasicProperties, delay_queues: &str) -> bool {
    let Some(headers) = properties.headers() else { return false };
    let headers = headers.inner();
    let is_delay_queue = |value: &AMQPValue| match value {
        AMQPValue::LongString(name) => name.as_bytes().starts_with(delay_queues.as_bytes()),
        _ => false,
    };
    headers.contains_key(ROUTING_KEY) && headers.get(FIRST_QUEUE).is_some_and(is_delay_queue)
}

/// Returns a header's value as bytes; `None` for tables, void and arrays.
fn header_value(value: &AMQPValue) -> Option<Bytes> {
    let text = match value {
        AMQPValue::LongString(value) => return Some(Bytes::copy_from_slice(value.as_bytes())),
        AMQPValue::ByteArray(value) => return Some(Bytes::copy_from_slice(value.as_slice())),
        AMQPValue::ShortString(value) => value.to_string(),
        AMQPValue::Boolean(value) => value.to_string(),
        AMQPValue::ShortShortInt(value) => value.to_string(),
        AMQPValue::ShortShortUInt(value) => value.to_string(),
        AMQPValue::ShortInt(value) => value.to_string(),
        AMQPValue::ShortUInt(value) => value.to_string(),
        AMQPValue::LongInt(value) => value.to_string(),
        AMQPValue::LongUInt(value) => value.to_string(),
        AMQPValue::LongLongInt(value) => value.to_string(),
        AMQPValue::Float(value) => value.to_string(),
        AMQPValue::Double(value) => value.to_string(),
        AMQPValue::Timestamp(value) => value.to_string(),
        AMQPValue::DecimalValue(value) => decimal(value.scale, value.value),
        AMQPValue::FieldArray(_) | AMQPValue::FieldTable(_) | AMQPValue::Void => return None,
    };
    Some(Bytes::from(text))
}

/// Returns a decimal number as text. Clients write and read its digits as a signed number.
fn decimal(scale: u8, digits: u32) -> String {
    let digits = digits.cast_signed();
    let (sign, scale) = (if digits < 0 { "-" } else { "" }, usize::from(scale));
    let padded = format!("{:0width$}", digits.unsigned_abs(), width = scale + 1);
    let (whole, fraction) = padded.split_at(padded.len() - scale);
    match scale {
        0 => format!("{sign}{whole}"),
        _ => format!("{sign}{whole}.{fraction}"),
    }
}

/// Returns the properties of a message that goes through a delay queue, with its routing key.
pub(crate) fn delayed(properties: NativeProperties, routing_key: &str) -> NativeProperties {
    let routing_key = (ROUTING_KEY, native::long_string(routing_key.as_bytes()));
    kept(properties, |_, _| false, vec![routing_key])
}

/// Returns the properties of a message that is published again: those that it had, without the broker's own headers, those
/// that `is_left_out`, its time to live, which is over, and the name of its user, which is not this one; and with further
/// headers, which replace those whose names are equal but for the case.
fn kept(
    mut properties: NativeProperties,
    is_left_out: impl Fn(&Bytes, &Bytes) -> bool,
    added: Vec<(&str, Bytes)>,
) -> NativeProperties {
    properties.headers.retain(|(name, value)| {
        let is_replaced = added.iter().any(|(it, _)| name.eq_ignore_ascii_case(it.as_bytes()));
        let is_own = std::str::from_utf8(name).is_ok_and(is_brokers_own);
        !is_replaced && !is_own && !is_left_out(name, value)
    });
    let added = added.into_iter();
    properties
        .headers
        .extend(added.map(|(name, value)| (Bytes::copy_from_slice(name.as_bytes()), value)));
    properties.values[native::DELIVERY_MODE] = Some(Bytes::from_static(&[PERSISTENT]));
    properties.values[native::EXPIRATION] = None;
    properties.values[native::USER_ID] = None;
    properties
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_decimal_number_has_its_sign_and_all_digits() {
        for (scale, digits, text) in [
            (2, 999, "9.99"),
            (0, 7, "7"),
            (3, 5, "0.005"),
            (1, (-15_i32).cast_unsigned(), "-1.5"),
            (0, i32::MIN.cast_unsigned(), "-2147483648"),
        ] {
            assert_eq!(decimal(scale, digits), text);
        }
        assert_eq!(decimal(255, 1).len(), 257);
    }

    #[test]
    fn a_redriven_message_has_one_id_whatever_the_case_of_the_headers_that_it_had() {
        let short = "m-1".to_owned();
        for (id, kept) in [(&short, true), (&"x".repeat(256), false), (&short, false)] {
            let had = if kept { id.clone() } else { "other".to_owned() };
            let mut table = FieldTable::default();
            for name in ["Message-Id", "MESSAGE-ID"] {
                table.insert(name.into(), long_string(had.as_bytes()));
            }
            table.insert("Hapax-Redrive".into(), long_string(b"another"));
            let mut had = BasicProperties::default().with_headers(table);
            if !kept {
                had = had.with_message_id("another".into());
            }
            let encoded = wrapped::encode(&had);
            let native = NativeProperties::parse(encoded.into()).map(|it| it.to_native());
            let id = hapax_messages::MessageId::new(id).unwrap();
            let mut message = OutgoingMessage::new("orders", id.clone(), "x");
            message.native = native;
            message.headers.push((DeadLetter::REDRIVE_HEADER.to_owned(), "d".into()));
            let now = Timestamp::from_micros(1_790_000_000_000_000);
            let (_, properties) = wrapped::received(outgoing(&message, now).unwrap());
            let received = incoming("orders", "orders", &properties, Vec::new());
            let find = |name: &str| received.header(name).map(|value| value.to_vec());
            assert_eq!(find(MESSAGE_ID), Some(id.as_str().as_bytes().to_vec()));
            assert_eq!(find(DeadLetter::REDRIVE_HEADER), Some(b"d".to_vec()));
            let headers = properties.headers().as_ref().unwrap().inner();
            assert_eq!(headers.contains_key("Message-Id"), kept);
            assert!(!headers.contains_key("Hapax-Redrive"));
            assert_eq!(received.published_at, Some(now), "it has no time of its own");
        }
    }

    #[test]
    fn an_origin_has_its_queue_whatever_its_name_is() {
        for queue in ["orders", "a/b", "100%", "%2F", "%25/%", "ü"] {
            let found = queue_of_origin(&origin(queue, "orders/created"));
            assert_eq!(found.as_deref(), Some(queue));
        }
        assert_eq!(queue_of_origin("nats://ORDERS/orders.created"), None);
        assert_eq!(queue_of_origin("amqp://orders"), None);
    }
}
