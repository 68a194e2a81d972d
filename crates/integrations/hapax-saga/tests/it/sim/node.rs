//! A process: it starts sagas, looks at due entries, and runs what it has claimed.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use hapax_core::exchange::{
    ClaimExchange, ClaimRequest, ClaimResult, Executions, Next, Ownership, WriteResult,
};
use hapax_core::machine::OwnerAction;
use hapax_core::schedule::EntryKey;
use hapax_core::store::{Snapshot, Swapped};
use hapax_core::{
    EntryId, Fingerprint, FingerprintScheme, OnUnknown, OperationId, RecordState, Terms,
};
use hapax_saga::log::{Log, LogTime};

use super::bugs::Bug;
use super::checks;
use super::drive;
use super::facts::saga_id;
use super::plan::{DAY, LEASE, SECOND, duration};
use super::senders;
use super::store::{self, Entry, Note};
use super::world::{Slot, W};

/// A process between two crashes.
pub(crate) struct Node {
    pub(crate) w: W,
    pub(crate) number: usize,
    executions: Executions,
    /// The latest time of the store's clock that is known here, and when it was read.
    clock: Cell<(u64, u64)>,
}

pub(crate) type N = Rc<Node>;

/// The right to run a saga, until a time of the process's own clock.
pub(crate) struct SimLease {
    pub(crate) ownership: Ownership,
    pub(crate) until: u64,
    pub(crate) renew_at: u64,
}

/// Result of a write of an owner.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Wrote {
    Recorded,
    Lost,
    /// The write may have arrived, and the lease has lapsed.
    Unclear,
}

/// Answer to a start.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Started {
    Accepted,
    Ended,
    /// Another execution is in flight, of which it is not known whether it has an entry.
    InFlight,
    Mismatch,
    /// The start failed, and the saga does not begin.
    Withdrawn,
}

pub(crate) fn terms(w: &W) -> Terms {
    let days = if w.has(Bug::ShortRetention) { 1 } else { 36_500 };
    let retention = duration(days * DAY);
    Terms { lease: duration(LEASE), retention, on_unknown: OnUnknown::Reexecute }
}

pub(crate) fn scheme() -> FingerprintScheme {
    FingerprintScheme::new("saga/1").expect("the name is short")
}

impl Node {
    pub(crate) fn start(w: &W, number: usize) -> N {
        let (w, executions) = (Rc::clone(w), Executions::default());
        Rc::new(Self { w, number, executions, clock: Cell::default() })
    }

    /// Takes note of a time of the store's clock.
    pub(crate) fn note(&self, now: hapax_core::Timestamp) {
        let (read, known) = self.clock.get();
        let estimate = known + (self.w.now() - read);
        if now.as_micros() > estimate {
            self.clock.set((self.w.now(), now.as_micros()));
        }
    }

    /// Returns the time of the store's clock, as far as it is known here.
    pub(crate) fn store_now(&self) -> LogTime {
        let (read, known) = self.clock.get();
        let now = known + (self.w.now() - read);
        LogTime::from(hapax_core::Timestamp::from_micros(now))
    }

    pub(crate) async fn load(&self, id: OperationId) -> Option<Snapshot> {
        let seen = store::load(&self.w, self.number, id).await?;
        self.note(seen.now);
        Some(seen)
    }

    pub(crate) async fn postpone(&self, entry: &Entry, due_in: Duration) {
        let expected = (!self.w.has(Bug::PostponesBlindly)).then_some(entry.due);
        store::postpone(&self.w, self.number, entry.key, expected, due_in).await;
    }

    /// Claims a record. `None`: without a definite reply.
    async fn claim(
        &self,
        id: OperationId,
        fingerprint: Fingerprint,
        adopts: Option<Snapshot>,
    ) -> Option<(ClaimResult, Snapshot, u64)> {
        let terms = terms(&self.w);
        let request = ClaimRequest {
            scheme: scheme(),
            fingerprint,
            terms,
            settle: None,
            hook: None,
            may_reconcile: false,
            executions: self.executions.clone(),
            description: None,
            // A copy of a withdrawn claim may arrive late, and must find its record.
            keep_released: duration(DAY),
            adopts: adopts.is_some() && !self.w.has(Bug::AdoptsNothing),
            quarantine: None,
        };
        let begun = match adopts {
            Some(seen) => ClaimExchange::start_at(id, request, seen, &self.w.ids),
            None => ClaimExchange::start(id, request, &self.w.ids),
        };
        let (mut exchange, mut next) = begun.ok()?;
        let mut sent = self.w.now();
        loop {
            match next {
                Next::Ready(result) => return Some((result, exchange.seen().clone(), sent)),
                Next::Send(swap) => {
                    sent = self.w.now();
                    let mut reply = None;
                    for _ in 0..4 {
                        reply = store::swap(&self.w, self.number, &swap).await;
                        if reply.is_some() {
                            break;
                        }
                    }
                    let reply = reply?;
                    self.note(match &reply {
                        Swapped::Stored(stamped) => stamped.now,
                        Swapped::Conflict(seen) => seen.now,
                    });
                    next = exchange.receive(reply, &self.w.ids).ok()?;
                }
            }
        }
    }

    fn lease(&self, ownership: Ownership, sent: u64) -> SimLease {
        SimLease { ownership, until: sent + LEASE, renew_at: sent + LEASE / 3 }
    }

    /// Performs a write of an owner, and repeats it until its reply is definite, or the lease has
    /// lapsed by the clock of this process.
    pub(crate) async fn write(&self, lease: &mut SimLease, action: OwnerAction) -> Wrote {
        let Ok((mut exchange, mut next)) = lease.ownership.write(action, &self.w.ids) else {
            return Wrote::Unclear;
        };
        loop {
            let swap = match next {
                Next::Ready(WriteResult::Recorded(seen)) => {
                    self.note(seen.now);
                    lease.ownership.update(seen);
                    return Wrote::Recorded;
                }
                Next::Ready(_) => {
                    lease.ownership.note_conflict(exchange.seen());
                    return Wrote::Lost;
                }
                Next::Send(swap) => swap,
            };
            // The first copy may be the one that is stored.
            let sent = self.w.now();
            let reply = loop {
                match store::swap(&self.w, self.number, &swap).await {
                    Some(reply) => break reply,
                    None if self.w.now() >= lease.until => return Wrote::Unclear,
                    None => self.w.sleep(SECOND / 5).await,
                }
            };
            let is_stored = matches!(reply, Swapped::Stored(_));
            let Ok(received) = exchange.receive(reply, &self.w.ids) else { return Wrote::Unclear };
            next = received;
            if is_stored {
                lease.until = sent + LEASE;
                lease.renew_at = sent + LEASE / 3;
            }
        }
    }

    /// Handles a client's request.
    pub(crate) async fn handle_start(self: N, note: Rc<Note>, answer: Slot<Started>) {
        let (w, saga) = (&self.w, note.saga);
        let note = note.of_version(w.newest_version(self.number));
        let id = saga_id(saga);
        let Some((claimed, seen, sent)) = self.claim(id, note.fingerprint, None).await else {
            return;
        };
        let started = match claimed {
            ClaimResult::Execute(ownership) => {
                let lease = self.lease(ownership, sent);
                self.accept(note, lease, &answer).await;
                return;
            }
            ClaimResult::Replay(_) => Started::Ended,
            ClaimResult::Mismatch => Started::Mismatch,
            // Accepted are a log and its entry.
            ClaimResult::InFlight { .. } => {
                let checkpoint = seen.stored.as_ref().and_then(|it| it.record.checkpoint.as_ref());
                let log = checkpoint.map(|log| Log::decode(log).expect("a log"));
                let is_accepted = match &log {
                    _ if w.has(Bug::AcceptsDuplicatesEarly) => true,
                    Some(log) if log.inserted || w.has(Bug::AcceptsByTheLog) => true,
                    Some(log) => {
                        store::has_entry(w, self.number, entry_of(id, log)).await == Some(true)
                    }
                    None => false,
                };
                if is_accepted {
                    self.accepted(&note);
                    w.count("duplicate accepted");
                    Started::Accepted
                } else {
                    Started::InFlight
                }
            }
            _ => return,
        };
        w.fill(&answer, started);
    }

    pub(crate) fn accepted(&self, note: &Note) {
        self.w.facts.borrow_mut().sagas[note.saga].accepted = Some(note.fingerprint);
        self.w.tell(|| format!("saga {} is accepted by node {}", note.saga, self.number));
        checks::accepted(&self.w, note.saga);
    }

    /// Runs a claimed saga, which inserts its entry and answers.
    async fn accept(self: N, note: Rc<Note>, mut lease: SimLease, answer: &Slot<Started>) {
        let w = Rc::clone(&self.w);
        let log = lease.ownership.checkpoint().and_then(|log| Log::decode(log).ok());
        if lease.ownership.is_takeover() {
            w.count("start takes over");
        }
        // A saga keeps the version of its log.
        let version = log.as_ref().map_or(note.version, |log| log.version);
        if !w.has_version(self.number, version) {
            w.count("start of another version withdrawn");
            let withdraw = lease.ownership.withdraw();
            self.write(&mut lease, withdraw).await;
            return;
        }
        let note = note.of_version(version);
        let id = saga_id(note.saga);
        let (key, exists) = match &log {
            Some(log) => {
                let key = entry_of(id, log);
                match store::has_entry(&w, self.number, key).await {
                    _ if log.inserted => (key, true),
                    Some(exists) => (key, exists || w.has(Bug::TakesOverWithoutAnEntry)),
                    None => {
                        let withdraw = lease.ownership.withdraw();
                        self.write(&mut lease, withdraw).await;
                        return;
                    }
                }
            }
            None => {
                let id_of_entry = EntryId::fresh(&w.ids).expect("there is entropy");
                (EntryKey { operation: id, id: id_of_entry }, false)
            }
        };
        if exists {
            self.accepted(&note);
            w.fill(answer, Started::Accepted);
            return drive::drive(self, lease, key, note, None).await;
        }
        if log.is_some() {
            w.count("entry inserted again");
        }
        if w.has(Bug::InsertsAfterBegin) {
            let (node, late, answer) = (Rc::clone(&self), Rc::clone(&note), answer.clone());
            w.spawn(self.number, async move {
                node.w.sleep(SECOND / 10).await;
                if store::insert(&node.w, node.number, key, LEASE, &late).await {
                    node.accepted(&late);
                    node.w.fill(&answer, Started::Accepted);
                }
            });
            return drive::drive(self, lease, key, note, None).await;
        }
        // Without a permit nothing is saved before the entry is there; nor after another owner, which may
        // have been accepted with another entry.
        let after_another = lease.ownership.is_takeover() && !w.has(Bug::SavesBesideAnEntry);
        if log.is_none() && (after_another || w.dice.below(3) == 0) {
            if !store::insert(&w, self.number, key, LEASE, &note).await {
                let is_takeover = lease.ownership.is_takeover();
                let withdraw = lease.ownership.withdraw();
                if self.write(&mut lease, withdraw).await == Wrote::Recorded && !is_takeover {
                    w.count("start withdrawn");
                    w.tell(|| format!("a start of saga {} is withdrawn", note.saga));
                    w.fill(answer, Started::Withdrawn);
                }
                return;
            }
            self.accepted(&note);
            w.count("saga accepted");
            w.fill(answer, Started::Accepted);
            return drive::drive(self, lease, key, note, None).await;
        }
        drive::drive(self, lease, key, note, Some(answer.clone())).await;
    }

    /// Looks at due entries, for ever.
    pub(crate) async fn poll(self: N) {
        loop {
            let due = store::due(&self.w, self.number).await;
            let next = due.as_ref().and_then(|(_, next)| *next);
            for entry in due.into_iter().flat_map(|(entries, _)| entries) {
                Rc::clone(&self).look(entry).await;
            }
            let idle = [1, 20, 300, 3_600][self.w.dice.below(4) as usize] * SECOND;
            let next = next.map_or(idle, |next| super::plan::micros(next).min(idle));
            self.w.sleep(next.max(SECOND) + self.w.dice.below(SECOND)).await;
        }
    }

    /// Inserts the entry of a saga that starts, and answers. Returns where the end of it arrives.
    pub(crate) fn insert(
        self: &N,
        key: EntryKey,
        note: &Rc<Note>,
        answer: Slot<Started>,
    ) -> Slot<bool> {
        let (node, note, slot) = (Rc::clone(self), Rc::clone(note), Slot::default());
        let end = slot.clone();
        self.w.spawn(self.number, async move {
            let inserted = store::insert(&node.w, node.number, key, LEASE, &note).await;
            if inserted {
                node.accepted(&note);
                node.w.count("saga accepted");
                node.w.fill(&answer, Started::Accepted);
            }
            node.w.fill(&end, inserted);
        });
        slot
    }

    /// Returns whether a log has another entry than this one.
    fn is_foreign(&self, checkpoint: Option<&bytes::Bytes>, key: EntryKey) -> bool {
        let log = checkpoint.map(|log| Log::decode(log).expect("a log"));
        !self.w.has(Bug::RunsForeignEntries)
            && log.is_some_and(|log| log.entry != *key.id.as_bytes())
    }

    /// Runs an adopted saga. One without a log gets an entry of its own first.
    async fn run_adopted(self: N, note: Rc<Note>, mut lease: SimLease, found: EntryKey) {
        if lease.ownership.checkpoint().is_some() {
            return drive::drive(self, lease, found, note, None).await;
        }
        let w = Rc::clone(&self.w);
        let (saga, input, fingerprint) = (note.saga, note.input.clone(), note.fingerprint);
        let version = note.version;
        let own = Rc::new(Note { saga, input, fingerprint, transactional: false, version });
        let id = EntryId::fresh(&w.ids).expect("there is entropy");
        let key = EntryKey { operation: found.operation, id };
        if !store::insert(&w, self.number, key, LEASE, &own).await {
            w.count("adoption withdrawn");
            let withdraw = lease.ownership.withdraw();
            self.write(&mut lease, withdraw).await;
            return;
        }
        w.count("entry replaced");
        store::remove(&w, self.number, found).await;
        drive::drive(self, lease, key, own, None).await;
    }

    async fn look(self: N, entry: Entry) {
        let w = Rc::clone(&self.w);
        let (id, note) = (entry.key.operation, Rc::clone(&entry.note));
        let Some(seen) = self.load(id).await else { return };
        let now = seen.now;
        let is_kept = |until: Option<_>| until.is_none_or(|until| now < until);
        let stored = seen.stored.clone().filter(|stored| is_kept(stored.keep_until));
        let claimed = match stored.map(|it| (it.record.state.clone(), it)) {
            None | Some((RecordState::Released, _))
                if note.transactional || w.has(Bug::AdoptsNothing) =>
            {
                self.claim(id, note.fingerprint, None).await
            }
            Some((RecordState::InFlight, stored))
                if stored.record.fingerprint == note.fingerprint
                    || w.has(Bug::RunsForeignEntries) =>
            {
                if self.is_foreign(stored.record.checkpoint.as_ref(), entry.key) {
                    // The saga has its own entry.
                    w.count("foreign entry removed");
                    return store::remove(&w, self.number, entry.key).await;
                }
                if now < stored.lease_until {
                    // Its runner may have crashed between parking and its second look.
                    if !w.has(Bug::PostponesWithoutALook)
                        && !w.has(Bug::ParksWithoutASecondLook)
                        && let Some(woke) = senders::look_again(&self, note.saga, &stored).await
                    {
                        if woke {
                            w.count("poll woke");
                        }
                        return;
                    }
                    if w.fault(250) {
                        w.sleep(w.dice.below(5 * SECOND)).await;
                    }
                    return self.postpone(&entry, stored.lease_until.since(now)).await;
                }
                self.claim(id, stored.record.fingerprint, Some(seen)).await
            }
            _ => return store::remove(&w, self.number, entry.key).await,
        };
        match claimed {
            Some((ClaimResult::Execute(ownership), _, sent)) => {
                let mut lease = self.lease(ownership, sent);
                if self.is_foreign(lease.ownership.checkpoint(), entry.key) {
                    w.count("foreign claim withdrawn");
                    let withdraw = lease.ownership.withdraw();
                    self.write(&mut lease, withdraw).await;
                    return;
                }
                w.count("adopted");
                w.tell(|| format!("node {} adopts saga {}", self.number, note.saga));
                if note.transactional {
                    self.accepted(&note);
                }
                self.postpone(&entry, duration(LEASE)).await;
                let node = Rc::clone(&self);
                w.spawn(self.number, node.run_adopted(note, lease, entry.key));
            }
            Some((ClaimResult::InFlight { remaining, .. }, _, _)) => {
                self.postpone(&entry, remaining.max(Duration::from_millis(100))).await;
            }
            Some((ClaimResult::NotFound, _, _)) => w.count("adopted nothing"),
            _ => {}
        }
    }
}

fn entry_of(operation: OperationId, log: &Log) -> EntryKey {
    EntryKey { operation, id: EntryId::from_bytes(log.entry) }
}
