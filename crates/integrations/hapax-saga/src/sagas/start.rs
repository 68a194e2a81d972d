//! The start of a saga: its claim, its entry, and its first execution.

use std::sync::{Arc, Weak};
use std::time::Duration;

use hapax_core::schedule::{EntryKey, NewEntry};
use hapax_core::store::BoxFuture;
use hapax_core::{Claim, EntryId, Lease, OperationId, SystemEntropy};
use tokio::sync::oneshot;
use tokio::time::sleep;

use crate::definition::Definition;
use crate::driver::{self, Starting};
use crate::error::SagaStartError;
use crate::handle::Found;
use crate::log::Log;
use crate::node::{Node, ScheduledSaga};
use crate::note::{Note, policy};

/// First and longest interval at which a start looks whether the start of another caller was accepted.
const ACCEPTED_POLL: [Duration; 2] = [Duration::from_millis(5), Duration::from_millis(250)];

/// Returns the state that a start finds. It waits for the start of another caller only while its
/// own caller waits.
pub(super) async fn start(
    node: Arc<Node>,
    definition: Arc<Definition>,
    id: OperationId,
    note: Note,
    caller: Weak<()>,
) -> Result<Found, SagaStartError> {
    let lease = match claim(&node, id, &note, &caller).await? {
        Ok(lease) => lease,
        Err(found) => return Ok(found),
    };
    let log_exists = lease.checkpoint().is_some();
    let permit = Arc::clone(&node.permits).try_acquire_owned().ok();
    let busy = permit.filter(|_| !node.is_shutting_down()).and_then(|it| node.enter(id, it));
    let log = match lease.checkpoint().map(|log| Log::decode(log)).transpose() {
        Ok(log) => log,
        Err(error) => {
            // It was accepted by a version that can read it, which continues it.
            tracing::error!(operation = ?id, %error, "the log of a saga cannot be read: run the version that wrote it");
            let _ = lease.withdraw().await;
            return Ok(Found::Unfinished);
        }
    };
    // Its lease had lapsed, or its store ended all leases, as a file does when it is opened. It waits for a decision,
    // and this start begins no execution.
    if log.as_ref().is_some_and(|log| log.stuck.is_some()) {
        let _ = lease.withdraw().await;
        return Ok(Found::Unfinished);
    }
    // A saga keeps the version of its log, also if this start passes another one.
    let own = match &log {
        Some(log) => node.definition(&log.definition, log.version),
        None => Some(definition),
    };
    let Some(definition) = own else {
        // A process that has this version continues it. If that is not stored, the lease lapses.
        let _ = lease.withdraw().await;
        return Ok(Found::Unfinished);
    };
    let found = found(&node, id, log.as_ref()).await;
    let (key, must_insert) = match found {
        Ok(found) => found,
        Err(error) => {
            // Nothing was executed.
            let _ = lease.withdraw().await;
            return Err(error);
        }
    };
    let input = note.input.0.clone();
    let encoded = match must_insert.then(|| note.encode()).transpose() {
        Ok(encoded) => encoded,
        Err(error) => {
            let _ = lease.withdraw().await;
            return Err(error.into());
        }
    };
    // Not due before it is parked, if there is no room: a node that looked at it while it is
    // claimed would postpone it by a lease.
    let (queue, due_in) = (definition.queue.clone(), node.lease);
    let mut entry = encoded.map(|note| NewEntry { key, queue, due_in, note });
    // The owner before may have been accepted with an entry of its own, which is removed once there is a
    // log of another one: that one must exist before the log.
    if busy.is_some()
        && log.is_none()
        && lease.is_takeover()
        && let Some(entry) = entry.take()
        && let Err(error) = lease.keep_alive(node.insert_entry(entry)).await
    {
        let _ = lease.withdraw().await;
        return Err(error.into());
    }
    let crashes = log.as_ref().map_or(0, |log| log.crashes_before(lease.attempt()));
    if busy.is_some() && !must_insert && lease.is_takeover() && !node.enter_alone(id, crashes) {
        // Another suspect runs here, and the entry is due. This execution does not count.
        let _ = lease.withdraw().await;
        return Ok(Found::Unfinished);
    }
    // It may be due long after the end of the lease: at the end of the pause from which this takes it. It is
    // due within a lease as long as a process runs the saga.
    if busy.is_some()
        && !must_insert
        && let Err(error) = lease.keep_alive(node.due_within_lease(key)).await
    {
        let _ = lease.withdraw().await;
        return Err(error.into());
    }
    let inserting = entry.clone().map(|entry| {
        let node = Arc::clone(&node);
        Box::pin(async move { node.insert_entry(entry).await }) as BoxFuture<'static, _>
    });
    let saga = ScheduledSaga { key, due: None, input };
    match (busy, inserting) {
        (Some(busy), inserting) => {
            let (inserted, accepted) = oneshot::channel();
            let starting = inserting.map(|insert| Starting { insert, inserted });
            let again = Arc::clone(&node);
            tokio::spawn(async move {
                driver::drive(node, definition, lease, saga, starting).await;
                drop(busy);
            });
            if let Some(entry) = entry {
                match accepted.await {
                    Ok(inserted) => inserted?,
                    // The lease was lost meanwhile. Beside the log of another owner this entry is
                    // removed, like a late copy.
                    Err(_) => again.insert_entry(entry).await?,
                }
            }
        }
        // No permit is free: the saga is parked, and is due now.
        (None, Some(inserting)) => {
            if let Err(error) = lease.keep_alive(inserting).await {
                // Nothing was executed. An entry that arrives later finds no record in flight, or one
                // that has the log of a start that was not accepted, which it continues.
                let _ = lease.withdraw().await;
                return Err(error.into());
            }
            park_new(&node, &definition, lease, key, log).await;
        }
        // This start has executed nothing: it is no crash, and the lease must not keep the saga from
        // the next node. That one may have postponed the entry because of this claim.
        (None, None) => {
            let _ = lease.withdraw().await;
            let _ = node.make_due(key).await;
        }
    }
    Ok(match log_exists {
        true => Found::Continued,
        false => Found::Nothing,
    })
}

/// Returns the key of the entry of a saga that was claimed, and whether the entry is to be inserted.
async fn found(
    node: &Node,
    operation: OperationId,
    log: Option<&Log>,
) -> Result<(EntryKey, bool), SagaStartError> {
    let Some(log) = log else {
        let id = EntryId::fresh(&SystemEntropy)?;
        return Ok((EntryKey { operation, id }, true));
    };
    let key = EntryKey { operation, id: EntryId::from_bytes(log.entry) };
    Ok((key, !log.inserted && !node.has_entry(key).await?))
}

/// Claims a saga that starts; the error is what is found of one that was accepted before.
///
/// A saga is accepted if its record has a log and its entry exists: see [`Starting`]. An owner that died
/// before that is taken over.
async fn claim(
    node: &Node,
    id: OperationId,
    note: &Note,
    caller: &Weak<()>,
) -> Result<Result<Lease, Found>, SagaStartError> {
    let [mut pause, longest] = ACCEPTED_POLL;
    loop {
        match node.engine.claim_id(id, note, &policy(node.lease)).await? {
            Claim::Execute(lease) => return Ok(Ok(lease)),
            Claim::Mismatch => return Err(SagaStartError::KeyReused),
            Claim::InFlight { remaining, .. } => {
                let stored = node.engine.load(&id).await?.stored;
                let log = stored.and_then(|it| it.record.checkpoint).map(|log| Log::decode(&log));
                let is_accepted = match log {
                    // One of a later version, which continues it.
                    Some(Err(_)) => true,
                    Some(Ok(log)) => !found(node, id, Some(&log)).await?.1,
                    None => false,
                };
                if is_accepted || caller.strong_count() == 0 {
                    return Ok(Err(Found::Unfinished));
                }
                // An execution of this process may outlive its lease for a moment.
                sleep(pause.min(remaining).max(ACCEPTED_POLL[0])).await;
                pause = (pause * 2).min(longest);
            }
            Claim::Replay(_) | Claim::Unknown { .. } | Claim::Reconcile(_) => {
                return Ok(Err(Found::Ended));
            }
        }
    }
}

/// Parks a saga that starts, of which nothing was called. It may have the log of a start that was not
/// accepted.
async fn park_new(
    node: &Node,
    definition: &Definition,
    lease: Lease,
    key: EntryKey,
    log: Option<Log>,
) {
    let now = lease.fence().issued_at().into();
    let mut log = log.unwrap_or_else(|| definition.new_log(key.id, now));
    // Parked by this attempt, which is no crash.
    log.not_begun(now);
    let log = Log { attempt: lease.attempt(), inserted: true, ..log };
    let Ok(log) = log.encode() else { return };
    // If either is not stored, the entry is due when the lease lapses.
    if lease.park(log, Duration::ZERO).await.is_ok() {
        let _ = node.make_due(key).await;
    }
}
