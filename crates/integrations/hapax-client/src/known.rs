//! Data of responses that later tries of an operation need.

use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use hapax_core::Timestamp;
use hapax_http::header::{IDEMPOTENCY_EXPIRES, IDEMPOTENCY_OPERATION_ID};
use hapax_saga::StepContext;
use http::HeaderMap;
use http::header::DATE;
use serde::{Deserialize, Serialize};

use crate::flow::{ClientState, Host, keep_known};
use crate::server::Profile;

/// Data of the responses to an operation so far. They are saved with the end of each try.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Known {
    /// Path and query of the status resource, at the server of the request, once it is accepted.
    pub(crate) status: Option<String>,
    /// The retention that the server has stated, from the first try that may have arrived.
    pub(crate) retention: Option<Duration>,
    /// The operation id that the server has sent, for lists.
    #[serde(default)]
    pub(crate) operation: Option<String>,
}

/// The longest operation id that is kept. That of Hapax has 64 characters.
const MAX_OPERATION: usize = 128;

/// Returns the server's operation id among the headers of a response.
pub(crate) fn operation_id(headers: &HeaderMap) -> Option<String> {
    let mut values = headers.get_all(IDEMPOTENCY_OPERATION_ID).iter();
    let (Some(value), None) = (values.next(), values.next()) else { return None };
    let text = value.to_str().ok().filter(|text| text.len() <= MAX_OPERATION)?;
    (!text.is_empty() && text.bytes().all(|byte| byte.is_ascii_graphic())).then(|| text.to_owned())
}

/// Adds to the data of earlier responses what this one says, and saves them with the end of this try.
pub(crate) fn learn(
    at: &StepContext<Arc<ClientState>>,
    host: &Host,
    known: Known,
    headers: &HeaderMap,
) -> Known {
    if known.status.is_some() {
        // A status resource has no key.
        return known;
    }
    // Other servers do not promise what this header means.
    let states = host.server.profile == Profile::Hapax;
    let stated = || stated_retention(headers, at.clock.now(), at.age());
    let retention = states.then(stated).flatten().or(known.retention);
    let operation = operation_id(headers).or(known.operation);
    let known = Known { retention, operation, ..known };
    keep_known(at, &known);
    known
}

/// Returns the retention that a response states by `Idempotency-Expires`, from the first try that may have
/// arrived; `age` is the time since that one, or none if it is this one.
///
/// The header is a time of the server's clock. What is left of it counts from the response's `Date`, of
/// the same clock, or from `now`, whichever leaves less: a clock that is wrong makes a key expire too
/// early, never too late. The time that this try took is left out, which makes it earlier too.
fn stated_retention(
    headers: &HeaderMap,
    now: Timestamp,
    age: Option<Duration>,
) -> Option<Duration> {
    let mut values = headers.get_all(IDEMPOTENCY_EXPIRES).iter();
    let (Some(value), None) = (values.next(), values.next()) else { return None };
    // A Date of RFC 9651, whose parameters mean nothing here.
    let text = value.to_str().ok()?.split(';').next()?.trim().strip_prefix('@')?;
    let seconds = u64::try_from(text.parse::<i64>().ok()?.max(0)).ok()?;
    let until = Timestamp::default().after(Duration::from_secs(seconds));
    let date =
        headers.get(DATE).and_then(|date| httpdate::parse_http_date(date.to_str().ok()?).ok());
    let date = date.and_then(|date| date.duration_since(UNIX_EPOCH).ok());
    let by_server = date.map(|date| until.since(Timestamp::default().after(date)));
    let left = by_server.map_or(until.since(now), |left| left.min(until.since(now)));
    Some(age.unwrap_or_default().saturating_add(left))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sun, 06 Nov 1994 08:49:37 GMT.
    const NOW: u64 = 784_111_777;

    fn stated(list: &[(&'static str, &str)], age: u64) -> Option<u64> {
        let list = list.iter().map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap()));
        let headers = HeaderMap::from_iter(list);
        let now = Timestamp::from_micros(NOW * 1_000_000);
        let age = (age > 0).then_some(Duration::from_secs(age));
        stated_retention(&headers, now, age).map(|retention| retention.as_secs())
    }

    #[test]
    fn the_stated_retention_counts_from_the_first_try_by_the_clock_that_leaves_less() {
        let expires = ("idempotency-expires", "@784115377");
        assert_eq!(stated(&[expires], 0), Some(3_600));
        assert_eq!(stated(&[expires], 100), Some(3_700));
        let [early, late] = ["Sun, 06 Nov 1994 08:39:37 GMT", "Sun, 06 Nov 1994 08:59:37 GMT"];
        assert_eq!(stated(&[expires, ("date", early)], 0), Some(3_600));
        assert_eq!(stated(&[expires, ("date", late)], 0), Some(3_000));
        assert_eq!(stated(&[expires, ("date", "yesterday")], 0), Some(3_600));
        assert_eq!(stated(&[("idempotency-expires", "@784115377;a=b")], 0), Some(3_600));
        for past in ["@0", "@-5", "@784111777"] {
            assert_eq!(stated(&[("idempotency-expires", past)], 0), Some(0), "{past}");
        }
    }

    #[test]
    fn an_operation_id_is_one_short_word() {
        let of = |values: &[&str]| {
            let name = IDEMPOTENCY_OPERATION_ID;
            let values = values.iter().map(|value| (name.clone(), value.parse().unwrap()));
            let mut headers = HeaderMap::new();
            values.for_each(|(name, value)| _ = headers.append(name, value));
            operation_id(&headers)
        };
        assert_eq!(of(&["4bf9"]).as_deref(), Some("4bf9"));
        for none in [&[][..], &["a", "b"], &[""], &["a b"], &[&"a".repeat(129)]] {
            assert_eq!(of(none), None, "{none:?}");
        }
    }

    #[test]
    fn a_header_that_states_no_time_states_no_retention() {
        for text in ["", "784115377", "@", "@1.5", "@soon", "Sun, 06 Nov 1994 08:49:37 GMT"] {
            assert_eq!(stated(&[("idempotency-expires", text)], 0), None, "{text}");
        }
        let expires = ("idempotency-expires", "@784115377");
        assert_eq!(stated(&[expires, expires], 0), None, "two of them");
        assert_eq!(stated(&[], 5), None);
    }
}
