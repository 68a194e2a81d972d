//! Encoding of records, sealed and unsealed.

mod golden;
mod seal;
mod strategy;

use bytes::Bytes;
use hapax_core::codec::{self, DecodeError, EncodeError, Field, MAX_CHECKPOINT, MAX_OUTCOME};
use hapax_core::{Outcome, RecordState};
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
        headed: bool,
    ) {
        let bytes = if headed { [b"hxr\x02".as_slice(), &bytes].concat() } else { bytes };
        if let Ok(read) = codec::decode(&bytes.clone().into()) {
            prop_assert_eq!(codec::encode(&read).unwrap(), bytes);
        }
    }
}

#[test]
fn foreign_bytes_and_unknown_versions_are_different_errors() {
    let mut bytes = codec::encode(&sample()).unwrap();
    bytes[3] = 3;
    assert_eq!(codec::decode(&bytes.clone().into()), Err(DecodeError::Version { found: 3 }));
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
fn a_field_over_its_limit_is_not_encoded() {
    let mut record = sample();
    record.checkpoint = Some(Bytes::from(vec![0; MAX_CHECKPOINT]));
    assert!(codec::encode(&record).is_ok());
    record.checkpoint = Some(Bytes::from(vec![0; MAX_CHECKPOINT + 1]));
    let (length, limit) = (MAX_CHECKPOINT + 1, MAX_CHECKPOINT);
    let error = EncodeError { field: Field::Checkpoint, length, limit };
    assert_eq!(codec::encode(&record), Err(error));
}
