//! What is remembered of an operation.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use crate::clock::Timestamp;
use crate::entropy::{Entropy, EntropyError};
use crate::fingerprint::{Fingerprint, FingerprintScheme};

macro_rules! random_id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash)]
        pub struct $name([u8; 16]);

        impl $name {
            /// A new one, never seen before.
            ///
            /// # Errors
            /// [`EntropyError`] when there is no randomness to be had.
            pub fn fresh(entropy: &dyn Entropy) -> Result<Self, EntropyError> {
                let mut bytes = [0; 16];
                entropy.fill(&mut bytes)?;
                Ok(Self(bytes))
            }

            /// One read back from a store.
            #[must_use]
            pub const fn from_bytes(bytes: [u8; 16]) -> Self {
                Self(bytes)
            }

            /// The bytes as stores write them.
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
    /// Names one write of a cell. A swap expects one and leaves another; none repeats.
    WriteId
}
random_id! {
    /// Ownership of a record: random, made for one claim, never repeated.
    LeaseId
}

/// A number that grows with each takeover of a key, for systems downstream to refuse the late.
///
/// Issued by the store: the larger of its clock in microseconds and the last fence plus one. It
/// decides nothing inside Hapax; the [`LeaseId`] does.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct FencingToken(u64);

impl FencingToken {
    /// The token as a number.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }

    /// A token read back from where it was written.
    #[must_use]
    pub const fn new(number: u64) -> Self {
        Self(number)
    }

    /// The token that follows `last` at the moment `now`.
    #[must_use]
    pub fn next(last: Option<Self>, now: Timestamp) -> Self {
        let floor = last.map_or(0, |last| last.0.saturating_add(1));
        Self(now.as_micros().max(floor))
    }

    /// About when it was issued: exact unless the store's clock stepped back.
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

/// What a retry gets when nobody knows whether the operation happened. Ordered by strictness.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub enum OnUnknown {
    /// It runs again, with a larger fencing token: at-least-once.
    Reexecute,
    /// A hook is asked what became of it.
    Reconcile,
    /// It never runs again by itself: at-most-once, until an operator resolves it. The default.
    #[default]
    Block,
}

impl OnUnknown {
    /// Returns the policy's name, as configurations and records show it.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Reexecute => "reexecute",
            Self::Reconcile => "reconcile",
            Self::Block => "block",
        }
    }
}

/// What was agreed when a key was claimed; stored with the record.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Terms {
    /// How long a claim holds without renewal.
    pub lease: Duration,
    /// How long an outcome is replayed, from its completion.
    pub retention: Duration,
    /// What a retry of an unknown outcome gets.
    pub on_unknown: OnUnknown,
}

/// Class of an outcome: what a response, or an error of a function, means for its key.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum OutcomeClass {
    /// The outcome is stored, and replayed until its retention ends: a card was declined.
    Final,
    /// The operation did not happen: nothing is stored, and the next request executes.
    Retryable,
    /// The operation may have happened, and [`OnUnknown`] says what the next request gets. An error
    /// that is not classified is unknown: as retryable it could happen twice, as final a failure of
    /// the network would be replayed for the whole retention.
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

/// The answer that is replayed: opaque bytes, and the name of the format they are in.
#[derive(Clone, PartialEq, Eq)]
pub struct Outcome {
    format: Arc<str>,
    bytes: Bytes,
}

impl Outcome {
    /// The longest name of a format, in bytes.
    pub const MAX_FORMAT: usize = 64;

    /// An outcome in `format` (`http/1`, say), so that no door reads another's bytes. A name
    /// longer than [`Outcome::MAX_FORMAT`] is cut there.
    #[must_use]
    pub fn new(format: impl Into<Arc<str>>, bytes: impl Into<Bytes>) -> Self {
        let mut format = format.into();
        if format.len() > Self::MAX_FORMAT {
            format = format[..format.floor_char_boundary(Self::MAX_FORMAT)].into();
        }
        Self { format, bytes: bytes.into() }
    }

    /// The name of the format.
    #[must_use]
    pub fn format(&self) -> &str {
        &self.format
    }

    /// The bytes, as they were given.
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

/// Where an operation stands.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum RecordState {
    /// Somebody holds it, or held it and has not been heard of since its lease lapsed.
    InFlight,
    /// It may or may not have happened.
    Unknown {
        /// What its owner saw, if it saw anything.
        seen: Option<Outcome>,
        /// Somebody is asking a hook; until when is the cell's `lease_until`.
        reconciling: bool,
    },
    /// It happened, and this is the answer.
    Done(Outcome),
    /// It did not happen; the next claim takes it. Kept so that fence and attempts survive.
    Released,
}

/// Text for operators beside a record; nothing is decided by it. Its `Debug` form shows no contents.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct Notes {
    /// The operation as operators see it: its key, its request, its caller. The engine keeps it
    /// only where it has a secret.
    pub description: Option<Bytes>,
    /// The last decision of an operator: who decided, when, from where and why.
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

/// What is remembered of one operation. Its `Debug` form shows no contents.
#[derive(Clone, PartialEq, Eq)]
pub struct Record {
    /// How the fingerprint was made.
    pub scheme: FingerprintScheme,
    /// What was asked.
    pub fingerprint: Fingerprint,
    /// Who owns it.
    pub lease_id: LeaseId,
    /// The first grant since the key was absent, released or expired; takeovers copy it.
    pub generation: LeaseId,
    /// Executions so far, this one included; 1 for the first.
    pub attempt: u32,
    /// What was agreed at the claim.
    pub terms: Terms,
    /// The last recovery point of the work under way.
    pub checkpoint: Option<Bytes>,
    /// Text for operators.
    pub notes: Notes,
    /// Where it stands.
    pub state: RecordState,
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
            .field("state", &self.state)
            .finish()
    }
}
