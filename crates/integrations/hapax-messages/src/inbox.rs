//! Inboxes: each message of a consumer is handled once.

mod process;

use std::fmt;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use hapax_core::store::BoxFuture;
use hapax_core::transaction::TransactionBackend;
use hapax_core::{
    Backoff, Clock, Entropy, FencingToken, HookTiming, Idempotency, InFlight, OnUnknown, Outcome,
    Policy, PolicyError, Scope, SystemClock, SystemEntropy, Terms, Verdict,
};

use crate::blocked::BlockedKeys;
use crate::dead_letter::DeadLetters;
use crate::id::{IdRules, MessageId};
use crate::message::Message;

pub(crate) use self::process::{Disposition, Finish, HoldCause, Progress};

/// Number of attempts to handle a message, and the pauses between them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Attempts {
    /// Executions after which a message that was not handled becomes a dead letter. Default 5.
    pub max: NonZeroU32,
    /// Bound of the pause after the first attempt, which doubles after each. Default 1 s.
    pub first_pause: Duration,
    /// Bound of all pauses. Default 5 min; at most 7 d.
    pub longest_pause: Duration,
}

impl Attempts {
    /// The longest pause that can be configured. Attempts are counted in the store for twice as long.
    pub const MAX_PAUSE: Duration = Duration::from_secs(7 * 24 * 60 * 60);

    pub(crate) fn are_valid(&self) -> bool {
        let range = Duration::from_millis(1)..=Self::MAX_PAUSE;
        self.first_pause <= self.longest_pause && range.contains(&self.longest_pause)
    }

    pub(crate) fn backoff(&self) -> Backoff {
        Backoff::new(self.first_pause, self.longest_pause)
    }
}

impl Default for Attempts {
    fn default() -> Self {
        Self {
            max: NonZeroU32::MIN.saturating_add(4),
            first_pause: Duration::from_secs(1),
            longest_pause: Duration::from_secs(5 * 60),
        }
    }
}

/// Action for a message without a record that is older than the retention of ids: it may have
/// been handled before.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum TooOld {
    /// The message becomes a dead letter.
    #[default]
    Reject,
    /// The message is handled, possibly a second time.
    Process,
}

/// Question about a message whose handler may have succeeded.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct MessageReconcileCall {
    /// Id of the message.
    pub id: MessageId,
    /// The message.
    pub message: Message,
    /// Fencing token of the execution in question.
    pub fence: FencingToken,
    /// Number of that execution, from 1.
    pub attempt: u32,
}

type Hook = dyn Fn(MessageReconcileCall) -> BoxFuture<'static, Verdict<()>> + Send + Sync;

/// Rule for a message whose handler may have succeeded: its process died, or it returned
/// [`MessageFailure::Unknown`](crate::MessageFailure::Unknown).
#[derive(Clone)]
pub(crate) enum UnknownRule {
    Reexecute,
    Block,
    Reconcile(HookTiming, Arc<Hook>),
}

impl fmt::Debug for UnknownRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Reexecute => f.write_str("Reexecute"),
            Self::Block => f.write_str("Block"),
            Self::Reconcile(timing, _) => write!(f, "Reconcile({timing:?})"),
        }
    }
}

/// Errors of the configuration of an inbox.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InboxError {
    /// The name is empty or longer than 255 bytes.
    #[error("expected a consumer name of 1 to 255 bytes, found {length}: it names the records")]
    Consumer {
        /// Length of the name, in bytes.
        length: usize,
    },
    /// There is no rule for unknown outcomes.
    #[error(
        "expected `reexecute`, `block` or `reconcile_with`, found none of them: decide what happens \
         to a message whose handler may have succeeded"
    )]
    NoUnknownRule,
    /// There is no store of dead letters.
    #[error("expected a place for dead letters, found none: call `dead_letters`")]
    NoDeadLetters,
    /// The inbox is ordered, and its place for dead letters cannot list order keys.
    #[error(
        "expected dead letters that are listed by order key, found others: an ordered inbox parks the \
         messages behind one"
    )]
    OrderKeys,
    /// There is no rule for ids.
    #[error("expected at least one rule for ids, found none")]
    NoIdRules,
    /// The pauses are out of range.
    #[error("expected a first pause of at most the longest, and a longest pause of 1 ms to 7 d")]
    Pauses,
    /// Lease, retention or hook are invalid.
    #[error(transparent)]
    Policy(#[from] PolicyError),
}

/// The inbox of a consumer.
///
/// A message's id is claimed when a handler is free for it, and its record says that it was handled
/// before the broker receives the acknowledgement. See [the crate](crate) for the modes.
#[derive(Clone, Debug)]
pub struct Inbox {
    pub(crate) shared: Arc<InboxState>,
}

#[derive(Debug)]
pub(crate) struct InboxState {
    pub(crate) consumer: String,
    scope: Scope,
    engine: Idempotency,
    policy: Policy,
    rule: UnknownRule,
    ids: IdRules,
    attempts: Attempts,
    too_old: TooOld,
    dead_letters: Arc<dyn DeadLetters>,
    transactions: Option<TransactionBackend>,
    pub(crate) blocked: Option<BlockedKeys>,
    clock: Arc<dyn Clock>,
    entropy: Arc<dyn Entropy>,
}

impl Inbox {
    /// Begins the inbox of `consumer`, whose records are in the store of `engine`. The name is part
    /// of the records' scope: two consumers of one message both handle it.
    pub fn builder(consumer: impl Into<String>, engine: Idempotency) -> InboxBuilder {
        InboxBuilder {
            consumer: consumer.into(),
            engine,
            rule: None,
            ids: IdRules::default(),
            lease: Duration::from_secs(30),
            retention: Duration::from_secs(30 * 24 * 60 * 60),
            attempts: Attempts::default(),
            too_old: TooOld::default(),
            dead_letters: None,
            transactions: None,
            is_ordered: false,
            clock: Arc::new(SystemClock),
            entropy: Arc::new(SystemEntropy),
        }
    }

    /// Returns the name of the consumer.
    #[must_use]
    pub fn consumer(&self) -> &str {
        &self.shared.consumer
    }

    /// Returns the scope of the records of a consumer's messages.
    #[must_use]
    pub fn scope(consumer: &str) -> Scope {
        Scope::of([("consumer", consumer)])
    }

    /// Returns whether `outcome` is that of a message that became a dead letter. The record of another
    /// one is not released: its message would be handled again.
    #[must_use]
    pub fn is_parked(outcome: &Outcome) -> bool {
        process::is_parked(outcome)
    }

    /// Returns the time for which the id of a handled message is known.
    #[must_use]
    pub fn retention(&self) -> Duration {
        self.shared.policy.terms.retention
    }
}

/// Builder of an [`Inbox`].
#[derive(Clone, Debug)]
#[must_use]
pub struct InboxBuilder {
    consumer: String,
    engine: Idempotency,
    rule: Option<UnknownRule>,
    ids: IdRules,
    lease: Duration,
    retention: Duration,
    attempts: Attempts,
    too_old: TooOld,
    dead_letters: Option<Arc<dyn DeadLetters>>,
    transactions: Option<TransactionBackend>,
    is_ordered: bool,
    clock: Arc<dyn Clock>,
    entropy: Arc<dyn Entropy>,
}

impl InboxBuilder {
    /// Executes the handler again if it may have succeeded: for handlers whose effects are safe to
    /// repeat, or are rows in the transaction of the record.
    pub fn reexecute(mut self) -> Self {
        self.rule = Some(UnknownRule::Reexecute);
        self
    }

    /// Makes a message whose handler may have succeeded a dead letter, for an operator to decide.
    pub fn block(mut self) -> Self {
        self.rule = Some(UnknownRule::Block);
        self
    }

    /// Calls `hook` about a message whose handler may have succeeded. It is called at the earliest
    /// [`HookTiming::after`] the lapse of the lease, once at a time for each message. While it cannot
    /// say, it is called again after the pauses of [`InboxBuilder::attempts`]; after as many calls as
    /// there are attempts the message becomes a dead letter.
    pub fn reconcile_with<F>(
        mut self,
        timing: HookTiming,
        hook: impl Fn(MessageReconcileCall) -> F + Send + Sync + 'static,
    ) -> Self
    where
        F: Future<Output = Verdict<()>> + Send + 'static,
    {
        self.rule =
            Some(UnknownRule::Reconcile(timing, Arc::new(move |call| Box::pin(hook(call)))));
        self
    }

    /// Sets the rules for ids. Default: the header `message-id`, then CloudEvents.
    pub fn ids(mut self, rules: IdRules) -> Self {
        self.ids = rules;
        self
    }

    /// Sets the lease: the time for which a process that died blocks its messages. Default 30 s.
    pub const fn lease(mut self, lease: Duration) -> Self {
        self.lease = lease;
        self
    }

    /// Sets the time for which ids are known after their message was handled. It must be longer
    /// than the broker, or a producer, may send a message again. Default 30 d.
    pub const fn retention(mut self, retention: Duration) -> Self {
        self.retention = retention;
        self
    }

    /// Sets the number of attempts and the pauses between them.
    pub const fn attempts(mut self, attempts: Attempts) -> Self {
        self.attempts = attempts;
        self
    }

    /// Sets the handling of messages without a record that are older than the retention.
    pub const fn too_old(mut self, too_old: TooOld) -> Self {
        self.too_old = too_old;
        self
    }

    /// Sets the store of dead letters. Required.
    pub fn dead_letters(mut self, place: Arc<dyn DeadLetters>) -> Self {
        self.dead_letters = Some(place);
        self
    }

    /// Commits the rows of the handler together with the record of the message:
    /// [`HandledMessage::transaction`](crate::HandledMessage::transaction).
    pub fn transactions(mut self, backend: TransactionBackend) -> Self {
        self.transactions = Some(backend);
        self
    }

    /// Handles messages with the same order key one after the other, in the order in which they are
    /// received. A dead letter parks the messages behind it that have its key.
    pub const fn ordered(mut self) -> Self {
        self.is_ordered = true;
        self
    }

    /// Sets the clock that the age of messages is measured with. Default: the system's.
    pub fn clock(mut self, clock: Arc<dyn Clock>) -> Self {
        self.clock = clock;
        self
    }

    /// Sets the source of randomness for the jitter of pauses. Default: the operating system.
    pub fn entropy(mut self, entropy: Arc<dyn Entropy>) -> Self {
        self.entropy = entropy;
        self
    }

    /// Builds the inbox.
    ///
    /// # Errors
    /// [`InboxError`] names the setting.
    pub fn build(self) -> Result<Inbox, InboxError> {
        let length = self.consumer.len();
        if !(1..=255).contains(&length) {
            return Err(InboxError::Consumer { length });
        }
        let rule = self.rule.ok_or(InboxError::NoUnknownRule)?;
        let dead_letters = self.dead_letters.ok_or(InboxError::NoDeadLetters)?;
        if self.is_ordered && !dead_letters.lists_order_keys() {
            return Err(InboxError::OrderKeys);
        }
        if self.ids.is_empty() {
            return Err(InboxError::NoIdRules);
        }
        if !self.attempts.are_valid() {
            return Err(InboxError::Pauses);
        }
        let (on_unknown, hook) = match &rule {
            UnknownRule::Reexecute => (OnUnknown::Reexecute, None),
            UnknownRule::Block => (OnUnknown::Block, None),
            UnknownRule::Reconcile(timing, _) => (OnUnknown::Reconcile, Some(*timing)),
        };
        let terms = Terms { lease: self.lease, retention: self.retention, on_unknown };
        let policy = Policy {
            terms,
            in_flight: InFlight::Reject,
            hook,
            // A message is claimed again after a pause: longer than the longest, by the time in
            // which it waits for a handler.
            keep_released: self.attempts.longest_pause.saturating_mul(2).saturating_add(self.lease),
        };
        policy.check()?;
        let blocked = self.is_ordered.then(|| BlockedKeys::new(Arc::clone(&dead_letters)));
        let shared = Arc::new(InboxState {
            scope: Inbox::scope(&self.consumer),
            consumer: self.consumer,
            engine: self.engine,
            policy,
            rule,
            ids: self.ids,
            attempts: self.attempts,
            too_old: self.too_old,
            dead_letters,
            transactions: self.transactions,
            blocked,
            clock: self.clock,
            entropy: self.entropy,
        });
        Ok(Inbox { shared })
    }
}
