//! Data that are saved with a try, and the key among them.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hapax_core::value;
use hapax_saga::log::{Blob, Log, LogTime};
use hapax_saga::{StepContext, StepError, StuckReason};
use serde::{Deserialize, Serialize};

use super::{ClientState, KEY_CHANGED, stuck};
use crate::known::Known;
use crate::server::Server;

/// Data that are saved with a try.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) struct PreparedTry {
    pub(super) within: Duration,
    /// Header and value of the key; `None` of a try without one.
    pub(super) key: Option<(String, Blob)>,
    /// Keyed hash of the credentials.
    pub(super) credentials: String,
    /// True if the server has rejected earlier ones.
    pub(super) rejected: bool,
    /// Data of the responses to earlier ones.
    pub(super) known: Known,
    /// Logs of earlier releases have none.
    #[serde(default)]
    pub(super) times: TryTimes,
}

/// Times of an operation, by the clock of its processes, for lists.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub(crate) struct TryTimes {
    /// Begin of its first try.
    pub(crate) first: Option<LogTime>,
    /// Begin of its last try.
    pub(crate) last: Option<LogTime>,
}

impl TryTimes {
    /// Returns the times with a try that begins now.
    pub(super) fn next(before: Option<Self>, now: LogTime) -> Self {
        Self { first: before.and_then(|before| before.first).or(Some(now)), last: Some(now) }
    }
}

/// Returns the header and the value of the key of a try. Rejects others than those of a try that may have
/// arrived, and a key after a try without one: for the server it would be another operation. The process of
/// that try may have declared the server otherwise.
///
/// Each try saves its key before it is sent, and replaces the saved one. Since a try that may have
/// arrived, all have had the same, so that the last one is compared. Data that cannot be read are of
/// another version, and their key may be any.
pub(super) fn check_key(
    at: &StepContext<Arc<ClientState>>,
    server: &Server,
) -> Result<Option<(String, Blob)>, StepError<()>> {
    let key = server.key(&at.id().downstream()).map(|(name, value)| {
        (name.as_str().to_owned(), Blob(Bytes::copy_from_slice(value.as_bytes())))
    });
    let is_same = || at.prepared::<PreparedTry>().is_some_and(|before| before.key == key);
    if at.age().is_some() && !is_same() {
        let text = "expected the key and the key header of a try that may have arrived, found others: declare the server as for that try";
        let reason = StuckReason::Step(KEY_CHANGED.to_owned());
        return Err(stuck(at, reason, text, false));
    }
    Ok(key)
}

/// Saves data of the responses so far with the end of this try.
pub(crate) fn keep_known(at: &StepContext<Arc<ClientState>>, known: &Known) {
    let Some(before) = at.prepared::<PreparedTry>() else { return };
    if before.known != *known {
        let prepared = PreparedTry { known: known.clone(), ..before };
        // It was written before, with other data.
        let _ = at.replace_prepared(&prepared);
    }
}

/// Returns whether the last try of an operation had no key.
pub(crate) fn was_without_key(log: &Log) -> bool {
    saved(log).is_some_and(|before| before.key.is_none())
}

/// Returns the times of the tries of an operation, and the operation id that the server has sent.
pub(crate) fn last_try(log: &Log) -> (TryTimes, Option<String>) {
    saved(log).map(|it| (it.times, it.known.operation)).unwrap_or_default()
}

/// Returns the data of the last try; `None` before the first one.
fn saved(log: &Log) -> Option<PreparedTry> {
    let prepared = log.steps.first().and_then(|step| step.forward.prepared.as_ref());
    value::read(&prepared?.0).ok()
}
