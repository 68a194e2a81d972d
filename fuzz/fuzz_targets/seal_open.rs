//! Sealed records.
//!
//! 1. Any bytes open to a record or an error, and under a secret never to a record.
//! 2. What was sealed opens in its own cell, for its own write, and nowhere else.
//! 3. It opens after a change of the secret only if the old one is in the ring.
//! 4. Not one byte of it can be changed, left off or added.
#![no_main]

use std::fmt;

use arbitrary::{Result, Unstructured};
use hapax_core::{Entropy, EntropyError, OperationId, Sealer, Secret, WriteId};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    let nowhere = (OperationId::from_bytes([1; 32]), WriteId::from_bytes([2; 16]));
    let stranger = Sealer::keyed(&Secret::new([3; 32]));
    assert!(stranger.open(&nowhere.0, nowhere.1, input).is_err(), "forged");
    if let Ok(record) = Sealer::checksum().open(&nowhere.0, nowhere.1, input) {
        let again = Sealer::checksum().seal(&nowhere.0, nowhere.1, &record, &Fixed([0; 24]));
        assert_eq!(again.expect("it was opened"), input, "a second form");
    }
    let _ = round_trip(&mut Unstructured::new(input));
});

fn round_trip(u: &mut Unstructured<'_>) -> Result<()> {
    let nonce = Fixed(u.arbitrary()?);
    let secret = Secret::new(u.arbitrary()?);
    let keyed: bool = u.arbitrary()?;
    let sealer = Sealer::new(keyed.then_some(&secret));
    let (key, write_id) =
        (OperationId::from_bytes(u.arbitrary()?), WriteId::from_bytes(u.arbitrary()?));
    let record = hapax_fuzz::record(u)?;
    let sealed = sealer.seal(&key, write_id, &record, &nonce).expect("within every limit");
    assert_eq!(sealer.open(&key, write_id, &sealed), Ok(record.clone()));

    let other = Secret::new(u.arbitrary()?);
    if other != secret {
        assert!(
            Sealer::keyed(&other).open(&key, write_id, &sealed).is_err(),
            "opened by a stranger"
        );
        let rotated = Sealer::keyed(&other).previously(&secret);
        assert_eq!(rotated.open(&key, write_id, &sealed).is_ok(), keyed);
    }

    let at = u.choose_index(sealed.len())?;
    let flip: u8 = u.int_in_range(1..=255)?;
    let mut changed = sealed.clone();
    changed[at] ^= flip;
    assert!(
        sealer.open(&key, write_id, &changed).is_err(),
        "byte {at} may be changed by {flip:#x}"
    );
    assert!(sealer.open(&key, write_id, &sealed[..at]).is_err(), "may be cut at {at}");
    assert!(sealer.open(&key, write_id, &[&sealed[..], &[flip]].concat()).is_err(), "may grow");

    let (mut stored, mut write) = (*key.as_bytes(), *write_id.as_bytes());
    stored[at % 32] ^= flip;
    write[at % 16] ^= flip;
    assert!(
        sealer.open(&OperationId::from_bytes(stored), write_id, &sealed).is_err(),
        "may be moved"
    );
    assert!(sealer.open(&key, WriteId::from_bytes(write), &sealed).is_err(), "may be put back");
    Ok(())
}

/// Always the same bytes, over and over.
struct Fixed([u8; 24]);

impl Entropy for Fixed {
    fn fill(&self, bytes: &mut [u8]) -> std::result::Result<(), EntropyError> {
        bytes.iter_mut().zip(self.0.iter().cycle()).for_each(|(to, from)| *to = *from);
        Ok(())
    }
}

impl fmt::Debug for Fixed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Fixed")
    }
}
