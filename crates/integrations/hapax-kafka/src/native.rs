//! The native form of a record: its partition and key, and which of its values are null. By it a redriven record is what
//! it was, although a message has neither partition nor null values, and a dead letter without an order no key.

use bytes::Bytes;

/// First word of the encoding.
const VERSION: &str = "kafka/1";

/// Prefix of an order key in base 16.
const BASE16: &str = "base16:";

/// Parts of a record in Kafka that a message has not.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct NativeRecord {
    /// Number of the partition.
    pub(crate) partition: i32,
    /// `None` for a null key.
    pub(crate) key: Option<Bytes>,
    /// Whether the value is null, as that of a tombstone is.
    pub(crate) has_null_value: bool,
    /// Indices of the headers whose values are null, in ascending order.
    pub(crate) null_headers: Vec<usize>,
}

impl NativeRecord {
    /// Encodes it as a line of words, and the key.
    pub(crate) fn encode(&self) -> Bytes {
        let word = |is_null: bool| if is_null { "null" } else { "bytes" };
        let (key, value) = (word(self.key.is_none()), word(self.has_null_value));
        let headers: Vec<_> = self.null_headers.iter().map(usize::to_string).collect();
        let text = format!("{VERSION} {} {key} {value} {}\n", self.partition, headers.join(","));
        let mut encoded = text.into_bytes();
        encoded.extend_from_slice(self.key.as_deref().unwrap_or_default());
        encoded.into()
    }

    /// Decodes what [`encode`](Self::encode) returns; `None` for other bytes, such as those of another broker.
    pub(crate) fn decode(encoded: &Bytes) -> Option<Self> {
        let end = encoded.iter().position(|byte| *byte == b'\n')?;
        let line = std::str::from_utf8(&encoded[..end]).ok()?;
        let [VERSION, partition, key, value, headers] =
            <[&str; 5]>::try_from(line.split(' ').collect::<Vec<_>>()).ok()?
        else {
            return None;
        };
        let is_null = |word: &str| match word {
            "null" => Some(true),
            "bytes" => Some(false),
            _ => None,
        };
        let headers = headers.split(',').filter(|index| !index.is_empty());
        let null_headers: Vec<usize> =
            headers.map(|index| index.parse().ok()).collect::<Option<_>>()?;
        if !null_headers.is_sorted_by(|one, next| one < next) {
            return None;
        }
        Some(Self {
            partition: partition.parse().ok()?,
            key: (!is_null(key)?).then(|| encoded.slice(end + 1..)),
            has_null_value: is_null(value)?,
            null_headers,
        })
    }
}

/// Returns the order key of a record's key. Different keys have different order keys.
pub(crate) fn order_key(key: &[u8]) -> String {
    match std::str::from_utf8(key) {
        // A database would not store a zero byte.
        Ok(text) if !text.contains('\0') && !text.starts_with(BASE16) => text.to_owned(),
        _ => {
            let hex: String = key.iter().map(|byte| format!("{byte:02x}")).collect();
            format!("{BASE16}{hex}")
        }
    }
}

/// Returns the key of a record that has this order key, unless a hash has replaced it.
pub(crate) fn record_key(order_key: &str) -> Bytes {
    let text = || Bytes::copy_from_slice(order_key.as_bytes());
    let Some(digits) = order_key.strip_prefix(BASE16) else { return text() };
    let byte = |digits: &[u8]| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok();
    let bytes: Option<Vec<_>> = digits.as_bytes().chunks(2).map(byte).collect();
    bytes.filter(|bytes| order_key == self::order_key(bytes)).map_or_else(text, Bytes::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_native_record_is_decoded_as_it_was_encoded_and_other_bytes_are_none() {
        let keys: [Option<&'static [u8]>; 4] =
            [None, Some(b""), Some(b"k 1\n"), Some(&[0xff, 0, b'\n'])];
        for (partition, key) in (0..).zip(keys) {
            for null_headers in [vec![], vec![0], vec![1, 30]] {
                let native = NativeRecord {
                    partition,
                    key: key.map(Bytes::from_static),
                    has_null_value: partition % 2 == 0,
                    null_headers,
                };
                assert_eq!(NativeRecord::decode(&native.encode()), Some(native));
            }
        }
        for other in [
            "",
            "kafka/1",
            "kafka/2 0 null bytes \n",
            "amqp/1 0 null bytes \n",
            "kafka/1 x null bytes \n",
            "kafka/1 0 none bytes \n",
            "kafka/1 0 null bytes 1,x\n",
            "kafka/1 0 null bytes 2,1\n",
            "kafka/1 0 null bytes 1,1\n",
            "kafka/1 0 null bytes 1 2\n",
            "kafka/1 0 null bytes ",
        ] {
            assert_eq!(
                NativeRecord::decode(&Bytes::from_static(other.as_bytes())),
                None,
                "{other:?}"
            );
        }
    }

    #[test]
    fn keys_that_are_not_utf8_stay_different_and_are_found_again() {
        assert_eq!(order_key("ä 1".as_bytes()), "ä 1");
        assert_eq!(order_key(&[0xff, 0]), "base16:ff00");
        assert_ne!(order_key(b"a\0"), order_key(b"a"));
        assert_ne!(order_key(b"base16:ff"), order_key(b"\xff"));
        let keys: [&[u8]; 6] = [b"", b"a", b"a\0", b"\xff\0", b"base16:ff", "ä".as_bytes()];
        for key in keys {
            assert_eq!(record_key(&order_key(key)), key);
        }
        for text in ["base16:f", "base16:61", "base16:FF", "base16:", "base16:+f"] {
            assert_eq!(record_key(text), text, "no record has this order key");
        }
    }
}
