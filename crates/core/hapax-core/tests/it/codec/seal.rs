use hapax_core::schedule::EntryKey;
use hapax_core::{
    Entropy, EntropyError, EntryId, KeyRing, OperationId, SealError, Sealer, Secret, SystemEntropy,
    WriteId,
};
use proptest::prelude::*;

use super::strategy::{record, sample};

const KEY: OperationId = OperationId::from_bytes([1; 32]);
const WRITE_ID: WriteId = WriteId::from_bytes([2; 16]);

fn secret(of: u8) -> Secret {
    Secret::new([of; 32])
}

fn sealers() -> [Sealer; 2] {
    [Sealer::checksum(), Sealer::keyed(&secret(1))]
}

proptest! {
    #[test]
    fn a_sealed_record_opens(record in record(), key: [u8; 32], write_id: [u8; 16]) {
        let (key, write_id) = (OperationId::from_bytes(key), WriteId::from_bytes(write_id));
        for sealer in sealers() {
            let sealed = sealer.seal(&key, write_id, &record, &SystemEntropy).unwrap();
            prop_assert_eq!(sealer.open(&key, write_id, &sealed), Ok(record.clone()));
        }
    }

    #[test]
    fn any_damage_is_an_error(record in record(), at in any::<prop::sample::Index>(), with in 1..=255u8) {
        for sealer in sealers() {
            let mut sealed = sealer.seal(&KEY, WRITE_ID, &record, &SystemEntropy).unwrap();
            let at = at.index(sealed.len());
            sealed[at] ^= with;
            prop_assert!(sealer.open(&KEY, WRITE_ID, &sealed).is_err());
            prop_assert!(sealer.open(&KEY, WRITE_ID, &sealed[..at]).is_err());
        }
    }

    #[test]
    fn any_unsealed_bytes_are_an_error(bytes in prop::collection::vec(any::<u8>(), 0..200), kind in 0..3u8) {
        let headed = [b"hxs\x01".as_slice(), &[kind], &bytes].concat();
        for sealer in sealers() {
            prop_assert!(sealer.open(&KEY, WRITE_ID, &bytes).is_err());
            prop_assert!(sealer.open(&KEY, WRITE_ID, &headed).is_err());
        }
    }
}

#[test]
fn a_record_opens_only_with_its_operation_and_write_id() {
    for sealer in sealers() {
        let sealed = sealer.seal(&KEY, WRITE_ID, &sample(), &SystemEntropy).unwrap();
        let other = OperationId::from_bytes([9; 32]);
        let later = WriteId::from_bytes([9; 16]);
        assert_eq!(sealer.open(&other, WRITE_ID, &sealed), Err(SealError::Broken));
        assert_eq!(sealer.open(&KEY, later, &sealed), Err(SealError::Broken));
    }
}

#[test]
fn a_record_sealed_with_a_secret_cannot_be_read() {
    let sealed = sealers()[1].seal(&KEY, WRITE_ID, &sample(), &SystemEntropy).unwrap();
    assert!(!sealed.windows(11).any(|window| window == b"201 created"));
    let again = sealers()[1].seal(&KEY, WRITE_ID, &sample(), &SystemEntropy).unwrap();
    assert_ne!(sealed, again, "a nonce was used twice");
}

#[test]
fn a_previous_secret_still_opens() {
    let old = Sealer::keyed(&secret(1));
    let both = Sealer::keyed(&secret(2)).previously(&secret(1));
    let new = Sealer::keyed(&secret(2));
    let before = old.seal(&KEY, WRITE_ID, &sample(), &SystemEntropy).unwrap();
    let after = both.seal(&KEY, WRITE_ID, &sample(), &SystemEntropy).unwrap();
    assert_eq!(both.open(&KEY, WRITE_ID, &before), Ok(sample()));
    assert_eq!(both.open(&KEY, WRITE_ID, &after), Ok(sample()));
    assert_eq!(new.open(&KEY, WRITE_ID, &after), Ok(sample()));
    assert!(matches!(new.open(&KEY, WRITE_ID, &before), Err(SealError::UnknownSecret { .. })));
    assert!(matches!(old.open(&KEY, WRITE_ID, &after), Err(SealError::UnknownSecret { .. })));
}

#[test]
fn a_record_without_its_seal_is_rejected() {
    let bare = Sealer::checksum().seal(&KEY, WRITE_ID, &sample(), &SystemEntropy).unwrap();
    let keyed = Sealer::keyed(&secret(1));
    assert_eq!(keyed.open(&KEY, WRITE_ID, &bare), Err(SealError::NotKeyed));
    let sealed = keyed.seal(&KEY, WRITE_ID, &sample(), &SystemEntropy).unwrap();
    let opened = Sealer::checksum().open(&KEY, WRITE_ID, &sealed);
    assert!(matches!(opened, Err(SealError::UnknownSecret { .. })));
}

#[test]
fn without_randomness_nothing_is_sealed() {
    #[derive(Debug)]
    struct Failing;
    impl Entropy for Failing {
        fn fill(&self, _: &mut [u8]) -> Result<(), EntropyError> {
            Err(EntropyError)
        }
    }
    assert_eq!(sealers()[1].seal(&KEY, WRITE_ID, &sample(), &Failing), Err(SealError::Entropy));
    assert!(
        sealers()[0].seal(&KEY, WRITE_ID, &sample(), &Failing).is_ok(),
        "a checksum needs no randomness"
    );
}

#[test]
fn a_store_that_began_without_a_secret_opens_records_of_each_step() {
    let bare = Sealer::checksum();
    let first = KeyRing::unnamed(secret(1));
    let second = first.clone().sealing(secret(1));
    let seal = |by: &Sealer| by.seal(&KEY, WRITE_ID, &sample(), &SystemEntropy).unwrap();
    let open = |by: &Sealer, sealed: &[u8]| by.open(&KEY, WRITE_ID, sealed);
    let (opens, seals) = (first.sealer(), second.sealer());
    assert!(!opens.is_keyed() && seals.is_keyed());
    let sealed = seal(&seals);
    for sealer in [&opens, &seals] {
        assert_eq!(open(sealer, &seal(&bare)), Ok(sample()));
        assert_eq!(open(sealer, &sealed), Ok(sample()));
    }
    assert!(!sealed.windows(11).any(|window| window == b"201 created"));
    assert!(matches!(open(&bare, &sealed), Err(SealError::UnknownSecret { .. })));
    // A record without a seal is rejected where a secret names records, and in a cache.
    let named = KeyRing::new(secret(2)).sealing(secret(1));
    for sealer in [named.sealer(), second.strict_sealer(), first.strict_sealer()] {
        assert_eq!(open(&sealer, &seal(&bare)), Err(SealError::NotKeyed));
        assert_eq!(open(&sealer, &sealed), Ok(sample()));
    }
}

#[test]
fn notes_are_sealed_and_opened_as_records_are() {
    let entry = EntryKey { operation: KEY, id: EntryId::from_bytes([3; 16]) };
    let first = KeyRing::unnamed(secret(1));
    let (opens, seals) = (first.sealer(), first.sealing(secret(1)).sealer());
    let [bare, sealed] = [&Sealer::checksum(), &seals]
        .map(|sealer| sealer.seal_note(&entry, b"a note", &SystemEntropy).unwrap());
    for sealer in [&opens, &seals] {
        for note in [&bare, &sealed] {
            assert_eq!(sealer.open_note(&entry, note).unwrap(), &b"a note"[..]);
        }
    }
    assert!(!sealed.windows(6).any(|window| window == b"a note"));
}

#[test]
fn a_description_is_left_out_by_a_ring_that_opens_only() {
    let mut record = sample();
    record.notes.description = Some("key and caller".into());
    let first = KeyRing::unnamed(secret(1));
    for (ring, is_kept) in [(first.clone(), false), (first.sealing(secret(1)), true)] {
        let sealer = ring.sealer();
        let sealed = sealer.seal(&KEY, WRITE_ID, &record, &SystemEntropy).unwrap();
        assert!(!sealed.windows(3).any(|window| window == b"key"));
        let opened = sealer.open(&KEY, WRITE_ID, &sealed).unwrap();
        assert_eq!(opened.notes.description.is_some(), is_kept);
        assert_eq!(opened.state, record.state);
    }
}
