//! Sends: from a caller's request to the end of its operation.

use std::fmt;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use hapax_core::{ClaimError, Key, OperationId, Outcome, RecordState, StoreError};
use hapax_saga::log::{Log, Stuck};
use hapax_saga::{
    SagaDecision, SagaError, SagaHandle, SagaLookup, SagaOperatorError, SagaStartError, SagaView,
    StuckReason,
};
use http::StatusCode;
use tokio::sync::{Notify, oneshot};
use tokio::time::{Instant, sleep, sleep_until, timeout};

use crate::admission::Admission;
use crate::client::Client;
use crate::error::SendError;
use crate::flow::{
    CREDENTIALS_CHANGED, ClientNode, INVALID_TOKEN, KEY_CHANGED, Live, NextTry, UNAUTHORIZED,
    was_without_key,
};
use crate::journal::JournalError;
use crate::request::RecordedRequest;
use crate::response::{RecordedResponse, ResponseKind, Sent};
use crate::server::Profile;

/// First and longest interval at which a call looks whether its operation is stuck or due.
const LOOK: [Duration; 2] = [Duration::from_millis(20), Duration::from_secs(1)];

/// Longest interval at which a call that waits for its permit looks whether another process has continued
/// its operation.
const WAITING: Duration = Duration::from_secs(60);

/// Times that a call which has begun no execution lets a stuck operation be tried again. Another process, with other
/// credentials, may begin the execution in its place, and stop again.
const ASKS: u32 = 3;

/// Handle of an operation whose response did not arrive within the time to wait. Dropping it does not stop the
/// operation.
pub struct Handle {
    name: String,
    end: oneshot::Receiver<Result<Sent, SendError>>,
    /// Token of the callers that wait.
    _waiting: Arc<()>,
}

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Handle({})", self.name)
    }
}

impl Handle {
    /// Returns the name of the operation.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Waits for the response, at most for `wait`.
    ///
    /// # Errors
    /// [`SendError::Pending`] with a handle if the time is over; [`SendError::Closed`] if the client was closed;
    /// others of [`SendError`].
    pub async fn wait(mut self, wait: Duration) -> Result<Sent, SendError> {
        match timeout(wait, &mut self.end).await {
            Ok(Ok(end)) => end,
            // The runtime is shutting down.
            Ok(Err(_)) => Err(SendError::Closed),
            Err(_) => Err(SendError::Pending(self)),
        }
    }
}

/// A caller among the live ones of its operation, until this is dropped.
struct LiveCaller {
    client: Client,
    id: OperationId,
    stuck: Arc<Notify>,
}

impl LiveCaller {
    /// Enters a caller; the second value is its own while it waits.
    fn enter(client: Client, id: OperationId, within: Duration) -> (Self, Arc<()>) {
        let (stuck, waiting) = {
            let mut live = client.inner.state.live();
            let live = live.entry(id).or_insert_with(|| Live {
                within,
                callers: 0,
                waiting: Arc::default(),
                is_received: false,
                body: None,
                stuck: Arc::default(),
                next: NextTry::default(),
            });
            live.callers += 1;
            // The one that tries for longer decides.
            live.within = live.within.max(within);
            (Arc::clone(&live.stuck), Arc::clone(&live.waiting))
        };
        (Self { client, id, stuck }, waiting)
    }

    /// Leaves the operation; `receives` is true if this caller gets its end. Returns whether it was the last
    /// one, and no caller gets the end.
    fn leave(self, receives: bool) -> bool {
        let mut live = self.client.inner.state.live();
        live.get_mut(&self.id).is_some_and(|live| {
            live.is_received |= receives;
            live.callers == 1 && !live.is_received
        })
    }
}

impl Drop for LiveCaller {
    fn drop(&mut self) {
        let state = &self.client.inner.state;
        let mut live = state.live();
        let Some(entry) = live.get_mut(&self.id) else { return };
        entry.callers -= 1;
        if entry.callers > 0 {
            return;
        }
        // Dropped without the lock.
        let _last = live.remove(&self.id);
        drop(live);
        state.forget_operation(&self.id);
    }
}

/// The state that a call keeps from one start of its operation to the next.
struct Rounds {
    /// True if this call has begun a try.
    executes: bool,
    /// Times that the operation may still be tried again when it is found stuck.
    asks: u32,
    /// True if the next try is a retry.
    is_retry: bool,
    /// True once the journal has the operation.
    is_accepted: bool,
    /// The pause before the next look.
    look: Duration,
    /// Time at which the operation is accepted also without a permit, and later that of its end.
    waits_until: Instant,
}

impl Rounds {
    /// Pauses after an error of the journal. It ends a call whose operation is not accepted, or whose time is
    /// over, and one that cannot read its own record; any other call looks again, since this process
    /// promises to try what it has accepted.
    async fn look_again(&self, error: StoreError) -> Result<(), SendError> {
        let is_over = self.waits_until <= Instant::now();
        if !self.is_accepted || is_over || matches!(error, StoreError::Corrupt(_)) {
            return Err(JournalError::Store(error).into());
        }
        sleep(LOOK[1]).await;
        Ok(())
    }
}

impl Client {
    /// Sends a request on a task, which continues when the caller stops waiting.
    pub(crate) async fn send(
        &self,
        name: Key,
        request: RecordedRequest,
        within: Duration,
        wait: Duration,
    ) -> Result<Sent, SendError> {
        let (ended, end) = oneshot::channel();
        let id = self.id(&name);
        let (caller, waiting) = LiveCaller::enter(self.clone(), id, within);
        let mut handle = Handle { name: name.as_str().to_owned(), end, _waiting: waiting };
        let (accept, accepted) = oneshot::channel();
        let client = self.clone();
        tokio::spawn(async move {
            let mut closed = client.inner.closed.subscribe();
            let end = tokio::select! {
                end = client.drive(&caller, &name, &request, (within, wait), accept) => end,
                _ = closed.wait_for(|closed| *closed) => Err(SendError::Closed),
            };
            let is_unreceived = caller.leave(!ended.is_closed());
            match ended.send(end) {
                Err(Err(error)) => tracing::warn!(
                    name = name.as_str(),
                    operation = %id,
                    %error,
                    "an operation has no response, and no caller waits: send it again, or resume"
                ),
                Err(Ok(sent)) if is_unreceived => report(name.as_str(), &id, sent.response.status),
                _ => {}
            }
        });
        let over = async {
            sleep(wait).await;
            // The journal has a pending operation. A start that fails ends the call instead.
            accepted.await
        };
        tokio::select! {
            biased;
            end = &mut handle.end => end.unwrap_or(Err(SendError::Closed)),
            Ok(()) = over => Err(SendError::Pending(handle)),
            else => Err(SendError::Closed),
        }
    }

    /// Drives an operation until it has ended, or is stuck.
    async fn drive(
        &self,
        caller: &LiveCaller,
        name: &Key,
        request: &RecordedRequest,
        (within, wait): (Duration, Duration),
        accept: oneshot::Sender<()>,
    ) -> Result<Sent, SendError> {
        let (inner, begun) = (&self.inner, Instant::now());
        let mut accept = Some(accept);
        let mut rounds = Rounds {
            executes: false,
            asks: ASKS,
            is_retry: false,
            is_accepted: false,
            look: LOOK[0],
            waits_until: deadline(begun, wait.min(within)),
        };
        loop {
            if let Some(host) = inner.state.host(request) {
                self.wait_for_permit(caller, &host.admission, &rounds).await?;
            }
            let started = inner.sending.start(&inner.saga, &Self::scope(), name, request).await;
            let started = match started {
                Ok(started) => started,
                // The request of a name that is free again may be another one.
                Err(SagaStartError::KeyReused) if self.frees(name).await? => continue,
                Err(SagaStartError::KeyReused) => return Err(SendError::Reused),
                Err(
                    SagaStartError::Store(error) | SagaStartError::Claim(ClaimError::Store(error)),
                ) if rounds.is_accepted => {
                    drop(inner.state.take_permit(&(caller.id, ClientNode::Sending)));
                    rounds.look_again(error).await?;
                    continue;
                }
                Err(error) => return Err(SendError::journal(error)),
            };
            if let Some(accept) = accept.take() {
                // A caller that waits for the end does not listen.
                let _ = accept.send(());
                rounds.is_accepted = true;
                rounds.waits_until = deadline(begun, within);
            }
            if !started.has_begun() {
                // What another caller's run has prepared stays.
                drop(inner.state.take_permit(&(caller.id, ClientNode::Sending)));
            }
            rounds.executes |= started.has_begun();
            // An operation that stopped during this call is not granted new tries by it.
            if rounds.executes {
                rounds.asks = 0;
            }
            let Some(end) = self.ended(caller, &started, request, &mut rounds).await? else {
                continue;
            };
            match end {
                // The name was freed, and taken by another caller, while this one waited.
                Ok(recorded) if recorded.request != request.fingerprint() => {
                    return Err(SendError::Reused);
                }
                // A response for which this call has waited is its own.
                Ok(recorded)
                    if recorded.kind == ResponseKind::NothingHappened && started.had_ended() =>
                {
                    self.free(&started.id(), |outcome| self.is_free_after(outcome)).await?;
                }
                Ok(recorded) => return self.sent(caller, recorded, rounds.executes),
                // The name was freed while this call waited.
                Err(SagaError::Gone) => {}
                Err(SagaError::Cancelled { reason }) => return Err(SendError::Unknown(reason)),
                Err(error) => return Err(SendError::journal(error)),
            }
        }
    }

    /// Waits for the permit of a try, if a start would begin one. It returns without one once the
    /// operation is to be accepted, or to end, whatever its server does.
    async fn wait_for_permit(
        &self,
        caller: &LiveCaller,
        admission: &Arc<Admission>,
        rounds: &Rounds,
    ) -> Result<(), SendError> {
        let state = &self.inner.state;
        let at = (caller.id, ClientNode::Sending);
        let free = if rounds.is_retry { None } else { admission.try_caller() };
        if let Some(permit) = free {
            state.put_permit(&at, permit);
            return Ok(());
        }
        let mut turn = pin!(admission.caller(rounds.is_retry));
        let mut pause = LOOK[1];
        loop {
            match self.would_begin(&caller.id).await {
                Ok(true) => {}
                Ok(false) => return Ok(()),
                Err(error) => {
                    rounds.look_again(error).await?;
                    continue;
                }
            }
            tokio::select! {
                permit = &mut turn => {
                    state.put_permit(&at, permit);
                    return Ok(());
                }
                () = sleep_until(rounds.waits_until) => return Ok(()),
                () = sleep(pause) => pause = (pause * 2).min(WAITING),
            }
        }
    }

    /// Returns whether a start of an operation would begin a try, and not find a response, or another
    /// process that runs it.
    async fn would_begin(&self, id: &OperationId) -> Result<bool, StoreError> {
        let seen = self.inner.engine.load(id).await?;
        let is_current = |until: Option<_>| until.is_none_or(|until| seen.now < until);
        let stored = seen.stored.filter(|stored| is_current(stored.keep_until));
        Ok(stored.is_none_or(|stored| match stored.record.state {
            RecordState::Released => true,
            RecordState::InFlight => stored.lease_until <= seen.now,
            _ => false,
        }))
    }

    fn sent(
        &self,
        caller: &LiveCaller,
        recorded: RecordedResponse,
        executes: bool,
    ) -> Result<Sent, SendError> {
        let mut response = recorded.response();
        match recorded.kind {
            ResponseKind::Complete | ResponseKind::NothingHappened => {}
            ResponseKind::Reused => return Err(SendError::ReusedAtServer(Box::new(response))),
            ResponseKind::NotRecorded => {
                let live = self.inner.state.live();
                let body = live.get(&caller.id).and_then(|live| live.body.as_ref());
                let body = body.map(|body| body.bytes.clone());
                response.body =
                    body.ok_or(SendError::ResponseNotRetained { status: recorded.status() })?;
            }
        }
        let (replayed, tries) = (recorded.replayed || !executes, recorded.tries);
        Ok(Sent { response, replayed, tries, stored: recorded.kind == ResponseKind::Complete })
    }

    /// Waits for the end of an operation. `None`: it is to be started again.
    async fn ended(
        &self,
        caller: &LiveCaller,
        started: &SagaHandle<RecordedResponse, ()>,
        request: &RecordedRequest,
        rounds: &mut Rounds,
    ) -> Result<Option<Result<RecordedResponse, SagaError<()>>>, SendError> {
        // The rest of the pause of a parked operation, which no process runs.
        let mut parked: Option<Duration> = None;
        // Not dropped by a look: it may be reading the journal.
        let mut outcome = pin!(started.outcome());
        loop {
            let stuck = caller.stuck.notified();
            tokio::select! {
                end = &mut outcome, if parked.is_none() => match end {
                    Err(SagaError::Store(error)) => {
                        rounds.look_again(error).await?;
                        outcome.set(started.outcome());
                        continue;
                    }
                    end => return Ok(Some(end)),
                },
                // It is saved next.
                () = stuck => rounds.look = LOOK[0],
                () = sleep(parked.unwrap_or(rounds.look)) => {
                    rounds.look = (rounds.look * 2).min(LOOK[1]);
                }
            }
            parked = None;
            let view = match self.inner.operator.show(&caller.id).await {
                Err(SagaOperatorError::Store(error)) => {
                    rounds.look_again(error).await?;
                    continue;
                }
                view => view.map_err(SendError::journal)?,
            };
            let SagaLookup::Unfinished(view) = view else {
                outcome.set(started.outcome());
                continue;
            };
            if let Some(log) = &view.log
                && let Some(stuck) = &log.stuck
            {
                // Processes that died before this call say nothing about its own try.
                if rounds.asks == 0 && stuck.reason != StuckReason::Crashed {
                    return Err(stuck_end(stuck, log));
                }
                if self.may_retry(request, &stuck.reason, log) {
                    if !self.retry(&view).await? {
                        continue;
                    }
                    rounds.asks = rounds.asks.saturating_sub(1);
                    rounds.is_retry = log.steps.first().is_some_and(|step| step.forward.arrived);
                    return Ok(None);
                }
                return Err(match stuck_end(stuck, log) {
                    // That was another declaration.
                    SendError::KeyChanged if was_without_key(log) => {
                        SendError::Unknown(stuck.detail.clone())
                    }
                    end => end,
                });
            }
            // No process runs it: it was parked, or its process died, perhaps before the first save.
            if view.lease_until <= view.now {
                let tries = view.log.iter().flat_map(|log| log.steps.first());
                rounds.is_retry =
                    tries.map(|step| &step.forward).any(|it| it.begun > 0 || it.arrived);
                return Ok(None);
            }
            let is_parked = |log: &Log| log.parked.is_some() && log.attempt == view.attempt;
            if view.log.as_ref().is_some_and(is_parked) {
                parked = Some(view.lease_until.since(view.now));
            }
        }
    }

    /// Returns whether an operation that is stuck for this reason may be tried again. It is checked again
    /// before each try whether it may be sent; where it certainly may not, the decision would be one more
    /// in the log each time.
    pub(crate) fn may_retry(
        &self,
        request: &RecordedRequest,
        reason: &StuckReason,
        log: &Log,
    ) -> bool {
        let arrived = log.steps.first().is_some_and(|step| step.forward.arrived);
        let host = self.inner.state.host(request);
        let can_be_sent =
            host.is_some_and(|host| !arrived || host.server.profile != Profile::WithoutKeys);
        match reason {
            StuckReason::Exhausted
            | StuckReason::Crashed
            | StuckReason::Unknown
            | StuckReason::Panicked
            | StuckReason::Step(_) => can_be_sent,
            StuckReason::KeyExpired => false,
            // The journal is of another version, or too small.
            _ => false,
        }
    }

    /// Lets a stuck operation be tried again. Returns false if it has changed since it was read: another
    /// process has decided or ended it, or has only found it stuck.
    pub(crate) async fn retry(&self, view: &SagaView) -> Result<bool, SendError> {
        let decided =
            self.inner.operator.decide(view, &SagaDecision::Retry, "client", "sent again").await;
        match decided {
            Ok(()) => Ok(true),
            Err(SagaOperatorError::Changed) => Ok(false),
            Err(error) => Err(SendError::journal(error)),
        }
    }

    /// Frees a name whose operation had no effect, and of which the server keeps nothing. Returns
    /// whether it is free, or was until another caller took it.
    async fn frees(&self, name: &Key) -> Result<bool, SendError> {
        let inner = &self.inner;
        let found = inner.sending.find(&inner.saga, &Self::scope(), name).await;
        let Some(started) = found.map_err(JournalError::Store)? else { return Ok(true) };
        let mut frees = false;
        let judge = |outcome: &Outcome| {
            frees = self.is_free_after(outcome);
            frees
        };
        self.free(&started.id(), judge).await?;
        Ok(frees)
    }

    /// Returns whether an outcome leaves the name free.
    fn is_free_after(&self, outcome: &Outcome) -> bool {
        let recorded = self.inner.saga.output(outcome);
        matches!(recorded, Some(Ok(recorded)) if recorded.kind == ResponseKind::NothingHappened)
    }
}

/// Reports the response of an operation for which no caller waits.
pub(crate) fn report(name: &str, id: &OperationId, status: StatusCode) {
    tracing::info!(
        name,
        operation = %id,
        status = status.as_u16(),
        "received the response of an operation for which no caller waits"
    );
}

/// Returns the time after a span, or one that never comes.
fn deadline(begun: Instant, span: Duration) -> Instant {
    const NEVER: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);
    begun + span.min(NEVER)
}

/// Returns the end of a send whose operation is stuck.
pub(crate) fn stuck_end(stuck: &Stuck, log: &Log) -> SendError {
    let tries = log.steps.first().map(|step| &step.forward);
    let last = tries.and_then(|tries| tries.error.as_deref());
    let text = match last {
        Some(last) => format!("{}; last error: {last}", stuck.detail),
        None => stuck.detail.clone(),
    };
    let arrived = tries.is_some_and(|tries| tries.arrived);
    match &stuck.reason {
        StuckReason::KeyExpired => SendError::Expired,
        StuckReason::Step(reason) if reason == CREDENTIALS_CHANGED => SendError::CredentialsChanged,
        StuckReason::Step(reason) if reason == KEY_CHANGED => SendError::KeyChanged,
        StuckReason::Step(reason) if reason == UNAUTHORIZED => SendError::Unauthorized,
        StuckReason::Step(reason) if reason == INVALID_TOKEN => SendError::InvalidToken,
        _ if arrived => SendError::Unknown(text),
        _ => SendError::NotSent(text),
    }
}
