//! Encoding of records, sealed and unsealed.

mod golden;
mod seal;
mod strategy;

use bytes::Bytes;
use hapax_core::codec::{self, DecodeError, EncodeError, Field, MAX_CHECKPOINT, MAX_OUTCOME};
use hapax_core::{Extensions, Outcome, RecordState};
use proptest::prelude::*;

use strategy::{record, sample};

proptest! {
    #[test]
    fn an_encoded_record_is_decoded(record in record()) {
        let bytes = Bytes::from(codec::encode(&record).unwrap());
        prop_assert_eq!(codec::decode(&bytes).unwrap(), record);
    }

    #[test]
    fn a_record_has_one_form(record in record(), at in any::<prop::sample::Index>(), to: u8) {
        let mut bytes = codec::encode(&record).unwrap();
        let at = at.index(bytes.len());
        bytes[at] = to;
        if let Ok(read) = codec::decode(&bytes.clone().into()) {
            prop_assert_eq!(codec::encode(&read).unwrap(), bytes);
        }
    }

    #[test]
    fn every_prefix_and_every_extension_is_an_error(record in record(), more: u8) {
        let mut bytes = codec::encode(&record).unwrap();
        for end in 0..bytes.len() {
            prop_assert!(codec::decode(&Bytes::copy_from_slice(&bytes[..end])).is_err(), "{}", end);
        }
        bytes.push(more);
        prop_assert_eq!(codec::decode(&bytes.into()), Err(DecodeError::TrailingBytes));
    }

    #[test]
    fn any_bytes_give_a_record_or_an_error(
        bytes in prop::collection::vec(any::<u8>(), 0..512),
        headed in 1..=3u8,
    ) {
        let head = [b'h', b'x', b'r', headed];
        let bytes = if headed > 1 { [head.as_slice(), &bytes].concat() } else { bytes };
        if let Ok(read) = codec::decode(&bytes.clone().into()) {
            prop_assert_eq!(codec::encode(&read).unwrap(), bytes);
        }
    }
}

#[test]
fn foreign_bytes_and_unknown_versions_are_different_errors() {
    let mut bytes = codec::encode(&sample()).unwrap();
    bytes[3] = 4;
    assert_eq!(codec::decode(&bytes.clone().into()), Err(DecodeError::Version { found: 4 }));
    bytes[0] = b'H';
    assert_eq!(codec::decode(&bytes.into()), Err(DecodeError::NotARecord));
    assert_eq!(codec::decode(&Bytes::new()), Err(DecodeError::Truncated));
}

#[test]
fn a_length_over_its_limit_is_rejected_before_the_field_is_read() {
    let mut record = sample();
    record.checkpoint = None;
    record.state = RecordState::Done(Outcome::new("", ""));
    let mut bytes = codec::encode(&record).unwrap();
    let end = bytes.len();
    bytes[end - 4..].copy_from_slice(&u32::MAX.to_be_bytes());
    let found = codec::decode(&bytes.clone().into());
    assert_eq!(found, Err(DecodeError::TooLong { field: Field::Outcome }));
    bytes[end - 4..].copy_from_slice(&(MAX_OUTCOME as u32).to_be_bytes());
    assert_eq!(codec::decode(&bytes.into()), Err(DecodeError::Truncated));
}

#[test]
fn extensions_have_one_order_and_a_limit() {
    let mut record = sample();
    record.extensions.set(7, Some(Bytes::from_static(b"seven")));
    record.extensions.set(2, Some(Bytes::from_static(b"two")));
    record.extensions.set(9, Some(Bytes::new()));
    record.extensions.set(9, None);
    let bytes = codec::encode(&record).unwrap();
    assert_eq!(bytes[3], 3);
    let list = b"\x02\x00\x02\x00\x00\x00\x03two\x00\x07\x00\x00\x00\x05seven";
    assert!(bytes.ends_with(list), "{bytes:?}");
    let fields = |list: &[u8]| {
        let bytes = [&bytes[..bytes.len() - 21], list].concat();
        codec::decode(&bytes.into()).map(|record| record.extensions.len())
    };
    let bad = Err(DecodeError::BadValue { field: Field::Extensions });
    assert_eq!(fields(b"\x01\x00\x02\x00\x00\x00\x00"), Ok(1));
    assert_eq!(fields(b"\x00"), bad, "an empty list is version 2");
    assert_eq!(fields(b"\x02\x00\x02\x00\x00\x00\x00\x00\x02\x00\x00\x00\x00"), bad, "twice");
    assert_eq!(fields(b"\xff"), Err(DecodeError::TooLong { field: Field::Extensions }));
    let long = [b"\x01\x00\x02\x00\x00\x40\x01".as_slice(), &[0; 0x4001]].concat();
    assert_eq!(fields(&long), Err(DecodeError::TooLong { field: Field::Extensions }));

    record.extensions.set(1, Some(Bytes::from(vec![0; Extensions::MAX_FIELD + 1])));
    let field = Field::Extensions;
    let (length, limit) = (Extensions::MAX_FIELD + 1, Extensions::MAX_FIELD);
    assert_eq!(codec::encode(&record), Err(EncodeError { field, length, limit }));
    (1..=33).for_each(|number| record.extensions.set(number, Some(Bytes::new())));
    let (length, limit) = (33, Extensions::MAX_FIELDS);
    assert_eq!(codec::encode(&record), Err(EncodeError { field, length, limit }));
}

#[test]
fn a_field_over_its_limit_is_not_encoded() {
    let mut record = sample();
    record.checkpoint = Some(Bytes::from(vec![0; MAX_CHECKPOINT]));
    assert!(codec::encode(&record).is_ok());
    record.checkpoint = Some(Bytes::from(vec![0; MAX_CHECKPOINT + 1]));
    let (length, limit) = (MAX_CHECKPOINT + 1, MAX_CHECKPOINT);
    let error = EncodeError { field: Field::Checkpoint, length, limit };
    assert_eq!(codec::encode(&record), Err(error));
}
