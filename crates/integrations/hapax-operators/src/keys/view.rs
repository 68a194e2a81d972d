//! A record as operators see it.

use std::fmt;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use hapax_core::store::StoredRecord;
use hapax_core::{OperationId, Outcome, Record, RecordState, Timestamp, may_execute_until};
use hapax_http::stored_response::StoredResponse;
use serde::{Deserialize, Deserializer, Serialize};

use super::time::rfc3339;
use crate::audit::DecisionNote;

/// The largest body that is shown or accepted, in bytes.
pub(super) const MAX_BODY: usize = 1 << 20;

/// Length of a time to the minute, as in `2026-11-28T20:14`.
const MINUTE: usize = 16;

/// The state of a record, for operators.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum StateView {
    /// An execution is in progress.
    InFlight,
    /// The operation happened, and its outcome is replayed.
    Done,
    /// The operation may have happened: its owner abandoned it, or its process crashed.
    Unknown,
    /// The operation did not happen; the next request executes.
    Released,
    /// The record is past its retention; the next request executes.
    Expired,
}

impl StateView {
    /// Returns the state of a record at `now`.
    pub(crate) fn of(stored: &StoredRecord, now: Timestamp) -> Self {
        match &stored.record.state {
            _ if stored.keep_until.is_some_and(|until| until <= now) => Self::Expired,
            RecordState::InFlight if now < stored.lease_until => Self::InFlight,
            // Its log says what happened, and another process continues it.
            RecordState::InFlight if stored.record.scheme.is_saga() => Self::InFlight,
            RecordState::InFlight | RecordState::Unknown { .. } => Self::Unknown,
            RecordState::Done(_) => Self::Done,
            RecordState::Released => Self::Released,
        }
    }

    /// Returns the name of the state in the API.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::InFlight => "in-flight",
            Self::Done => "done",
            Self::Unknown => "unknown",
            Self::Released => "released",
            Self::Expired => "expired",
        }
    }
}

impl fmt::Display for StateView {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A record as operators see it. With a secret it has a sealed description of the operation, with key
/// and caller; without one, neither is stored.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RecordView {
    /// The record's name: 64 hexadecimal digits.
    pub id: String,
    /// The state of the record.
    pub state: StateView,
    /// The fencing token of its last execution.
    pub fence: u64,
    /// Executions so far.
    pub attempt: u32,
    /// Policy for a retry while the outcome is unknown.
    pub on_unknown: String,
    /// The fingerprint scheme of the request.
    pub scheme: String,
    /// The first eight hexadecimal digits of the fingerprint. The whole fingerprint, if it is not
    /// keyed, would let a reader guess the request.
    pub fingerprint: String,
    /// The store's clock, RFC 3339, like all times here.
    pub now: String,
    /// When the last execution began.
    pub began: String,
    /// The time at which it was done or released; `None` in any other state.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended: Option<String>,
    /// The end of the lease.
    pub lease_until: String,
    /// The reason for which the outcome is unknown: `lapsed`, if its owner ended without a word, for example in a crash;
    /// `status-N`, if the response had a status that leaves it open; `no-response`, or, of what is no HTTP request,
    /// `no-value`. `None` in any other state.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Time from which the request of an unknown outcome no longer executes, if that is later than `now`. A
    /// service may work on after its caller has gone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub may_execute_until: Option<String>,
    /// When it expires; `None` for never.
    pub keep_until: Option<String>,
    /// The operation as it was described at its claim; only where a secret seals.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub described: Option<OperationDescription>,
    /// The last decision of an operator about it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decision: Option<DecisionNote>,
    /// The response that is replayed; of an unknown outcome, the response that was seen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub response: Option<ResponseView>,
}

/// An operation as its record describes it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct OperationDescription {
    /// The idempotency key.
    #[serde(default)]
    pub key: String,
    /// The name of a function.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub function: Option<String>,
    /// The method of an HTTP request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub method: Option<String>,
    /// Its path, without the query.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<String>,
    /// The name of its route, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub route: Option<String>,
    /// The headers of its scope.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub caller: Vec<CallerView>,
    /// The namespace of its service; like the fields below only if it can be reconciled without a retry.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    /// The keyed hash of the name of its route's hook; `None` if the description is that of an earlier execution.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hook: Option<String>,
    /// Whether it is a request of gRPC.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub grpc: bool,
    /// Whether `caller` lacks values, or values that are no credentials.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub partial: bool,
    /// The value of its `traceparent` header.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub traceparent: Option<String>,
}

/// A header of a request's scope: its value, or a short keyed hash of one that may be a credential.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct CallerView {
    /// The name of the header.
    pub header: String,
    /// Its value.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value: Option<String>,
    /// The hash of its value.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hash: Option<String>,
}

/// A record before a decision.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct RecordBefore {
    /// The state of the record before the decision.
    pub state: StateView,
    /// When it was done.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended: Option<String>,
    /// The status of its response; for an unknown outcome, the status that the owner saw.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<u16>,
}

impl RecordBefore {
    pub(super) fn of(stored: &StoredRecord, now: Timestamp) -> Self {
        let status = outcome(stored).and_then(|outcome| {
            match StoredResponse::from_outcome(outcome).ok()? {
                StoredResponse::NotRetained { status } => Some(status.as_u16()),
                StoredResponse::Whole(whole) => Some(whole.status.as_u16()),
            }
        });
        Self { state: StateView::of(stored, now), ended: ended(stored).map(rfc3339), status }
    }
}

/// A stored response.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ResponseView {
    /// Its status.
    pub status: u16,
    /// Whether headers and body are stored; if not, a retry gets 409 `response-not-retained`.
    pub retained: bool,
    /// Its headers.
    pub headers: Vec<(String, String)>,
    /// Its body, if it is text of at most 1 MiB.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub body: Option<String>,
    /// Its body, if it is no text and of at most 1 MiB.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub body_base64: Option<String>,
    /// Bytes of its body.
    pub body_bytes: usize,
}

impl RecordView {
    /// Returns the minute in which the last execution began, as in `2026-11-28T20:14Z`.
    #[must_use]
    pub fn minute(&self) -> String {
        format!("{}Z", self.began.get(..MINUTE).unwrap_or(&self.began))
    }

    /// Creates the view of a record, with its response.
    pub(super) fn of(id: &OperationId, stored: &StoredRecord, now: Timestamp) -> Self {
        Self {
            response: outcome(stored).and_then(ResponseView::of),
            ..Self::named(id, stored, now)
        }
    }

    /// Creates the view of a record without its response, so that nothing large is copied.
    pub(crate) fn named(id: &OperationId, stored: &StoredRecord, now: Timestamp) -> Self {
        let record = &stored.record;
        Self {
            id: id.to_string(),
            state: StateView::of(stored, now),
            fence: stored.fence.get(),
            attempt: record.attempt,
            on_unknown: record.terms.on_unknown.as_str().to_owned(),
            scheme: record.scheme.as_str().to_owned(),
            fingerprint: crate::hex(&record.fingerprint.as_bytes()[..4]),
            now: rfc3339(now),
            began: rfc3339(stored.fence.issued_at()),
            ended: ended(stored).map(rfc3339),
            lease_until: rfc3339(stored.lease_until),
            reason: reason(stored, now),
            may_execute_until: may_execute(stored, now),
            keep_until: stored.keep_until.map(rfc3339),
            described: described(record),
            decision: decided(record),
            response: None,
        }
    }
}

impl ResponseView {
    /// Returns the view of an outcome; `None` if it is no HTTP response.
    fn of(outcome: &Outcome) -> Option<Self> {
        match StoredResponse::from_outcome(outcome).ok()? {
            StoredResponse::NotRetained { status } => Some(Self {
                status: status.as_u16(),
                retained: false,
                headers: Vec::new(),
                body: None,
                body_base64: None,
                body_bytes: 0,
            }),
            StoredResponse::Whole(whole) => {
                let shown = (whole.body.len() <= MAX_BODY).then_some(&whole.body);
                let body = shown.and_then(|body| std::str::from_utf8(body).ok());
                let headers = whole.headers.iter().map(|(name, value)| {
                    (name.to_string(), String::from_utf8_lossy(value.as_bytes()).into_owned())
                });
                Some(Self {
                    status: whole.status.as_u16(),
                    retained: true,
                    headers: headers.collect(),
                    body: body.map(str::to_owned),
                    body_base64: match body {
                        Some(_) => None,
                        None => shown.map(|body| to_base64(body)),
                    },
                    body_bytes: whole.body.len(),
                })
            }
        }
    }
}

fn reason(stored: &StoredRecord, now: Timestamp) -> Option<String> {
    if StateView::of(stored, now) != StateView::Unknown {
        return None;
    }
    let is_request = stored.record.scheme.of_request().starts_with("http/");
    Some(match (&stored.record.state, RecordBefore::of(stored, now).status) {
        (RecordState::InFlight, _) => "lapsed".to_owned(),
        (_, Some(status)) => format!("status-{status}"),
        (_, None) if is_request => "no-response".to_owned(),
        (_, None) => "no-value".to_owned(),
    })
}

fn may_execute(stored: &StoredRecord, now: Timestamp) -> Option<String> {
    // While a process renews its lease the time is not known.
    let is_unknown = StateView::of(stored, now) == StateView::Unknown;
    let until = may_execute_until(stored).filter(|until| is_unknown && now < *until);
    until.map(rfc3339)
}

/// Returns the description; `None` also for one that this version cannot read. The hook of an earlier execution, whose
/// description a takeover kept, decides about this one no more than that of another operation.
pub(super) fn described(record: &Record) -> Option<OperationDescription> {
    let described = record.notes.description.as_ref()?;
    let mut described: OperationDescription = serde_json::from_slice(described).ok()?;
    described.hook = described.hook.filter(|_| record.extensions.describes(record.lease_id));
    Some(described)
}

/// Returns the last decision; `None` also for one that this version cannot read.
fn decided(record: &Record) -> Option<DecisionNote> {
    serde_json::from_slice(record.notes.decision.as_ref()?).ok()
}

/// Returns the outcome that is replayed, or that was seen before the outcome became unknown.
const fn outcome(stored: &StoredRecord) -> Option<&Outcome> {
    match &stored.record.state {
        RecordState::Done(outcome) | RecordState::Unknown { seen: Some(outcome), .. } => {
            Some(outcome)
        }
        RecordState::InFlight | RecordState::Unknown { .. } | RecordState::Released => None,
    }
}

/// Returns the end of what was done, a retention before its outcome expires, or of what was released, whose lease ended
/// with the release. A released record is kept for a lease or longer.
fn ended(stored: &StoredRecord) -> Option<Timestamp> {
    match stored.record.state {
        RecordState::Done(_) => {
            let retention = stored.record.terms.retention.as_micros();
            let micros = u64::try_from(retention).unwrap_or(u64::MAX);
            Some(Timestamp::from_micros(stored.keep_until?.as_micros().saturating_sub(micros)))
        }
        RecordState::Released => Some(stored.lease_until),
        RecordState::InFlight | RecordState::Unknown { .. } => None,
    }
}

pub(super) fn to_base64(bytes: &[u8]) -> String {
    STANDARD.encode(bytes)
}

pub(super) fn from_base64(text: &str) -> Option<Vec<u8>> {
    STANDARD.decode(text).ok()
}

pub(crate) fn id_or_none<'de, D: Deserializer<'de>>(
    from: D,
) -> Result<Option<OperationId>, D::Error> {
    let Some(text) = Option::<String>::deserialize(from)? else { return Ok(None) };
    let id = OperationId::from_hex(&text);
    id.map(Some).ok_or_else(|| serde::de::Error::custom("an id has 64 hexadecimal digits"))
}
