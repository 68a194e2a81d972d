use hapax_core::{
    Entropy, EntropyError, OperationId, SealError, Sealer, Secret, SystemEntropy, WriteId,
};
use proptest::prelude::*;

use super::strategy::{record, sample};

const KEY: OperationId = OperationId::from_bytes([1; 32]);
const TAG: WriteId = WriteId::from_bytes([2; 16]);

fn secret(of: u8) -> Secret {
    Secret::new([of; 32])
}

fn sealers() -> [Sealer; 2] {
    [Sealer::checksum(), Sealer::keyed(&secret(1))]
}

proptest! {
    #[test]
    fn what_is_sealed_opens(record in record(), key: [u8; 32], write_id: [u8; 16]) {
        let (key, write_id) = (OperationId::from_bytes(key), WriteId::from_bytes(write_id));
        for sealer in sealers() {
            let sealed = sealer.seal(&key, write_id, &record, &SystemEntropy).unwrap();
            prop_assert_eq!(sealer.open(&key, write_id, &sealed), Ok(record.clone()));
        }
    }

    #[test]
    fn any_damage_is_found(record in record(), at in any::<prop::sample::Index>(), with in 1..=255u8) {
        for sealer in sealers() {
            let mut sealed = sealer.seal(&KEY, TAG, &record, &SystemEntropy).unwrap();
            let at = at.index(sealed.len());
            sealed[at] ^= with;
            prop_assert!(sealer.open(&KEY, TAG, &sealed).is_err());
            prop_assert!(sealer.open(&KEY, TAG, &sealed[..at]).is_err());
        }
    }

    #[test]
    fn any_bytes_are_an_error(bytes in prop::collection::vec(any::<u8>(), 0..200), kind in 0..3u8) {
        let headed = [b"hxs\x01".as_slice(), &[kind], &bytes].concat();
        for sealer in sealers() {
            prop_assert!(sealer.open(&KEY, TAG, &bytes).is_err());
            prop_assert!(sealer.open(&KEY, TAG, &headed).is_err());
        }
    }
}

#[test]
fn a_record_belongs_to_one_cell_and_one_write() {
    for sealer in sealers() {
        let sealed = sealer.seal(&KEY, TAG, &sample(), &SystemEntropy).unwrap();
        let elsewhere = OperationId::from_bytes([9; 32]);
        let later = WriteId::from_bytes([9; 16]);
        assert_eq!(sealer.open(&elsewhere, TAG, &sealed), Err(SealError::Broken));
        assert_eq!(sealer.open(&KEY, later, &sealed), Err(SealError::Broken));
    }
}

#[test]
fn with_a_secret_nothing_of_the_record_shows() {
    let sealed = sealers()[1].seal(&KEY, TAG, &sample(), &SystemEntropy).unwrap();
    assert!(!sealed.windows(11).any(|window| window == b"201 created"));
    let again = sealers()[1].seal(&KEY, TAG, &sample(), &SystemEntropy).unwrap();
    assert_ne!(sealed, again, "a nonce was used twice");
}

#[test]
fn secrets_rotate() {
    let old = Sealer::keyed(&secret(1));
    let both = Sealer::keyed(&secret(2)).previously(&secret(1));
    let new = Sealer::keyed(&secret(2));
    let before = old.seal(&KEY, TAG, &sample(), &SystemEntropy).unwrap();
    let after = both.seal(&KEY, TAG, &sample(), &SystemEntropy).unwrap();
    assert_eq!(both.open(&KEY, TAG, &before), Ok(sample()));
    assert_eq!(both.open(&KEY, TAG, &after), Ok(sample()));
    assert_eq!(new.open(&KEY, TAG, &after), Ok(sample()));
    assert!(matches!(new.open(&KEY, TAG, &before), Err(SealError::UnknownSecret { .. })));
    assert!(matches!(old.open(&KEY, TAG, &after), Err(SealError::UnknownSecret { .. })));
}

#[test]
fn a_seal_cannot_be_left_off() {
    let bare = Sealer::checksum().seal(&KEY, TAG, &sample(), &SystemEntropy).unwrap();
    let keyed = Sealer::keyed(&secret(1));
    assert_eq!(keyed.open(&KEY, TAG, &bare), Err(SealError::NotKeyed));
    let sealed = keyed.seal(&KEY, TAG, &sample(), &SystemEntropy).unwrap();
    let opened = Sealer::checksum().open(&KEY, TAG, &sealed);
    assert!(matches!(opened, Err(SealError::UnknownSecret { .. })));
}

#[test]
fn without_randomness_nothing_is_sealed() {
    #[derive(Debug)]
    struct Dry;
    impl Entropy for Dry {
        fn fill(&self, _: &mut [u8]) -> Result<(), EntropyError> {
            Err(EntropyError)
        }
    }
    assert_eq!(sealers()[1].seal(&KEY, TAG, &sample(), &Dry), Err(SealError::Entropy));
    assert!(sealers()[0].seal(&KEY, TAG, &sample(), &Dry).is_ok(), "a checksum needs none");
}
