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
use crate::native;

/// Header with the order key of a message.
pub(crate) const ORDER_KEY: &str = "message-order-key";

/// Header with the routing key of a message that comes from a delay queue.
pub(crate) const ROUTING_KEY: &str = "hapax-routing-key";

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

/// Returns the properties of a message to publish.
pub(crate) fn outgoing(
    message: &OutgoingMessage,
    now: Timestamp,
) -> Result<BasicProperties, PublishError> {
    if let Some(native) = message.native.as_ref().and_then(native::decode) {
        return Ok(redriven(message, &native));
    }
    let mut properties = BasicProperties::default()
        .with_delivery_mode(PERSISTENT)
        .with_timestamp(now.as_micros() / 1_000_000);
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
            || name.eq_ignore_ascii_case(ROUTING_KEY)
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

/// Returns the properties of a redriven message: those that it had, its id, and the header with its dead letter. It is
/// persistent.
fn redriven(message: &OutgoingMessage, native: &BasicProperties) -> BasicProperties {
    let redrive = message.headers.iter().filter(|(name, _)| name == DeadLetter::REDRIVE_HEADER);
    let mut added: Vec<_> = redrive.map(|(name, value)| (&**name, &value[..])).collect();
    let id = short(message.id.as_str());
    if id.is_none() {
        added.push((MESSAGE_ID, message.id.as_str().as_bytes()));
    }
    let properties = kept(native, added);
    match id {
        Some(id) => properties.with_message_id(id),
        None => properties,
    }
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
    ];
    for (name, value) in properties_as_headers {
        if let Some(value) = value {
            let value = Bytes::copy_from_slice(value.as_str().as_bytes());
            message.headers.push((name.to_owned(), value));
        }
    }
    for (name, value) in properties.headers().iter().flatten() {
        let name = name.as_str();
        if name == ROUTING_KEY || is_brokers_own(name) {
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
    if let Some(seconds) = properties.timestamp() {
        message = message.published_at(Timestamp::from_micros(seconds.saturating_mul(1_000_000)));
    }
    message
}

/// Returns the routing key under which a message was published first.
pub(crate) fn original_routing_key(delivered: &str, properties: &BasicProperties) -> String {
    let headers = properties.headers().as_ref();
    let original = headers.and_then(|headers| headers.inner().get(ROUTING_KEY));
    match original {
        Some(AMQPValue::LongString(original)) => original.to_string(),
        _ => delivered.to_owned(),
    }
}

/// Returns a header's value as bytes; `None` for tables and void.
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
        AMQPValue::DecimalValue(_)
        | AMQPValue::FieldArray(_)
        | AMQPValue::FieldTable(_)
        | AMQPValue::Void => return None,
    };
    Some(Bytes::from(text))
}

/// Returns the properties of a message that goes through a delay queue, with its routing key.
pub(crate) fn delayed(properties: &BasicProperties, routing_key: &str) -> BasicProperties {
    kept(properties, [(ROUTING_KEY, routing_key.as_bytes())])
}

/// Returns the properties of a message that is published again: those that it had, without the broker's own headers, its
/// time to live, which is over, and the name of its user, which is not this one; and with further headers.
fn kept<'a>(
    properties: &BasicProperties,
    added: impl IntoIterator<Item = (&'a str, &'a [u8])>,
) -> BasicProperties {
    let mut table = FieldTable::default();
    for (name, value) in properties.headers().iter().flatten() {
        if !is_brokers_own(name.as_str()) {
            table.insert(name.clone(), value.clone());
        }
    }
    for (name, value) in added {
        table.insert(name.into(), long_string(value));
    }
    let mut kept = BasicProperties::default().with_headers(table).with_delivery_mode(PERSISTENT);
    macro_rules! keep {
        ($($get:ident $set:ident)*) => {
            $(if let Some(value) = properties.$get() { kept = kept.$set(value.clone()); })*
        };
    }
    keep! {
        content_type with_content_type
        content_encoding with_content_encoding
        priority with_priority
        correlation_id with_correlation_id
        reply_to with_reply_to
        message_id with_message_id
        timestamp with_timestamp
        kind with_type
        app_id with_app_id
    }
    kept
}

/// Returns about the bytes of a frame of properties.
pub(crate) fn bytes(properties: &BasicProperties) -> usize {
    fn of_value(value: &AMQPValue) -> usize {
        match value {
            AMQPValue::LongString(value) => value.as_bytes().len(),
            AMQPValue::ByteArray(value) => value.as_slice().len(),
            AMQPValue::FieldArray(values) => {
                values.as_slice().iter().map(|value| 8 + of_value(value)).sum()
            }
            AMQPValue::FieldTable(table) => of_table(table),
            _ => 16,
        }
    }
    fn of_table(table: &FieldTable) -> usize {
        table.into_iter().map(|(name, value)| name.as_str().len() + 8 + of_value(value)).sum()
    }
    // Each of the ten further properties that are short strings has at most 255 bytes.
    properties.headers().as_ref().map_or(0, of_table)
}

#[cfg(test)]
mod tests {
    use super::*;

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
