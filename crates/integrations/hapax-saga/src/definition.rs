//! Definitions of sagas: steps with their undo, and a flow.

use std::collections::BTreeMap;
use std::error::Error as StdError;
use std::fmt;
use std::future::Future;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hapax_core::schedule::QueueName;
use hapax_core::store::BoxFuture;

use hapax_core::{EntryId, Verdict, value};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::call::{CallContext, StepContext, StepEffect, StepError, UndoError};
use crate::error::DefinitionError;
use crate::flow::{FlowContext, StepChannel, StepHandle, read_result};
use crate::log::{Blob, Log, LogTime, MAX_LOG, StuckReason};
use crate::retry::StepRetry;
use crate::run::{
    FlowEnd, FlowFuture, Kind, Run, RunTerms, StepTerms, StuckCause, TryEnd, UndoFailure,
};

type CallFn = Arc<dyn Fn(CallContext, Bytes) -> BoxFuture<'static, TryEnd> + Send + Sync>;
type PrepareFn =
    Arc<dyn Fn(CallContext, Bytes) -> BoxFuture<'static, Result<Blob, TryEnd>> + Send + Sync>;
type UndoFn = Arc<
    dyn Fn(CallContext, Bytes, Option<Bytes>) -> BoxFuture<'static, Result<(), UndoFailure>>
        + Send
        + Sync,
>;
type ReconcileFn =
    Arc<dyn Fn(CallContext, Bytes) -> BoxFuture<'static, Verdict<Blob>> + Send + Sync>;
type FlowFn = Arc<dyn Fn(Arc<StepChannel>, Bytes) -> FlowFuture + Send + Sync>;

/// Default retention of outcomes.
pub(crate) const RETENTION: Duration = Duration::from_secs(30 * 24 * 60 * 60);

/// The functions of a step.
#[derive(Clone)]
pub(crate) struct Functions {
    pub(crate) call: CallFn,
    pub(crate) prepare: Option<PrepareFn>,
    pub(crate) undo: Option<UndoFn>,
    pub(crate) reconcile: Option<ReconcileFn>,
}

/// A definition without its types.
pub(crate) struct Definition {
    pub(crate) name: &'static str,
    pub(crate) version: u32,
    pub(crate) queue: QueueName,
    /// The queue of rejected starts, which no process polls.
    pub(crate) rejected: QueueName,
    pub(crate) retention: Duration,
    pub(crate) terms: Arc<RunTerms>,
    pub(crate) functions: BTreeMap<&'static str, Functions>,
    pub(crate) flow: FlowFn,
}

impl fmt::Debug for Definition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Definition({} version {})", self.name, self.version)
    }
}

impl Definition {
    /// Creates a run that continues `log`, in attempt number `attempt` of the record.
    pub(crate) fn run(&self, log: Log, attempt: u32, input: Bytes) -> Run {
        Run::new(log, Arc::clone(&self.terms), attempt, |desk| (self.flow)(desk, input))
    }

    /// Returns whether a step writes in the database of the records.
    pub(crate) fn is_within(&self) -> bool {
        self.terms.steps.values().any(|terms| terms.kind == Kind::Within)
    }

    /// Creates the log of a saga that begins.
    pub(crate) fn new_log(&self, entry: EntryId, now: LogTime) -> Log {
        Log::new(self.name, self.version, entry, now)
    }
}

/// A saga: a definition with the types of its input, output and error. Cheap to clone.
#[derive(Debug)]
pub struct Saga<I, O, E> {
    pub(crate) definition: Arc<Definition>,
    types: PhantomData<fn(I) -> Result<O, E>>,
}

impl<I, O, E> Clone for Saga<I, O, E> {
    fn clone(&self) -> Self {
        Self { definition: Arc::clone(&self.definition), types: PhantomData }
    }
}

impl<I: Serialize, O, E> Saga<I, O, E> {
    /// Creates a run without a store, for simulators.
    ///
    /// # Errors
    /// [`value::ValueError`] if the input cannot be serialized.
    #[doc(hidden)]
    pub fn simulate(
        &self,
        log: Option<Log>,
        entry: EntryId,
        attempt: u32,
        now: LogTime,
        input: &I,
    ) -> Result<Run, value::ValueError> {
        let input = value::write(input, hapax_core::schedule::MAX_NOTE)?;
        let log = log.unwrap_or_else(|| self.definition.new_log(entry, now));
        Ok(self.definition.run(log, attempt, input))
    }
}

impl Saga<(), (), ()> {
    /// Begins a definition. `name` and `version` name it in records, queues and metrics: 1 to 100
    /// characters, each a letter, a digit, `-`, `_` or `.`. `state` is what its steps need, such as
    /// clients of other services.
    pub fn define<S>(name: &'static str, version: u32, state: S) -> SagaBuilder<S> {
        SagaBuilder {
            name,
            version,
            state: Arc::new(state),
            retention: RETENTION,
            max_value: 64 << 10,
            max_log: 256 << 10,
            park_after: Duration::from_secs(10),
            steps: BTreeMap::new(),
            functions: BTreeMap::new(),
            error: check_name(name).err(),
        }
    }
}

/// A definition in progress.
#[must_use = "a definition without a flow is no saga"]
pub struct SagaBuilder<S> {
    name: &'static str,
    version: u32,
    state: Arc<S>,
    retention: Duration,
    max_value: usize,
    max_log: usize,
    park_after: Duration,
    steps: BTreeMap<&'static str, StepTerms>,
    functions: BTreeMap<&'static str, Functions>,
    error: Option<DefinitionError>,
}

impl<S> fmt::Debug for SagaBuilder<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SagaBuilder")
            .field("name", &self.name)
            .field("version", &self.version)
            .field("steps", &self.steps)
            .finish_non_exhaustive()
    }
}

impl<S: Send + Sync + 'static> SagaBuilder<S> {
    /// Sets the time for which an outcome is replayed. Default 30 days. It is at least the lifetime of
    /// each step's key, which is the same for the next saga under the saga's key, and at least ten
    /// [leases](crate::SagasBuilder::lease).
    pub fn retention(mut self, retention: Duration) -> Self {
        self.retention = retention;
        self
    }

    /// Sets the limit of the step log, in bytes: a saga whose next step would exceed it is stuck as
    /// `too-large`. Default 256 KiB, at most 1 MiB.
    pub fn max_log(mut self, bytes: usize) -> Self {
        self.max_log = bytes;
        self
    }

    /// Sets the longest pause for which a process keeps a saga; one that waits longer is parked. Default
    /// 10 s.
    pub fn park_after(mut self, pause: Duration) -> Self {
        self.park_after = pause;
        self
    }

    /// Sets the largest argument, prepared value, result or error of a step, in bytes. Default 64 KiB.
    pub fn max_value(mut self, bytes: usize) -> Self {
        self.max_value = bytes;
        self
    }

    /// Defines a step that calls a system which honors the step's key for `lifetime`: a repeated call
    /// under [`StepContext::key`] has no second effect.
    ///
    /// No try begins later after the first one than 0.9 of the lifetime, or the lifetime without the
    /// timeout of a try if that is less. A process that is frozen just before a call makes it up to a
    /// lease later: do not rely on lifetimes of less than ten leases.
    pub fn keyed<A, R, E, F, Fut>(
        &mut self,
        name: &'static str,
        lifetime: Duration,
        step: F,
    ) -> StepBuilder<'_, S, A, R, E>
    where
        A: DeserializeOwned + Send + 'static,
        R: Serialize + DeserializeOwned + Send + 'static,
        E: Serialize + Send + 'static,
        F: Fn(StepContext<S>, A) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<R, StepError<E>>> + Send + 'static,
    {
        self.step(name, Kind::Keyed { lifetime }, step)
    }

    /// Defines a step that calls a system which honors no key. It is called once. If it is then unknown
    /// whether it happened, its reconcile function decides, or an operator.
    pub fn once<A, R, E, F, Fut>(
        &mut self,
        name: &'static str,
        step: F,
    ) -> StepBuilder<'_, S, A, R, E>
    where
        A: DeserializeOwned + Send + 'static,
        R: Serialize + DeserializeOwned + Send + 'static,
        E: Serialize + Send + 'static,
        F: Fn(StepContext<S>, A) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<R, StepError<E>>> + Send + 'static,
    {
        self.step(name, Kind::Once, step)
    }

    /// Defines a step that may be repeated, such as a look-up.
    pub fn again<A, R, E, F, Fut>(
        &mut self,
        name: &'static str,
        step: F,
    ) -> StepBuilder<'_, S, A, R, E>
    where
        A: DeserializeOwned + Send + 'static,
        R: Serialize + DeserializeOwned + Send + 'static,
        E: Serialize + Send + 'static,
        F: Fn(StepContext<S>, A) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<R, StepError<E>>> + Send + 'static,
    {
        self.step(name, Kind::Again, step)
    }

    /// Defines a step that writes rows in the database of the records, in a transaction that it takes
    /// by [`StepContext::tx`]. Its writes and its result in the log commit together. Needs
    /// [`SagasBuilder::transactions`](crate::SagasBuilder::transactions).
    pub fn within<A, R, E, F, Fut>(
        &mut self,
        name: &'static str,
        step: F,
    ) -> StepBuilder<'_, S, A, R, E>
    where
        A: DeserializeOwned + Send + 'static,
        R: Serialize + DeserializeOwned + Send + 'static,
        E: Serialize + Send + 'static,
        F: Fn(StepContext<S>, A) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<R, StepError<E>>> + Send + 'static,
    {
        self.step(name, Kind::Within, step)
    }

    fn step<A, R, E, F, Fut>(
        &mut self,
        name: &'static str,
        kind: Kind,
        step: F,
    ) -> StepBuilder<'_, S, A, R, E>
    where
        A: DeserializeOwned + Send + 'static,
        R: Serialize + DeserializeOwned + Send + 'static,
        E: Serialize + Send + 'static,
        F: Fn(StepContext<S>, A) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<R, StepError<E>>> + Send + 'static,
    {
        let (state, step) = (Arc::clone(&self.state), Arc::new(step));
        let call: CallFn = Arc::new(move |context, argument| {
            let (state, step) = (Arc::clone(&state), Arc::clone(&step));
            Box::pin(async move {
                let argument = match value::read::<A>(&argument) {
                    Ok(argument) => argument,
                    Err(error) => return TryEnd::Faulted(unreadable(name, &error)),
                };
                match step(StepContext { state, context }, argument).await {
                    Ok(result) => {
                        written(name, &result).map_or_else(TryEnd::Lost, TryEnd::Happened)
                    }
                    Err(error) => try_end(name, error),
                }
            })
        });
        let terms = StepTerms {
            kind,
            retry: StepRetry::default(),
            undo_retry: StepRetry::within(Duration::from_secs(24 * 60 * 60)),
            settle: Duration::from_secs(60),
            has_undo: false,
            reconciles: false,
            prepares: false,
        };
        if let Err(error) = check_name(name) {
            self.error.get_or_insert(error);
        }
        if self.functions.contains_key(name) {
            self.error.get_or_insert(DefinitionError::Twice { name });
        }
        let functions = Functions { call, prepare: None, undo: None, reconcile: None };
        StepBuilder { saga: self, name, terms, functions, types: PhantomData }
    }

    /// Ends the definition with its flow, which requests steps by [`FlowContext::run`] and may branch
    /// and loop. If it returns an error, every step that happened is undone in reverse order, and then
    /// the error is the outcome.
    ///
    /// # Errors
    /// [`DefinitionError`].
    pub fn flow<I, O, E, F, Fut>(self, flow: F) -> Result<Saga<I, O, E>, DefinitionError>
    where
        I: Serialize + DeserializeOwned + Send + 'static,
        O: Serialize + DeserializeOwned + Send + 'static,
        E: Serialize + DeserializeOwned + Send + 'static,
        F: Fn(FlowContext, I) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<O, E>> + Send + 'static,
    {
        if let Some(error) = self.error {
            return Err(error);
        }
        if self.max_log > MAX_LOG {
            return Err(DefinitionError::MaxLog { found: self.max_log });
        }
        if self.retention.is_zero() {
            return Err(DefinitionError::Retention);
        }
        self.steps.iter().try_for_each(|(name, terms)| terms.check(name))?;
        let too_short = self.steps.iter().find_map(|(step, terms)| match terms.kind {
            Kind::Keyed { lifetime } if lifetime > self.retention => Some((*step, lifetime)),
            _ => None,
        });
        if let Some((step, lifetime)) = too_short {
            let retention = self.retention;
            return Err(DefinitionError::KeyOutlives { step, lifetime, retention });
        }
        let queue_of = |kind: &str| {
            QueueName::new(format!("{kind}:{}:{}", self.name, self.version))
                .map_err(|_| DefinitionError::Name { name: self.name })
        };
        let (queue, rejected) = (queue_of("saga")?, queue_of("saga-rejected")?);
        let flow = Arc::new(flow);
        let flow: FlowFn = Arc::new(move |desk, input| {
            let flow = Arc::clone(&flow);
            Box::pin(async move {
                let input = match value::read::<I>(&input) {
                    Ok(input) => input,
                    Err(error) => return FlowEnd::Faulted(unreadable("the input", &error)),
                };
                let end = flow(FlowContext::new(desk), input).await;
                match end {
                    Ok(output) => written("the output", &output)
                        .map_or_else(FlowEnd::Faulted, FlowEnd::Returned),
                    Err(error) => {
                        written("the error", &error).map_or_else(FlowEnd::Faulted, FlowEnd::Failed)
                    }
                }
            })
        });
        let terms = Arc::new(RunTerms {
            steps: self.steps,
            park_after: self.park_after,
            stuck_for: Duration::from_secs(24 * 60 * 60),
            max_value: self.max_value,
            max_log: self.max_log,
        });
        let Self { name, version, retention, functions, .. } = self;
        let definition =
            Definition { name, version, queue, rejected, retention, terms, functions, flow };
        Ok(Saga { definition: Arc::new(definition), types: PhantomData })
    }
}

/// A step in progress, which ends with [`undo`](Self::undo) or [`no_undo`](Self::no_undo).
#[must_use = "a step that does not end with `undo` or `no_undo` is not defined"]
pub struct StepBuilder<'a, S, A, R, E> {
    saga: &'a mut SagaBuilder<S>,
    name: &'static str,
    terms: StepTerms,
    functions: Functions,
    types: PhantomData<fn(A) -> Result<R, E>>,
}

impl<S, A, R, E> fmt::Debug for StepBuilder<'_, S, A, R, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "StepBuilder({})", self.name)
    }
}

impl<S, A, R, E> StepBuilder<'_, S, A, R, E>
where
    S: Send + Sync + 'static,
    A: DeserializeOwned + Send + 'static,
    R: Serialize + DeserializeOwned + Send + 'static,
{
    /// Sets how often the step is tried. Default: [`StepRetry::default`].
    pub fn retry(mut self, retry: StepRetry) -> Self {
        self.terms.retry = retry;
        self
    }

    /// Sets how often its undo is tried. Default: within a day.
    pub fn undo_retry(mut self, retry: StepRetry) -> Self {
        self.terms.undo_retry = retry;
        self
    }

    /// Sets the settle time: for so long after the timeout of a try, its call may still take effect in
    /// the called system. A step whose outcome is unknown is neither reconciled nor undone before that.
    /// Default 60 s.
    pub fn settle(mut self, settle: Duration) -> Self {
        self.terms.settle = settle;
        self
    }

    /// Sets the function that prepares each try: its value is saved together with the try, before the
    /// call, which gets it by [`StepContext::prepared`]. It calls nothing that has an effect. Its
    /// error ends the try without a call; whatever the error says, nothing was sent.
    pub fn prepare<P, F, Fut>(mut self, prepare: F) -> Self
    where
        P: Serialize + Send + 'static,
        E: Serialize + Send + 'static,
        F: Fn(StepContext<S>, A) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<P, StepError<E>>> + Send + 'static,
    {
        let (name, state) = (self.name, Arc::clone(&self.saga.state));
        let prepare = Arc::new(prepare);
        self.terms.prepares = true;
        self.functions.prepare = Some(Arc::new(move |context, argument| {
            let (state, prepare) = (Arc::clone(&state), Arc::clone(&prepare));
            Box::pin(async move {
                let argument = value::read::<A>(&argument)
                    .map_err(|error| TryEnd::Faulted(unreadable(name, &error)))?;
                let prepared = prepare(StepContext { state, context }, argument).await;
                let value = prepared.map_err(|error| match try_end(name, error) {
                    TryEnd::Unknown(error) => TryEnd::NotSent(error),
                    TryEnd::RetryAfter(after, error) => TryEnd::Postponed(after, error),
                    TryEnd::Lost(fault) => TryEnd::Faulted(fault),
                    end => end,
                })?;
                written(name, &value).map_err(TryEnd::Faulted)
            })
        }));
        self
    }

    /// Sets the function that determines whether the step happened. It is called once the tries are
    /// exhausted, the key has expired, or a `once` step may have happened; and before the undo of a step
    /// whose outcome is unknown: in all at most [`StepRetry::tries`] times. [`Verdict::DidNotHappen`]
    /// also promises that no call with this fence or a smaller one will take effect.
    pub fn reconcile<F, Fut>(mut self, reconcile: F) -> Self
    where
        F: Fn(StepContext<S>, A) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Verdict<R>> + Send + 'static,
    {
        let (name, state) = (self.name, Arc::clone(&self.saga.state));
        let reconcile = Arc::new(reconcile);
        self.terms.reconciles = true;
        self.functions.reconcile = Some(Arc::new(move |context, argument| {
            let (state, reconcile) = (Arc::clone(&state), Arc::clone(&reconcile));
            Box::pin(async move {
                let Ok(argument) = value::read::<A>(&argument) else { return Verdict::CannotSay };
                match reconcile(StepContext { state, context }, argument).await {
                    Verdict::Happened(result) => {
                        written(name, &result).map_or(Verdict::CannotSay, Verdict::Happened)
                    }
                    Verdict::DidNotHappen => Verdict::DidNotHappen,
                    Verdict::CannotSay => Verdict::CannotSay,
                }
            })
        }));
        self
    }

    /// Sets the undo, which gets the argument and the result of the step, and ends its definition. It
    /// may be called more than once.
    #[must_use = "the flow requests the step by this handle"]
    pub fn undo<F, Fut>(mut self, undo: F) -> StepHandle<A, R, E>
    where
        F: Fn(StepContext<S>, A, StepEffect<R>) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<(), UndoError>> + Send + 'static,
    {
        let (name, state, undo) = (self.name, Arc::clone(&self.saga.state), Arc::new(undo));
        self.terms.has_undo = true;
        self.functions.undo = Some(Arc::new(move |context, argument, result| {
            let (state, undo) = (Arc::clone(&state), Arc::clone(&undo));
            Box::pin(async move {
                let unreadable = |error| UndoFailure::Faulted(unreadable(name, &error));
                let argument = value::read::<A>(&argument).map_err(unreadable)?;
                let result = match result {
                    Some(result) => {
                        StepEffect::Happened(read_result::<R>(&result).map_err(unreadable)?)
                    }
                    None => StepEffect::Unknown,
                };
                let undone = undo(StepContext { state, context }, argument, result).await;
                undone.map_err(|UndoError(source)| UndoFailure::Error(text(&*source)))
            })
        }));
        self.end()
    }

    /// Ends the definition of a step that has no undo: its effect stays.
    #[must_use = "the flow requests the step by this handle"]
    pub fn no_undo(self) -> StepHandle<A, R, E> {
        self.end()
    }

    fn end(self) -> StepHandle<A, R, E> {
        self.saga.steps.insert(self.name, self.terms);
        self.saga.functions.insert(self.name, self.functions);
        StepHandle::new(self.name)
    }
}

fn check_name(name: &'static str) -> Result<(), DefinitionError> {
    let is_valid = |char: char| char.is_ascii_alphanumeric() || "-_.".contains(char);
    match (1..=100).contains(&name.len()) && name.chars().all(is_valid) {
        true => Ok(()),
        false => Err(DefinitionError::Name { name }),
    }
}

fn written<T: Serialize>(name: &str, value: &T) -> Result<Blob, StuckCause> {
    value::write(value, hapax_core::codec::MAX_CHECKPOINT).map(Blob).map_err(|error| {
        let detail = format!("expected a value of `{name}` that serde can serialize, of at most 16 MiB, found: {error}: correct its type, then `retry`");
        StuckCause { reason: StuckReason::TooLarge, detail }
    })
}

fn try_end<E: Serialize>(name: &str, error: StepError<E>) -> TryEnd {
    match error {
        StepError::Rejected(error) => {
            written(name, &error).map_or_else(TryEnd::Lost, TryEnd::Rejected)
        }
        StepError::NotSent(error) => TryEnd::NotSent(text(&*error)),
        StepError::Unknown(error) => TryEnd::Unknown(text(&*error)),
        StepError::RetryAfter { after, source } => TryEnd::RetryAfter(after, text(&*source)),
        StepError::Postponed { after, source } => TryEnd::Postponed(after, text(&*source)),
        StepError::Stuck { reason, source, sent } => {
            let fault = StuckCause { reason, detail: text(&*source) };
            if sent { TryEnd::Lost(fault) } else { TryEnd::Faulted(fault) }
        }
    }
}

fn unreadable(name: &str, error: &value::ValueError) -> StuckCause {
    let detail = format!(
        "expected logged values of `{name}` of the types in this definition, found: {error}"
    );
    StuckCause { reason: StuckReason::Unreadable, detail }
}

/// Returns an error with its causes, at most 1,000 characters.
pub(crate) fn text(error: &(dyn StdError + 'static)) -> String {
    let causes = std::iter::successors(Some(error), |error| (*error).source());
    let causes: Vec<String> = causes.map(ToString::to_string).collect();
    causes.join(": ").chars().take(1_000).collect()
}
