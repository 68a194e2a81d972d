//! State of a consumer's unacknowledged messages at the server, as it was last read.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_nats::jetstream::stream::{Config as StreamConfig, DiscardPolicy};
use hapax_core::{Clock, SystemClock, Timestamp};
use hapax_messages::SourceError;
use tokio::time::{Instant, timeout};

use crate::connection::{Connected, TIMEOUT, no_reply};
use crate::delivery::timestamp;

/// Time after which the state is read again while messages wait at the server.
const READ_EVERY: Duration = Duration::from_secs(1);

/// Time after which it is read again otherwise.
const READ_IDLE_EVERY: Duration = Duration::from_secs(10);

/// Time that a message has to stay in the stream beyond its pause: for its next attempt, and for a clock behind that of the
/// server, which the time of the stream's last message does not show.
const MARGIN: Duration = Duration::from_secs(60);

/// The state of a consumer and its stream at the server.
pub(crate) struct Pending {
    /// `max_ack_pending`, if so many messages are unacknowledged, some of them wait for their next attempts, and the server
    /// has further ones; otherwise 0. It ends with a message that is delivered for the first time.
    full: AtomicI64,
    /// Whether a limit of deliveries was set since the start, towards which a delay counts.
    is_limited: AtomicBool,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    read_at: Instant,
    /// The last end of the pauses for which this process has delayed messages.
    delayed_until: Instant,
    deletion: Deletion,
    /// Time of the server at which the stream's last message was stored, as was last read.
    last_stored_at: Timestamp,
}

/// Which messages a stream deletes although they are unacknowledged. One that waits at the server would be lost: no process
/// has it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Deletion {
    /// Zero without a limit.
    max_age: Duration,
    /// The setting by which new messages delete old ones of any age.
    pub(crate) by_new_ones: Option<&'static str>,
}

impl Deletion {
    pub(crate) fn of(config: &StreamConfig) -> Self {
        let discards_old = config.discard == DiscardPolicy::Old;
        let limits = [
            ("max_msgs", discards_old && config.max_messages > 0),
            ("max_bytes", discards_old && config.max_bytes > 0),
            (
                "max_msgs_per_subject",
                config.max_messages_per_subject > 0 && !config.discard_new_per_subject,
            ),
            ("allow_rollup_hdrs", config.allow_rollup),
        ];
        let by_new_ones = limits.into_iter().find(|(_, deletes)| *deletes).map(|(name, _)| name);
        Self { max_age: config.max_age, by_new_ones }
    }

    /// Returns whether the stream keeps a message for a time from now on.
    fn keeps(&self, stored_at: Timestamp, now: Timestamp, time: Duration) -> bool {
        let kept_until = stored_at.after(self.max_age);
        self.by_new_ones.is_none()
            && (self.max_age.is_zero() || now.after(time.saturating_add(MARGIN)) <= kept_until)
    }
}

impl fmt::Debug for Pending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pending").field("full", &self.full).finish_non_exhaustive()
    }
}

impl Pending {
    pub(crate) fn new(stream: &StreamConfig) -> Self {
        let (deletion, now) = (Deletion::of(stream), Instant::now());
        Self {
            full: AtomicI64::new(0),
            is_limited: AtomicBool::new(false),
            state: Mutex::new(State {
                read_at: now,
                delayed_until: now,
                deletion,
                last_stored_at: Timestamp::default(),
            }),
        }
    }

    /// Returns `max_ack_pending` if it is full.
    pub(crate) fn full_limit(&self) -> Option<i64> {
        Some(self.full.load(Ordering::Relaxed)).filter(|full| *full > 0)
    }

    /// Notes that the server has delivered a message for the first time.
    pub(crate) fn note_first_delivery(&self) {
        self.full.store(0, Ordering::Relaxed);
    }

    /// Notes that a message waits at the server.
    pub(crate) fn note_delay(&self, pause: Duration) {
        let mut state = self.state();
        if let Some(until) = Instant::now().checked_add(pause) {
            state.delayed_until = state.delayed_until.max(until);
        }
    }

    /// Reads the state.
    pub(crate) async fn read(&self, connected: &Connected) -> Result<(), SourceError> {
        let reading = async {
            let info = connected.consumer.get_info().await.map_err(SourceError::new)?;
            let stream = connected.stream.get_info().await.map_err(SourceError::new)?;
            Ok((info, Deletion::of(&stream.config), timestamp(stream.state.last_timestamp)))
        };
        let (info, deletion, last_stored_at) =
            timeout(TIMEOUT, reading).await.map_err(|_| no_reply(TIMEOUT))??;
        let waits = {
            let mut state = self.state();
            let now = Instant::now();
            (state.read_at, state.deletion, state.last_stored_at) = (now, deletion, last_stored_at);
            state.delayed_until > now
        };
        let max = info.config.max_ack_pending;
        let is_reached = i64::try_from(info.num_ack_pending).is_ok_and(|found| found >= max);
        // With one message at a time this is normal.
        let is_full = is_reached && waits && info.num_pending > 0 && max > 1;
        self.full.store(if is_full { max } else { 0 }, Ordering::Relaxed);
        let found = info.config.max_deliver;
        if !self.is_limited.swap(found > 0, Ordering::Relaxed) && found > 0 {
            tracing::error!(
                consumer = info.name,
                found,
                "expected unlimited deliveries, found max_deliver: unset it, since the server drops messages after the \
                 limit; messages that wait for their next attempts stay with this process"
            );
        }
        Ok(())
    }

    /// Reads the state on a task, if it was not read for a time: beside a pull, which neither waits for it nor ends it. An
    /// error is only logged.
    pub(crate) fn read_if_due(self: &Arc<Self>, connected: &Arc<Connected>) {
        {
            let (mut state, now) = (self.state(), Instant::now());
            let waits = state.delayed_until > now || self.full.load(Ordering::Relaxed) > 0;
            let every = if waits { READ_EVERY } else { READ_IDLE_EVERY };
            if now.duration_since(state.read_at) < every {
                return;
            }
            state.read_at = now;
        }
        let (pending, connected) = (Arc::clone(self), Arc::clone(connected));
        tokio::spawn(async move {
            if let Err(error) = pending.read(&connected).await {
                tracing::debug!(%error, "the number of unacknowledged messages was not read");
            }
        });
    }

    /// Returns whether the server keeps a message for a time from now on, and delivers it after that, as was last read.
    pub(crate) fn may_delay(&self, stored_at: Timestamp, time: Duration) -> bool {
        let state = self.state();
        // The clock of the server is not before this, however far this one is behind.
        let of_server = state.last_stored_at.after(state.read_at.elapsed());
        !self.is_limited.load(Ordering::Relaxed)
            && state.deletion.keeps(stored_at, SystemClock.now().max(of_server), time)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_not_delayed_if_the_stream_may_delete_it_before_its_next_attempt() {
        let unlimited = || StreamConfig { max_messages_per_subject: -1, ..StreamConfig::default() };
        let keeps = |config: &StreamConfig, age_s: u64, pause_s: u64| {
            let (stored_at, age) = (Timestamp::from_micros(0), Duration::from_secs(age_s));
            Deletion::of(config).keeps(
                stored_at,
                stored_at.after(age),
                Duration::from_secs(pause_s),
            )
        };
        assert!(keeps(&unlimited(), 1 << 40, u64::MAX));
        let aged = StreamConfig { max_age: Duration::from_secs(3600), ..unlimited() };
        assert!(keeps(&aged, 3000, 540) && !keeps(&aged, 3000, 541) && !keeps(&aged, 4000, 1));
        assert!(!keeps(&aged, 0, u64::MAX));
        let new = DiscardPolicy::New;
        for (config, by_new_ones) in [
            (StreamConfig { max_messages: 9, ..unlimited() }, Some("max_msgs")),
            (StreamConfig { max_bytes: 9, ..unlimited() }, Some("max_bytes")),
            (StreamConfig { max_messages: 9, max_bytes: 9, discard: new, ..unlimited() }, None),
            (
                StreamConfig { max_messages_per_subject: 9, discard: new, ..unlimited() },
                Some("max_msgs_per_subject"),
            ),
            (
                StreamConfig {
                    max_messages_per_subject: 9,
                    discard: new,
                    discard_new_per_subject: true,
                    ..unlimited()
                },
                None,
            ),
            (StreamConfig { allow_rollup: true, ..unlimited() }, Some("allow_rollup_hdrs")),
        ] {
            assert_eq!(Deletion::of(&config).by_new_ones, by_new_ones, "{config:?}");
            assert_eq!(keeps(&config, 0, 1), by_new_ones.is_none());
        }
    }

    #[test]
    fn a_clock_behind_that_of_the_server_does_not_make_a_message_younger() {
        let config = StreamConfig { max_age: Duration::from_secs(3600), ..StreamConfig::default() };
        let pending = Pending::new(&StreamConfig { max_messages_per_subject: -1, ..config });
        let (minute, stored_at) = (Duration::from_secs(60), SystemClock.now());
        assert!(pending.may_delay(stored_at, minute));
        pending.state().last_stored_at = stored_at.after(minute * 59);
        assert!(!pending.may_delay(stored_at, minute));
    }
}
