//! Times in the form of RFC 3339.

use hapax_core::Timestamp;

/// Returns a time as RFC 3339 has it, in UTC, to the millisecond.
#[must_use]
pub fn rfc3339(moment: Timestamp) -> String {
    moment.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_formatted_as_rfc_3339() {
        for (millis, text) in [
            (0, "1970-01-01T00:00:00.000Z"),
            (951_782_399_999, "2000-02-28T23:59:59.999Z"),
            (951_782_400_000, "2000-02-29T00:00:00.000Z"),
            (951_868_800_000, "2000-03-01T00:00:00.000Z"),
            (1_767_225_599_001, "2025-12-31T23:59:59.001Z"),
            (4_107_542_400_000, "2100-03-01T00:00:00.000Z"),
        ] {
            assert_eq!(rfc3339(Timestamp::from_micros(millis * 1000)), text);
        }
    }
}
