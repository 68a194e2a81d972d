//! The saga of an operation: one step, a request.
//!
//! 1. [`prepare`] decides before each try whether it may be made: the age of the key, the time of the
//!    operation, the budget of the server, and the key and the credentials, which are compared with
//!    those of a try that may have arrived. The key and a hash of the credentials are saved with the try.
//! 2. [`call`] sends the request once, reads the response to its end, and maps it by the profile of the
//!    server: a result ends the operation; *not sent* and *unknown* are tried again; otherwise the
//!    operation is stuck, until the caller sends again, or resumes.
//! 3. What is sent again has the same bytes and the same key. Nothing is sent to a server that honors no
//!    keys, once a try may have arrived; nor to any once the key is too old.

mod credentials;
mod prepared;

use std::collections::HashMap;
use std::mem::swap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hapax_core::{Clock, Idempotency, OperationId, value};
use hapax_proxy::Upstream;
use hapax_saga::{
    AdmissionDenied, DefinitionError, Saga, StepContext, StepError, StepRetry, StuckReason,
};
use http::{StatusCode, Uri};
use serde::Deserialize;
use tokio::sync::{Notify, Semaphore};

use self::credentials::{credentials, unauthorized};
use self::prepared::{PreparedTry, check_key, keep_unsent};
pub(crate) use self::prepared::{TryTimes, keep_known, last_try, was_without_key};
use crate::accepted;
use crate::admission::{Admission, TryPermit};
use crate::body::LargeBody;
use crate::budget::LONGEST;
use crate::client::PAUSE;
use crate::credentials::{Credentials, Supplier};
use crate::exchange::{exchange, outgoing};
use crate::known::{self, Known};
use crate::request::{RecordedRequest, server_name};
use crate::response::{ClientResponse, MAX_RECORDED, RecordedResponse, ResponseKind};
use crate::send::report;
use crate::server::{Follow, Profile, Server, follow, is_replayed};
use crate::stats::{CountedTry, HostCounters, OperationCounters, add};

/// Reasons of a stuck operation that only a client has.
pub(crate) const UNAUTHORIZED: &str = "unauthorized";
pub(crate) const INVALID_TOKEN: &str = "invalid-token";
pub(crate) const CREDENTIALS_CHANGED: &str = "credentials-changed";
pub(crate) const KEY_CHANGED: &str = "key-changed";
const REJECTED: &str = "rejected";

/// Time for one try, from its beginning to the end of its response.
pub(crate) const TRY: Duration = Duration::from_secs(60);

/// Pause of a caller's operation without a permit: just longer than what it spends in memory.
const PARKED: Duration = PAUSE.saturating_add(Duration::from_millis(1));

/// An operation: the saga of a request.
pub(crate) type RequestSaga = Saga<RecordedRequest, RecordedResponse, ()>;

/// A declared server.
#[derive(Debug)]
pub(crate) struct Host {
    pub(crate) server: Server,
    pub(crate) upstream: Upstream,
    pub(crate) admission: Arc<Admission>,
    pub(crate) counters: HostCounters,
    /// Answers instead of the server, in tests with a paused clock.
    #[cfg(test)]
    pub(crate) double: Option<crate::tests::Double>,
}

/// An operation for which a caller of this process waits, or waited.
#[derive(Debug)]
pub(crate) struct Live {
    pub(crate) within: Duration,
    pub(crate) callers: usize,
    /// Shared by those that still wait: a caller may drop its future or its handle.
    pub(crate) waiting: Arc<()>,
    /// True if one of them has got the end.
    pub(crate) is_received: bool,
    /// A body that the journal does not keep.
    pub(crate) body: Option<LargeBody>,
    /// Notified when the operation is about to be stuck.
    pub(crate) stuck: Arc<Notify>,
    /// The next try at the node of callers.
    pub(crate) next: NextTry,
}

/// Parts of the next try of an operation. Their owner, the callers of the operation or its resumed run,
/// drops them if they are not used: the run may end at any point, and leave the try uncalled.
#[derive(Debug, Default)]
pub(crate) struct NextTry {
    /// Its permit, until it is prepared.
    permit: Option<TryPermit>,
    /// Its data, from its preparation to its call.
    trying: Option<Trying>,
}

/// Data of a try that are never stored.
#[derive(Debug)]
struct Trying {
    credentials: Credentials,
    /// True if the server has just rejected others.
    rejected: bool,
    permit: TryPermit,
}

/// The node of an operation in this process: that of callers, or that of resumed operations.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum ClientNode {
    Sending,
    Resuming,
}

/// An operation at a node.
pub(crate) type AtNode = (OperationId, ClientNode);

/// The state of the step.
#[derive(Debug)]
pub(crate) struct ClientState {
    pub(crate) hosts: HashMap<String, Host>,
    pub(crate) supplier: Option<Supplier>,
    pub(crate) within: Duration,
    /// Lease of an operation of a caller.
    lease: Duration,
    pub(crate) engine: Idempotency,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) counters: OperationCounters,
    live: Mutex<HashMap<OperationId, Live>>,
    /// The next tries of the operations that were resumed here.
    resumed: Mutex<HashMap<OperationId, NextTry>>,
    /// Operations whose last credentials the server has rejected, with the reason.
    rejected: Mutex<HashMap<OperationId, &'static str>>,
    /// One permit for each MiB of the responses that the journal does not keep.
    pub(crate) large: Arc<Semaphore>,
}

impl ClientState {
    pub(crate) fn new(
        hosts: HashMap<String, Host>,
        supplier: Option<Supplier>,
        [within, lease]: [Duration; 2],
        engine: Idempotency,
        clock: Arc<dyn Clock>,
        response_memory: usize,
    ) -> Self {
        let (live, resumed, rejected) = (Mutex::default(), Mutex::default(), Mutex::default());
        let large = Arc::new(Semaphore::new(response_memory >> 20));
        let counters = OperationCounters::default();
        Self {
            hosts,
            supplier,
            within,
            lease,
            engine,
            clock,
            counters,
            live,
            resumed,
            rejected,
            large,
        }
    }

    pub(crate) fn live(&self) -> MutexGuard<'_, HashMap<OperationId, Live>> {
        // Locked for single changes.
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether a caller of this process waits for the end of an operation.
    fn is_awaited(&self, id: &OperationId) -> bool {
        // One is that of the entry.
        self.live().get(id).is_some_and(|live| Arc::strong_count(&live.waiting) > 1)
    }

    fn resumed(&self) -> MutexGuard<'_, HashMap<OperationId, NextTry>> {
        // Locked for single changes.
        self.resumed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the next try of an operation at a node; `None` if no caller and no run there owns one.
    /// `change` must not drop a permit, because the lock is held.
    fn next<R>(&self, at: &AtNode, change: impl FnOnce(&mut NextTry) -> R) -> Option<R> {
        match at.1 {
            ClientNode::Sending => self.live().get_mut(&at.0).map(|live| change(&mut live.next)),
            ClientNode::Resuming => self.resumed().get_mut(&at.0).map(change),
        }
    }

    fn rejected(&self) -> MutexGuard<'_, HashMap<OperationId, &'static str>> {
        // Locked for single changes.
        self.rejected.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the reason for which the server has rejected the credentials of the last try that was sent, if it has.
    fn rejection(&self, id: &OperationId) -> Option<&'static str> {
        self.rejected().get(id).copied()
    }

    pub(crate) fn host(&self, request: &RecordedRequest) -> Option<&Host> {
        self.hosts.get(&server_name(&request.uri()?)?)
    }

    /// Removes the permit of a try that has not been prepared.
    pub(crate) fn take_permit(&self, at: &AtNode) -> Option<TryPermit> {
        self.next(at, |next| next.permit.take()).flatten()
    }

    /// Keeps the permit of a try that is about to be prepared.
    pub(crate) fn put_permit(&self, at: &AtNode, permit: TryPermit) {
        let mut permit = Some(permit);
        self.next(at, |next| swap(&mut next.permit, &mut permit));
    }

    /// Keeps the data of a try until it is called; `None` if its owner has left.
    fn put_trying(&self, at: &AtNode, trying: Trying) -> Option<()> {
        let mut trying = Some(trying);
        self.next(at, |next| swap(&mut next.trying, &mut trying))
    }

    /// Forgets what is in memory for an operation without callers.
    pub(crate) fn forget_operation(&self, id: &OperationId) {
        self.rejected().remove(id);
    }

    /// Decides whether an operation with this input is resumed now. One with a caller in this process is
    /// left to the caller, which waits in memory: if this process dies, the operation is due after a lease. One
    /// of a server that is not declared here is left to other processes, for which it stays due.
    pub(crate) fn resume(
        self: &Arc<Self>,
        id: &OperationId,
        input: &[u8],
    ) -> Result<Box<dyn Send>, AdmissionDenied> {
        if self.live().contains_key(id) {
            return Err(AdmissionDenied::Postponed(self.lease.min(LONGEST)));
        }
        let mut next = NextTry::default();
        // One that cannot be read is stuck by its run.
        if let Ok(input) = value::read::<ResumedRequest>(input) {
            let url: Option<Uri> = input.url.parse().ok();
            let host = url.as_ref().and_then(server_name).and_then(|name| self.hosts.get(&name));
            let host = host.ok_or(AdmissionDenied::LeftAlone(LONGEST))?;
            next.permit = Some(host.admission.resumed().map_err(AdmissionDenied::Postponed)?);
        }
        let before = self.resumed().insert(*id, next);
        // Dropped without the lock.
        drop(before);
        Ok(Box::new(ResumedTry { state: Arc::clone(self), id: *id }))
    }
}

/// Ends the tries of an operation until it is sent again or resumed.
pub(crate) fn stuck(
    at: &StepContext<Arc<ClientState>>,
    reason: StuckReason,
    text: &str,
    sent: bool,
) -> StepError<()> {
    let id = at.id();
    at.counters.stuck(&reason);
    // The next send asks for new credentials, whatever was rejected before.
    at.rejected().remove(&id);
    let has_caller = at.live().get(&id).map(|live| live.stuck.notify_one()).is_some();
    if !has_caller {
        let name = at.input().map(|request: RecordedRequest| request.name).unwrap_or_default();
        tracing::warn!(
            name,
            operation = %id,
            reason = reason.as_str(),
            "an operation for which no caller waits has stopped without a response: send it again, or resume"
        );
    }
    StepError::Stuck { reason, source: text.into(), sent }
}

/// The part of a request by which it is admitted.
#[derive(Deserialize)]
struct ResumedRequest {
    url: String,
}

/// A resumed operation, until its run has ended.
struct ResumedTry {
    state: Arc<ClientState>,
    id: OperationId,
}

impl Drop for ResumedTry {
    fn drop(&mut self) {
        let next = self.state.resumed().remove(&self.id);
        // Dropped without the lock.
        drop(next);
    }
}

/// Defines the saga for a node, whose outcomes are kept for the time `remember`, and which stays in memory
/// during pauses up to `park_after`.
pub(crate) fn define(
    state: Arc<ClientState>,
    remember: Duration,
    park_after: Duration,
    node: ClientNode,
) -> Result<RequestSaga, DefinitionError> {
    // The time of an operation is its own, and `prepare` ends it.
    const FOREVER: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);
    let mut saga = Saga::define("client", 1, state).retention(remember);
    saga = saga.max_value(2 * MAX_RECORDED).park_after(park_after);
    let retry = StepRetry::within(FOREVER).timeout(TRY);
    let request = saga.again("request", move |at, ()| call(at, node)).retry(retry);
    let request = request.prepare(move |at, ()| prepare(at, node)).no_undo();
    saga.flow(move |op, _: RecordedRequest| async move { op.run(request, ()).await })
}

/// Rejects a try that may not be made because of the ones before it.
fn check_age(
    at: &StepContext<Arc<ClientState>>,
    server: &Server,
    known: &Known,
) -> Result<(), StepError<()>> {
    let Some(age) = at.age() else { return Ok(()) };
    if known.status.is_some() {
        // It reads what may have happened.
        return Ok(());
    }
    if server.profile == Profile::WithoutKeys {
        let text = "a try may have arrived, and the server is declared without keys: look the operation up there, then acknowledge it";
        return Err(stuck(at, StuckReason::Unknown, text, true));
    }
    if age >= server.last_age(known.retention) {
        let text = format!(
            "expected a key younger than {:?}, found one of {age:?}: look the operation up at the server, then acknowledge it",
            server.last_age(known.retention)
        );
        return Err(stuck(at, StuckReason::KeyExpired, &text, false));
    }
    Ok(())
}

/// Returns the data of the responses so far, as far as this try may use them.
fn known(at: &StepContext<Arc<ClientState>>) -> Known {
    let known = at.prepared::<PreparedTry>().map(|it| it.known).unwrap_or_default();
    match at.age() {
        Some(_) => known,
        // Of tries that did not arrive; the rest is of no use to a first one.
        None => Known { operation: known.operation, ..Known::default() },
    }
}

async fn prepare(
    at: StepContext<Arc<ClientState>>,
    node: ClientNode,
) -> Result<PreparedTry, StepError<()>> {
    let (state, id) = (Arc::clone(&at), at.id());
    let request = read_request(&at)?;
    let Some(host) = state.host(&request) else {
        let source = "expected a declaration of the server of this operation, found none: declare it by `ClientBuilder::server`".into();
        return Err(StepError::Postponed { after: LONGEST, source });
    };
    let key = check_key(&at, &host.server)?;
    let known = known(&at);
    check_age(&at, &host.server, &known)?;
    let live = state.live().get(&id).map(|live| live.within);
    let before = at.prepared::<PreparedTry>();
    let within = live.or(before.as_ref().map(|it| it.within)).unwrap_or(state.within);
    let left = within.saturating_sub(at.spent());
    if left.is_zero() {
        // A try that was rejected was sent, and what is left is to get other credentials.
        let reason = match state.rejection(&id) {
            Some(reason) => StuckReason::Step(reason.to_owned()),
            None => StuckReason::Exhausted,
        };
        let text = format!("expected a response within {within:?} of tries, found none");
        return Err(stuck(&at, reason, &text, false));
    }
    let is_retry = at.number() > 1 || at.age().is_some();
    let permit = permit(&state, host, (id, node), is_retry).map_err(|after| {
        add(&host.counters.denied);
        let source = "the server has no permit for a try now".into();
        StepError::Postponed { after: after.min(left), source }
    })?;
    let (hash, credentials, rejected) = credentials(&at, &request, &host.server).await?;
    let trying = Trying { credentials, rejected, permit };
    // A run whose journal fails ends before the call, and without an owner these would not be dropped.
    state.put_trying(&(id, node), trying).ok_or_else(|| {
        let source = "its callers have left: it is sent again, or resumed".into();
        StepError::Postponed { after: PARKED, source }
    })?;
    let times = TryTimes::next(before.map(|it| it.times), state.clock.now().into());
    Ok(PreparedTry { within, key, credentials: hash, rejected, known, times })
}

/// Returns the permit of a try. Without one a caller's operation is parked, and the caller waits for its
/// permit; a pause in memory is followed by another try of the same run.
fn permit(
    state: &ClientState,
    host: &Host,
    at: AtNode,
    is_retry: bool,
) -> Result<TryPermit, Duration> {
    let mut permit = match (state.take_permit(&at), at.1) {
        (Some(permit), _) => permit,
        (None, ClientNode::Sending) => host.admission.try_caller().ok_or(PARKED)?,
        (None, ClientNode::Resuming) => host.admission.resumed()?,
    };
    match (is_retry.then(|| permit.retry()), at.1) {
        (None | Some(Ok(())), _) => Ok(permit),
        (Some(Err(_)), ClientNode::Sending) => Err(PARKED),
        (Some(Err(pause)), ClientNode::Resuming) => Err(pause),
    }
}

async fn call(
    at: StepContext<Arc<ClientState>>,
    node: ClientNode,
) -> Result<RecordedResponse, StepError<()>> {
    let (state, id) = (Arc::clone(&at), at.id());
    let request = read_request(&at)?;
    let known = known(&at);
    let trying = state.next(&(id, node), |next| next.trying.take()).flatten();
    let (Some(host), Some(mut trying)) = (state.host(&request), trying) else {
        keep_unsent(&at, &known);
        return Err(StepError::not_sent(
            "expected the credentials of this try in this process, found none: it is prepared again",
        ));
    };
    // Saving the try may have taken long.
    check_age(&at, &host.server, &known)?;
    let read = known.status.as_deref().map(|status| accepted::status_request(&request, status));
    let key = read.is_none().then_some(&id);
    let outgoing = outgoing(read.as_ref().unwrap_or(&request), host, key, &trying.credentials)
        .ok_or_else(|| {
            StepError::not_sent("expected a stored request that is valid HTTP, found another")
        })?;
    state.rejected().remove(&id);
    trying.permit.begin();
    let counted = CountedTry::new(&host.counters);
    // Boxed: the state of a connection is large.
    let exchanged = Box::pin(exchange(&state, host, outgoing, state.is_awaited(&id))).await;
    trying.permit.end(exchanged.is_err());
    counted.end(match &exchanged {
        Ok(_) => |counters| &counters.responded,
        Err(StepError::NotSent(_)) => |counters| &counters.not_sent,
        Err(_) => |counters| &counters.unknown,
    });
    if let Err(StepError::NotSent(_)) = &exchanged {
        keep_unsent(&at, &known);
    }
    let (head, body) = exchanged?;
    let bytes = body.as_ref().map(|body| body.bytes.clone()).unwrap_or_default();
    let (profile, now) = (host.server.profile, state.clock.now());
    let known = known::learn(&at, host, known, &head.headers);
    let prepared: Option<PreparedTry> = at.prepared();
    let times = prepared.as_ref().map(|it| it.times).unwrap_or_default();
    let left = prepared.map_or(state.within, |it| it.within).saturating_sub(at.spent());
    if let Some(goes_on) =
        accepted::follow(&at, &request, host, known.clone(), (&head, &bytes), left)
    {
        host.admission.responded();
        return Err(goes_on);
    }
    let profile = match profile {
        // Reading may be repeated, whatever the server does with keys.
        Profile::WithoutKeys if read.is_some() => Profile::Plain,
        profile => profile,
    };
    let follows = follow(profile, head.status, &head.headers, &bytes, now);
    tracing::debug!(name = request.name, operation = %id, status = head.status.as_u16(), follows = ?follows, "received a response");
    if !matches!(follows, Follow::Again(_)) {
        host.admission.responded();
    }
    let status = head.status;
    let replayed = is_replayed(profile, &head.headers);
    let response = ClientResponse { status, headers: head.headers, body: bytes.clone() };
    let kind = match follows {
        Follow::Final if body.is_none() || bytes.len() > MAX_RECORDED => ResponseKind::NotRecorded,
        Follow::Final => ResponseKind::Complete,
        // An earlier try may have had an effect, which this response does not concern.
        Follow::NothingHappened if at.age().is_some() => {
            let reason = match status {
                StatusCode::FORBIDDEN => StuckReason::Step(UNAUTHORIZED.to_owned()),
                _ => StuckReason::Unknown,
            };
            return Err(stuck(&at, reason, &format!("found {status}"), true));
        }
        Follow::NothingHappened
            if state.is_awaited(&id)
                && body.as_ref().is_some_and(|body| body.bytes.len() <= MAX_RECORDED) =>
        {
            ResponseKind::NothingHappened
        }
        // No list would have it once its response is lost.
        Follow::NothingHappened => {
            let text = format!(
                "the server executed nothing ({status}), and no caller got the response: correct the credentials or the declaration of the server"
            );
            let reason = StuckReason::Step(REJECTED.to_owned());
            return Err(stuck(&at, reason, &text, false));
        }
        Follow::Again(after) => {
            let after = after.min(left);
            let source = format!("found {status}").into();
            return Err(StepError::RetryAfter { after, source });
        }
        Follow::Unauthorized | Follow::InvalidToken => {
            keep_unsent(&at, &known);
            let is_token = follows == Follow::InvalidToken;
            let reason = if is_token { INVALID_TOKEN } else { UNAUTHORIZED };
            return Err(unauthorized(&at, trying.rejected, reason));
        }
        Follow::Unknown => {
            let text = format!("the server reports that the outcome is unknown ({status})");
            return Err(stuck(&at, StuckReason::Unknown, &text, true));
        }
        Follow::Reused => {
            tracing::error!(
                name = request.name,
                operation = %id,
                "expected the server to have this request under the key, found another one: find the program or the name that used the key; the operation is not sent again"
            );
            ResponseKind::Reused
        }
    };
    add(&state.counters.finished);
    if kind == ResponseKind::NotRecorded
        && let Some(live) = state.live().get_mut(&id)
    {
        live.body = body;
    }
    // A caller that has left reports it.
    if !state.live().contains_key(&id) {
        report(&request.name, &id, status);
    }
    Ok(RecordedResponse::new(kind, &request, &response).after(at.number(), replayed, times))
}

fn read_request(at: &StepContext<Arc<ClientState>>) -> Result<RecordedRequest, StepError<()>> {
    at.input().map_err(|error| StepError::stuck(StuckReason::Unreadable, error))
}
