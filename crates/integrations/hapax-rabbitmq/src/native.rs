//! The native form of a message: its properties, and its headers with their types. By it a redriven message is what it was,
//! although the headers of a message are bytes.

use bytes::Bytes;
use lapin::BasicProperties;
use lapin::protocol::basic::{gen_properties, parse_properties};

use crate::frames;

/// Begin of the encoding, before the properties as AMQP encodes them.
const PREFIX: &[u8] = b"amqp/1\n";

/// Encodes properties; `None` for a property that AMQP cannot encode, which no broker has delivered.
pub(crate) fn encode(properties: &BasicProperties) -> Option<Bytes> {
    let encoded = gen_properties::<Vec<u8>>(properties)(Vec::new().into()).ok()?;
    Some([PREFIX, &encoded.write].concat().into())
}

/// Decodes what [`encode`] returns; `None` for other bytes, such as those of another broker.
pub(crate) fn decode(native: &Bytes) -> Option<BasicProperties> {
    let encoded = native.strip_prefix(PREFIX)?;
    // As from a server: the client does not survive tables that are nested deep.
    let encoded = frames::repaired_properties(encoded);
    let (rest, properties) = parse_properties(&encoded[..]).ok()?;
    rest.is_empty().then_some(properties)
}

#[cfg(test)]
mod tests {
    use lapin::types::{AMQPValue, FieldArray, FieldTable, LongString};

    use super::*;

    #[test]
    fn properties_are_decoded_as_they_were_encoded_and_other_bytes_are_none() {
        let mut table = FieldTable::default();
        for (name, value) in [
            ("bool", AMQPValue::Boolean(true)),
            ("int", AMQPValue::LongInt(-1)),
            ("void", AMQPValue::Void),
            ("bytes", AMQPValue::LongString(LongString::from(&[0xff, 0][..]))),
        ] {
            table.insert(name.into(), value);
        }
        let array = FieldArray::from(vec![AMQPValue::FieldTable(table.clone())]);
        table.insert("nested".into(), AMQPValue::FieldArray(array));
        let full = BasicProperties::default()
            .with_headers(table)
            .with_type("invoice".into())
            .with_priority(7)
            .with_timestamp(1_790_000_000);
        for properties in [BasicProperties::default(), full] {
            assert_eq!(decode(&encode(&properties).unwrap()), Some(properties));
        }
        for other in [&b""[..], b"amqp/1", b"amqp/1\n", b"amqp/1\n\x80", b"kafka/1 0 null bytes \n"]
        {
            assert_eq!(decode(&Bytes::from_static(other)), None, "{other:?}");
        }
    }

    #[test]
    fn tables_that_are_nested_deep_are_repaired() {
        let mut value = b"V".to_vec();
        for _ in 0..10_000 {
            let length = u32::try_from(value.len()).unwrap().to_be_bytes();
            value = [b"A", &length[..], &value].concat();
        }
        let table = [b"\x04deep", &value[..]].concat();
        let length = u32::try_from(table.len()).unwrap().to_be_bytes();
        // The flags of headers and of the priority.
        let encoded = [PREFIX, &0x2800_u16.to_be_bytes(), &length, &table, &[7]].concat();
        assert_eq!(*decode(&encoded.into()).unwrap().priority(), Some(7));
    }
}
