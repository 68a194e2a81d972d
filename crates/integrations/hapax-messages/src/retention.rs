//! The retention of ids: whether it covers the redeliveries of the broker, and the bytes it takes.

use std::convert::Infallible;
use std::fmt;
use std::time::Duration;

use tokio::time::sleep;

use crate::source::SourceLimits;

/// Bytes of a record in a store, of a handled message: as measured on PostgreSQL, Redis and the
/// file.
pub(crate) const RECORD_BYTES: u64 = 700;

/// Time of the first measurement of the rate of ids, and of each later one.
const FIRST: Duration = Duration::from_secs(60);
const FURTHER: Duration = Duration::from_secs(24 * 60 * 60);

/// The retention of a consumer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Retention<'a> {
    pub(crate) consumer: &'a str,
    pub(crate) time: Duration,
    /// Bytes that an id takes in the store.
    pub(crate) bytes_per_id: u64,
}

/// Ids that one process stored in a time.
#[derive(Clone, Copy, Debug)]
struct StoredIds {
    count: u64,
    within: Duration,
}

impl Retention<'_> {
    /// Compares the retention with the time for which the source delivers a message again, and logs
    /// the bytes that the ids take: at start for one id per second, after the first minute that
    /// stores ids, and then each day, by the rate of this process. `stored` returns the ids that it
    /// has stored. Does not end.
    pub(crate) async fn watch(self, source: SourceLimits, stored: impl Fn() -> u64) -> Infallible {
        let Self { consumer, time, .. } = self;
        if let Some(span) = source.redelivers_for.filter(|span| *span > time) {
            tracing::warn!(
                consumer,
                retention = ?time,
                redelivers_for = ?span,
                "expected a retention of ids of at least the time for which the source delivers a message \
                                 again, found a shorter one: set a longer `retention`"
            );
        }
        let of_one = StoredIds { count: 1, within: Duration::from_secs(1) };
        tracing::info!(consumer, "{}", self.cost("at 1 id/s", of_one));
        let mut within = FIRST;
        loop {
            let before = stored();
            sleep(within).await;
            let count = stored() - before;
            if count > 0 {
                let ids = StoredIds { count, within };
                let rate = Short(count as f64 / within.as_secs_f64());
                tracing::info!(
                    consumer,
                    "{}",
                    self.cost(&format!("at {rate} ids/s of this process"), ids)
                );
                within = FURTHER;
            }
        }
    }

    /// Describes the bytes that the ids take, if they go on to be stored at this rate.
    fn cost(self, rate: &str, ids: StoredIds) -> String {
        let (time, each) = (Span(self.time), self.bytes_per_id);
        let bytes = Bytes(self.bytes(ids));
        format!(
            "retention {time}: {rate} the ids take about {bytes} in the store ({each} bytes per id)"
        )
    }

    fn bytes(self, StoredIds { count, within }: StoredIds) -> u128 {
        let bytes = u128::from(count).saturating_mul(self.bytes_per_id.into());
        bytes.saturating_mul(self.time.as_millis()) / within.as_millis().max(1)
    }
}

/// A positive number with two significant digits, and with all digits before the decimal point.
struct Short(f64);

impl fmt::Display for Short {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let places = match self.0 {
            value if value < 0.001 => return f.write_str("under 0.001"),
            value if value < 0.0995 => 3,
            value if value < 0.995 => 2,
            value if value < 9.95 => 1,
            _ => 0,
        };
        write!(f, "{:.places$}", self.0)
    }
}

/// A number of bytes, in decimal units.
struct Bytes(u128);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut value = self.0 as f64;
        for unit in ["bytes", "KB", "MB", "GB"] {
            // 999.5 would be written as 1000.
            if value < 999.5 {
                return write!(f, "{} {unit}", Short(value));
            }
            value /= 1000.0;
        }
        write!(f, "{} TB", Short(value))
    }
}

/// A time in its largest whole unit.
struct Span(Duration);

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = self.0.as_secs();
        let units = [(24 * 60 * 60, "day"), (60 * 60, "hour"), (60, "minute")];
        let unit = units
            .into_iter()
            .find(|(length, _)| seconds >= *length && seconds.is_multiple_of(*length));
        let (length, name) = unit.unwrap_or((1, "second"));
        let count = seconds / length;
        write!(f, "{count} {name}{}", if count == 1 { "" } else { "s" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DAY: Duration = Duration::from_secs(24 * 60 * 60);

    fn retention(time: Duration, bytes_per_id: u64) -> Retention<'static> {
        Retention { consumer: "orders", time, bytes_per_id }
    }

    #[test]
    fn the_bytes_are_rate_times_retention_times_size() {
        let ids = |count, secs| StoredIds { count, within: Duration::from_secs(secs) };
        let month = retention(30 * DAY, 700);
        assert_eq!(month.bytes(ids(1, 1)), 1_814_400_000);
        assert_eq!(month.bytes(ids(7_200, 60)), 120 * 1_814_400_000);
        assert_eq!(month.bytes(ids(86_400, 86_400)), 1_814_400_000);
        assert_eq!(month.bytes(ids(0, 60)), 0);
        assert_eq!(
            month.cost("at 120 ids/s of this process", ids(7_200, 60)),
            "retention 30 days: at 120 ids/s of this process the ids take about 218 GB in the store \
             (700 bytes per id)"
        );
        // No overflow.
        let most = retention(Duration::MAX, u64::MAX);
        assert!(most.bytes(ids(u64::MAX, 0)) > 0);
    }

    #[test]
    fn numbers_are_short() {
        let bytes = [1, 12, 999, 1_000, 12_345, 999_600, 1_814_400_000, 5 << 50];
        let texts = bytes.map(|it| Bytes(it).to_string());
        let expected = [
            "1.0 bytes",
            "12 bytes",
            "999 bytes",
            "1.0 KB",
            "12 KB",
            "1.0 MB",
            "1.8 GB",
            "5629 TB",
        ];
        assert_eq!(texts, expected);
        let rates =
            [0.0001, 0.0167, 0.5, 0.9999, 1.0, 9.94, 9.96, 120.4].map(|it| Short(it).to_string());
        assert_eq!(rates, ["under 0.001", "0.017", "0.50", "1.0", "1.0", "9.9", "10", "120"]);
        let spans = [30 * DAY, DAY, DAY * 3 / 2, Duration::from_secs(60), Duration::from_secs(90)];
        let spans = spans.map(|it| Span(it).to_string());
        assert_eq!(spans, ["30 days", "1 day", "36 hours", "1 minute", "90 seconds"]);
    }
}
