//! Functions with their own policy.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::super::claim::ClaimError;
use super::super::idempotency::Idempotency;
use super::outcome::{of_error, of_value};
use crate::key::{CompositeKey, Key};
use crate::machine::{HookTiming, Verdict};
use crate::policy::{InFlight, Policy, PolicyError};
use crate::record::{FencingToken, OnUnknown, Outcome, OutcomeClass};
use crate::scope::Scope;
use crate::store::BoxFuture;
use crate::value::{self, ValueError};

/// A function that executes once for each key: its name, its policy, and the classes of its errors.
/// Cheap to clone.
///
/// ```
/// # use std::sync::Arc;
/// # use std::time::Duration;
/// # use hapax_core::{Idempotency, Key, MemoryStore, RunError, Scope};
/// use hapax_core::{OutcomeClass, Function};
/// use serde::{Deserialize, Serialize};
///
/// #[derive(Debug, Serialize, Deserialize, thiserror::Error)]
/// enum ChargeError {
///     #[error("the card was declined")]
///     Declined,
///     #[error("the bank could not be reached")]
///     NotReached,
///     #[error("the bank did not answer")]
///     NoAnswer,
/// }
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let idempotency = Idempotency::builder(Arc::new(MemoryStore::default())).build()?;
/// let charge: Function<String, ChargeError> = idempotency
///     .function("charge")
///     .at_most_once()
///     .wait(Duration::from_secs(10))
///     .classify(|error| match error {
///         ChargeError::Declined => OutcomeClass::Final,
///         ChargeError::NotReached => OutcomeClass::Retryable,
///         ChargeError::NoAnswer => OutcomeClass::Unknown,
///     })
///     .build()?;
///
/// let (customer, key) = (Scope::of([("customer", "c-1")]), Key::new("order-17")?);
/// let declined = || async { Err(ChargeError::Declined) };
/// for replay in [false, true] {
///     let answer = charge.run(&customer, &key, &100, move |_| declined()).await;
///     let Err(RunError::Failed { error, replayed, .. }) = answer else { panic!("{answer:?}") };
///     assert!(matches!(error, ChargeError::Declined));
///     assert_eq!(replayed, replay);
/// }
/// # Ok(()) }
/// ```
pub struct Function<T, E> {
    pub(super) declared: Arc<Declared<E>>,
    value: PhantomData<fn() -> T>,
}

pub(super) struct Declared<E> {
    pub(super) engine: Idempotency,
    pub(super) name: Option<Box<str>>,
    pub(super) policy: Policy,
    pub(super) errors: Option<Errors<E>>,
    pub(super) hook: Option<ReconcileHook>,
}

/// The times of reconciliation, and the hook.
type ReconcileHook = (HookTiming, Box<HookFn>);
type HookFn = dyn Fn(ReconcileCall) -> BoxFuture<'static, Verdict> + Send + Sync;

/// The classification and the encoding of errors. Only errors that are recorded have to be encoded.
pub(super) struct Errors<E> {
    pub(super) class: Box<dyn Fn(&E) -> OutcomeClass + Send + Sync>,
    pub(super) keep: Option<Keep<E>>,
}

pub(super) struct Keep<E> {
    pub(super) write: fn(&E) -> Outcome,
    pub(super) read: fn(&[u8]) -> Result<E, ValueError>,
}

impl Idempotency {
    /// Begins the declaration of a function called `name`.
    ///
    /// The name is part of the scope, so that functions that are called with the same key, as all
    /// calls of one request may be, do not replay each other's values. It must not change: under
    /// another name no record is found, and a retry executes again. The same holds for adding a
    /// name to calls that were made by [`Idempotency::at_most_once`] or
    /// [`Idempotency::at_least_once`].
    ///
    /// There is no default for operations that may have taken effect: the builder needs
    /// [`at_most_once`](FunctionBuilder::at_most_once),
    /// [`at_least_once`](FunctionBuilder::at_least_once) or
    /// [`reconcile_with`](FunctionBuilder::reconcile_with), or [`build`](FunctionBuilder::build)
    /// fails.
    pub fn function<T, E>(&self, name: impl Into<Box<str>>) -> FunctionBuilder<T, E> {
        FunctionBuilder {
            engine: self.clone(),
            name: name.into(),
            policy: Policy::default(),
            on_unknown: None,
            timeout: None,
            errors: None,
            hook: None,
            value: PhantomData,
        }
    }
}

impl<T, E> Function<T, E> {
    pub(super) fn unnamed(engine: &Idempotency, on_unknown: OnUnknown) -> Self {
        let mut policy = Policy::default();
        policy.terms.on_unknown = on_unknown;
        let declared =
            Declared { engine: engine.clone(), name: None, policy, errors: None, hook: None };
        Self { declared: Arc::new(declared), value: PhantomData }
    }

    /// Returns the scope of this function's calls for a caller's scope. With it
    /// [`Idempotency::operation_id`] names the record of a call, as operators see it.
    #[must_use]
    pub fn scope(&self, caller: &Scope) -> Scope {
        match &self.declared.name {
            Some(name) => caller.within("function", name.as_bytes()),
            None => caller.clone(),
        }
    }

    /// Returns the candidate of `key` to call with: [`Idempotency::choose`] in the scope of this
    /// function's calls.
    ///
    /// # Errors
    /// [`ClaimError::Store`]: the candidate is unknown, so do not call.
    pub async fn choose(&self, caller: &Scope, key: &CompositeKey) -> Result<Key, ClaimError> {
        self.declared.engine.choose(&self.scope(caller), key).await
    }

    /// Returns the outcome that replays `value`: for a program by which operators resolve a record
    /// ([`Idempotency::resolve`]).
    #[must_use]
    pub fn outcome(&self, value: &T) -> Outcome
    where
        T: Serialize,
    {
        of_value(value)
    }

    /// Returns the outcome that replays `error`, as a final one. Only a function that
    /// [classifies](FunctionBuilder::classify) can decode it.
    #[must_use]
    pub fn error_outcome(&self, error: &E) -> Outcome
    where
        E: Serialize,
    {
        of_error(error)
    }

    /// Returns the policy.
    #[must_use]
    pub fn policy(&self) -> &Policy {
        &self.declared.policy
    }
}

impl<T, E> Clone for Function<T, E> {
    fn clone(&self) -> Self {
        Self { declared: Arc::clone(&self.declared), value: PhantomData }
    }
}

impl<T, E> fmt::Debug for Function<T, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Function")
            .field("name", &self.declared.name)
            .field("policy", &self.declared.policy)
            .finish_non_exhaustive()
    }
}

/// A builder of a function.
#[must_use]
pub struct FunctionBuilder<T, E> {
    engine: Idempotency,
    name: Box<str>,
    policy: Policy,
    on_unknown: Option<OnUnknown>,
    timeout: Option<Duration>,
    errors: Option<Errors<E>>,
    hook: Option<ReconcileHook>,
    value: PhantomData<fn() -> T>,
}

impl<T, E> fmt::Debug for FunctionBuilder<T, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FunctionBuilder")
            .field("name", &self.name)
            .field("policy", &self.settled())
            .finish_non_exhaustive()
    }
}

impl<T, E> FunctionBuilder<T, E> {
    /// Sets lease, retention, and the answer to calls in flight unless [`wait`](Self::wait) sets
    /// it. Without this the default policy applies. `terms.on_unknown` of `policy` does not count:
    /// one of [`at_most_once`](Self::at_most_once), [`at_least_once`](Self::at_least_once) and
    /// [`reconcile_with`](Self::reconcile_with) states it.
    pub fn policy(mut self, policy: Policy) -> Self {
        self.policy = policy;
        self
    }

    /// After an execution that may have taken effect, calls get
    /// [`OutcomeUnknown`](super::RunError::OutcomeUnknown) until an operator resolves it:
    /// [`OnUnknown::Block`].
    ///
    /// Each `Err` that is not classified counts as such an execution, and so does a panic. State
    /// with [`retryable`](Self::retryable) or [`classify`](Self::classify) which errors occur
    /// before any effect, so that they release the key.
    pub fn at_most_once(self) -> Self {
        self.on_unknown(OnUnknown::Block)
    }

    /// After an execution that may have taken effect, the next call executes again, with a larger
    /// fence: [`OnUnknown::Reexecute`]. For operations that may be repeated.
    pub fn at_least_once(self) -> Self {
        self.on_unknown(OnUnknown::Reexecute)
    }

    /// Sets one of the three guarantees by its value, for programs that are configured.
    pub fn on_unknown(mut self, on_unknown: OnUnknown) -> Self {
        self.on_unknown = Some(on_unknown);
        self
    }

    /// Makes calls wait this long for one that is in flight, instead of being rejected at once.
    pub fn wait(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// Sets the classes of errors. Without it each error is [`OutcomeClass::Unknown`].
    ///
    /// Final errors are replayed as they were, so that they are encoded and decoded like values. A
    /// panic in `class` counts as one of the operation.
    pub fn classify(mut self, class: impl Fn(&E) -> OutcomeClass + Send + Sync + 'static) -> Self
    where
        E: Serialize + DeserializeOwned,
    {
        let keep = Keep { write: of_error, read: |bytes| value::read(bytes) };
        self.errors = Some(Errors { class: Box::new(class), keep: Some(keep) });
        self
    }

    /// Sets which errors certainly had no effect: [`OutcomeClass::Retryable`]. Any other is
    /// [`OutcomeClass::Unknown`], and none is final, so that this accepts errors which cannot be
    /// serialized, such as `std::io::Error`. It replaces [`classify`](Self::classify): the later of
    /// the two counts.
    pub fn retryable(mut self, nothing: impl Fn(&E) -> bool + Send + Sync + 'static) -> Self {
        let class = move |error: &E| match nothing(error) {
            true => OutcomeClass::Retryable,
            false => OutcomeClass::Unknown,
        };
        self.errors = Some(Errors { class: Box::new(class), keep: None });
        self
    }

    /// After an execution that may have taken effect, a later call runs the hook, at the times of
    /// `hook`, and its verdict decides: [`OnUnknown::Reconcile`]. With
    /// [`at_most_once`](Self::at_most_once) as well, the hook does not run.
    ///
    /// A hook that takes longer than `hook.timeout`, or panics, cannot say.
    pub fn reconcile_with<A>(
        mut self,
        hook: HookTiming,
        ask: impl Fn(ReconcileCall) -> A + Send + Sync + 'static,
    ) -> Self
    where
        T: Serialize,
        A: Future<Output = Verdict<T>> + Send + 'static,
    {
        let ask = move |doubt| -> BoxFuture<'static, Verdict> {
            let answer = ask(doubt);
            Box::pin(async move {
                match answer.await {
                    Verdict::Happened(value) => Verdict::Happened(of_value(&value)),
                    Verdict::DidNotHappen => Verdict::DidNotHappen,
                    Verdict::CannotSay => Verdict::CannotSay,
                }
            })
        };
        self.hook = Some((hook, Box::new(ask)));
        self
    }

    /// Returns the policy, whatever the order of the calls that set it.
    fn settled(&self) -> Policy {
        let mut policy = self.policy;
        if let Some((times, _)) = &self.hook {
            policy.hook = Some(*times);
            policy.terms.on_unknown = OnUnknown::Reconcile;
        }
        if let Some(on_unknown) = self.on_unknown {
            policy.terms.on_unknown = on_unknown;
        }
        if let Some(timeout) = self.timeout {
            policy.in_flight = InFlight::Wait(timeout);
        }
        policy
    }

    /// Builds the function.
    ///
    /// # Errors
    /// [`FunctionError`] names a setting that would break a promise in production.
    pub fn build(self) -> Result<Function<T, E>, FunctionError> {
        let policy = self.settled();
        if self.name.is_empty() {
            return Err(FunctionError::NoName);
        }
        match self.hook {
            None if self.on_unknown.is_none() => return Err(FunctionError::NoGuarantee),
            Some(_) if policy.terms.on_unknown < OnUnknown::Reconcile => {
                return Err(FunctionError::HookNeverCalled);
            }
            None if policy.hook.is_some() => return Err(FunctionError::NoReconcile),
            _ => {}
        }
        policy.check()?;
        let Self { engine, name, errors, hook, .. } = self;
        let declared = Declared { engine, name: Some(name), policy, errors, hook };
        Ok(Function { declared: Arc::new(declared), value: PhantomData })
    }
}

/// Errors of a declaration.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FunctionError {
    /// A setting of the engine's policy is invalid.
    #[error(transparent)]
    Policy(#[from] PolicyError),
    /// The name is empty.
    #[error("the name of a function is empty: expected one that no other function has")]
    NoName,
    /// There is no guarantee: neither at most once, nor at least once, nor reconciled.
    #[error(
        "expected a guarantee, found none: add `at_most_once()`, `at_least_once()` or \
         `reconcile_with(hook, …)`"
    )]
    NoGuarantee,
    /// The policy has times of reconciliation, and there is no hook.
    #[error("`policy.hook` is set, but there is no hook: add `reconcile_with`, or clear it")]
    NoReconcile,
    /// The two guarantees contradict each other: unknown outcomes would be executed again without
    /// the hook.
    #[error("`at_least_once` and `reconcile_with` contradict each other: remove one")]
    HookNeverCalled,
}

/// An execution whose outcome is unknown. Its `Debug` form shows nothing of the request.
#[derive(Clone)]
pub struct ReconcileCall {
    /// The fence. A hook that returns *did not happen* must ensure that this fence is rejected from
    /// then on.
    pub fence: FencingToken,
    /// The idempotency key. It names the operation within its caller's scope: two customers may
    /// have the same one.
    pub key: Key,
    /// The key that the execution had for downstream systems, as [`LeaseHandle::downstream`]
    /// returned it.
    ///
    /// [`LeaseHandle::downstream`]: crate::LeaseHandle::downstream
    pub downstream: Key,
    pub(super) request: Bytes,
}

impl ReconcileCall {
    /// Returns the request of the call that reconciles, which equals that of the execution.
    ///
    /// # Errors
    /// An error if the request cannot be decoded as `R`, or the function was called by
    /// [`run_request`](Function::run_request), which has none.
    pub fn request<R: DeserializeOwned>(&self) -> Result<R, ValueError> {
        value::read(&self.request)
    }
}

impl fmt::Debug for ReconcileCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReconcileCall")
            .field("fence", &self.fence)
            .field("key", &self.key)
            .finish_non_exhaustive()
    }
}
