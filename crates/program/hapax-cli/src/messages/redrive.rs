//! `hapax messages redrive`.
//!
//! Each letter in three steps, each of which may be repeated: its redrive begins, which is stored and
//! has the direct inbox forget the message; its record in a store is released; its message is
//! published under an id that is new to the broker. The consumer removes the letter.
//!
//! Only a message that is parked is forgotten or released. The consumer may have handled it already,
//! and may have ended before it removed the letter: then the copy is a duplicate.

use std::sync::Arc;
use std::time::Duration;

use hapax_core::{Idempotency, RecordState, Resolution, Resolve, Store, WriteResult};
use hapax_gateway::{OpenStore, StoreOpener};
use hapax_messages::{
    DeadLetter, DeadLetterReason, Inbox, MessageId, MessageSink, OutgoingMessage,
};
use hapax_nats::NatsSink;
use hapax_postgres_messages::{LetterQuery, LetterView, OUTBOX_CONSUMER, PgDeadLetters};
use tokio::time::{Instant, sleep};

use super::args::{HiddenUrl, RedriveArgs};
use super::{find, gone, letters, print, render, unavailable};
use crate::exit::{CliError, of};
use crate::keys::{TIMEOUT, user};

/// Letters of a page.
const PAGE: u32 = 1000;

/// Time between two looks at a letter that the consumer is to remove.
const LOOK: Duration = Duration::from_millis(200);

struct Redrive {
    letters: PgDeadLetters,
    sink: Option<Arc<dyn MessageSink>>,
    records: Option<(Idempotency, OpenStore)>,
    wait: Duration,
    reason: String,
}

pub(super) async fn run(args: RedriveArgs) -> Result<(), CliError> {
    let redrive = Redrive {
        letters: letters(&args.at)?,
        sink: match &args.to {
            Some(url) => Some(sink(url).await?),
            None => None,
        },
        records: match args.store {
            Some(url) => {
                let url = url.read().map_err(of("--store"))?;
                let opener = StoreOpener {
                    secret_file: args.secret_file,
                    timeout: TIMEOUT,
                    make: false,
                    ..StoreOpener::new(url)
                };
                let opened = opener.open().await.map_err(CliError::unavailable)?;
                let store = Arc::clone(&opened.store) as Arc<dyn Store>;
                let engine = Idempotency::builder(store).store_timeout(TIMEOUT).build();
                Some((engine.map_err(CliError::unavailable)?, opened))
            }
            None => None,
        },
        wait: args.wait,
        reason: args.reason,
    };
    let mut named = Vec::new();
    for prefix in &args.letters {
        named.push(find(&redrive.letters, prefix).await?);
    }
    if let Some(consumer) = &args.consumer {
        // All of them first: consumers remove letters while others are redriven.
        let mut query = LetterQuery {
            consumer: Some(consumer.clone()),
            reason: args.parked_as.map(Into::into),
            after: None,
            limit: PAGE,
        };
        loop {
            let page = redrive.letters.list(&query).await.map_err(unavailable)?;
            let Some(last) = page.last() else { break };
            query.after = Some(last.place());
            named.extend(page);
        }
    }
    let count = named.len();
    for letter in named {
        redrive.one(&letter).await?;
    }
    if let Some((engine, opened)) = redrive.records {
        engine.drain().await;
        opened.close().await;
    }
    print(&format!("{count} redriven\n"));
    Ok(())
}

/// Connects to the broker of a URL.
pub(crate) async fn sink(url: &HiddenUrl) -> Result<Arc<dyn MessageSink>, CliError> {
    if !["nats://", "tls://"].iter().any(|scheme| url.0.starts_with(scheme)) {
        return Err(CliError::usage("--to: expected nats://HOST or tls://HOST, found another URL"));
    }
    let sink = NatsSink::connect(&url.0).await;
    let sink = sink.map_err(|error| CliError::unavailable(format!("--to: {error}")))?;
    Ok(Arc::new(sink))
}

impl Redrive {
    async fn one(&self, letter: &LetterView) -> Result<(), CliError> {
        let hex = render::hex(&letter.id);
        if letter.consumer == OUTBOX_CONSUMER {
            self.begin(letter).await?;
            let returned = self.letters.return_to_outbox(&letter.id).await;
            if !returned.map_err(unavailable)? {
                return Err(gone(&hex));
            }
            print(&format!("{} returned to the outbox\n", &hex[..12]));
            return Ok(());
        }
        let Some(sink) = &self.sink else {
            return Err(CliError::usage("--to is required for the letters of consumers"));
        };
        let Some(id) = &letter.message_id else {
            return Err(CliError::no(format!(
                "{}: expected a message with an id, found none: publish it with an id and drop the \
                 letter",
                &hex[..12]
            )));
        };
        if letter.reason == DeadLetterReason::Conflict.as_str() {
            return Err(CliError::no(format!(
                "{}: expected a message with an id of its own, found that of another message, which \
                 would be handled again: publish it under another id and drop the letter",
                &hex[..12]
            )));
        }
        let id = MessageId::new(id).map_err(CliError::no)?;
        let contents = self.letters.contents(&letter.id).await.map_err(unavailable)?;
        let contents = contents.ok_or_else(|| gone(&hex))?;
        let number = self.begin(letter).await?;
        self.release(&letter.consumer, &id).await?;
        let subject = letter.origin.strip_prefix("nats://").and_then(|it| it.split_once('/'));
        let destination = subject.map_or(letter.origin.as_str(), |(_, subject)| subject);
        let mut message = OutgoingMessage::new(destination, id, contents.payload);
        message.broker_id = Some(format!("{} redrive {} {number}", message.id, &hex[..12]));
        message.key.clone_from(&letter.order_key);
        message.headers = contents.headers;
        let header = DeadLetter::REDRIVE_HEADER;
        message.headers.retain(|(name, _)| !name.eq_ignore_ascii_case(header));
        message.headers.push((header.to_owned(), hex.clone().into()));
        sink.publish(&message)
            .await
            .map_err(|error| CliError::unavailable(format!("{}: {error}", &hex[..12])))?;
        print(&format!("{} published\n", &hex[..12]));
        if letter.order_key.is_some() {
            self.wait(letter, &hex).await?;
        }
        Ok(())
    }

    async fn begin(&self, letter: &LetterView) -> Result<u64, CliError> {
        let begun = self.letters.begin_redrive(&letter.id, &user(), &self.reason).await;
        begun.map_err(unavailable)?.ok_or_else(|| gone(&render::hex(&letter.id)))
    }

    /// Releases the record of the message, unless it says that the message was handled.
    async fn release(&self, consumer: &str, id: &MessageId) -> Result<(), CliError> {
        let Some((engine, opened)) = &self.records else { return Ok(()) };
        let id = engine.operation_id(&Inbox::scope(consumer), &id.to_key());
        let seen = opened.store.load(&id).await.map_err(CliError::unavailable)?;
        let Some(stored) = seen.stored else { return Ok(()) };
        let forget = match &stored.record.state {
            RecordState::Done(outcome) if Inbox::is_parked(outcome) => true,
            RecordState::Done(_) => return Ok(()),
            RecordState::Released | RecordState::InFlight | RecordState::Unknown { .. } => false,
        };
        let resolve = Resolve {
            expected: stored.fence,
            force: false,
            forget,
            resolution: Resolution::DidNotHappen,
            note: None,
        };
        let resolved = engine.resolve(id, resolve).await.map_err(CliError::unavailable)?;
        match resolved.result {
            WriteResult::Recorded(_) | WriteResult::NotFound => Ok(()),
            _ => Err(CliError::no(
                "the message is being handled, or its record changed: run the command again",
            )),
        }
    }

    /// Waits until the consumer has removed the letter, before the next one of its order key.
    async fn wait(&self, letter: &LetterView, hex: &str) -> Result<(), CliError> {
        let deadline = Instant::now() + self.wait;
        while Instant::now() < deadline {
            match self.letters.find(hex).await.map_err(unavailable)?.as_slice() {
                [] => return Ok(()),
                [now, ..] if now.last_at != letter.last_at => {
                    return Err(CliError::no(format!(
                        "{}: the message was parked again ({}): the later ones of its order key stay",
                        &hex[..12],
                        now.error
                    )));
                }
                _ => sleep(LOOK).await,
            }
        }
        Err(CliError::no(format!(
            "{}: its consumer did not handle the message within --wait: the later ones of its order \
             key stay; run the command again",
            &hex[..12]
        )))
    }
}
