//! Lists of HTTP statuses, by which a route sets the class of a response.

use std::fmt;
use std::str::FromStr;

use http::StatusCode;

use crate::classify::OutcomeClass;

/// One status (`503`) or a range of them (`500-502`, `5xx`), within 200 to 599.
///
/// ```
/// use hapax_http::statuses::StatusRange;
/// let range: StatusRange = "5xx".parse()?;
/// assert!(range.contains(http::StatusCode::SERVICE_UNAVAILABLE));
/// assert_eq!("500-599".parse(), Ok(range));
/// # Ok::<(), hapax_http::statuses::StatusError>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct StatusRange {
    first: u16,
    last: u16,
}

impl StatusRange {
    /// Returns whether the range has this status.
    #[must_use]
    pub fn contains(&self, status: StatusCode) -> bool {
        (self.first..=self.last).contains(&status.as_u16())
    }

    /// Returns the smallest status of both, if there is one.
    fn common(&self, other: &Self) -> Option<u16> {
        let (first, last) = (self.first.max(other.first), self.last.min(other.last));
        (first <= last).then_some(first)
    }
}

impl FromStr for StatusRange {
    type Err = StatusError;

    fn from_str(text: &str) -> Result<Self, StatusError> {
        let code = |text: &str| {
            let digits = text.len() == 3 && text.bytes().all(|byte| byte.is_ascii_digit());
            text.parse().ok().filter(|code| digits && (200..=599).contains(code)).ok_or(StatusError)
        };
        let (first, last) = match text.split_once('-') {
            Some((first, last)) => (code(first)?, code(last)?),
            None => match text.strip_suffix("xx") {
                Some(digit) => (code(&format!("{digit}00"))?, code(&format!("{digit}99"))?),
                None => (code(text)?, code(text)?),
            },
        };
        if first > last {
            return Err(StatusError);
        }
        Ok(Self { first, last })
    }
}

impl From<StatusCode> for StatusRange {
    fn from(status: StatusCode) -> Self {
        Self { first: status.as_u16(), last: status.as_u16() }
    }
}

impl fmt::Display for StatusRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { first, last } = *self;
        if first == last {
            write!(f, "{first}")
        } else if first.is_multiple_of(100) && last == first + 99 {
            write!(f, "{}xx", first / 100)
        } else {
            write!(f, "{first}-{last}")
        }
    }
}

/// The text is not a status nor a range of statuses.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("expected a status from 200 to 599, such as 503, or a range, such as 5xx or 500-502")]
pub struct StatusError;

/// The classes of statuses that a route sets. A status in none of the lists goes by the route's
/// [`Profile`](crate::classify::Profile).
///
/// The lists apply to statuses that a handler returned. A response that broke off or never came
/// stays unknown.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct StatusLists {
    /// The outcome is stored and replayed.
    pub final_statuses: Vec<StatusRange>,
    /// The key is released: the next request executes.
    pub retryable_statuses: Vec<StatusRange>,
    /// The operation may have happened.
    pub unknown_statuses: Vec<StatusRange>,
}

impl StatusLists {
    fn lists(&self) -> [(OutcomeClass, &[StatusRange]); 3] {
        [
            (OutcomeClass::Final, &self.final_statuses),
            (OutcomeClass::Retryable, &self.retryable_statuses),
            (OutcomeClass::Unknown, &self.unknown_statuses),
        ]
    }

    /// Returns the class of a status that is in one of the lists.
    #[must_use]
    pub fn class(&self, status: StatusCode) -> Option<OutcomeClass> {
        let has = |list: &[StatusRange]| list.iter().any(|range| range.contains(status));
        self.lists().into_iter().find_map(|(class, list)| has(list).then_some(class))
    }

    /// Checks that no status is in two lists.
    ///
    /// # Errors
    /// [`StatusOverlap`] names the lists and a status that both have.
    pub fn check(&self) -> Result<(), StatusOverlap> {
        let [a, b, c] = self.lists();
        for ((one, first), (other, second)) in [(a, b), (a, c), (b, c)] {
            let common =
                first.iter().find_map(|range| second.iter().find_map(|it| range.common(it)));
            if let Some(status) = common {
                return Err(StatusOverlap { one, other, status });
            }
        }
        Ok(())
    }
}

/// A status that is in two lists.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "--{}-statuses and --{}-statuses both have {status}: leave it in one of them",
    .one.as_str(),
    .other.as_str()
)]
pub struct StatusOverlap {
    /// The first list.
    pub one: OutcomeClass,
    /// The second list.
    pub other: OutcomeClass,
    /// The smallest status of both.
    pub status: u16,
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ranges(texts: &[&str]) -> Vec<StatusRange> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    #[test]
    fn statuses_and_ranges_are_read_as_they_are_shown() {
        for text in ["200", "503", "599", "5xx", "2xx", "500-502"] {
            assert_eq!(text.parse::<StatusRange>().unwrap().to_string(), text);
        }
        for bad in [
            "",
            "99",
            "100",
            "199",
            "600",
            "1xx",
            "6xx",
            "5x",
            "xx",
            "502-500",
            "5xx-599",
            " 503",
            "+503",
            "0503",
            "500-",
            "-500",
            "500-502-504",
            "5XX",
            "٥00",
        ] {
            assert_eq!(bad.parse::<StatusRange>(), Err(StatusError), "{bad}");
        }
    }

    #[test]
    fn a_status_in_two_lists_is_found() {
        let lists = |retryable: &[&str], unknown: &[&str]| StatusLists {
            final_statuses: ranges(&["404"]),
            retryable_statuses: ranges(retryable),
            unknown_statuses: ranges(unknown),
        };
        assert_eq!(lists(&["503"], &["500-502", "504"]).check(), Ok(()));
        let both = lists(&["400", "502-503"], &["5xx"]).check().unwrap_err();
        assert_eq!(
            (both.one, both.other, both.status),
            (OutcomeClass::Retryable, OutcomeClass::Unknown, 502)
        );
        let message =
            "--final-statuses and --unknown-statuses both have 404: leave it in one of them";
        assert_eq!(lists(&[], &["4xx"]).check().unwrap_err().to_string(), message);
    }

    proptest! {
        #[test]
        fn any_text_is_a_range_or_an_error(text in "[0-9x-]{0,9}") {
            if let Ok(range) = text.parse::<StatusRange>() {
                prop_assert_eq!(range.to_string().parse(), Ok(range));
            }
        }
    }
}
