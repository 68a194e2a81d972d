//! Records as bytes.
//!
//! 1. Any bytes decode to a record or an error; a record that they decode to encodes to them.
//! 2. Any record survives the round trip; no beginning of its bytes, and nothing longer, decodes.
#![no_main]

use arbitrary::Unstructured;
use bytes::Bytes;
use hapax_core::codec::{DecodeError, decode, encode};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    let bytes = Bytes::copy_from_slice(input);
    if let Ok(record) = decode(&bytes) {
        assert_eq!(encode(&record).expect("it was read"), input, "a second form");
    }

    let mut u = Unstructured::new(input);
    let Ok(record) = hapax_fuzz::record(&mut u) else { return };
    let encoded = Bytes::from(encode(&record).expect("within every limit"));
    assert_eq!(decode(&encoded).as_ref(), Ok(&record));

    let cut = u.choose_index(encoded.len()).unwrap_or_default();
    assert!(decode(&encoded.slice(..cut)).is_err(), "half a record was read");
    let longer = Bytes::from([&encoded[..], &[cut as u8]].concat());
    assert_eq!(decode(&longer), Err(DecodeError::TrailingBytes));
});
