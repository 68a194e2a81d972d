//! Records: the stored state of operations.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use crate::clock::Timestamp;
use crate::entropy::{Entropy, EntropyError};
use crate::fingerprint::{Fingerprint, FingerprintScheme};

mod extensions;
mod redirects;

pub use self::extensions::Extensions;
pub use self::redirects::Redirect;

macro_rules! random_id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name([u8; 16]);

        impl $name {
            /// Returns a new random id.
            ///
            /// # Errors
            /// [`EntropyError`] if there is no randomness.
            pub fn fresh(entropy: &dyn Entropy) -> Result<Self, EntropyError> {
                let mut bytes = [0; 16];
                entropy.fill(&mut bytes)?;
                Ok(Self(bytes))
            }

            /// Creates the id from the bytes that a store read.
            #[must_use]
            pub const fn from_bytes(bytes: [u8; 16]) -> Self {
                Self(bytes)
            }

            /// Returns the bytes as stores write them.
            #[must_use]
            pub const fn as_bytes(&self) -> &[u8; 16] {
                &self.0
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:08x}", u128::from_be_bytes(self.0) >> 96)
            }
        }
    };
}

random_id! {
    /// Name of one write of a record. A swap expects one and leaves another; none repeats.
    WriteId
}
random_id! {
    /// Id of one lease: random, made for one claim, never repeated. A record's owner is the
    /// execution that has the record's lease id.
    LeaseId
}
random_id! {
    /// Id of one insertion into a [`Schedule`](crate::schedule::Schedule).
    EntryId
}

/// Fencing token: a number that grows with each takeover of a key, by which systems downstream
/// reject a late execution.
///
/// The store issues it: the larger of its clock in microseconds and the last fence plus one. It
/// decides nothing inside Hapax; the [`LeaseId`] does.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct FencingToken(u64);

impl FencingToken {
    /// Returns the fence as a number.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }

    /// Creates the fence from its number, as a system downstream stored it.
    #[must_use]
    pub const fn new(number: u64) -> Self {
        Self(number)
    }

    /// Returns the fence that follows `last` at the time `now`.
    #[must_use]
    pub fn next(last: Option<Self>, now: Timestamp) -> Self {
        let floor = last.map_or(0, |last| last.0.saturating_add(1));
        Self(now.as_micros().max(floor))
    }

    /// Returns about the time at which it was issued: exact unless the store's clock stepped back.
    #[must_use]
    pub const fn issued_at(self) -> Timestamp {
        Timestamp::from_micros(self.0)
    }
}

impl fmt::Display for FencingToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Policy for a retry while it is unknown whether the operation happened. Ordered by strictness.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub enum OnUnknown {
    /// The operation executes again, with a larger fence: at-least-once.
    Reexecute,
    /// A hook determines whether the operation happened.
    Reconcile,
    /// The operation never executes again until an operator decides: at-most-once. The default.
    #[default]
    Block,
}

impl OnUnknown {
    /// Returns the policy's name in configurations and records.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Reexecute => "reexecute",
            Self::Reconcile => "reconcile",
            Self::Block => "block",
        }
    }
}

/// Terms of a claim, stored with the record.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Terms {
    /// Duration of the lease without renewal.
    pub lease: Duration,
    /// Time from its completion in which an outcome is replayed.
    pub retention: Duration,
    /// Policy for a retry of an unknown outcome.
    pub on_unknown: OnUnknown,
}

/// Class of an outcome: what a response, or an error of a function, means for its key.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum OutcomeClass {
    /// The outcome is stored, and replayed until its retention ends: a card was declined.
    Final,
    /// The operation did not happen: nothing is stored, and the next request executes.
    Retryable,
    /// The operation may have happened, and [`OnUnknown`] determines what the next request gets. An
    /// error that is not classified is unknown: as retryable it could happen twice, as final a
    /// failure of the network would be replayed for the whole retention.
    Unknown,
}

impl OutcomeClass {
    /// Returns the value of the header `Idempotency-Outcome`.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Final => "final",
            Self::Retryable => "retryable",
            Self::Unknown => "unknown",
        }
    }

    /// Returns the class of this name.
    #[must_use]
    pub fn named(word: &str) -> Option<Self> {
        [Self::Final, Self::Retryable, Self::Unknown].into_iter().find(|it| it.as_str() == word)
    }
}

/// Outcome that is replayed: opaque bytes, and the name of their format.
#[derive(Clone, PartialEq, Eq)]
pub struct Outcome {
    format: Arc<str>,
    bytes: Bytes,
}

impl Outcome {
    /// Longest name of a format, in bytes.
    pub const MAX_FORMAT: usize = 64;

    /// Returns an outcome in `format`, such as `http/1`, so that no integration reads the bytes of
    /// another. A name longer than [`Outcome::MAX_FORMAT`] is cut.
    #[must_use]
    pub fn new(format: impl Into<Arc<str>>, bytes: impl Into<Bytes>) -> Self {
        let mut format = format.into();
        if format.len() > Self::MAX_FORMAT {
            format = format[..format.floor_char_boundary(Self::MAX_FORMAT)].into();
        }
        Self { format, bytes: bytes.into() }
    }

    /// Returns the name of the format.
    #[must_use]
    pub fn format(&self) -> &str {
        &self.format
    }

    /// Returns the bytes, unchanged.
    #[must_use]
    pub const fn bytes(&self) -> &Bytes {
        &self.bytes
    }
}

impl fmt::Debug for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Outcome({}, {} bytes)", self.format, self.bytes.len())
    }
}

/// State of an operation.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum RecordState {
    /// Its owner executes, or has not written since its lease lapsed.
    InFlight,
    /// The operation may have happened.
    Unknown {
        /// Response that its owner saw, if any.
        seen: Option<Outcome>,
        /// A claim is calling a hook, until the `lease_until` of the stored record.
        reconciling: bool,
    },
    /// The operation happened, with this outcome.
    Done(Outcome),
    /// The operation did not happen; the next claim executes. Stored so that fence and attempts
    /// survive.
    Released,
}

/// Text for operators in a record, without effect on decisions. Its `Debug` form shows no contents.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct Notes {
    /// Description of the operation: key, request, caller. The engine stores it only where the store seals it.
    pub description: Option<Bytes>,
    /// Last decision of an operator: who decided, when, from where and why.
    pub decision: Option<Bytes>,
}

impl fmt::Debug for Notes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Notes")
            .field("description_bytes", &self.description.as_ref().map(Bytes::len))
            .field("decision_bytes", &self.decision.as_ref().map(Bytes::len))
            .finish()
    }
}

/// Record of one operation. Its `Debug` form shows no contents.
#[derive(Clone, PartialEq, Eq)]
pub struct Record {
    /// Scheme of the fingerprint.
    pub scheme: FingerprintScheme,
    /// Fingerprint of the request.
    pub fingerprint: Fingerprint,
    /// Lease id of the owner.
    pub lease_id: LeaseId,
    /// First lease id since the record was absent, released or expired; takeovers copy it.
    pub generation: LeaseId,
    /// Executions so far, this one included; 1 for the first, 0 after the first was withdrawn.
    pub attempt: u32,
    /// Terms of the claim.
    pub terms: Terms,
    /// Last checkpoint of the execution.
    pub checkpoint: Option<Bytes>,
    /// Text for operators.
    pub notes: Notes,
    /// Fields of later versions than 2.
    pub extensions: Extensions,
    /// State of the operation.
    pub state: RecordState,
}

impl Record {
    /// Returns whether an earlier owner of this generation did not end its execution.
    #[must_use]
    pub fn is_takeover(&self) -> bool {
        self.generation != self.lease_id
    }
}

impl fmt::Debug for Record {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Record")
            .field("scheme", &self.scheme)
            .field("fingerprint", &self.fingerprint)
            .field("lease_id", &self.lease_id)
            .field("generation", &self.generation)
            .field("attempt", &self.attempt)
            .field("terms", &self.terms)
            .field("checkpoint_bytes", &self.checkpoint.as_ref().map(Bytes::len))
            .field("notes", &self.notes)
            .field("extensions", &self.extensions)
            .field("state", &self.state)
            .finish()
    }
}
