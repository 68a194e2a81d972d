use hapax_core::{
    Entropy, EntropyError, OperationId, SealError, Sealer, Secret, SystemEntropy, WriteId,
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
