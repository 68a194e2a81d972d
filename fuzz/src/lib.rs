//! What fuzz targets share: arbitrary records.

use std::time::Duration;

use arbitrary::{Arbitrary, Result, Unstructured};
use bytes::Bytes;
use hapax_core::codec::{MAX_DECISION, MAX_DESCRIPTION};
use hapax_core::{
    Extensions, Fingerprint, FingerprintScheme, LeaseId, Notes, OnUnknown, Outcome, Record,
    RecordState, Terms,
};

/// Any record that can be written.
pub fn record(u: &mut Unstructured<'_>) -> Result<Record> {
    Ok(Record {
        scheme: scheme(u)?,
        fingerprint: Fingerprint::from_bytes(u.arbitrary()?),
        lease_id: LeaseId::from_bytes(u.arbitrary()?),
        generation: LeaseId::from_bytes(u.arbitrary()?),
        attempt: u.arbitrary()?,
        terms: Terms {
            lease: duration(u)?,
            retention: duration(u)?,
            on_unknown: *u.choose(&[
                OnUnknown::Reexecute,
                OnUnknown::Reconcile,
                OnUnknown::Block,
            ])?,
        },
        checkpoint: Option::<Vec<u8>>::arbitrary(u)?.map(Into::into),
        notes: Notes { description: note(u, MAX_DESCRIPTION)?, decision: note(u, MAX_DECISION)? },
        extensions: extensions(u)?,
        state: match u.int_in_range(0..=3)? {
            0 => RecordState::InFlight,
            1 => RecordState::Unknown {
                seen: if u.arbitrary()? { Some(outcome(u)?) } else { None },
                reconciling: u.arbitrary()?,
            },
            2 => RecordState::Done(outcome(u)?),
            _ => RecordState::Released,
        },
    })
}

fn scheme(u: &mut Unstructured<'_>) -> Result<FingerprintScheme> {
    let keyed = if u.arbitrary()? { "keyed/1;" } else { "" };
    let name = format!("{keyed}{}", u.arbitrary::<&str>()?);
    FingerprintScheme::new(name).map_err(|_| arbitrary::Error::IncorrectFormat)
}

fn duration(u: &mut Unstructured<'_>) -> Result<Duration> {
    Ok(Duration::new(u.arbitrary()?, u.int_in_range(0..=999_999_999)?))
}

fn extensions(u: &mut Unstructured<'_>) -> Result<Extensions> {
    let mut extensions = Extensions::default();
    for _ in 0..u.int_in_range(0..=3)? {
        extensions.set(u.arbitrary()?, note(u, Extensions::MAX_FIELD)?);
    }
    Ok(extensions)
}

fn note(u: &mut Unstructured<'_>, limit: usize) -> Result<Option<Bytes>> {
    let mut note = Option::<Vec<u8>>::arbitrary(u)?;
    if let Some(bytes) = &mut note {
        bytes.truncate(limit);
    }
    Ok(note.map(Bytes::from))
}

fn outcome(u: &mut Unstructured<'_>) -> Result<Outcome> {
    Ok(Outcome::new(u.arbitrary::<&str>()?, u.arbitrary::<Vec<u8>>()?))
}
