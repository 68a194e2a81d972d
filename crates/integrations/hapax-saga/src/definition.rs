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

use crate::call::{At, CallContext, StepError, Undo, UndoError};
use crate::flow::{Desk, Op, StepHandle};
use crate::log::{Blob, Log, LogTime, MAX_LOG, StuckReason};
use crate::retry::StepRetry;
use crate::run::{
    FlowEnd, FlowFuture, Kind, Run, RunTerms, SagaFault, StepTerms, TryEnd, UndoFailure,
};

type CallFn = Arc<dyn Fn(CallContext, Bytes) -> BoxFuture<'static, TryEnd> + Send + Sync>;
type UndoFn = Arc<
    dyn Fn(CallContext, Bytes, Option<Bytes>) -> BoxFuture<'static, Result<(), UndoFailure>>
        + Send
        + Sync,
>;
type ReconcileFn =
    Arc<dyn Fn(CallContext, Bytes) -> BoxFuture<'static, Verdict<Blob>> + Send + Sync>;
type FlowFn = Arc<dyn Fn(Arc<Desk>, Bytes) -> FlowFuture + Send + Sync>;

/// The functions of a step.
#[derive(Clone)]
pub(crate) struct Functions {
    pub(crate) call: CallFn,
    pub(crate) undo: Option<UndoFn>,
    pub(crate) reconcile: Option<ReconcileFn>,
}

/// A definition without its types.
pub(crate) struct Definition {
    pub(crate) name: &'static str,
    pub(crate) version: u32,
    pub(crate) queue: QueueName,
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
            retention: Duration::from_secs(30 * 24 * 60 * 60),
            max_value: 64 << 10,
            max_log: 256 << 10,
            steps: BTreeMap::new(),
            functions: BTreeMap::new(),
            error: check_name(name).err(),
        }
    }
}

/// A definition under way.
#[must_use = "a definition without a flow is no saga"]
pub struct SagaBuilder<S> {
    name: &'static str,
    version: u32,
    state: Arc<S>,
    retention: Duration,
    max_value: usize,
    max_log: usize,
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
    /// Sets the time for which an outcome is replayed. Default 30 days.
    pub fn retention(mut self, retention: Duration) -> Self {
        self.retention = retention;
        self
    }

    /// Sets the size of the log, in bytes, to which no further step is added. Default 256 KiB, at most
    /// [`MAX_LOG`].
    pub fn max_log(mut self, bytes: usize) -> Self {
        self.max_log = bytes;
        self
    }

    /// Defines a step that calls a system which honors the step's key for `lifetime`: a repeated call
    /// under [`At::key`] has no second effect.
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
        F: Fn(At<S>, A) -> Fut + Send + Sync + 'static,
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
        F: Fn(At<S>, A) -> Fut + Send + Sync + 'static,
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
        F: Fn(At<S>, A) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<R, StepError<E>>> + Send + 'static,
    {
        self.step(name, Kind::Again, step)
    }

    /// Defines a step that writes rows in the database of the records, in a transaction that it takes
    /// by [`At::tx`]. Its writes and its result in the log commit together. Needs
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
        F: Fn(At<S>, A) -> Fut + Send + Sync + 'static,
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
        F: Fn(At<S>, A) -> Fut + Send + Sync + 'static,
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
                match step(At { state, context }, argument).await {
                    Ok(result) => {
                        written(name, &result).map_or_else(TryEnd::Lost, TryEnd::Happened)
                    }
                    Err(StepError::No(error)) => {
                        written(name, &error).map_or_else(TryEnd::Lost, TryEnd::Rejected)
                    }
                    Err(StepError::NotSent(error)) => TryEnd::NotSent(text(&*error)),
                    Err(StepError::Unknown(error)) => TryEnd::Unknown(text(&*error)),
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
        };
        if let Err(error) = check_name(name) {
            self.error.get_or_insert(error);
        }
        if self.functions.contains_key(name) {
            self.error.get_or_insert(DefinitionError::Twice { name });
        }
        let functions = Functions { call, undo: None, reconcile: None };
        StepBuilder { saga: self, name, terms, functions, types: PhantomData }
    }

    /// Ends the definition with its flow, which requests steps by [`Op::run`] and may branch and loop.
    /// If it returns an error, every step that happened is undone in reverse order, and then the
    /// error is the outcome.
    ///
    /// # Errors
    /// [`DefinitionError`].
    pub fn flow<I, O, E, F, Fut>(self, flow: F) -> Result<Saga<I, O, E>, DefinitionError>
    where
        I: Serialize + DeserializeOwned + Send + 'static,
        O: Serialize + DeserializeOwned + Send + 'static,
        E: Serialize + DeserializeOwned + Send + 'static,
        F: Fn(Op, I) -> Fut + Send + Sync + 'static,
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
        let queue = QueueName::new(format!("saga:{}:{}", self.name, self.version))
            .map_err(|_| DefinitionError::Name { name: self.name })?;
        let flow = Arc::new(flow);
        let flow: FlowFn = Arc::new(move |desk, input| {
            let flow = Arc::clone(&flow);
            Box::pin(async move {
                let input = match value::read::<I>(&input) {
                    Ok(input) => input,
                    Err(error) => return FlowEnd::Faulted(unreadable("the input", &error)),
                };
                let end = flow(Op::new(desk), input).await;
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
            park_after: Duration::from_secs(10),
            stuck_for: Duration::from_secs(24 * 60 * 60),
            max_value: self.max_value,
            max_log: self.max_log,
        });
        let Self { name, version, retention, functions, .. } = self;
        let definition = Definition { name, version, queue, retention, terms, functions, flow };
        Ok(Saga { definition: Arc::new(definition), types: PhantomData })
    }
}

/// A step under way, which ends with [`undo`](Self::undo) or [`no_undo`](Self::no_undo).
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

    /// Sets the time after the timeout of a try in which it may still take effect. A step whose
    /// outcome is unknown is reconciled or undone no earlier. Default 60 s.
    pub fn settle(mut self, settle: Duration) -> Self {
        self.terms.settle = settle;
        self
    }

    /// Sets the function that determines whether the step happened, once its tries are exhausted or
    /// its key has expired. It may only answer [`Verdict::DidNotHappen`] if the step never will
    /// happen under this fence or a smaller one.
    pub fn reconcile<F, Fut>(mut self, reconcile: F) -> Self
    where
        F: Fn(At<S>, A) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Verdict<R>> + Send + 'static,
    {
        let (name, state) = (self.name, Arc::clone(&self.saga.state));
        let reconcile = Arc::new(reconcile);
        self.terms.reconciles = true;
        self.functions.reconcile = Some(Arc::new(move |context, argument| {
            let (state, reconcile) = (Arc::clone(&state), Arc::clone(&reconcile));
            Box::pin(async move {
                let Ok(argument) = value::read::<A>(&argument) else { return Verdict::CannotSay };
                match reconcile(At { state, context }, argument).await {
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
        F: Fn(At<S>, A, Undo<R>) -> Fut + Send + Sync + 'static,
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
                    Some(result) => Undo::Happened(value::read::<R>(&result).map_err(unreadable)?),
                    None => Undo::Unknown,
                };
                let undone = undo(At { state, context }, argument, result).await;
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

/// Errors of a definition.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DefinitionError {
    /// A name is empty, too long, or has other characters.
    #[error(
        "expected a name of 1 to 100 letters, digits, `-`, `_` and `.`, found `{name}`: rename it"
    )]
    Name {
        /// The name.
        name: &'static str,
    },
    /// Two steps have one name.
    #[error("expected one step named `{name}`, found two: rename one")]
    Twice {
        /// The name.
        name: &'static str,
    },
    /// The limit of the log is too large.
    #[error("expected a log of at most {MAX_LOG} bytes, found {found}: lower `max_log`")]
    MaxLog {
        /// The limit.
        found: usize,
    },
    /// The retention is zero.
    #[error("expected a retention above zero: a retry would start the saga again")]
    Retention,
}

fn check_name(name: &'static str) -> Result<(), DefinitionError> {
    let is_valid = |char: char| char.is_ascii_alphanumeric() || "-_.".contains(char);
    match (1..=100).contains(&name.len()) && name.chars().all(is_valid) {
        true => Ok(()),
        false => Err(DefinitionError::Name { name }),
    }
}

fn written<T: Serialize>(name: &str, value: &T) -> Result<Blob, SagaFault> {
    value::write(value, hapax_core::codec::MAX_CHECKPOINT).map(Blob).map_err(|error| {
        let detail = format!("expected a value of `{name}` that can be serialized, found: {error}");
        SagaFault { reason: StuckReason::TooLarge, detail }
    })
}

fn unreadable(name: &str, error: &value::ValueError) -> SagaFault {
    let detail = format!(
        "expected logged values of `{name}` of the types in this definition, found: {error}"
    );
    SagaFault { reason: StuckReason::Unreadable, detail }
}

/// Returns an error with its causes, at most 1,000 characters.
pub(crate) fn text(error: &(dyn StdError + 'static)) -> String {
    let causes = std::iter::successors(Some(error), |error| (*error).source());
    let causes: Vec<String> = causes.map(ToString::to_string).collect();
    causes.join(": ").chars().take(1_000).collect()
}
