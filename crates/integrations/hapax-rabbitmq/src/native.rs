//! The native form of a message: its properties and headers, byte for byte. By it a redriven message is what it was, although
//! the headers of a message have neither types nor an order.

use bytes::{BufMut as _, Bytes, BytesMut};

use crate::frames::{PROPERTIES, Property};

/// Begin of the encoding, before the properties as AMQP encodes them.
const PREFIX: &[u8] = b"amqp/1\n";

/// Indices of properties.
pub(crate) const HEADERS: usize = 2;
pub(crate) const DELIVERY_MODE: usize = 3;
pub(crate) const EXPIRATION: usize = 7;
pub(crate) const USER_ID: usize = 11;

/// Bits of the flags that belong to no property. No client sets them.
const OTHER_FLAGS: u16 = 0b11;

/// Properties, each as it is encoded.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct NativeProperties {
    /// Values, in the order of [`PROPERTIES`]. That of the headers is `None`.
    pub(crate) values: [Option<Bytes>; PROPERTIES.len()],
    /// Names and values with their types, in their order.
    pub(crate) headers: Vec<(Bytes, Bytes)>,
}

impl NativeProperties {
    /// Parses what AMQP has encoded; `None` for other bytes. The contents of tables in headers are not parsed, so that
    /// their depth does not matter.
    pub(crate) fn parse(mut encoded: Bytes) -> Option<Self> {
        let rest = &mut encoded;
        let flags = take(rest, 2)?;
        let flags = u16::from_be_bytes([flags[0], flags[1]]);
        if flags & OTHER_FLAGS != 0 {
            return None;
        }
        let mut parsed = Self::default();
        for (index, property) in PROPERTIES.into_iter().enumerate() {
            if flags & (0x8000 >> index) == 0 {
                continue;
            }
            match property {
                Property::ShortString => parsed.values[index] = Some(short_string(rest)?),
                Property::Fixed(bytes) => parsed.values[index] = Some(take(rest, bytes)?),
                Property::Table => {
                    let length = length(rest)?;
                    let mut table = take(rest, length)?;
                    while !table.is_empty() {
                        let name = short_string(&mut table)?.slice(1..);
                        parsed.headers.push((name, value(&mut table)?));
                    }
                }
            }
        }
        rest.is_empty().then_some(parsed)
    }

    /// Encodes them as AMQP does. Properties without headers have no table of them.
    pub(crate) fn encode(&self) -> Bytes {
        let mut table = BytesMut::new();
        for (name, value) in &self.headers {
            // A name has at most 255 bytes, as it was parsed or is one of ours.
            let length = u8::try_from(name.len()).unwrap_or(u8::MAX);
            table.put_u8(length);
            table.put_slice(&name[..usize::from(length)]);
            table.put_slice(value);
        }
        let (mut flags, mut encoded) = (0, BytesMut::new());
        for (index, value) in self.values.iter().enumerate() {
            let flag = 0x8000 >> index;
            if index == HEADERS && !table.is_empty() {
                flags |= flag;
                encoded.put_slice(&length_of(&table));
                encoded.put_slice(&table);
            } else if let Some(value) = value {
                flags |= flag;
                encoded.put_slice(value);
            }
        }
        [&u16::to_be_bytes(flags)[..], &encoded].concat().into()
    }

    /// Returns the native form of a message.
    pub(crate) fn to_native(&self) -> Bytes {
        [PREFIX, &self.encode()].concat().into()
    }

    /// Decodes the native form; `None` for other bytes, such as those of another broker.
    pub(crate) fn of_native(native: &Bytes) -> Option<Self> {
        native.starts_with(PREFIX).then(|| Self::parse(native.slice(PREFIX.len()..)))?
    }
}

/// Encodes a header's value that is a long string.
pub(crate) fn long_string(bytes: &[u8]) -> Bytes {
    [b"S", &length_of(bytes)[..], bytes].concat().into()
}

/// Encodes a header's value that is a time in seconds since 1970.
pub(crate) fn timestamp(seconds: u64) -> Bytes {
    [b"T", &seconds.to_be_bytes()[..]].concat().into()
}

/// Encodes a property that is a short string.
pub(crate) fn property(text: &lapin::types::ShortString) -> Bytes {
    let text = text.as_str().as_bytes();
    // A short string has at most 255 bytes.
    let length = u8::try_from(text.len()).unwrap_or(u8::MAX);
    [&[length], &text[..usize::from(length)]].concat().into()
}

fn length_of(bytes: &[u8]) -> [u8; 4] {
    u32::try_from(bytes.len()).unwrap_or(u32::MAX).to_be_bytes()
}

fn take(rest: &mut Bytes, count: usize) -> Option<Bytes> {
    (count <= rest.len()).then(|| rest.split_to(count))
}

/// Takes a short string with its length.
fn short_string(rest: &mut Bytes) -> Option<Bytes> {
    let length = *rest.first()?;
    take(rest, 1 + usize::from(length))
}

fn length(rest: &mut Bytes) -> Option<usize> {
    let length = take(rest, 4)?;
    usize::try_from(u32::from_be_bytes(length[..].try_into().ok()?)).ok()
}

/// Takes a value with its type.
fn value(rest: &mut Bytes) -> Option<Bytes> {
    let mut after = rest.clone();
    let content = match take(&mut after, 1)?[0] {
        b'V' => 0,
        b't' | b'b' | b'B' => 1,
        b's' | b'U' | b'u' => 2,
        b'I' | b'i' | b'f' => 4,
        b'D' => 5,
        b'L' | b'l' | b'd' | b'T' => 8,
        b'S' | b'x' | b'A' | b'F' => length(&mut after)?,
        _ => return None,
    };
    take(&mut after, content)?;
    take(rest, rest.len() - after.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(entries: &[u8]) -> Vec<u8> {
        [&length_of(entries), entries].concat()
    }

    #[test]
    fn properties_are_decoded_as_they_were_encoded_and_other_bytes_are_none() {
        let mut nested = b"V".to_vec();
        for _ in 0..10_000 {
            nested = [b"A", &table(&nested)[..]].concat();
        }
        let headers = [
            &b"\x01vV\x01tt\x02\x01bb\x01\x01BB\x01\x01ss\x01\x02\x01UU\x01\x02\x01uu\x01\x02"[..],
            b"\x01II\x01\x02\x03\x04\x01ii\x01\x02\x03\x04\x01ff\x7f\xa0\0\x01",
            b"\x01DD\x01\x02\x03\x04\x05\x01Ll12345678\x01lL12345678\x01dd12345678\x01TT12345678",
            b"\x01SS\0\0\0\x01\xff\x02\xff\0x\0\0\0\x01\xff\x01vV\0V\x01FF\0\0\0\x03\x01?V\x04deep",
            &nested,
        ]
        .concat();
        let full = [
            &b"\xff\xfc\x02t\xff\0"[..],
            &table(&headers),
            b"\x02\x07\x01c\x01r\x03600\x01\xff12345678\x01t\x01u\x01a\x01c",
        ]
        .concat();
        for encoded in [vec![0, 0], full.clone(), b"\x20\0\0\0\0\x03\x01vV".to_vec()] {
            let parsed = NativeProperties::parse(encoded.clone().into()).unwrap();
            assert_eq!(parsed.encode(), encoded);
            assert_eq!(NativeProperties::of_native(&parsed.to_native()), Some(parsed));
        }
        for at in 0..full.len() {
            assert_eq!(NativeProperties::parse(full[..at].to_vec().into()), None, "{at}");
        }
        let others = [&b""[..], b"amqp/1", b"amqp/1\n", b"amqp/1\n\x80", b"amqp/1\n\0\x01"];
        for other in others.into_iter().chain([&b"amqp/1\n\0\0x"[..], b"kafka/1 0 null bytes \n"]) {
            assert_eq!(NativeProperties::of_native(&Bytes::from_static(other)), None, "{other:?}");
        }
    }
}
