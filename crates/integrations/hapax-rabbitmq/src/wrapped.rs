//! Properties of a message as the bytes of one header, as which they go through the client library.
//!
//! Properties that the server delivers are wrapped, also those that have this form already, so that a producer cannot replace
//! them by its own header. Those that do not fit into a frame when they are wrapped are repaired instead. No other properties
//! that a sink publishes have this form: they have a delivery mode.

use bytes::Bytes;
use lapin::BasicProperties;
use lapin::protocol::basic::{gen_properties, parse_properties};
use lapin::types::{AMQPValue, ByteArray, FieldTable};

use crate::frames;
use crate::native::NativeProperties;

/// Name of the header.
const NAME: &str = "hapax-properties";

/// Flags of properties that are headers only.
const HEADERS_ONLY: [u8; 2] = [0x20, 0];

/// Bytes of a length, and of the type of a value.
const LENGTH: usize = 4;
const TYPE: usize = 1;

/// Bytes that wrapped properties have besides the properties.
pub(crate) const OVERHEAD: usize = HEADERS_ONLY.len() + LENGTH + 1 + NAME.len() + TYPE + LENGTH;

fn length(of: usize) -> [u8; LENGTH] {
    u32::try_from(of).unwrap_or(u32::MAX).to_be_bytes()
}

/// Wraps encoded properties.
pub(crate) fn wrap(encoded: &[u8]) -> Vec<u8> {
    let mut wrapped = Vec::with_capacity(OVERHEAD + encoded.len());
    wrapped.extend_from_slice(&prefix(encoded.len()));
    wrapped.extend_from_slice(encoded);
    wrapped
}

fn prefix(bytes: usize) -> Vec<u8> {
    let table = OVERHEAD - HEADERS_ONLY.len() - LENGTH + bytes;
    let name = u8::try_from(NAME.len()).unwrap_or(u8::MAX);
    [&HEADERS_ONLY[..], &length(table), &[name], NAME.as_bytes(), b"x", &length(bytes)].concat()
}

/// Returns the properties that were wrapped; `None` if these are not.
pub(crate) fn unwrap(wrapped: &[u8]) -> Option<&[u8]> {
    let (start, encoded) = wrapped.split_at_checked(OVERHEAD)?;
    (start == prefix(encoded.len())).then_some(encoded)
}

/// Returns properties to publish, which the server gets as they are encoded here.
pub(crate) fn to_publish(encoded: &[u8]) -> BasicProperties {
    let mut table = FieldTable::default();
    table.insert(NAME.into(), AMQPValue::ByteArray(ByteArray::from(encoded)));
    BasicProperties::default().with_headers(table)
}

/// Returns properties that the library has received: as the producer's client encoded them, which
/// [`NativeProperties::parse`] accepts, and as far as they can be read. Not parsed, they take up no more memory than in
/// their frame.
pub(crate) fn received(properties: BasicProperties) -> (Bytes, BasicProperties) {
    let encoded = Bytes::from(encode(&properties));
    let (encoded, properties) = match unwrap(&encoded) {
        Some(producers) => (encoded.slice_ref(producers), read(producers)),
        // Wrapped, they did not fit into a frame.
        None => (encoded, properties),
    };
    match NativeProperties::parse(encoded.clone()) {
        Some(_) => (encoded, properties),
        None => (encode(&properties).into(), properties),
    }
}

/// Returns encoded properties, as far as they can be read.
pub(crate) fn read(encoded: &[u8]) -> BasicProperties {
    let encoded = frames::repaired_properties(encoded);
    match parse_properties(&encoded[..]) {
        Ok(([], properties)) => properties,
        _ => BasicProperties::default(),
    }
}

/// Encodes properties. Those that AMQP cannot encode, which no broker delivers, are left out.
pub(crate) fn encode(properties: &BasicProperties) -> Vec<u8> {
    match gen_properties::<Vec<u8>>(properties)(Vec::new().into()) {
        Ok(encoded) => encoded.write,
        Err(_) => vec![0; HEADERS_ONLY.len()],
    }
}
