//! Declared functions: a name, a policy, and classes of errors.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::super::claim::ClaimError;
use super::super::idempotency::Idempotency;
use super::outcome::{error_outcome, value_outcome};
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

/// Timing of the hook, and the hook.
type ReconcileHook = (HookTiming, Box<HookFn>);
type HookFn = dyn Fn(ReconcileCall) -> BoxFuture<'static, Verdict> + Send + Sync;

/// Classification of errors, and their codec if final errors are stored. Only those have to be
/// serialized and deserialized.
pub(super) struct Errors<E> {
    pub(super) class: Box<dyn Fn(&E) -> OutcomeClass + Send + Sync>,
    pub(super) codec: Option<ErrorCodec<E>>,
}

pub(super) struct ErrorCodec<E> {
    pub(super) write: fn(&E) -> Outcome,
    pub(super) read: fn(&[u8]) -> Result<E, ValueError>,
}

impl Idempotency {
    /// Begins the declaration of a function called `name`.
    ///
    /// The name is part of the scope: functions that are called with the same key, such as all
    /// calls made for one request, do not replay each other's outcomes. Never change the name:
    /// under another name no record is found, and a retry executes again. The same holds for adding
    /// a name to an operation that was called by [`Idempotency::at_most_once`] or
    /// [`Idempotency::at_least_once`].
    ///
    /// There is no default for the case that an earlier call may have taken effect: without
    /// [`at_most_once`](FunctionBuilder::at_most_once),
    /// [`at_least_once`](FunctionBuilder::at_least_once) or
    /// [`reconcile_with`](FunctionBuilder::reconcile_with), [`build`](FunctionBuilder::build)
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

    /// Returns the scope of a call: the caller's scope with this function's name. With it
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
    /// [`ClaimError::Store`]: the candidate is not known, so do not call.
    pub async fn choose(&self, caller: &Scope, key: &CompositeKey) -> Result<Key, ClaimError> {
        self.declared.engine.choose(&self.scope(caller), key).await
    }

    /// Returns the outcome that replays `value`, for a program by which operators resolve an
    /// operation as happened ([`Idempotency::resolve`]).
    #[must_use]
    pub fn outcome(&self, value: &T) -> Outcome
    where
        T: Serialize,
    {
        value_outcome(value)
    }

    /// Returns the outcome that replays `error`, as a final one. Only a function that
    /// [classifies](FunctionBuilder::classify) errors can read it.
    #[must_use]
    pub fn error_outcome(&self, error: &E) -> Outcome
    where
        E: Serialize,
    {
        error_outcome(error)
    }

    /// Returns the policy in force.
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

/// Builder of a function.
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
            .field("policy", &self.effective_policy())
            .finish_non_exhaustive()
    }
}

impl<T, E> FunctionBuilder<T, E> {
    /// Sets lease, retention, and the result of calls in flight unless [`wait`](Self::wait) sets
    /// it. Default: [`Policy::default`]. `terms.on_unknown` of `policy` is ignored:
    /// [`at_most_once`](Self::at_most_once), [`at_least_once`](Self::at_least_once) or
    /// [`reconcile_with`](Self::reconcile_with) sets it.
    pub fn policy(mut self, policy: Policy) -> Self {
        self.policy = policy;
        self
    }

    /// Blocks the key after an execution that may have taken effect: calls get
    /// [`OutcomeUnknown`](super::RunError::OutcomeUnknown) until an operator resolves it
    /// ([`OnUnknown::Block`]).
    ///
    /// Each `Err` that is not classified counts as such an execution, and so does a panic. Classify
    /// the errors that happen before any effect with [`retryable`](Self::retryable) or
    /// [`classify`](Self::classify), so that they release the key.
    pub fn at_most_once(self) -> Self {
        self.on_unknown(OnUnknown::Block)
    }

    /// Executes again, with a larger fence, at the first call after an execution that may have
    /// taken effect ([`OnUnknown::Reexecute`]). For operations that may be repeated.
    pub fn at_least_once(self) -> Self {
        self.on_unknown(OnUnknown::Reexecute)
    }

    /// Sets one of the three guarantees by its value, for programs that read it from a
    /// configuration.
    pub fn on_unknown(mut self, on_unknown: OnUnknown) -> Self {
        self.on_unknown = Some(on_unknown);
        self
    }

    /// Makes calls wait this long for one in flight, instead of returning at once.
    pub fn wait(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// Sets the classes of errors. Without it each error is [`OutcomeClass::Unknown`].
    ///
    /// Final errors are replayed as they were, so they are serialized and deserialized like values.
    /// A panic in `class` counts as one of the operation.
    pub fn classify(mut self, class: impl Fn(&E) -> OutcomeClass + Send + Sync + 'static) -> Self
    where
        E: Serialize + DeserializeOwned,
    {
        let codec = ErrorCodec { write: error_outcome, read: |bytes| value::read(bytes) };
        self.errors = Some(Errors { class: Box::new(class), codec: Some(codec) });
        self
    }

    /// Sets the errors after which certainly nothing happened: [`OutcomeClass::Retryable`]. Any
    /// other error is [`OutcomeClass::Unknown`] and none is final, so this accepts errors that
    /// cannot be serialized, such as `std::io::Error`. It replaces [`classify`](Self::classify),
    /// and the reverse: the later call counts.
    pub fn retryable(
        mut self,
        did_not_happen: impl Fn(&E) -> bool + Send + Sync + 'static,
    ) -> Self {
        let class = move |error: &E| match did_not_happen(error) {
            true => OutcomeClass::Retryable,
            false => OutcomeClass::Unknown,
        };
        self.errors = Some(Errors { class: Box::new(class), codec: None });
        self
    }

    /// Reconciles after an execution that may have taken effect: a later call calls `hook`, at the
    /// times of `timing`, and its verdict decides ([`OnUnknown::Reconcile`]). With
    /// [`at_most_once`](Self::at_most_once) as well, `hook` is never called.
    ///
    /// A hook that takes longer than `timing.timeout`, or panics, counts as [`Verdict::CannotSay`].
    pub fn reconcile_with<A>(
        mut self,
        timing: HookTiming,
        hook: impl Fn(ReconcileCall) -> A + Send + Sync + 'static,
    ) -> Self
    where
        T: Serialize,
        A: Future<Output = Verdict<T>> + Send + 'static,
    {
        let reconcile = move |call| -> BoxFuture<'static, Verdict> {
            let verdict = hook(call);
            Box::pin(async move {
                match verdict.await {
                    Verdict::Happened(value) => Verdict::Happened(value_outcome(&value)),
                    Verdict::DidNotHappen => Verdict::DidNotHappen,
                    Verdict::CannotSay => Verdict::CannotSay,
                }
            })
        };
        self.hook = Some((timing, Box::new(reconcile)));
        self
    }

    /// Returns the policy in force, in whichever order it was set.
    fn effective_policy(&self) -> Policy {
        let mut policy = self.policy;
        if let Some((timing, _)) = &self.hook {
            policy.hook = Some(*timing);
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
    /// [`FunctionError`] for a declaration that would break a guarantee in production.
    pub fn build(self) -> Result<Function<T, E>, FunctionError> {
        let policy = self.effective_policy();
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

/// Errors of a function's declaration.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FunctionError {
    /// The policy is invalid.
    #[error(transparent)]
    Policy(#[from] PolicyError),
    /// The name is empty, so it does not separate functions.
    #[error("the name of a function is empty: pass one that no other function has")]
    NoName,
    /// None of the three guarantees is set.
    #[error(
        "expected a guarantee, found none: add `at_most_once()`, `at_least_once()` or \
         `reconcile_with(timing, hook)`"
    )]
    NoGuarantee,
    /// There are times for a hook, but no hook.
    #[error("`policy.hook` is set without a hook: add `reconcile_with(timing, hook)`, or clear it")]
    NoReconcile,
    /// An unknown outcome would lead to an execution without reconciling.
    #[error(
        "`at_least_once()` and `reconcile_with(timing, hook)` contradict each other: remove one"
    )]
    HookNeverCalled,
}

/// An execution whose outcome is unknown. Its `Debug` form shows nothing of the request.
#[derive(Clone)]
pub struct ReconcileCall {
    /// Fence of the execution. A hook that returns [`Verdict::DidNotHappen`] must make sure that
    /// this fence is rejected from then on.
    pub fence: FencingToken,
    /// Key of the execution. It names the operation within its caller's scope: two customers may
    /// have the same key.
    pub key: Key,
    /// Key that the execution had for downstream systems, as [`LeaseHandle::downstream`] returned
    /// it.
    ///
    /// [`LeaseHandle::downstream`]: crate::LeaseHandle::downstream
    pub downstream: Key,
    pub(super) request: Bytes,
}

impl ReconcileCall {
    /// Returns the request of the call that reconciles, which is the same as that of the execution.
    ///
    /// # Errors
    /// [`ValueError`] if `R` cannot be read from the request, or the function was called by
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
