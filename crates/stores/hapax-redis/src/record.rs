//! The format of a record in Redis, and of the scripts' answers.
//!
//! The script stamps the numbers next to the sealed record, so they cannot be sealed: a process
//! that can write to the server can end leases and retention, as it can delete keys. With a secret
//! it cannot read a record, forge one, or move one to another key or write id.

use std::time::Duration;

use hapax_core::store::{Snapshot, Stamped, StoredRecord, Swapped};
use hapax_core::{FencingToken, OperationId, Sealer, StoreError, Timestamp, WriteId};
use redis::Value;

use crate::error::RedisStoreError;

const MAGIC: &[u8; 4] = b"hxc1";
const DIGITS: usize = 16;
const NEVER: u64 = 9_999_999_999_999_999;

/// Limit of stored durations, to which longer ones are shortened: 150 years, which the scripts can
/// add to any clock of this century.
const LONGEST: Duration = Duration::from_secs(150 * 365 * 86_400);

/// Returns a duration in the scripts' format.
pub(crate) fn micros(duration: Duration) -> String {
    duration.min(LONGEST).as_micros().to_string()
}

/// Parses the answer of `swap.lua` to a swap of this key and write id.
pub(crate) fn swapped(
    (key, write_id): (&OperationId, WriteId),
    value: Value,
    sealer: &Sealer,
) -> Result<Swapped, ReplyError> {
    let Value::Array(answer) = value else { return Err(ReplyError::Unreadable) };
    let ours = |asked: &Value| bytes(asked) == Some(&write_id.as_bytes()[..]);
    match <[Value; 5]>::try_from(answer) {
        Ok([kind, asked, now, fence, lease]) if bytes(&kind) == Some(b"S") && ours(&asked) => {
            Ok(Swapped::Stored(Stamped {
                now: time(&now)?,
                fence: FencingToken::new(number(&fence)?),
                lease_until: time(&lease)?,
            }))
        }
        Err(answer) => match <[Value; 4]>::try_from(answer) {
            Ok([kind, asked, now, stored]) if bytes(&kind) == Some(b"C") && ours(&asked) => {
                Ok(Swapped::Conflict(snapshot(key, time(&now)?, &stored, sealer)?))
            }
            _ => Err(ReplyError::Unreadable),
        },
        Ok(_) => Err(ReplyError::Unreadable),
    }
}

/// Returns whether a script answered to the request named `asked` that the store has another identity
/// than the expected one.
pub(crate) fn is_replaced(asked: &[u8], value: &Value) -> bool {
    let Value::Array(answer) = value else { return false };
    let [kind, said] = &answer[..] else { return false };
    bytes(kind) == Some(b"R") && bytes(said) == Some(asked)
}

/// Parses the answer of `load.lua` for this key, which has that name on the server.
pub(crate) fn loaded(
    (key, name): (&OperationId, &str),
    value: Value,
    sealer: &Sealer,
) -> Result<Snapshot, ReplyError> {
    let Value::Array(answer) = value else { return Err(ReplyError::Unreadable) };
    match <[Value; 4]>::try_from(answer) {
        Ok([asked, seconds, micros, stored]) if bytes(&asked) == Some(name.as_bytes()) => {
            let seconds = Duration::from_secs(number(&seconds)?);
            let now = seconds.saturating_add(Duration::from_micros(number(&micros)?));
            snapshot(key, Timestamp::default().after(now), &stored, sealer)
        }
        _ => Err(ReplyError::Unreadable),
    }
}

/// Parses the answer of `GET` for this key.
pub(crate) fn got(
    key: &OperationId,
    value: &Value,
    sealer: &Sealer,
) -> Result<Option<StoredRecord>, ReplyError> {
    if *value == Value::Nil {
        return Ok(None);
    }
    let stored = bytes(value).ok_or(ReplyError::Unreadable)?;
    open(key, stored, sealer).map(Some).map_err(ReplyError::Damaged)
}

/// Reasons for which an answer is unusable.
#[derive(Debug)]
pub(crate) enum ReplyError {
    /// The answer is none of the script's, or belongs to another request: its effect is unknown.
    Unreadable,
    /// The script was executed, and the record that it found is damaged, or sealed by another
    /// secret.
    Damaged(StoreError),
}

impl ReplyError {
    /// Returns the error of a request that changes nothing.
    pub(crate) fn into_read_error(self) -> StoreError {
        match self {
            Self::Damaged(error) => error,
            Self::Unreadable => StoreError::unavailable(RedisStoreError::Unreadable),
        }
    }
}

fn snapshot(
    key: &OperationId,
    now: Timestamp,
    stored: &Value,
    sealer: &Sealer,
) -> Result<Snapshot, ReplyError> {
    let stored = match stored {
        Value::Boolean(false) => None,
        stored => got(key, stored, sealer)?,
    };
    Ok(Snapshot { now, stored })
}

fn open(key: &OperationId, stored: &[u8], sealer: &Sealer) -> Result<StoredRecord, StoreError> {
    let (columns, sealed) =
        columns(stored).ok_or_else(|| StoreError::corrupt(RedisStoreError::ForeignValue))?;
    let [fence, lease_until, keep_until, _due] = columns.numbers;
    let record = sealer.open(key, columns.write_id, sealed).map_err(StoreError::corrupt)?;
    Ok(StoredRecord {
        write_id: columns.write_id,
        fence: FencingToken::new(fence),
        lease_until: Timestamp::from_micros(lease_until),
        keep_until: (keep_until != NEVER).then_some(Timestamp::from_micros(keep_until)),
        record,
    })
}

struct Columns {
    write_id: WriteId,
    numbers: [u64; 4],
}

/// Splits a stored value into columns and sealed record.
fn columns(stored: &[u8]) -> Option<(Columns, &[u8])> {
    let rest = stored.strip_prefix(MAGIC)?;
    let (write_id, mut rest) = rest.split_first_chunk()?;
    let mut numbers = [0; 4];
    for number in &mut numbers {
        let (digits, after) = rest.split_first_chunk::<DIGITS>()?;
        *number = parse(digits)?;
        rest = after;
    }
    Some((Columns { write_id: WriteId::from_bytes(*write_id), numbers }, rest))
}

pub(crate) fn time(value: &Value) -> Result<Timestamp, ReplyError> {
    number(value).map(Timestamp::from_micros)
}

pub(crate) fn number(value: &Value) -> Result<u64, ReplyError> {
    bytes(value).and_then(parse).ok_or(ReplyError::Unreadable)
}

/// Parses digits only: no sign, no white space.
fn parse(digits: &[u8]) -> Option<u64> {
    let all = !digits.is_empty() && digits.iter().all(u8::is_ascii_digit);
    all.then(|| std::str::from_utf8(digits).ok()?.parse().ok()).flatten()
}

pub(crate) fn bytes(value: &Value) -> Option<&[u8]> {
    match value {
        Value::BulkString(bytes) => Some(bytes),
        Value::SimpleString(text) => Some(text.as_bytes()),
        _ => None,
    }
}
