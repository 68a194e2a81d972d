//! Durations and sizes as people write them.
//!
//! 1. What is read is digits and one known unit, and has the value they say.
//! 2. All such texts are read, unless the value does not fit.
//! 3. A size is read back as it is written.
#![no_main]

use std::time::Duration;

use hapax_proxy::{ByteSize, parse_duration};
use libfuzzer_sys::fuzz_target;

const DURATIONS: [(&str, u128); 5] =
    [("ms", 1), ("s", 1000), ("m", 60_000), ("h", 3_600_000), ("d", 86_400_000)];
const SIZES: [(&str, u128); 4] = [("B", 1), ("KiB", 1 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30)];

fuzz_target!(|input: (&str, Option<(u64, u8)>)| {
    let (text, made) = input;
    check(text);
    if let Some((number, unit)) = made {
        let (duration, _) = DURATIONS[usize::from(unit) % DURATIONS.len()];
        let (size, _) = SIZES[usize::from(unit) % SIZES.len()];
        check(&format!("{number}{duration}"));
        check(&format!("{number}{size}"));
        check(&format!("{number}{text}"));
    }
});

fn check(text: &str) {
    let duration = value(text, &DURATIONS).filter(|millis| *millis <= u128::from(u64::MAX));
    assert_eq!(parse_duration(text).ok().as_ref().map(Duration::as_millis), duration);
    let size: Option<ByteSize> = text.parse().ok();
    let expected = value(text, &SIZES).filter(|bytes| *bytes <= usize::MAX as u128);
    assert_eq!(size.map(|size| size.0 as u128), expected);
    if let Some(size) = size {
        assert_eq!(size.to_string().parse(), Ok(size));
    }
}

/// The value of digits and a unit, if it is one whose digits fit 64 bits.
fn value(text: &str, units: &[(&str, u128)]) -> Option<u128> {
    let at = text.find(|character: char| !character.is_ascii_digit())?;
    let (_, scale) = units.iter().find(|(unit, _)| *unit == &text[at..])?;
    let number: u64 = text[..at].parse().ok()?;
    Some(u128::from(number) * scale)
}
