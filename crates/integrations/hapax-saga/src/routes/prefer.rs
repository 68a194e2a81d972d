//! The header `Prefer` (RFC 7240), as far as it is about waiting.

use std::time::Duration;

use axum::http::{HeaderMap, HeaderName};

pub(super) const PREFER: HeaderName = HeaderName::from_static("prefer");
pub(super) const PREFERENCE_APPLIED: HeaderName = HeaderName::from_static("preference-applied");

/// Preferences of a request. What cannot be read is ignored, as RFC 7240 requires.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Preferences {
    /// 202 instead of waiting.
    pub(super) respond_async: bool,
    /// The time for which the client waits.
    pub(super) wait: Option<Duration>,
}

impl Preferences {
    pub(super) fn of(headers: &HeaderMap) -> Self {
        let mut preferences = Self::default();
        let lines = headers.get_all(PREFER).iter().filter_map(|line| line.to_str().ok());
        for preference in lines.flat_map(|line| line.split(',')) {
            // Parameters after a semicolon have no meaning for these two.
            let preference = preference.split(';').next().unwrap_or_default();
            let (name, value) = preference.split_once('=').unwrap_or((preference, ""));
            let value = value.trim().trim_matches('"');
            match name.trim().to_ascii_lowercase().as_str() {
                "respond-async" => preferences.respond_async = true,
                // The first counts.
                "wait" if preferences.wait.is_none() => {
                    preferences.wait = value.parse().ok().map(Duration::from_secs);
                }
                _ => {}
            }
        }
        preferences
    }

    /// Returns how long to wait.
    pub(super) fn wait(self, otherwise: Duration, longest: Duration) -> Duration {
        match self.wait {
            Some(wait) => wait.min(longest),
            None if self.respond_async => Duration::ZERO,
            None => otherwise.min(longest),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(lines: &[&str]) -> Preferences {
        let mut headers = HeaderMap::new();
        for line in lines {
            headers.append(PREFER, line.parse().unwrap());
        }
        Preferences::of(&headers)
    }

    #[test]
    fn preferences_are_read_as_rfc_7240_writes_them() {
        let seconds = |seconds| Some(Duration::from_secs(seconds));
        let (sync, later) = (false, true);
        for (lines, respond_async, wait) in [
            (&["respond-async"][..], later, None),
            (&["Respond-Async, wait=10"], later, seconds(10)),
            (&["wait=10", "respond-async"], later, seconds(10)),
            (&["wait = \"5\"; a=b, handling=lenient"], sync, seconds(5)),
            (&["wait=3, wait=9"], sync, seconds(3)),
            (&["wait=-1", "wait", ",,", "return=minimal; respond-async"], sync, None),
            (&[], sync, None),
        ] {
            assert_eq!(of(lines), Preferences { respond_async, wait }, "{lines:?}");
        }
    }

    #[test]
    fn a_wait_is_bounded_by_the_service() {
        let [short, long] = [Duration::from_secs(1), Duration::from_secs(9)];
        assert_eq!(of(&["wait=100"]).wait(short, long), long);
        assert_eq!(of(&["respond-async"]).wait(short, long), Duration::ZERO);
        assert_eq!(of(&[]).wait(short, long), short);
        assert_eq!(of(&["respond-async, wait=2"]).wait(short, long), Duration::from_secs(2));
    }
}
