//! The search for messages that the client library cannot parse.
//!
//! Such a message ends the connection each time that it is delivered, and nothing names it: it is between the consumer's
//! last acknowledged and its last delivered message. After an end of the connection the messages there are read by
//! requests, and those that the client cannot parse are delivered from the answers.
//!
//! 1. After one end these are the messages that were delivered first since then: those behind the last one that was
//!    received. If the connection ends again soon, all that are not known to be acknowledged: the message may have been
//!    delivered to another process, or before this one started.
//! 2. A search finds messages that were terminated before, while an earlier one is not acknowledged: nothing says that the
//!    server has their acknowledgements. One that this process has terminated is terminated again, and not delivered. For
//!    one of another process the record, or the dead letter, is the same.
//! 3. A search reads for a short time, and then the source receives again: other messages do not wait for the end of a
//!    search of many.
//! 4. A future that is dropped loses nothing: what was found is in the state, and the search goes on with the next call.

use std::num::NonZeroUsize;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_nats::jetstream::AckKind;
use async_nats::jetstream::consumer::Info;
use async_nats::jetstream::stream::RawMessage;
use futures_util::{StreamExt as _, stream};
use hapax_messages::{Delivery, SourceError};
use tokio::time::{Instant, timeout};

use self::state::{Progress, State, Unread};
use crate::connection::{Connected, TIMEOUT, no_reply};
use crate::delivery::{Found, NatsDelivery, StoredId};
use crate::source::Shared;
use crate::stored;

mod state;

/// Messages that are read at a time, at most.
const AT_A_TIME: usize = 16;

/// Bytes of messages that are read at a time, at most, unless a single one may have more.
const AT_A_TIME_BYTES: usize = 16 << 20;

/// Requests that are begun before the source receives again, at most.
const MOST: usize = 256;

/// Time for which requests are begun before the source receives again.
const ROUND: Duration = Duration::from_millis(250);

/// State of the search.
pub(crate) struct Inspection {
    /// Time without an end after which ends are no consecutive ones: a message that is delivered again and again ends
    /// the connection at shorter intervals.
    calm: Duration,
    state: Mutex<State>,
}

/// A request for a message.
#[derive(Clone, Copy)]
enum Target {
    /// The message of this sequence, which is before the range.
    Single(u64),
    /// The first message from this sequence on.
    Next(u64),
}

/// The answer to a request for the first message from a sequence on.
struct Answer {
    /// The sequence.
    from: u64,
    /// The message.
    message: Option<RawMessage>,
    /// Last sequence from `from` on that has none but this message.
    until: u64,
}

impl Inspection {
    /// Creates a state for a consumer with this `ack_wait`.
    pub(crate) fn new(ack_wait: Duration) -> Self {
        let calm = ack_wait.saturating_mul(2).saturating_add(Duration::from_secs(30));
        Self { calm, state: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes a message that was received. It is doubtful if its subject looks as if the client could not read it.
    pub(crate) fn received(&self, id: StoredId, is_doubtful: bool) {
        self.state().received(id, is_doubtful);
    }

    /// Notes a message that was terminated.
    pub(crate) fn terminated(&self, id: StoredId) {
        self.state().terminated(id);
    }

    /// Returns the number of messages that were found.
    pub(crate) fn unreadable(&self) -> u64 {
        self.state().unreadable
    }

    /// Returns whether the connection ends again and again without a known cause.
    pub(crate) fn ends_often(&self) -> bool {
        self.state().ends_often(self.calm)
    }

    /// Returns whether there are messages left to read.
    pub(crate) fn is_unfinished(&self) -> bool {
        self.state().is_unfinished()
    }

    /// Returns messages that the client cannot parse, after an end of the connection.
    pub(crate) async fn find(
        &self,
        shared: &Arc<Shared>,
        connected: &Connected,
        max: NonZeroUsize,
    ) -> Vec<Arc<dyn Delivery>> {
        let ends = shared.link.ends();
        self.state().note_ends(ends, self.calm);
        if self.state().is_due {
            match info(connected).await {
                Ok(info) => {
                    self.state().begin(Progress::of(&info));
                    self.conclude_if_over(connected);
                }
                Err(error) => tracing::debug!(%error, "the state of the consumer was not read"),
            }
        }
        self.read(shared, connected, max.get()).await;
        let mut state = self.state();
        let count = state.found.len().min(max.get());
        let found = state.found.drain(..count);
        found
            .map(|found| Arc::new(NatsDelivery::found(shared, found)) as Arc<dyn Delivery>)
            .collect()
    }

    /// Reads messages for a short time, or until there are `max` to deliver.
    async fn read(&self, shared: &Shared, connected: &Connected, max: usize) {
        let Some(Unread { again, range, subjects }) = self.state().unread() else { return };
        let (first, last) = range.unwrap_or((1, 0));
        let stream = &*connected.consumer.cached_info().stream_name;
        let client = connected.context.client();
        let knows_subjects = client.is_server_compatible(2, 9, 0);
        let subjects: &[String] = if knows_subjects { &subjects } else { &[] };
        // An answer may be that for later sequences, too, which are left out then.
        let next = &AtomicU64::new(first);
        let following = std::iter::from_fn(|| {
            let sequence = next.fetch_add(1, Ordering::Relaxed);
            (sequence <= last).then_some(Target::Next(sequence))
        });
        let (began_at, mut begun) = (Instant::now(), 0);
        let targets = again.into_iter().map(Target::Single).chain(following);
        // The first one always, so that a slow server does not end the search.
        let targets = targets.take_while(|_| {
            begun += 1;
            begun == 1 || begun <= MOST && began_at.elapsed() < ROUND
        });
        let reading = stream::iter(targets).map(|target| async move {
            (target, request(connected, stream, target, subjects, last).await)
        });
        let mut reading = pin!(reading.buffered(at_a_time(client.server_info().max_payload)));
        while self.state().found.len() < max
            && let Some((target, read)) = reading.next().await
        {
            let read = match read {
                Ok(answer) => {
                    next.fetch_max(answer.until.saturating_add(1), Ordering::Relaxed);
                    self.take(shared, connected, target, answer).await
                }
                Err(error) => Err(error),
            };
            if let Err(error) = read {
                self.conclude(connected, Some(&error));
                return;
            }
            if self.conclude_if_over(connected) {
                return;
            }
        }
    }

    /// Takes the answer to a request, unless it is known.
    async fn take(
        &self,
        shared: &Shared,
        connected: &Connected,
        target: Target,
        Answer { from, message, until }: Answer,
    ) -> Result<(), async_nats::Error> {
        let info = connected.consumer.cached_info();
        let names = (&*info.stream_name, &*info.name);
        let at = message.as_ref().map_or(until.saturating_add(1), |message| message.sequence);
        self.state().absent(from, at);
        if let Some(message) = message
            && self.state().is_unread(message.sequence)
        {
            let id = StoredId { sequence: message.sequence, stored_at: message.time };
            self.state().present(id);
            let is_other = !self.state().receives(&message.subject) || self.state().is_readable(id);
            if !is_other && let Some(found) = Found::of(&message, names, &shared.order_key)? {
                self.note(shared, names, found).await;
            }
        }
        match target {
            Target::Single(sequence) => self.state().passed_again(sequence),
            Target::Next(_) => self.state().passed(until),
        }
        Ok(())
    }

    /// Keeps a message that was found from being delivered by the server, which would end the connection.
    async fn note(&self, shared: &Shared, (stream, consumer): (&str, &str), found: Found) {
        let is_terminated = self.state().is_terminated(found.id);
        let kept = match is_terminated {
            true => shared.link.send(&found.reply, AckKind::Term).await,
            false => shared.link.hold(&found.reply).await,
        };
        let (sequence, part) = (found.id.sequence, found.part);
        if let Err(error) = kept {
            tracing::debug!(%error, sequence, "a message may be delivered again");
        }
        if !is_terminated && self.state().add(found) {
            tracing::warn!(
                stream,
                consumer,
                sequence,
                found = part,
                "the NATS client cannot read a message"
            );
        }
    }

    /// Ends a search that has read everything. Returns whether it has.
    fn conclude_if_over(&self, connected: &Connected) -> bool {
        let is_over = !self.state().is_unfinished();
        if is_over {
            self.conclude(connected, None);
        }
        is_over
    }

    /// Ends a search: reports the connection if its ends have no known cause.
    fn conclude(&self, connected: &Connected, error: Option<&async_nats::Error>) {
        let mut state = self.state();
        if !state.conclude(error.is_some()) {
            return;
        }
        let (first, last) = state.unacknowledged;
        let info = connected.consumer.cached_info();
        tracing::error!(
            stream = info.stream_name,
            consumer = info.name,
            first_sequence = first,
            last_sequence = last,
            ends = state.unexplained,
            error = error.map(tracing::field::display),
            "the connection to the NATS server ends again and again, and no unacknowledged message was found that the client \
             cannot read: check the server's log, that the user may publish to $JS.API.STREAM.MSG.GET of the stream, and that \
             the subjects of the consumer were not changed while it had messages of others"
        );
    }
}

async fn info(connected: &Connected) -> Result<Info, SourceError> {
    let info = timeout(TIMEOUT, connected.consumer.get_info()).await;
    info.map_err(|_| no_reply(TIMEOUT))?.map_err(SourceError::new)
}

/// Requests a message; of the range, whose last sequence this is, the first that has one of the subjects, if any are
/// given.
async fn request(
    connected: &Connected,
    stream: &str,
    target: Target,
    subjects: &[String],
    last: u64,
) -> Result<Answer, async_nats::Error> {
    let context = &connected.context;
    let (from, message) = match target {
        Target::Next(from) if !subjects.is_empty() => {
            let message = stored::read_next(context, stream, from, subjects).await?;
            let message = message.filter(|message| message.sequence <= last);
            let until = message.as_ref().map_or(last, |message| message.sequence);
            return Ok(Answer { from, message, until });
        }
        Target::Single(from) | Target::Next(from) => {
            (from, stored::read(context, stream, from).await?)
        }
    };
    Ok(Answer { from, message, until: from })
}

/// Returns the number of messages that are read at a time from a server with this largest size of a message.
fn at_a_time(max_payload: usize) -> usize {
    (AT_A_TIME_BYTES / max_payload.max(1)).clamp(1, AT_A_TIME)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fewer_large_messages_are_read_at_a_time() {
        for (max_payload, expected) in [(0, 16), (1 << 20, 16), (4 << 20, 4), (64 << 20, 1)] {
            assert_eq!(at_a_time(max_payload), expected);
        }
    }
}
