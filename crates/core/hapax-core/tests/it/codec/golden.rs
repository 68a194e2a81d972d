//! Bytes that earlier releases wrote. Every version has to read them, and writes the same bytes
//! until the format version changes. A new format gets new files; old files stay.

use std::time::Duration;

use bytes::Bytes;
use hapax_core::{
    Entropy, EntropyError, Extensions, Notes, OperationId, Outcome, Record, RecordState, Sealer,
    Secret, WriteId, codec,
};

use super::strategy::sample;

fn states() -> [(&'static str, RecordState); 5] {
    let outcome = Outcome::new("http/1", b"201 created".as_slice());
    [
        ("in-flight", RecordState::InFlight),
        ("unknown", RecordState::Unknown { seen: None, reconciling: true }),
        ("unknown-seen", RecordState::Unknown { seen: Some(outcome.clone()), reconciling: false }),
        ("done", RecordState::Done(outcome)),
        ("released", RecordState::Released),
    ]
}

#[test]
fn records_are_read_and_written_as_in_earlier_versions() {
    for (name, state) in states() {
        let checkpoint = if name == "in-flight" { None } else { sample().checkpoint };
        let notes = if name == "in-flight" { Notes::default() } else { sample().notes };
        let record = Record { checkpoint, notes, state, ..sample() };
        let golden = golden(&format!("record-{name}.v2.hex"), &codec::encode(&record).unwrap());
        assert_eq!(hex(&codec::encode(&record).unwrap()), hex(&golden), "{name}");
        assert_eq!(codec::decode(&Bytes::from(golden)).unwrap(), record, "{name}");
    }
}

#[test]
fn records_with_extensions_are_read_and_written_as_in_earlier_versions() {
    let mut record = sample();
    record.extensions.set_settle(Some(Duration::from_micros(60_000_001)));
    record
        .extensions
        .set(Extensions::FIRST_OF_KEY + 77, Some(Bytes::from_static(b"of a later version")));
    let golden = golden("record-extensions.v3.hex", &codec::encode(&record).unwrap());
    assert_eq!(hex(&codec::encode(&record).unwrap()), hex(&golden));
    let read = codec::decode(&Bytes::from(golden)).unwrap();
    assert_eq!(read, record);
    assert_eq!(read.extensions.settle(), Some(Duration::from_millis(60_001)));
}

#[test]
fn seals_are_opened_and_made_as_in_earlier_versions() {
    /// Returns counted bytes, so that the nonce is always the same.
    #[derive(Debug)]
    struct Counting;
    impl Entropy for Counting {
        fn fill(&self, bytes: &mut [u8]) -> Result<(), EntropyError> {
            bytes.iter_mut().zip(0..).for_each(|(byte, count)| *byte = count);
            Ok(())
        }
    }
    let (key, write_id) = (OperationId::from_bytes([0x11; 32]), WriteId::from_bytes([0x22; 16]));
    let keyed = Sealer::keyed(&Secret::new([0x33; 32]));
    for (name, sealer) in [("checksum", Sealer::checksum()), ("keyed", keyed)] {
        let sealed = sealer.seal(&key, write_id, &sample(), &Counting).unwrap();
        let golden = golden(&format!("seal-{name}.v2.hex"), &sealed);
        assert_eq!(hex(&sealed), hex(&golden), "{name}");
        assert_eq!(sealer.open(&key, write_id, &golden), Ok(sample()), "{name}");
    }
}

/// Returns the bytes of this file; `UPDATE_GOLDEN=1` writes the current ones into it.
fn golden(name: &str, current: &[u8]) -> Vec<u8> {
    let path = format!("{}/tests/golden/{name}", env!("CARGO_MANIFEST_DIR"));
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        std::fs::write(&path, hex(current) + "\n").unwrap();
    }
    let text = std::fs::read_to_string(&path).unwrap_or_default();
    let digits: Vec<u32> = text.chars().filter_map(|digit| digit.to_digit(16)).collect();
    digits.chunks(2).map(|pair| (pair[0] * 16 + pair[1]) as u8).collect()
}

fn hex(bytes: &[u8]) -> String {
    let lines = bytes
        .chunks(32)
        .map(|line| line.iter().map(|byte| format!("{byte:02x}")).collect::<String>());
    lines.collect::<Vec<_>>().join("\n")
}
