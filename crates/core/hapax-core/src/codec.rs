//! Encoding of a [`Record`] as bytes, with a version and a limit on every field.
//!
//! 1. The encoding is canonical: a record has one form, and [`decode`] accepts no other.
//! 2. [`decode`] returns a record or an error for any bytes. It never panics, and it allocates no
//!    more than the size of its input. Outcome and checkpoint share the input's memory.
//! 3. Bytes of another kind or of an unknown version are an error.
//! 4. Version 3 is version 2 with the [`Extensions`] of the record at its end: their number, then
//!    number, length and bytes of each, in ascending order. A record without extensions has version
//!    2, which older builds read.
//!
//! Stores do not write these bytes directly: they seal them, see [`Sealer`](crate::Sealer).

use std::time::Duration;

use bytes::Bytes;

use crate::fingerprint::{Fingerprint, FingerprintScheme};
use crate::record::{Extensions, LeaseId, Notes, OnUnknown, Outcome, Record, RecordState, Terms};

/// The longest outcome, in bytes: 64 MiB.
pub const MAX_OUTCOME: usize = 64 << 20;

/// The longest checkpoint, in bytes: 16 MiB.
pub const MAX_CHECKPOINT: usize = 16 << 20;

/// The longest description, in bytes: 4 KiB.
pub const MAX_DESCRIPTION: usize = 4 << 10;

/// The longest decision, in bytes: 4 KiB.
pub const MAX_DECISION: usize = 4 << 10;

const MAGIC: [u8; 3] = *b"hxr";
const VERSION: u8 = 2;
const VERSION_WITH_EXTENSIONS: u8 = 3;

/// Encodes `record`.
///
/// # Errors
/// [`EncodeError`] if a field is longer than its limit. There is no other error.
pub fn encode(record: &Record) -> Result<Vec<u8>, EncodeError> {
    let Record {
        scheme,
        fingerprint,
        lease_id,
        generation,
        attempt,
        terms,
        checkpoint,
        notes,
        extensions,
        state,
    } = record;
    let mut out = Vec::with_capacity(size(record));
    out.extend_from_slice(&MAGIC);
    out.push(if extensions.is_empty() { VERSION } else { VERSION_WITH_EXTENSIONS });
    out.extend_from_slice(lease_id.as_bytes());
    out.extend_from_slice(generation.as_bytes());
    out.extend_from_slice(fingerprint.as_bytes());
    out.extend_from_slice(&attempt.to_be_bytes());
    put_duration(&mut out, terms.lease);
    put_duration(&mut out, terms.retention);
    out.push(match terms.on_unknown {
        OnUnknown::Reexecute => 0,
        OnUnknown::Reconcile => 1,
        OnUnknown::Block => 2,
    });
    put(&mut out, scheme.as_str().as_bytes(), FingerprintScheme::MAX_LEN, Field::Scheme)?;
    put_option(&mut out, checkpoint.as_ref(), MAX_CHECKPOINT, Field::Checkpoint)?;
    put_option(&mut out, notes.description.as_ref(), MAX_DESCRIPTION, Field::Description)?;
    put_option(&mut out, notes.decision.as_ref(), MAX_DECISION, Field::Decision)?;
    match state {
        RecordState::InFlight => out.push(0),
        RecordState::Unknown { seen, reconciling } => {
            out.push(1);
            out.push(u8::from(*reconciling));
            match seen {
                None => out.push(0),
                Some(outcome) => {
                    out.push(1);
                    put_outcome(&mut out, outcome)?;
                }
            }
        }
        RecordState::Done(outcome) => {
            out.push(2);
            put_outcome(&mut out, outcome)?;
        }
        RecordState::Released => out.push(3),
    }
    if !extensions.is_empty() {
        put_extensions(&mut out, extensions)?;
    }
    Ok(out)
}

/// Decodes a record.
///
/// # Errors
/// [`DecodeError`] names the defect.
pub fn decode(bytes: &Bytes) -> Result<Record, DecodeError> {
    let mut reader = Reader { all: bytes, at: 0 };
    if reader.array()? != MAGIC {
        return Err(DecodeError::NotARecord);
    }
    let [version] = reader.array()?;
    if !matches!(version, VERSION | VERSION_WITH_EXTENSIONS) {
        return Err(DecodeError::Version { found: version });
    }
    let lease_id = LeaseId::from_bytes(reader.array()?);
    let generation = LeaseId::from_bytes(reader.array()?);
    let fingerprint = Fingerprint::from_bytes(reader.array()?);
    let attempt = u32::from_be_bytes(reader.array()?);
    let lease = reader.duration(Field::Lease)?;
    let retention = reader.duration(Field::Retention)?;
    let on_unknown = match reader.array()? {
        [0] => OnUnknown::Reexecute,
        [1] => OnUnknown::Reconcile,
        [2] => OnUnknown::Block,
        [_] => return Err(DecodeError::BadValue { field: Field::OnUnknown }),
    };
    let scheme = FingerprintScheme::new(reader.text(FingerprintScheme::MAX_LEN, Field::Scheme)?)
        .map_err(|_| DecodeError::TooLong { field: Field::Scheme })?;
    let checkpoint = reader.option(MAX_CHECKPOINT, Field::Checkpoint)?;
    let description = reader.option(MAX_DESCRIPTION, Field::Description)?;
    let decision = reader.option(MAX_DECISION, Field::Decision)?;
    let notes = Notes { description, decision };
    let state = match reader.array()? {
        [0] => RecordState::InFlight,
        [1] => {
            let reconciling = reader.flag(Field::State)?;
            let seen = match reader.flag(Field::State)? {
                true => Some(reader.outcome()?),
                false => None,
            };
            RecordState::Unknown { seen, reconciling }
        }
        [2] => RecordState::Done(reader.outcome()?),
        [3] => RecordState::Released,
        [_] => return Err(DecodeError::BadValue { field: Field::State }),
    };
    let extensions = match version {
        VERSION => Extensions::default(),
        _ => reader.extensions()?,
    };
    if reader.at != bytes.len() {
        return Err(DecodeError::TrailingBytes);
    }
    let terms = Terms { lease, retention, on_unknown };
    Ok(Record {
        scheme,
        fingerprint,
        lease_id,
        generation,
        attempt,
        terms,
        checkpoint,
        notes,
        extensions,
        state,
    })
}

/// A field of a record, as errors name it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Field {
    /// The lease.
    Lease,
    /// The retention.
    Retention,
    /// The policy for a retry of an unknown outcome.
    OnUnknown,
    /// The fingerprint scheme.
    Scheme,
    /// The checkpoint.
    Checkpoint,
    /// The description of the operation for operators.
    Description,
    /// The last decision of an operator.
    Decision,
    /// The state of the operation.
    State,
    /// The name of the outcome's format.
    Format,
    /// The outcome.
    Outcome,
    /// The list of extensions.
    Extensions,
}

/// Error of [`encode`]: a field is longer than its limit.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{field:?} has {length} bytes, expected at most {limit}")]
pub struct EncodeError {
    /// The field.
    pub field: Field,
    /// Its length, in bytes.
    pub length: usize,
    /// The limit, in bytes.
    pub limit: usize,
}

/// Errors of [`decode`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DecodeError {
    /// The bytes do not begin like a record.
    #[error("the bytes are not a record")]
    NotARecord,
    /// The version is unknown: a newer Hapax wrote the record, or the byte is damaged.
    #[error("a record of version {found}; this build reads versions 2 and 3")]
    Version {
        /// The version that was found.
        found: u8,
    },
    /// The bytes end too early.
    #[error("the record is cut short")]
    Truncated,
    /// A field states a length over its limit.
    #[error("{field:?} is longer than its limit")]
    TooLong {
        /// The field.
        field: Field,
    },
    /// A field has a value that no record has.
    #[error("{field:?} has an invalid value")]
    BadValue {
        /// The field.
        field: Field,
    },
    /// Bytes follow the record.
    #[error("bytes follow the record")]
    TrailingBytes,
}

/// Returns an estimate of the encoded size, for the capacity of the vector.
fn size(record: &Record) -> usize {
    let outcome = match &record.state {
        RecordState::Done(outcome) | RecordState::Unknown { seen: Some(outcome), .. } => {
            outcome.bytes().len().min(MAX_OUTCOME)
        }
        _ => 0,
    };
    let checkpoint = record.checkpoint.as_ref().map_or(0, Bytes::len).min(MAX_CHECKPOINT);
    let notes = [&record.notes.description, &record.notes.decision];
    let notes: usize = notes.into_iter().flatten().map(Bytes::len).sum();
    let extensions: usize = record.extensions.iter().map(|(_, field)| 6 + field.len()).sum();
    192 + record.scheme.as_str().len() + checkpoint + notes + extensions + outcome
}

fn put(out: &mut Vec<u8>, bytes: &[u8], limit: usize, field: Field) -> Result<(), EncodeError> {
    let too_long = EncodeError { field, length: bytes.len(), limit };
    if bytes.len() > limit {
        return Err(too_long);
    }
    let length = u32::try_from(bytes.len()).map_err(|_| too_long)?;
    out.extend_from_slice(&length.to_be_bytes());
    out.extend_from_slice(bytes);
    Ok(())
}

fn put_option(
    out: &mut Vec<u8>,
    bytes: Option<&Bytes>,
    limit: usize,
    field: Field,
) -> Result<(), EncodeError> {
    match bytes {
        None => {
            out.push(0);
            Ok(())
        }
        Some(bytes) => {
            out.push(1);
            put(out, bytes, limit, field)
        }
    }
}

fn put_outcome(out: &mut Vec<u8>, outcome: &Outcome) -> Result<(), EncodeError> {
    put(out, outcome.format().as_bytes(), Outcome::MAX_FORMAT, Field::Format)?;
    put(out, outcome.bytes(), MAX_OUTCOME, Field::Outcome)
}

fn put_extensions(out: &mut Vec<u8>, extensions: &Extensions) -> Result<(), EncodeError> {
    let length = extensions.len();
    let count = u8::try_from(length).ok().filter(|_| length <= Extensions::MAX_FIELDS);
    let limit = Extensions::MAX_FIELDS;
    out.push(count.ok_or(EncodeError { field: Field::Extensions, length, limit })?);
    for (number, field) in extensions.iter() {
        out.extend_from_slice(&number.to_be_bytes());
        put(out, field, Extensions::MAX_FIELD, Field::Extensions)?;
    }
    Ok(())
}

fn put_duration(out: &mut Vec<u8>, duration: Duration) {
    out.extend_from_slice(&duration.as_secs().to_be_bytes());
    out.extend_from_slice(&duration.subsec_nanos().to_be_bytes());
}

struct Reader<'a> {
    all: &'a Bytes,
    at: usize,
}

impl Reader<'_> {
    fn array<const N: usize>(&mut self) -> Result<[u8; N], DecodeError> {
        let rest = self.all.get(self.at..).unwrap_or_default();
        let array = rest.first_chunk().ok_or(DecodeError::Truncated)?;
        self.at += N;
        Ok(*array)
    }

    fn field(&mut self, limit: usize, field: Field) -> Result<Bytes, DecodeError> {
        let length = u32::from_be_bytes(self.array()?) as usize;
        if length > limit {
            return Err(DecodeError::TooLong { field });
        }
        let end = self.at.checked_add(length).ok_or(DecodeError::Truncated)?;
        if end > self.all.len() {
            return Err(DecodeError::Truncated);
        }
        let bytes = self.all.slice(self.at..end);
        self.at = end;
        Ok(bytes)
    }

    fn option(&mut self, limit: usize, field: Field) -> Result<Option<Bytes>, DecodeError> {
        match self.flag(field)? {
            true => self.field(limit, field).map(Some),
            false => Ok(None),
        }
    }

    fn text(&mut self, limit: usize, field: Field) -> Result<std::sync::Arc<str>, DecodeError> {
        let bytes = self.field(limit, field)?;
        let text = std::str::from_utf8(&bytes).map_err(|_| DecodeError::BadValue { field })?;
        Ok(text.into())
    }

    fn outcome(&mut self) -> Result<Outcome, DecodeError> {
        let format = self.text(Outcome::MAX_FORMAT, Field::Format)?;
        Ok(Outcome::new(format, self.field(MAX_OUTCOME, Field::Outcome)?))
    }

    fn extensions(&mut self) -> Result<Extensions, DecodeError> {
        const FIELD: Field = Field::Extensions;
        let [count] = self.array()?;
        // Without any, the record has version 2.
        if count == 0 {
            return Err(DecodeError::BadValue { field: FIELD });
        }
        if usize::from(count) > Extensions::MAX_FIELDS {
            return Err(DecodeError::TooLong { field: FIELD });
        }
        let mut extensions = Extensions::default();
        let mut last = None;
        for _ in 0..count {
            let number = u16::from_be_bytes(self.array()?);
            if last.is_some_and(|last| number <= last) {
                return Err(DecodeError::BadValue { field: FIELD });
            }
            last = Some(number);
            // A copy: a field must not keep the memory of a large outcome.
            let field = self.field(Extensions::MAX_FIELD, FIELD)?;
            extensions.set_copied(number, &field);
        }
        Ok(extensions)
    }

    fn flag(&mut self, field: Field) -> Result<bool, DecodeError> {
        match self.array()? {
            [0] => Ok(false),
            [1] => Ok(true),
            [_] => Err(DecodeError::BadValue { field }),
        }
    }

    fn duration(&mut self, field: Field) -> Result<Duration, DecodeError> {
        let seconds = u64::from_be_bytes(self.array()?);
        let nanos = u32::from_be_bytes(self.array()?);
        // More nanoseconds would be a second encoding of the same duration.
        if nanos >= 1_000_000_000 {
            return Err(DecodeError::BadValue { field });
        }
        Ok(Duration::new(seconds, nanos))
    }
}
