//! Conversations: what the core is told, and what it wants next.

use hapax::RecordState;
use hapax::exchange::{ClaimResult, Next, Ownership, WriteResult};
use hapax::machine::{OwnerAction, Verdict};
use hapax::store::{Swap, Swapped};

use super::answers::{Asker, Told};
use super::bug::{self, Bug};
use super::plan;
use super::tally::{Event as Count, Fault};
use super::truth::{Meaning, Phase, SimVerdict, Truth, Violation, ensure};
use super::world::{Activity, Conv, Talk, World, WriteTalk, note};

impl World {
    /// A definite answer to a conversation's swap.
    pub(super) fn receive(&mut self, conv: u32, mut swapped: Swapped, truth: Truth) {
        self.convs[conv as usize].waiting = false;
        if let Some(bug) = self.bug {
            if bug == Bug::CountsLateAnswers && self.insists(conv, &swapped) {
                return;
            }
            bug::garble(bug, self, &self.convs[conv as usize], &mut swapped);
            if bug == Bug::CompletesOnceOnly && self.denies(conv, &swapped, &truth) {
                return;
            }
        }
        let stored = matches!(swapped, Swapped::Stored(_));
        // From here on it knows what landed late of its own, and must see to it.
        if !stored
            && truth.phase == Phase::Held
            && let Some(tenure) = self.ledger.tenures.get_mut(truth.tenure as usize)
            && tenure.conv == conv
        {
            tenure.stray = false;
        }
        note!(self, "c{conv} hears {}", words(&swapped));
        let state = &mut self.convs[conv as usize];
        match &mut state.talk {
            Talk::Claim(claim) if state.background => {
                let ownership = claim.claiming.receive_late(swapped);
                state.over = true;
                let entered =
                    ownership.as_ref().and_then(|ownership| self.ledger.entered(conv, ownership));
                if entered.is_none() {
                    self.ledger.turned_away(conv);
                }
                if let Some(ownership) = ownership
                    && let Some(tenure) = entered
                {
                    self.count(Count::Released);
                    self.begin_write(
                        conv,
                        &ownership,
                        OwnerAction::Release,
                        Meaning::Release,
                        tenure,
                        true,
                    );
                }
            }
            Talk::Claim(claim) => {
                if let Swapped::Conflict(seen) = &swapped
                    && let Some(stored) = &seen.stored
                    && stored.record.terms.on_unknown != claim.policy
                {
                    self.tally.fault(Fault::MixedPolicies);
                }
                match claim.claiming.receive(swapped, &self.ids.0) {
                    Ok(next) => self.claim_goes(conv, next, &truth, stored, None),
                    Err(_) => self.no_entropy(),
                }
            }
            Talk::Write(write) => match write.writing.receive(swapped, &self.ids.0) {
                Ok(next) => self.write_goes(conv, next, Some(&truth)),
                Err(_) => self.no_entropy(),
            },
        }
    }

    pub(super) fn no_entropy(&mut self) {
        self.judge(Err(Violation { promise: "sim", what: "seeded entropy failed" }));
    }

    pub(super) fn claim_goes(
        &mut self,
        conv: u32,
        next: Next<ClaimResult>,
        truth: &Truth,
        stored: bool,
        said: Option<SimVerdict>,
    ) {
        match next {
            Next::Send(swap) => {
                let meaning = self.claim_means(conv, &swap, said);
                self.post(conv, swap, meaning);
            }
            Next::Ready(claimed) => self.claimed(conv, claimed, truth, stored),
        }
    }

    fn claim_means(&self, conv: u32, swap: &Swap, said: Option<SimVerdict>) -> Meaning {
        let Talk::Claim(claim) = &self.convs[conv as usize].talk else { return Meaning::Own };
        let record = &swap.draft.record;
        let asked = claim.asked.map(|(version, _)| version);
        match (&record.state, swap.draft.stamp) {
            (RecordState::InFlight, hapax::store::Stamp::NextFence) => Meaning::Execute {
                anew: record.generation == record.lease_id,
                attempt: record.attempt,
                asked: asked.filter(|_| said.is_some()),
            },
            (RecordState::InFlight, _) => Meaning::Own,
            (RecordState::Unknown { reconciling: true, .. }, _) => {
                let (after, timeout) = claim.hook.unwrap_or_default();
                Meaning::Announce { after, timeout }
            }
            _ => Meaning::Conclude {
                said: said.unwrap_or(SimVerdict::CannotSay),
                asked: asked.unwrap_or_default(),
            },
        }
    }

    fn claimed(&mut self, conv: u32, claimed: ClaimResult, truth: &Truth, stored: bool) {
        let state = &mut self.convs[conv as usize];
        let Talk::Claim(claim) = &mut state.talk else { return };
        let letter = &self.letters[state.letter as usize];
        let answered = match letter.meaning {
            Meaning::Conclude { said, .. } if stored => Some(said),
            _ => None,
        };
        let asker = Asker {
            request: claim.request,
            policy: claim.policy,
            hook_after: claim.hook.map(|(after, _)| after),
            answered,
            process: plan::process(state.process),
            key: state.key,
        };
        let worker = state.process;
        let told = match claimed {
            ClaimResult::Execute(ownership) => {
                let tenure = letter.tenure.filter(|_| stored).or(claim.tenure);
                state.over = true;
                return self.begin_work(conv, ownership, tenure);
            }
            ClaimResult::Rehash(scheme) => {
                self.count(Count::Rehash);
                return self.rehash(conv, scheme, truth);
            }
            ClaimResult::Reconcile(fence) => {
                let about = claim.asked.map(|(_, tenure)| tenure);
                self.count(Count::Ask);
                let right = about.map(|tenure| self.ledger.tenures[tenure as usize].fence);
                let judged =
                    ensure(right == Some(fence.get()), "reconcile", "asks about another fence");
                self.judge(judged);
                return self.ask(conv);
            }
            ClaimResult::Contended => {
                state.over = true;
                self.ledger.turned_away(conv);
                self.count(Count::Contended);
                return self.end_operation(worker, true);
            }
            ClaimResult::Replay(replay) => {
                self.count(Count::Replay);
                Told::Replay {
                    outcome: plan::number(replay.outcome.bytes()),
                    fence: replay.fence.get(),
                    expires_in: replay.expires_in.map_or(u64::MAX, |rest| rest.as_micros() as u64),
                }
            }
            ClaimResult::InFlight { remaining, .. } => {
                self.count(Count::InFlight);
                Told::InFlight { remaining: remaining.as_micros() as u64 }
            }
            ClaimResult::Mismatch => {
                self.count(Count::Mismatch);
                Told::Mismatch
            }
            ClaimResult::Unknown { .. } => {
                self.count(Count::Unknown);
                Told::Unknown
            }
        };
        self.convs[conv as usize].over = true;
        note!(self, "c{conv} is told {told:?}");
        let judged = self.ledger.judge_claim(truth, told, &asker);
        self.ledger.turned_away(conv);
        self.judge(judged);
        if matches!(told, Told::InFlight { .. }) && self.chance(400) {
            self.wait(worker);
        } else {
            let again = !matches!(told, Told::Replay { .. } | Told::Mismatch);
            self.end_operation(worker, again);
        }
    }

    fn rehash(&mut self, conv: u32, scheme: hapax::FingerprintScheme, truth: &Truth) {
        let number = plan::scheme_number(&scheme);
        let Talk::Claim(claim) = &mut self.convs[conv as usize].talk else { return };
        let other = number != claim.scheme;
        claim.scheme = number;
        let fingerprint = plan::fingerprint(claim.request, number);
        let next = claim.claiming.rehashed(scheme, fingerprint, &self.ids.0);
        self.judge(ensure(other, "fingerprint", "asks for the scheme it was given"));
        match next {
            Ok(next) => self.claim_goes(conv, next, truth, false, None),
            Err(_) => self.no_entropy(),
        }
    }

    /// Tells a claimer what the hook said.
    pub(super) fn answer(&mut self, conv: u32, said: SimVerdict) {
        let verdict = match said {
            SimVerdict::Happened(outcome) => Verdict::Happened(plan::outcome(outcome)),
            SimVerdict::DidNotHappen => Verdict::DidNotHappen,
            SimVerdict::CannotSay => Verdict::CannotSay,
        };
        let key = usize::from(self.convs[conv as usize].key);
        let clock = self.store.clock(self.now);
        let truth = self.ledger.look(key, clock);
        let Talk::Claim(claim) = &mut self.convs[conv as usize].talk else { return };
        match claim.claiming.reconciled(verdict, &self.ids.0) {
            Ok(next) => self.claim_goes(conv, next, &truth, false, Some(said)),
            Err(_) => self.no_entropy(),
        }
    }

    /// Begins a holder's write, and answers which conversation it is.
    pub(super) fn begin_write(
        &mut self,
        on_behalf_of: u32,
        ownership: &Ownership,
        action: OwnerAction,
        meaning: Meaning,
        tenure: u32,
        background: bool,
    ) -> Option<u32> {
        let Ok((writing, next)) = ownership.write(action, &self.ids.0) else {
            self.no_entropy();
            return None;
        };
        let Conv { process, epoch, operation, key, .. } = self.convs[on_behalf_of as usize];
        // A renewal may be given up; its worker has the holding.
        let renewal = matches!(meaning, Meaning::Renew { .. } | Meaning::Checkpoint(_));
        let ownership = (!renewal).then(|| ownership.clone());
        let talk = Talk::Write(WriteTalk { writing, tenure, meaning, landed: false, ownership });
        let operation = if background { operation } else { self.operation_of(process) };
        let conv = self.begin(Conv {
            process,
            epoch,
            operation,
            key,
            letter: 0,
            sends: 0,
            waiting: false,
            ambiguous: false,
            background,
            over: false,
            talk,
        });
        self.write_goes(conv, next, None);
        Some(conv)
    }

    pub(super) fn operation_of(&self, process: u8) -> u32 {
        self.processes[usize::from(process)].operation
    }

    pub(super) fn begin(&mut self, conv: Conv) -> u32 {
        self.convs.push(conv);
        self.convs.len() as u32 - 1
    }

    pub(super) fn write_goes(&mut self, conv: u32, next: Next<WriteResult>, truth: Option<&Truth>) {
        match next {
            Next::Send(swap) => {
                let Talk::Write(write) = &self.convs[conv as usize].talk else { return };
                let meaning = write.meaning;
                self.post(conv, swap, meaning);
            }
            Next::Ready(wrote) => self.wrote(conv, wrote, truth),
        }
    }

    pub(super) fn wrote(&mut self, conv: u32, mut wrote: WriteResult, truth: Option<&Truth>) {
        let state = &mut self.convs[conv as usize];
        state.over = true;
        let Talk::Write(write) = &mut state.talk else { return };
        write.ownership = None;
        let (meaning, tenure, landed) = (write.meaning, write.tenure, write.landed);
        let (process, operation, background) = (state.process, state.operation, state.background);
        if let (
            Some(Bug::ReportsLateAsLost),
            Meaning::Complete { .. },
            WriteResult::Recorded(seen),
        ) = (self.bug, meaning, &wrote)
        {
            let since = self.ledger.tenures[tenure as usize].fence;
            let lease = self.ledger.tenures[tenure as usize].lease;
            if seen.now.as_micros() > since + lease {
                wrote = WriteResult::Lost;
            }
        }
        note!(self, "c{conv}: {meaning:?} ends: {}", said(&wrote));
        if let (Meaning::Operator { fence, force, forget, outcome }, Some(truth)) = (meaning, truth)
        {
            let asked = (fence, force, forget, outcome);
            let judged = self.ledger.judge_operator(truth, asked, landed, &wrote);
            self.judge(judged);
            return self.operator_hears(meaning, &wrote);
        }
        if let Some(truth) = truth {
            let judged = self.ledger.judge_write(truth, tenure, meaning, landed, &wrote);
            self.judge(judged);
        }
        self.count(match (&wrote, meaning) {
            (WriteResult::Lost, _) => Count::Lost,
            (WriteResult::Gone, _) => Count::Gone,
            (WriteResult::Recorded(_), Meaning::Renew { .. } | Meaning::Checkpoint(_)) => {
                Count::Renewed
            }
            (WriteResult::Recorded(_), _) => Count::Recorded,
            _ => Count::Contended,
        });
        if !matches!(meaning, Meaning::Renew { .. } | Meaning::Checkpoint(_)) {
            self.ledger.ended(tenure);
        }
        if matches!(wrote, WriteResult::Contended) {
            let claim = self.ledger.tenures[tenure as usize].conv;
            self.ledger.dropped(claim);
        }
        if self.operation_of(process) != operation {
            return;
        }
        match meaning {
            Meaning::Renew { .. } | Meaning::Checkpoint(_) => self.renewed(conv, process, wrote),
            _ if background => {}
            _ => self.end_operation(process, false),
        }
    }

    /// [`Bug::CountsLateAnswers`]: writes the answer over whatever is there.
    fn insists(&mut self, conv: u32, swapped: &Swapped) -> bool {
        let letter = &self.letters[self.convs[conv as usize].letter as usize];
        let answer = matches!(
            letter.meaning,
            Meaning::Conclude { .. } | Meaning::Execute { asked: Some(_), .. }
        );
        let Swapped::Conflict(seen) = swapped else { return false };
        let (true, Some(stored)) = (answer, &seen.stored) else { return false };
        let mut again = letter.swap.clone();
        let meaning = letter.meaning;
        again.expected = Some(stored.write_id);
        if let Ok(write_id) = hapax::WriteId::fresh(&self.ids.0) {
            again.write_id = write_id;
        }
        self.post(conv, again, meaning);
        true
    }

    /// [`Bug::CompletesOnceOnly`]: what is done already counts as lost.
    fn denies(&mut self, conv: u32, swapped: &Swapped, truth: &Truth) -> bool {
        let Talk::Write(write) = &self.convs[conv as usize].talk else { return false };
        let Swapped::Conflict(seen) = swapped else { return false };
        let done = seen.stored.as_ref().is_some_and(|stored| {
            matches!(stored.record.state, RecordState::Done(_))
                && stored.record.lease_id == self.ledger.tenures[write.tenure as usize].lease_id
        });
        if !done || !matches!(write.meaning, Meaning::Complete { .. }) {
            return false;
        }
        self.wrote(conv, WriteResult::Lost, Some(truth));
        true
    }

    pub(super) fn is_over(&self, worker: u8) -> bool {
        matches!(self.processes[usize::from(worker)].activity, Activity::Over)
    }
}

fn words(swapped: &Swapped) -> String {
    match swapped {
        Swapped::Stored(stamped) => format!("stored, fence {}", stamped.fence),
        Swapped::Conflict(seen) => match &seen.stored {
            None => "conflict: nothing there".to_owned(),
            Some(stored) => format!(
                "conflict: {:?} {:?} of {:?} life {:?}, lease until {:?}, kept until {:?}, now {:?}",
                stored.write_id,
                stored.record.state,
                stored.record.lease_id,
                stored.record.generation,
                stored.lease_until,
                stored.keep_until,
                seen.now
            ),
        },
    }
}

const fn said(wrote: &WriteResult) -> &'static str {
    match wrote {
        WriteResult::Recorded(_) => "recorded",
        WriteResult::Lost => "lost",
        WriteResult::Gone => "gone",
        WriteResult::NotFound => "not found",
        WriteResult::Rejected => "refused",
        WriteResult::Changed => "changed",
        WriteResult::Contended => "contended",
    }
}
