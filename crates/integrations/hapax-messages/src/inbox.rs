//! Inboxes: each message of a consumer is handled once.

mod disposition;
mod ended;
mod first_ids;
mod process;
mod progress;
mod record;

use std::fmt;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use hapax_core::store::{BoxFuture, StoredRecord};
use hapax_core::transaction::TransactionBackend;
use hapax_core::{
    Backoff, Clock, Entropy, FencingToken, HookTiming, Idempotency, InFlight, Namespace, OnUnknown,
    Outcome, Policy, PolicyError, Scope, SystemClock, SystemEntropy, Terms, Timestamp, Verdict,
};

use crate::dead_letter::{CaughtPanics, DeadLetterStore};
use crate::failures::FailureLog;
use crate::id::{IdRules, MessageId};
use crate::message::Message;

pub(crate) use self::disposition::{Disposition, Finish, HoldCause};
pub(crate) use self::first_ids::{FirstIds, NO_ID_PAUSE};
pub(crate) use self::progress::Progress;

/// Number of attempts to handle a message, and the pauses between them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Attempts {
    /// Executions after which a message that was not handled becomes a dead letter. Default 60: with
    /// the default pauses they take two hours on average, and no outage of an hour makes dead
    /// letters.
    pub max: NonZeroU32,
    /// Consecutive executions in which the process ended, after which a message becomes a dead letter:
    /// it may end each process that executes it. An execution that fails, or whose outcome is unknown,
    /// does not count, and the next one is the first again. If the handler saves checkpoints, failed
    /// executions count too, if the process ended in the last one. Default 5; at most `max` counts.
    pub max_crashes: NonZeroU32,
    /// Bound of the pause after the first attempt; it doubles after each further one, and a pause
    /// is random below its bound (exponential backoff with full jitter). Default 1 s.
    pub first_pause: Duration,
    /// Largest bound of a pause. Default 5 min; at most 7 d.
    pub longest_pause: Duration,
}

impl Attempts {
    /// Largest [`longest_pause`](Self::longest_pause) that can be configured. In claim mode the store
    /// counts attempts for the retention, and for at least twice `longest_pause`.
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
            // The 59 pauses take 2 h 9 min on average, with a standard deviation of 10 min.
            max: NonZeroU32::MIN.saturating_add(59),
            max_crashes: NonZeroU32::MIN.saturating_add(4),
            first_pause: Duration::from_secs(1),
            longest_pause: Duration::from_secs(5 * 60),
        }
    }
}

/// Action for a message without a record that is older than the retention of ids: it may have
/// been handled before.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum OnTooOld {
    /// The message becomes a dead letter.
    #[default]
    Park,
    /// The message is handled, possibly a second time.
    Handle,
}

/// Arguments of a reconciliation hook: a message whose handler may have succeeded.
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
    /// The name is empty, or longer than 255 bytes with the namespace.
    #[error(
        "expected a consumer name of 1 to 255 bytes, found {length}: choose another one; it is \
         part of the scope of the records"
    )]
    Consumer {
        /// Length of the name as [`Namespace::stored_consumer`] returns it, in bytes.
        length: usize,
    },
    /// The name is one that a consumer of a namespace has in the dead letters.
    #[error(
        "expected a consumer name that does not begin with `namespace:` and the name of a namespace, found \
         {name}: choose another one, or build the engine with that namespace"
    )]
    NamespacedConsumer {
        /// The name.
        name: String,
    },
    /// There is no rule for unknown outcomes.
    #[error(
        "expected `reexecute`, `block` or `reconcile_with`, found none of them: decide what happens \
         to a message whose handler may have succeeded"
    )]
    NoUnknownRule,
    /// There is no store of dead letters.
    #[error("expected a store of dead letters, found none: call `dead_letters`")]
    NoDeadLetters,
    /// The inbox is ordered, and its store of dead letters does not find them by order key.
    #[error(
        "expected a store of dead letters that finds them by order key, found one that does not: use \
         another one, or an inbox that is not `ordered`"
    )]
    OrderKeys,
    /// There is no rule for ids.
    #[error(
        "expected at least one rule for ids, found none: pass one to `ids`, or keep the default"
    )]
    NoIdRules,
    /// The pauses are out of range.
    #[error(
        "expected `first_pause` <= `longest_pause`, and `longest_pause` from 1 ms to 7 days, \
         found {first:?} and {longest:?}: change `attempts`"
    )]
    Pauses {
        /// The first pause.
        first: Duration,
        /// The longest pause.
        longest: Duration,
    },
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
    on_too_old: OnTooOld,
    dead_letters: Arc<dyn DeadLetterStore>,
    transactions: Option<TransactionBackend>,
    pub(crate) is_ordered: bool,
    pub(crate) first_ids: Option<FirstIds>,
    failures: FailureLog,
    clock: Arc<dyn Clock>,
    entropy: Arc<dyn Entropy>,
}

impl InboxState {
    pub(crate) const fn attempts(&self) -> Attempts {
        self.attempts
    }
}

impl Inbox {
    /// Returns a builder of the inbox of `consumer`, whose records are in the store of `engine`. All
    /// processes of the consumer share the store: those that have a file each handle a message once
    /// each, and nothing detects that. The name is part of the records' scope: two consumers of one
    /// message both handle it.
    pub fn builder(consumer: impl Into<String>, engine: Idempotency) -> InboxBuilder {
        InboxBuilder {
            consumer: consumer.into(),
            engine,
            rule: None,
            ids: IdRules::default(),
            lease: Duration::from_secs(30),
            settle: None,
            retention: Duration::from_secs(30 * 24 * 60 * 60),
            attempts: Attempts::default(),
            on_too_old: OnTooOld::default(),
            dead_letters: None,
            transactions: None,
            is_ordered: false,
            expects_ids: false,
            clock: Arc::new(SystemClock),
            entropy: Arc::new(SystemEntropy),
        }
    }

    /// Returns the name of the consumer, as dead letters have it: within a namespace of the engine that is
    /// [`Namespace::stored_consumer`].
    #[must_use]
    pub fn consumer(&self) -> &str {
        &self.shared.consumer
    }

    /// Returns the scope of the records of a consumer's messages, by its name within the namespace.
    #[must_use]
    pub fn scope(consumer: &str) -> Scope {
        Scope::of([("consumer", consumer)])
    }

    /// Returns whether `outcome` is that of a message that became a dead letter. The record of
    /// another one is not released: its message would be handled again.
    #[must_use]
    pub fn is_parked(outcome: &Outcome) -> bool {
        record::is_parked(outcome)
    }

    /// Returns the time until which the handler of a message without a result, or the request that it sent, may
    /// still execute: see [`may_execute_until`](hapax_core::may_execute_until). That holds also for one that is
    /// parked because its attempts failed. `None` if none may.
    #[must_use]
    pub fn may_execute_until(stored: &StoredRecord) -> Option<Timestamp> {
        record::may_execute_until(stored)
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
    settle: Option<Duration>,
    retention: Duration,
    attempts: Attempts,
    on_too_old: OnTooOld,
    dead_letters: Option<Arc<dyn DeadLetterStore>>,
    transactions: Option<TransactionBackend>,
    is_ordered: bool,
    expects_ids: bool,
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

    /// Parks a message whose handler may have succeeded, until an operator decides.
    pub fn block(mut self) -> Self {
        self.rule = Some(UnknownRule::Block);
        self
    }

    /// Calls `hook` to reconcile a message whose handler may have succeeded: not before
    /// [`HookTiming::after`] has passed since the lapse of the lease, and one call at a time for
    /// each message. While it cannot
    /// say, it is called again after the pauses of [`InboxBuilder::attempts`]; after as many calls
    /// as there are attempts the message becomes a dead letter.
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

    /// Sets the lease: the time for which a process that died blocks its messages. Default 30 s. It
    /// is not renewed within a [transaction](Self::transactions): set it to at least the longest time of one.
    pub const fn lease(mut self, lease: Duration) -> Self {
        self.lease = lease;
        self
    }

    /// Sets the time for which a request that the handler sends to another system may still execute there
    /// after the handler has ended, such as its timeout; see [`Policy::settle`]. Default: it sends none.
    pub const fn settle(mut self, settle: Duration) -> Self {
        self.settle = Some(settle);
        self
    }

    /// Sets the time for which ids are known after their message was handled. It must be longer
    /// than the time for which the broker or a producer may send a message again. Default 30 d.
    pub const fn retention(mut self, retention: Duration) -> Self {
        self.retention = retention;
        self
    }

    /// Sets the number of attempts and the pauses between them.
    pub const fn attempts(mut self, attempts: Attempts) -> Self {
        self.attempts = attempts;
        self
    }

    /// Sets the action for messages without a record that are older than the retention.
    pub const fn on_too_old(mut self, on_too_old: OnTooOld) -> Self {
        self.on_too_old = on_too_old;
        self
    }

    /// Sets the store of dead letters. Required.
    pub fn dead_letters(mut self, store: Arc<dyn DeadLetterStore>) -> Self {
        self.dead_letters = Some(store);
        self
    }

    /// Commits the rows of the handler together with the record of the message:
    /// [`MessageExecution::transaction`](crate::MessageExecution::transaction).
    pub fn transactions(mut self, backend: TransactionBackend) -> Self {
        self.transactions = Some(backend);
        self
    }

    /// Handles messages with the same order key one after the other, in the order in which they are
    /// received. A dead letter parks the messages behind it that have its key: each message with an
    /// order key costs a query of the dead letters, by index.
    pub const fn ordered(mut self) -> Self {
        self.is_ordered = true;
        self
    }

    /// Sets that the first messages are held, instead of parked, until a rule finds an id in one of them: if none has
    /// an id, the rules are probably wrong.
    /// [`ConsumerMonitor::until_ids_are_missing`](crate::ConsumerMonitor::until_ids_are_missing) returns after ten of
    /// them, which stay held. Fewer are parked 30 s after the first of them, with a warning. After a message with an id
    /// was received, those without one are parked.
    pub const fn expect_ids(mut self) -> Self {
        self.expects_ids = true;
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
        let namespace = self.engine.namespace();
        let consumer = namespace.stored_consumer(&self.consumer).into_owned();
        // With the namespace: so long a name fits into the table of dead letters.
        let length = if self.consumer.is_empty() { 0 } else { consumer.len() };
        if !(1..=255).contains(&length) {
            return Err(InboxError::Consumer { length });
        }
        if Namespace::of_stored_consumer(&consumer).0 != *namespace {
            return Err(InboxError::NamespacedConsumer { name: consumer });
        }
        let rule = self.rule.ok_or(InboxError::NoUnknownRule)?;
        let dead_letters = self.dead_letters.ok_or(InboxError::NoDeadLetters)?;
        let dead_letters: Arc<dyn DeadLetterStore> = Arc::new(CaughtPanics(dead_letters));
        if self.is_ordered && !dead_letters.finds_order_keys() {
            return Err(InboxError::OrderKeys);
        }
        if self.ids.is_empty() {
            return Err(InboxError::NoIdRules);
        }
        if !self.attempts.are_valid() {
            let Attempts { first_pause: first, longest_pause: longest, .. } = self.attempts;
            return Err(InboxError::Pauses { first, longest });
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
            settle: self.settle,
            // Attempts are counted for as long as the id of a handled message is known: a message is
            // claimed again after a pause and a wait for a handler, and after an outage of the broker
            // or of all consumers. If it restarted at attempt 1 each time, a message that always fails
            // would never become a dead letter.
            keep_released: self.retention.max(self.attempts.longest_pause.saturating_mul(2)),
        };
        policy.check()?;
        let shared = Arc::new(InboxState {
            scope: Inbox::scope(&self.consumer),
            consumer,
            engine: self.engine,
            policy,
            rule,
            ids: self.ids,
            attempts: self.attempts,
            on_too_old: self.on_too_old,
            dead_letters,
            transactions: self.transactions,
            is_ordered: self.is_ordered,
            first_ids: self.expects_ids.then(FirstIds::default),
            failures: FailureLog::default(),
            clock: self.clock,
            entropy: self.entropy,
        });
        Ok(Inbox { shared })
    }
}
