//! Bugs that can be planted, each where a developer could make it.

use hapax_core::store::{Stamp, StoredRecord, Swap, Swapped};
use hapax_core::{Extensions, OnUnknown, Record, RecordState, Timestamp};

use super::ledger::SwapPurpose;
use super::plan;
use super::world::{ExchangeKind, SimClaim, SimExchange, World};

macro_rules! bugs {
    ($($(#[$doc:meta])* $bug:ident,)*) => {
        /// A bug that the simulator must find.
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        pub enum Bug {
            $($(#[$doc])* $bug,)*
        }

        impl Bug {
            /// All bugs.
            pub const ALL: &[Self] = &[$(Self::$bug,)*];
        }
    };
}

bugs! {
    /// A process takes over from an execution of its own, whose lease has lapsed.
    TakesOverFromItself,
    /// The store checks the write id, and writes a moment later.
    ChecksThenSets,
    /// The store acknowledges some writes that it never makes.
    LosesWrites,
    /// The store reaps released records at once, so that fences fall back.
    ReapsReleasedAtOnce,
    /// The store reaps unfinished records by their lease, although their retention has no end.
    ReapsUndecidedRecords,
    /// A claim or write uses the clock of its process.
    UsesTheClientsClock,
    /// A lost reply is resolved by loading the record.
    ResolvesByLoading,
    /// A claim that was given up is not released, although it may land.
    LeavesAbandonedClaims,
    /// A completion without a reply is taken for recorded.
    TakesLostReplyForSuccess,
    /// Ownership is decided by comparing fences instead of lease ids.
    ComparesFences,
    /// An owner renews any record that it finds.
    RenewsWithoutOwnership,
    /// An owner releases any record that it finds.
    ReleasesWithoutOwnership,
    /// An owner completes any record that it finds.
    CompletesWithoutOwnership,
    /// A completion after the lease, without a takeover, is reported as lost.
    ReportsLateAsLost,
    /// A completion that is recorded already is reported as lost.
    CompletesOnceOnly,
    /// A late completion overwrites another outcome.
    OverwritesOutcomes,
    /// An undecided record under `block` or `reconcile` expires after its retention.
    ExpiresUnderBlock,
    /// The claimer's policy decides alone.
    IgnoresTheRecordsPolicy,
    /// The record's policy decides alone.
    IgnoresTheClaimersPolicy,
    /// A takeover writes its own policy into the record, though the record's is stricter.
    LoosensTerms,
    /// A takeover keeps the fence.
    TakesOverUnderTheSameFence,
    /// A takeover begins a new generation.
    BeginsNewGeneration,
    /// A takeover drops the checkpoint.
    DropsTheCheckpoint,
    /// A takeover is decided by the lease of the claim, without its renewals.
    IgnoresRenewals,
    /// Attempts begin anew after a release.
    ResetsAttempts,
    /// A withdrawn claim counts as an attempt.
    CountsWithdrawnClaims,
    /// A release keeps the attempts for one lease only.
    ForgetsAttemptsAfterALease,
    /// A withdrawn takeover hides that the owner before it crashed.
    ForgetsTheCrash,
    /// The fingerprint is not compared.
    IgnoresTheFingerprint,
    /// An operation that may have happened is released.
    ReleasesTheUnknown,
    /// The announcement of a reconcile request replaces the owner's lease id.
    ReconcileReplacesLeaseId,
    /// A hook's verdict counts, although the record has changed.
    AcceptsLateVerdicts,
    /// A hook is called as soon as the lease lapses, while the owner's requests may be in progress.
    CallsHookTooSoon,
    /// A hook is called without a retry as soon as the lease lapses.
    CallsHookWithoutRetryTooSoon,
    /// A hook is called without a retry about an execution that was not listed.
    ReconcilesUnseenExecution,
    /// A hook is called without a retry about a record whose checkpoint a retry may continue.
    ReconcilesWithoutItsCheckpoint,
    /// A hook's verdict without a retry counts, although the record has changed.
    SettlesLate,
    /// The announcement of a call without a retry hides when the execution ended.
    CallHidesTheEnd,
    /// A takeover without a description takes that of the earlier execution for its own.
    TakesOverTheDescription,
    /// An operator's decision counts for an execution that the operator never saw.
    DecidesUnseenExecution,
    /// An operator interrupts a live lease without force.
    ResolvesWithoutForce,
    /// An operator releases a lapsed record at once, while its request may still execute.
    DecidesBeforeItSettled,
    /// The announcement of a reconcile request hides when the execution ended.
    ReconcileHidesTheEnd,
    /// A redirected request is answered by its redirect only until the target executes.
    ForgetsRedirectsOnceExecuted,
    /// A released record keeps its redirects for one lease only.
    ForgetsRedirectsAfterALease,
    /// A redirect answers every request.
    RedirectsEveryRequest,
}

/// Alters the store's reply before the core receives it.
pub(super) fn alter_reply(bug: Bug, world: &World, exchange: &SimExchange, swapped: &mut Swapped) {
    if bug == Bug::UsesTheClientsClock {
        let skewed = world.store.clock(world.now).saturating_add_signed(
            world.plan.skew[usize::from(exchange.process)] - world.store.offset,
        );
        let now = Timestamp::from_micros(skewed);
        match swapped {
            Swapped::Stored(stamped) => stamped.now = now,
            Swapped::Conflict(seen) => seen.now = now,
        }
        return;
    }
    let Swapped::Conflict(seen) = swapped else { return };
    let now = seen.now;
    let Some(stored) = &mut seen.stored else { return };
    match &exchange.talk {
        ExchangeKind::Claim(claim) => garble_for_claimer(bug, now, claim, stored),
        ExchangeKind::Write(write) => {
            let Some(execution) = world.ledger.executions.get(write.execution as usize) else {
                return;
            };
            let seize = match (bug, write.meaning) {
                (Bug::ComparesFences, SwapPurpose::Operator { .. }) => false,
                (Bug::ComparesFences, _) => execution.fence >= stored.fence.get(),
                (Bug::RenewsWithoutOwnership, SwapPurpose::Renew { .. }) => true,
                (Bug::ReleasesWithoutOwnership, SwapPurpose::Release { .. }) => true,
                (Bug::CompletesWithoutOwnership, SwapPurpose::Complete { .. }) => true,
                _ => false,
            };
            if seize {
                stored.record.lease_id = execution.lease_id;
                stored.record.generation = execution.record_life;
            }
            let own = stored.record.lease_id == execution.lease_id;
            match (bug, write.meaning, &stored.record.state) {
                (Bug::OverwritesOutcomes, SwapPurpose::Complete { .. }, RecordState::Done(_))
                    if own =>
                {
                    stored.record.state = RecordState::InFlight;
                }
                (Bug::DecidesUnseenExecution, SwapPurpose::Operator { fence, .. }, _) => {
                    stored.fence = hapax_core::FencingToken::new(fence);
                }
                _ => {}
            }
        }
    }
}

fn garble_for_claimer(bug: Bug, now: Timestamp, claim: &SimClaim, stored: &mut StoredRecord) {
    match bug {
        Bug::IgnoresTheRecordsPolicy => stored.record.terms.on_unknown = OnUnknown::Reexecute,
        Bug::IgnoresRenewals => {
            let claimed = stored.fence.issued_at().after(stored.record.terms.lease);
            stored.lease_until = stored.lease_until.min(claimed);
        }
        Bug::ResetsAttempts if stored.record.state == RecordState::Released => {
            stored.record.attempt = 0
        }
        Bug::IgnoresTheFingerprint => {
            stored.record.scheme = plan::scheme(claim.scheme);
            stored.record.fingerprint = plan::fingerprint(claim.request, claim.scheme);
        }
        Bug::ForgetsRedirectsOnceExecuted if stored.record.state != RecordState::Released => {
            stored.record.extensions = description_only(&stored.record);
        }
        Bug::RedirectsEveryRequest => {
            let redirects = stored.record.extensions.redirects();
            if let Some(mut redirect) = redirects.into_iter().next() {
                redirect.scheme = plan::scheme(claim.scheme);
                redirect.fingerprint = plan::fingerprint(claim.request, claim.scheme);
                stored.record.extensions.add_redirect(redirect);
            }
        }
        Bug::CallsHookTooSoon
            if stored.record.state == RecordState::InFlight && stored.lease_until <= now =>
        {
            stored.lease_until = Timestamp::default();
        }
        _ => {}
    }
}

/// Alters the core's swap before the store receives it.
pub(super) fn alter_swap(bug: Bug, policy: OnUnknown, meaning: SwapPurpose, swap: &mut Swap) {
    let draft = &mut swap.draft;
    let takeover = matches!(meaning, SwapPurpose::Execute { anew: false, .. });
    match bug {
        Bug::ExpiresUnderBlock => {
            draft.keep = draft.keep.or(Some(draft.record.terms.retention));
        }
        Bug::LoosensTerms if takeover => draft.record.terms.on_unknown = policy,
        // The claim itself was sent as `reexecute`.
        Bug::IgnoresTheClaimersPolicy
            if matches!(meaning, SwapPurpose::Execute { anew: true, .. }) =>
        {
            draft.record.terms.on_unknown = policy;
            draft.keep = draft.keep.filter(|_| policy == OnUnknown::Reexecute);
        }
        Bug::TakesOverUnderTheSameFence if takeover => draft.stamp = Stamp::Keep,
        Bug::BeginsNewGeneration if takeover => draft.record.generation = draft.record.lease_id,
        Bug::DropsTheCheckpoint if takeover => draft.record.checkpoint = None,
        Bug::CountsWithdrawnClaims if matches!(meaning, SwapPurpose::Withdraw { .. }) => {
            draft.record.attempt += 1;
        }
        Bug::ForgetsAttemptsAfterALease if matches!(meaning, SwapPurpose::Release { .. }) => {
            draft.keep = Some(draft.record.terms.lease);
        }
        Bug::ForgetsRedirectsAfterALease if matches!(meaning, SwapPurpose::Redirect { .. }) => {
            draft.keep = Some(draft.record.terms.lease);
        }
        Bug::ForgetsTheCrash if matches!(meaning, SwapPurpose::Withdraw { .. }) => {
            draft.record.generation = draft.record.lease_id;
        }
        Bug::ReleasesTheUnknown if matches!(meaning, SwapPurpose::Abandon { .. }) => {
            draft.record.state = RecordState::Released;
        }
        Bug::ReconcileHidesTheEnd if matches!(meaning, SwapPurpose::Announce { .. }) => {
            hide_the_end(&mut draft.record);
        }
        Bug::CallHidesTheEnd if matches!(meaning, SwapPurpose::Call { .. }) => {
            hide_the_end(&mut draft.record);
        }
        Bug::TakesOverTheDescription if takeover => {
            draft.record.extensions.set_described(Some(draft.record.lease_id));
        }
        Bug::ReconcileReplacesLeaseId if matches!(meaning, SwapPurpose::Announce { .. }) => {
            draft.record.lease_id = hapax_core::LeaseId::from_bytes(*swap.write_id.as_bytes());
        }
        _ => {}
    }
}

fn hide_the_end(record: &mut Record) {
    let settle = record.extensions.settle();
    record.extensions = description_only(record);
    record.extensions.set_settle(settle);
}

/// Returns the extension that has the execution which a record describes, without the others.
fn description_only(record: &Record) -> Extensions {
    let mut extensions = Extensions::default();
    let described = record.extensions.describes(record.lease_id);
    extensions.set_described(described.then_some(record.lease_id));
    extensions
}
