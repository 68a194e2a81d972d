//! The time in a key.

use super::Key;
use crate::clock::Timestamp;

/// Characters of a ULID, in the order of their values (Crockford's base 32).
const ULID_DIGITS: &[u8; 32] = b"0123456789ABCDEFGHJKMNPQRSTVWXYZ";

impl Key {
    /// Returns the time at which the key was made by the clock of its client, to the millisecond: that in a UUID of
    /// version 7 (RFC 9562, section 5.7) with hyphens, or in a ULID. `None` for every other key.
    ///
    /// A key of another kind that looks like a ULID has a time that means nothing.
    #[must_use]
    pub fn made_at(&self) -> Option<Timestamp> {
        let text = self.0.as_bytes();
        let millis = uuid_v7_millis(text).or_else(|| ulid_millis(text))?;
        Some(Timestamp::from_micros(millis * 1000))
    }
}

fn uuid_v7_millis(text: &[u8]) -> Option<u64> {
    let is_hyphen = |at: usize| matches!(at, 8 | 13 | 18 | 23);
    let fits = |(at, byte): (usize, &u8)| match is_hyphen(at) {
        true => *byte == b'-',
        false => byte.is_ascii_hexdigit(),
    };
    let is_uuid = text.len() == 36 && text.iter().enumerate().all(fits);
    if !is_uuid || text[14] != b'7' || !matches!(text[19], b'8' | b'9' | b'a' | b'b' | b'A' | b'B')
    {
        return None;
    }
    let digits = text[..13].iter().filter(|byte| **byte != b'-');
    digits
        .map(|byte| char::from(*byte).to_digit(16))
        .try_fold(0, |millis, digit| Some(millis << 4 | u64::from(digit?)))
}

fn ulid_millis(text: &[u8]) -> Option<u64> {
    let value = |byte: &u8| {
        let digit = byte.to_ascii_uppercase();
        ULID_DIGITS.iter().position(|it| *it == digit).and_then(|at| u64::try_from(at).ok())
    };
    // 26 digits of 5 bits are 130: the first one has 3 bits.
    let is_ulid = text.len() == 26 && text[0] <= b'7' && text.iter().all(|it| value(it).is_some());
    is_ulid
        .then(|| text[..10].iter().filter_map(value).fold(0, |millis, digit| millis << 5 | digit))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn millis(key: &str) -> Option<u64> {
        Key::new(key).unwrap().made_at().map(|at| at.as_micros() / 1000)
    }

    #[test]
    fn a_uuid_of_version_7_and_a_ulid_have_a_time() {
        // RFC 9562, appendix A.6, and the specification of ULIDs.
        assert_eq!(millis("017F22E2-79B0-7CC3-98C4-DC0C0C07398F"), Some(0x017F_22E2_79B0));
        assert_eq!(millis("017f22e2-79b0-7cc3-98c4-dc0c0c07398f"), Some(0x017F_22E2_79B0));
        assert_eq!(millis("01ARZ3NDEKTSV4RRFFQ69G5FAV"), Some(1_469_922_850_259));
        assert_eq!(millis("01arz3ndektsv4rrffq69g5fav"), Some(1_469_922_850_259));
        assert_eq!(millis("7ZZZZZZZZZZZZZZZZZZZZZZZZZ"), Some((1 << 48) - 1));
    }

    #[test]
    fn every_other_key_has_none() {
        for other in [
            "8e03978e-40d5-43dd-bc93-6894a57f9324",
            "017f22e2-79b0-7cc3-c8c4-dc0c0c07398f",
            "017f22e279b07cc398c4dc0c0c07398f",
            "017f22e2-79b0-7cc3-98c4-dc0c0c07398",
            "{17f22e2-79b0-7cc3-98c4-dc0c0c07398f",
            "8ZZZZZZZZZZZZZZZZZZZZZZZZZ",
            "01ARZ3NDEKTSV4RRFFQ69G5FAU",
            "01ARZ3NDEKTSV4RRFFQ69G5FA",
            "order-4711",
        ] {
            assert_eq!(millis(other), None, "{other}");
        }
    }
}
