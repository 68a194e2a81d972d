//! `hapax messages redrive`.
//!
//! Each dead letter is redriven in three steps, each of which may be repeated: the decision is
//! stored, and the id of the message is removed from an inbox in batch mode; the record of an inbox
//! in claim mode is released; the message is published under an id that is new to the broker. The
//! consumer removes the dead letter.
//!
//! The command redrives a dead letter only if it is the oldest with its order key: the consumer would
//! park the message of a later one again. It redrives the next one after the consumer has handled the
//! one before. Messages with the key that arrive meanwhile become dead letters too: the command lists
//! the dead letters of these keys that are newer than its start until there are none. Those behind one
//! that is not selected stay.
//!
//! Other processes cannot open a store in a file meanwhile, so the consumer is stopped, and one dead
//! letter of each order key is redriven in a run.
//!
//! After one that fails, such as one that is parked again, or that the broker does not acknowledge, the later ones of its order
//! key are left out, and the command goes on with the others. One that is gone meanwhile was handled or dropped: the later
//! ones are not left out.
//!
//! The selection has ids only, and each dead letter is read when it is redriven: a list of a million with their errors would
//! take gigabytes.
//!
//! Only the id of a message that is parked is removed or released. The consumer may have handled
//! the message already, and may have ended before it removed the dead letter: then the message is a
//! duplicate.

mod results;

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use hapax_core::{
    DefiniteVerdict, Idempotency, Namespace, RecordState, Resolve, Store, Timestamp, WriteResult,
};
use hapax_file::OpenError;
use hapax_gateway::{OpenStore, StoreOpenError, StoreOpener, StoreUrl};
use hapax_messages::{
    DeadLetter, DeadLetterReason, DeadLetterStore as _, Inbox, MessageId, MessageSink,
    OrderKeyQuery, OrderKeyState, OutgoingMessage, PublishError,
};
use hapax_operators::rfc3339;
use hapax_postgres_data::StatementError;
use hapax_postgres_messages::{
    ConnectCause, DeadLetterPosition, DeadLetterQuery, DeadLetterSummary, OUTBOX_CONSUMER,
    PgDeadLetterStore,
};
use tokio::time::{Instant, sleep};

use self::results::{NotRedriven, OrderKeys, Results};
use super::args::RedriveArgs;
use super::{dead_letters, find, render, sink, unavailable};
use crate::exit::{CliError, of, with_causes};
use crate::keys::{TIMEOUT, user};
use crate::output::print;
use crate::secrets;

/// Dead letters of a page.
const PAGE: u32 = 1000;

/// SQLSTATE with which an outbox rejects a dead letter whose position another message has.
const UNIQUE_VIOLATION: &str = "23505";

/// Pause before the command looks whether the consumer has removed the dead letter; it doubles up to
/// the longest one.
const FIRST_POLL: Duration = Duration::from_millis(20);
const LONGEST_POLL: Duration = Duration::from_millis(320);

/// Times that the dead letters of order keys are listed again. Each time those are redriven that became
/// dead letters meanwhile, fewer than before unless messages arrive faster than they are redriven.
const PASSES: u32 = 100;

/// A dead letter of a list, by its position.
type Listed = (DeadLetterPosition, [u8; 32]);

struct Redrive {
    dead_letters: PgDeadLetterStore,
    sink: Option<Arc<dyn MessageSink>>,
    records: Option<OpenStore>,
    /// Whether the store is a file, so that no consumer runs.
    is_file: bool,
    /// Whether a message without an id gets one.
    new_id: bool,
    wait: Duration,
    /// Whether records are released whose handlers may still execute.
    force: bool,
    reason: String,
}

pub(super) async fn run(args: RedriveArgs) -> Result<(), CliError> {
    let store = args.store.map(|url| url.read().map_err(of("--store"))).transpose()?;
    let redrive = Redrive {
        is_file: matches!(store, Some(StoreUrl::File(_))),
        dead_letters: dead_letters(&args.at).await?,
        sink: match &args.to {
            Some(url) => Some(sink(url, &args.properties, &args.broker).await?),
            None => None,
        },
        records: match store {
            Some(url) => {
                let opener = StoreOpener {
                    secret_file: args.secret_file,
                    timeout: TIMEOUT,
                    make: false,
                    ..StoreOpener::new(url)
                };
                secrets::warn_of_store(&opener);
                Some(opener.open().await.map_err(not_opened)?)
            }
            None => None,
        },
        new_id: args.new_id,
        wait: args.wait,
        force: args.force,
        reason: args.reason,
    };
    let selection = Selection {
        ids: args.dead_letters,
        consumer: args.consumer,
        namespace: args.namespace.unwrap_or_default(),
        reason: args.parked_as.map(Into::into),
    };
    let (selected, start) = redrive.select(selection).await?;
    redrive.check_mode(&selected).await?;
    let mut results = Results::default();
    let ended = redrive.all(&selected, start, &mut results).await;
    let (has_store, is_file) = (redrive.records.is_some(), redrive.is_file);
    if let Some(opened) = redrive.records {
        opened.close().await;
    }
    print(&results.summary(has_store, ended.is_err()));
    ended?;
    results.end(is_file)
}

/// The dead letters that the flags select.
struct Selection {
    ids: Vec<String>,
    consumer: Option<String>,
    namespace: Namespace,
    reason: Option<DeadLetterReason>,
}

/// Returns the error of a message whose former handler may still execute.
fn early(name: &str, until: Timestamp, now: Timestamp) -> CliError {
    let (seconds, until) = (until.since(now).as_secs_f64().ceil(), rfc3339(until));
    CliError::no(format!(
        "{name}: a former handler of the message, or the request that it sent, may still execute until {until} \
         (in {seconds} s): run the command again then, or with --force"
    ))
}

/// Returns the error of a dead letter of a consumer in claim mode without its store.
fn without_store(found: &DeadLetterSummary) -> CliError {
    CliError::usage(format!(
        "--store: expected the store of the consumer {}, since its inbox is not in --database and so has the record that \
         the message {} is parked, found none: add --store with the value of its process (`hapax consume --store`: \
         postgres://USER@HOST/DB, redis://HOST or file:PATH), or set HAPAX_STORE; add --force instead for a consumer in \
         batch mode whose retention of ids has ended",
        found.consumer,
        &render::hex(&found.id)[..12]
    ))
}

fn not_opened(error: StoreOpenError) -> CliError {
    let StoreOpenError::File { path, source: OpenError::InUse { pid, .. } } = error else {
        return CliError::unavailable(format!("--store: {error}"));
    };
    let owner = pid.map_or("another process".into(), |pid| format!("process {pid}"));
    CliError::unavailable(format!(
        "--store: expected a file that no process has open, found {} in use by {owner}; nothing was \
         redriven: stop the consumer, run the command again, and then start the consumer",
        path.display()
    ))
}

/// Results of releasing the record of a message.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Released {
    NoStore,
    NoRecord,
    Handled,
    Parked,
}

impl Released {
    const fn text(self) -> &'static str {
        match self {
            Self::NoStore => "",
            Self::NoRecord => ", no record in --store",
            Self::Handled => ", not released: it was handled before",
            Self::Parked => ", its record released",
        }
    }
}

impl Redrive {
    /// Returns the selected dead letters in their order, and the position up to which those of the consumer are.
    async fn select(
        &self,
        selection: Selection,
    ) -> Result<(Vec<Listed>, DeadLetterPosition), CliError> {
        let mut start = self.dead_letters.last_position().await.map_err(unavailable)?;
        let mut selected = Vec::new();
        for prefix in &selection.ids {
            let dead_letter = find(&self.dead_letters, prefix).await?;
            start = start.max(dead_letter.position());
            selected.push((dead_letter.position(), dead_letter.id));
        }
        if let Some(consumer) = selection.consumer {
            // One with its namespace is given as a list shows it. An outbox has none.
            let is_bare = Namespace::of_stored_consumer(&consumer).0.is_default();
            let consumer = match is_bare && consumer != OUTBOX_CONSUMER {
                true => selection.namespace.stored_consumer(&consumer).into_owned(),
                false => consumer,
            };
            let (consumer, reason) = (Some(consumer), selection.reason);
            let query = DeadLetterQuery { consumer, reason, after: None, limit: PAGE };
            selected = self.list(query, |dead_letter| dead_letter.position() <= start).await?;
        }
        // In the order of a list, whatever the order of the arguments.
        selected.sort_unstable();
        selected.dedup();
        Ok((selected, start))
    }

    /// Rejects dead letters of a consumer in claim mode without its store: their messages would be duplicates.
    async fn check_mode(&self, selected: &[Listed]) -> Result<(), CliError> {
        if self.records.is_some() || self.force {
            return Ok(());
        }
        let ids: Vec<_> = selected.iter().map(|(_, id)| *id).collect();
        for ids in ids.chunks(PAGE as usize) {
            // One that is gone since is not found again.
            while let Some(found) =
                self.dead_letters.first_not_in_inbox(ids).await.map_err(unavailable)?
            {
                if let Some(found) = self.get(&found).await? {
                    return Err(without_store(&found));
                }
            }
        }
        Ok(())
    }

    /// Redrives dead letters in their order, and then those with their order keys that were stored
    /// after the position `start`.
    async fn all(
        &self,
        selected: &[Listed],
        start: DeadLetterPosition,
        results: &mut Results,
    ) -> Result<(), CliError> {
        let is_one = selected.len() == 1;
        let mut keys = OrderKeys::default();
        for (_, id) in selected {
            let Some(dead_letter) = self.get(id).await? else {
                results.note_gone(id);
                continue;
            };
            if dead_letter.consumer != OUTBOX_CONSUMER {
                keys.insert(&dead_letter);
            }
            if results.leaves_out(&dead_letter) {
                continue;
            }
            if let Err(reason) = self.one(&dead_letter, results).await {
                results.note(&dead_letter, reason, is_one)?;
            }
        }
        let mut seen = HashSet::new();
        for _ in 0..PASSES {
            let mut arrived = self.arrived(&keys, start).await?;
            arrived.retain(|(_, id)| seen.insert(*id));
            if arrived.is_empty() {
                return Ok(());
            }
            for (_, id) in &arrived {
                let Some(dead_letter) = self.get(id).await? else {
                    results.note_gone(id);
                    continue;
                };
                if results.leaves_out(&dead_letter) {
                    continue;
                }
                match self.one(&dead_letter, results).await {
                    // One that is behind another, which is not selected, stays.
                    Ok(()) | Err(NotRedriven::Behind) => {}
                    Err(reason) => results.note(&dead_letter, reason, false)?,
                }
            }
        }
        Err(CliError::no(format!(
            "expected no further dead letter of the order keys after {PASSES} passes, found some in each: \
             their messages arrive faster than they are redriven; reduce the rate and run the command again"
        )))
    }

    /// Returns the dead letters of order keys, each of a consumer, that were stored after a position: a
    /// message that its consumer parked before it handled a redriven one is among them.
    async fn arrived(
        &self,
        keys: &OrderKeys,
        after: DeadLetterPosition,
    ) -> Result<Vec<Listed>, CliError> {
        let mut arrived = Vec::new();
        for consumer in keys.consumers() {
            let consumer = Some(consumer.to_owned());
            let query = DeadLetterQuery { consumer, reason: None, after: Some(after), limit: PAGE };
            arrived.extend(self.list(query, |dead_letter| keys.contains(dead_letter)).await?);
        }
        arrived.sort_unstable();
        Ok(arrived)
    }

    /// Returns all dead letters of a query that `is_meant` returns true for.
    async fn list(
        &self,
        mut query: DeadLetterQuery,
        is_meant: impl Fn(&DeadLetterSummary) -> bool,
    ) -> Result<Vec<Listed>, CliError> {
        // All of them first: consumers remove dead letters while others are redriven.
        let mut all = Vec::new();
        loop {
            let page = self.dead_letters.list(&query).await.map_err(unavailable)?;
            let Some(last) = page.last() else { return Ok(all) };
            query.after = Some(last.position());
            let meant = page.iter().filter(|dead_letter| is_meant(dead_letter));
            all.extend(meant.map(|dead_letter| (dead_letter.position(), dead_letter.id)));
        }
    }

    async fn get(&self, id: &[u8; 32]) -> Result<Option<DeadLetterSummary>, CliError> {
        self.dead_letters.get(id).await.map_err(unavailable)
    }

    /// Redrives a dead letter.
    async fn one(
        &self,
        dead_letter: &DeadLetterSummary,
        results: &mut Results,
    ) -> Result<(), NotRedriven> {
        let hex = render::hex(&dead_letter.id);
        if dead_letter.consumer == OUTBOX_CONSUMER {
            self.begin(dead_letter).await?;
            let moved = self.dead_letters.redrive_to_outbox(&dead_letter.id).await;
            if !moved.map_err(|error| not_moved(error, &hex[..12]))? {
                return Err(NotRedriven::Gone);
            }
            print(&format!("{} moved back to the outbox\n", &hex[..12]));
            results.moved += 1;
            return Ok(());
        }
        if let Some(key) = &dead_letter.order_key {
            let (consumer, id) = (&*dead_letter.consumer, &dead_letter.id);
            let query = OrderKeyQuery { consumer, key, dead_letter: id, is_redriven: true };
            let state = self.dead_letters.order_key(query).await;
            if state.map_err(|error| unavailable(Box::new(error)))? == OrderKeyState::Blocked {
                // The key of one that is gone is blocked by those behind it.
                return Err(match self.get(id).await? {
                    Some(_) => NotRedriven::Behind,
                    None => NotRedriven::Gone,
                });
            }
        }
        let Some(sink) = &self.sink else {
            let error = CliError::usage(
                "--to: expected the broker of the consumer, found none: add --to nats://HOST, \
                 amqp://HOST or kafka://HOST",
            );
            return Err(error.into());
        };
        self.check_id(dead_letter, &hex)?;
        let released = self.publish(sink, dead_letter, &hex).await?;
        results.note_published(released == Released::Parked);
        print(&format!("{} published{}\n", &hex[..12], released.text()));
        if dead_letter.order_key.is_some() && !self.is_file {
            let waited = self.wait(dead_letter, &hex).await;
            results.note_wait(&waited);
            if matches!(waited, Err(NotRedriven::Unhandled(_))) {
                self.find_late(results).await?;
            }
            waited?;
        }
        Ok(())
    }

    /// Rejects a message that has no id of its own.
    fn check_id(&self, dead_letter: &DeadLetterSummary, hex: &str) -> Result<(), CliError> {
        if dead_letter.message_id.is_none() && !self.new_id {
            return Err(CliError::no(format!(
                "{}: expected a message with an id, found none: add --new-id to redrive it under a new one, or publish \
                 it with an id and drop the dead letter",
                &hex[..12]
            )));
        }
        if dead_letter.reason == DeadLetterReason::Mismatch.as_str() {
            return Err(CliError::no(format!(
                "{}: expected a message with an id of its own, found that of another message, which \
                 would be handled again: publish it under another id and drop the dead letter",
                &hex[..12]
            )));
        }
        Ok(())
    }

    /// Releases the record of a message, and publishes it.
    async fn publish(
        &self,
        sink: &Arc<dyn MessageSink>,
        dead_letter: &DeadLetterSummary,
        hex: &str,
    ) -> Result<Released, NotRedriven> {
        let contents = self.dead_letters.contents(&dead_letter.id).await.map_err(unavailable)?;
        let contents = contents.ok_or(NotRedriven::Gone)?;
        let id = match &dead_letter.message_id {
            Some(id) => MessageId::new(id).map_err(CliError::no)?,
            None => {
                let (consumer, letter) = (&*dead_letter.consumer, &dead_letter.id);
                let id = DeadLetter::redriven_id(consumer, letter, &contents.payload);
                // Before the message is published: its consumer finds the dead letter by this id.
                self.dead_letters.set_message_id(letter, &id).await.map_err(unavailable)?;
                id
            }
        };
        let number = self.begin(dead_letter).await?;
        let released = self.release(&dead_letter.consumer, &id, &hex[..12]).await?;
        let destination = super::redrive_destination(&dead_letter.origin);
        let mut message = OutgoingMessage::new(destination, id, contents.payload);
        message.broker_id = Some(format!("{} redrive {} {number}", message.id, &hex[..12]));
        message.key.clone_from(&dead_letter.order_key);
        message.native = contents.native;
        message.headers = contents.headers;
        let header = DeadLetter::REDRIVE_HEADER;
        message.headers.retain(|(name, _)| !name.eq_ignore_ascii_case(header));
        message.headers.push((header.to_owned(), hex.to_owned().into()));
        sink.publish(&message).await.map_err(|error| {
            let text = format!("{}: {error}", &hex[..12]);
            match error {
                PublishError::Rejected(_) => NotRedriven::Failed(CliError::no(text)),
                // Others may be acknowledged, such as those for another topic.
                _ => NotRedriven::Unacknowledged(CliError::unavailable(text)),
            }
        })?;
        Ok(released)
    }

    async fn begin(&self, dead_letter: &DeadLetterSummary) -> Result<u64, NotRedriven> {
        let begun = self.dead_letters.begin_redrive(&dead_letter.id, &user(), &self.reason).await;
        begun.map_err(unavailable)?.ok_or(NotRedriven::Gone)
    }

    /// Releases the record of the message, unless it says that the message was handled.
    async fn release(
        &self,
        consumer: &str,
        id: &MessageId,
        name: &str,
    ) -> Result<Released, CliError> {
        let Some(opened) = &self.records else { return Ok(Released::NoStore) };
        let (namespace, consumer) = Namespace::of_stored_consumer(consumer);
        let store = Arc::clone(&opened.store) as Arc<dyn Store>;
        let engine = Idempotency::builder(store).namespace(namespace.as_str());
        let engine = engine.store_timeout(TIMEOUT).build().map_err(CliError::unavailable)?;
        let id = engine.operation_id(&Inbox::scope(consumer), &id.to_key());
        let seen = opened.store.load(&id).await.map_err(CliError::unavailable)?;
        let Some(stored) = seen.stored else { return Ok(Released::NoRecord) };
        let forget = match &stored.record.state {
            RecordState::Done(outcome) if Inbox::is_parked(outcome) => true,
            RecordState::Done(_) => return Ok(Released::Handled),
            RecordState::Released | RecordState::InFlight | RecordState::Unknown { .. } => false,
        };
        let may_execute = Inbox::may_execute_until(&stored).filter(|until| seen.now < *until);
        // Of one that a consumer handles just now, nothing is forced.
        let is_over = stored.lease_until <= seen.now;
        match may_execute {
            Some(until) if is_over && !self.force => return Err(early(name, until, seen.now)),
            _ => {}
        }
        let resolve = Resolve {
            expected: stored.fence,
            force: self.force && is_over,
            forget,
            resolution: DefiniteVerdict::DidNotHappen,
            note: None,
            // With the attempts of before, it would be parked again without one.
            restart: true,
        };
        let resolved = engine.resolve(id, resolve).await;
        engine.drain().await;
        let resolved = resolved.map_err(CliError::unavailable)?;
        match resolved.result {
            WriteResult::Recorded(_) | WriteResult::NotFound => Ok(Released::Parked),
            WriteResult::MayExecute { until } => Err(early(name, until, resolved.was.now)),
            _ => Err(CliError::no(
                "--store: expected the record of a parked message, found one that is in flight or was \
                 changed meanwhile: run the command again",
            )),
        }
    }

    /// Waits until the consumer has removed the dead letter, before the next one of its order key.
    async fn wait(&self, dead_letter: &DeadLetterSummary, hex: &str) -> Result<(), NotRedriven> {
        let deadline = Instant::now() + self.wait;
        let mut pause = FIRST_POLL;
        while Instant::now() < deadline {
            match self.get(&dead_letter.id).await? {
                None => return Ok(()),
                Some(now) if now.last_at != dead_letter.last_at => {
                    return Err(NotRedriven::Failed(CliError::no(format!(
                        "{}: expected the message to be handled, found it parked again ({}): fix the \
                         cause and run the command again; later messages of its order key wait",
                        &hex[..12],
                        now.error
                    ))));
                }
                Some(_) => {
                    sleep(pause).await;
                    pause = LONGEST_POLL.min(pause * 2);
                }
            }
        }
        Err(NotRedriven::Unhandled(CliError::no(format!(
            "{}: expected its consumer to handle the message within --wait, found it unhandled: run the \
             command again; later messages of its order key wait",
            &hex[..12]
        ))))
    }

    /// Notes that the consumer runs if a message that nothing handled within its wait has been handled, or parked again, since: then
    /// its attempts take longer than `--wait`.
    async fn find_late(&self, results: &mut Results) -> Result<(), CliError> {
        for (id, last_at) in results.unhandled() {
            if self.get(id).await?.is_none_or(|now| now.last_at != *last_at) {
                results.note_running();
                break;
            }
        }
        Ok(())
    }
}

/// Returns the error of a dead letter that was not moved back to the outbox.
fn not_moved(error: ConnectCause, name: &str) -> CliError {
    let rejected = error.downcast_ref::<StatementError>();
    if !rejected.is_some_and(|rejected| rejected.is(UNIQUE_VIOLATION)) {
        return unavailable(error);
    }
    // Its hint states what to do.
    CliError::no(format!("{name}: {}", with_causes(&*error)))
}
