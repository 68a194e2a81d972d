//! Fields that records got after version 2 of their encoding.

use std::fmt;
use std::time::Duration;

use bytes::Bytes;

use super::LeaseId;
use crate::clock::Timestamp;

/// The list of numbered fields of a record, each with bytes.
///
/// A process stores the fields of numbers that it does not know as it read them, and decides without
/// them. A field that is not needed for a safe decision needs one release. A field that older processes must
/// understand needs two: the first reads it, the second writes it.
///
/// A field whose number is at least [`Extensions::FIRST_OF_KEY`] belongs to the key: it stays when a claim
/// begins a new generation on a released record. Other fields belong to the generation.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct Extensions {
    /// The settle time. Most records have this field alone, which so needs no memory of its own.
    settle: Option<[u8; 8]>,
    /// The other fields, in ascending order of numbers, each of them once. One of the number of the settle time has
    /// another length than that has.
    fields: Vec<(u16, Bytes)>,
}

impl Extensions {
    /// The most fields of a record.
    pub const MAX_FIELDS: usize = 32;
    /// The longest field, in bytes.
    pub const MAX_FIELD: usize = 16 << 10;
    /// The smallest number of a field that belongs to the key.
    pub const FIRST_OF_KEY: u16 = 0x8000;

    /// Number of the settle time: eight bytes, milliseconds.
    const SETTLE: u16 = 1;
    /// Number of the end of an execution without a response: eight bytes, microseconds, and the lease
    /// id of the execution. Another execution of the generation has another one, also if a process
    /// that does not know the field began it.
    const ENDED: u16 = 2;
    /// Number of the lease id of the execution that the record describes. A process that does not know the field keeps
    /// the description of an earlier execution in a takeover, under another lease id.
    const DESCRIBED: u16 = 3;

    /// Returns the field of this number.
    #[must_use]
    pub fn get(&self, number: u16) -> Option<&[u8]> {
        match (number, &self.settle) {
            (Self::SETTLE, Some(settle)) => Some(settle),
            _ => self.field(number).map(AsRef::as_ref),
        }
    }

    /// Returns the field of this number, unless it is a settle time.
    pub(super) fn field(&self, number: u16) -> Option<&Bytes> {
        let at = self.fields.binary_search_by_key(&number, |(number, _)| *number).ok()?;
        self.fields.get(at).map(|(_, field)| field)
    }

    /// Sets the field of this number in place of an earlier one; `None` removes it.
    pub fn set(&mut self, number: u16, field: Option<Bytes>) {
        if number == Self::SETTLE {
            self.settle = field.as_ref().and_then(|field| field.as_ref().try_into().ok());
        }
        let field = field.filter(|_| number != Self::SETTLE || self.settle.is_none());
        let at = self.fields.binary_search_by_key(&number, |(number, _)| *number);
        match (at, field) {
            (Ok(at), Some(field)) => self.fields[at].1 = field,
            (Ok(at), None) => drop(self.fields.remove(at)),
            (Err(at), Some(field)) => self.fields.insert(at, (number, field)),
            (Err(_), None) => {}
        }
    }

    /// Sets the field of this number to a copy of `field`.
    pub(crate) fn set_copied(&mut self, number: u16, field: &[u8]) {
        match (number, field.try_into()) {
            (Self::SETTLE, Ok(settle)) => self.settle = Some(settle),
            _ => self.set(number, Some(Bytes::copy_from_slice(field))),
        }
    }

    /// Returns the fields by their numbers, in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = (u16, &[u8])> {
        let (before, after) =
            self.fields.split_at(self.fields.partition_point(|(number, _)| *number < Self::SETTLE));
        let settle = self.settle.as_ref().map(|settle| (Self::SETTLE, settle.as_slice()));
        let [before, after] =
            [before, after].map(|fields| fields.iter().map(|(number, it)| (*number, it.as_ref())));
        before.chain(settle).chain(after)
    }

    /// Returns the number of fields.
    #[must_use]
    pub fn len(&self) -> usize {
        self.fields.len() + usize::from(self.settle.is_some())
    }

    /// Returns whether there is no field.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the fields that belong to the key.
    #[must_use]
    pub fn of_key(&self) -> Self {
        let of_key = self.fields.iter().filter(|(number, _)| *number >= Self::FIRST_OF_KEY);
        Self { settle: None, fields: of_key.cloned().collect() }
    }

    /// Returns the settle time: how long a request that the owner sent to another system may still
    /// execute there after the owner's lease has lapsed. `None` if the owner sends none.
    #[must_use]
    pub fn settle(&self) -> Option<Duration> {
        self.settle.map(|bytes| Duration::from_millis(u64::from_be_bytes(bytes)))
    }

    /// Sets the settle time, rounded up to milliseconds.
    pub fn set_settle(&mut self, settle: Option<Duration>) {
        self.set(Self::SETTLE, None);
        self.settle = settle.map(|settle| {
            let millis = settle.as_nanos().div_ceil(1_000_000);
            u64::try_from(millis).unwrap_or(u64::MAX).to_be_bytes()
        });
    }

    /// Returns when the execution with this lease id ended or lapsed without a response, if a hook has been
    /// called about it since: the lease of the record is then that of the call.
    #[must_use]
    pub fn ended(&self, lease_id: LeaseId) -> Option<Timestamp> {
        let (at, of) = self.get(Self::ENDED)?.split_first_chunk::<8>()?;
        (of == lease_id.as_bytes()).then(|| Timestamp::from_micros(u64::from_be_bytes(*at)))
    }

    /// Sets when the execution with this lease id ended or lapsed without a response.
    pub fn set_ended(&mut self, lease_id: LeaseId, at: Timestamp) {
        let field = [&at.as_micros().to_be_bytes()[..], lease_id.as_bytes()].concat();
        self.set(Self::ENDED, Some(field.into()));
    }

    /// Returns whether the record's description is that of the execution with this lease id, so that the hook that it
    /// names decides about this execution. Known only of records under [`OnUnknown::Reconcile`](super::OnUnknown).
    #[must_use]
    pub fn describes(&self, lease_id: LeaseId) -> bool {
        self.get(Self::DESCRIBED).is_some_and(|of| of == lease_id.as_bytes())
    }

    /// Sets the lease id of the execution that the record describes; `None` if it describes an earlier one, or none.
    pub fn set_described(&mut self, lease_id: Option<LeaseId>) {
        let of = lease_id.map(|lease_id| Bytes::copy_from_slice(lease_id.as_bytes()));
        self.set(Self::DESCRIBED, of);
    }
}

impl fmt::Debug for Extensions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.iter().map(|(number, field)| (number, field.len()))).finish()
    }
}
