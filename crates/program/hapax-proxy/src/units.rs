//! Text forms of durations (`30s`, `5m`, `24h`) and sizes (`1MiB`).

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// Parses a whole number and its unit: `250ms`, `30s`, `5m`, `24h`, `7d`.
///
/// # Errors
/// [`UnitError`] for anything else, including a number without a unit: some readers would take it
/// for seconds, others for milliseconds.
pub fn parse_duration(text: &str) -> Result<Duration, UnitError> {
    let (number, unit) = split(text);
    let scale = match unit {
        "ms" => 1,
        "s" => 1_000,
        "m" => 60_000,
        "h" => 3_600_000,
        "d" => 86_400_000,
        _ => return Err(UnitError::Duration),
    };
    let number: u64 = number.parse().map_err(|_| UnitError::Duration)?;
    number.checked_mul(scale).map(Duration::from_millis).ok_or(UnitError::Duration)
}

/// A number of bytes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct ByteSize(pub usize);

impl FromStr for ByteSize {
    type Err = UnitError;

    /// Parses a whole number and its unit: `512B`, `64KiB`, `1MiB`, `2GiB`.
    fn from_str(text: &str) -> Result<Self, UnitError> {
        let (number, unit) = split(text);
        let shift = match unit {
            "B" => 0,
            "KiB" => 10,
            "MiB" => 20,
            "GiB" => 30,
            _ => return Err(UnitError::Size),
        };
        let number: usize = number.parse().map_err(|_| UnitError::Size)?;
        number.checked_mul(1 << shift).map(Self).ok_or(UnitError::Size)
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (shift, unit) in [(30, "GiB"), (20, "MiB"), (10, "KiB")] {
            if self.0 != 0 && self.0.trailing_zeros() >= shift {
                return write!(f, "{}{unit}", self.0 >> shift);
            }
        }
        write!(f, "{}B", self.0)
    }
}

fn split(text: &str) -> (&str, &str) {
    text.split_at(text.bytes().take_while(u8::is_ascii_digit).count())
}

/// Errors of parsing a duration or a size.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum UnitError {
    /// A duration was expected.
    #[error("expected a whole number and ms, s, m, h or d, like 30s")]
    Duration,
    /// A size was expected.
    #[error("expected a whole number and B, KiB, MiB or GiB, like 1MiB")]
    Size,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations() {
        assert_eq!(parse_duration("250ms"), Ok(Duration::from_millis(250)));
        assert_eq!(parse_duration("24h"), Ok(Duration::from_secs(86_400)));
        for bad in ["", "30", "s", "-1s", "1.5s", "1 s", "30S", "99999999999999999999s", "1h30m"] {
            assert_eq!(parse_duration(bad), Err(UnitError::Duration), "{bad}");
        }
    }

    #[test]
    fn sizes_are_written_as_they_are_read() {
        for text in ["0B", "512B", "64KiB", "1MiB", "3GiB"] {
            assert_eq!(text.parse::<ByteSize>().map(|size| size.to_string()), Ok(text.into()));
        }
        for bad in ["", "1", "1MB", "1 MiB", "99999999999999999999B", "99999999999GiB"] {
            assert_eq!(bad.parse::<ByteSize>(), Err(UnitError::Size), "{bad}");
        }
    }
}
