//! What operators see of the store, and what they may do to it.
//!
//! One implementation for the admin listener and for `hapax keys` on a file. Keys and scopes are not
//! in the store; a record is named by its id, a hash of both.

mod time;
mod view;

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hapax::exchange::{Resolved, Wrote};
use hapax::machine::{Resolution, Resolve};
use hapax::{ClaimError, FencingToken, Idempotency, Inspect, Key, Scope, StoreError, StoreKey};
use hapax_http::classify::is_grpc;
use hapax_http::stored::{Stored, Whole, bodiless, hop_by_hop};
use http::header::{CONTENT_LENGTH, DATE, TRAILER};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use serde::{Deserialize, Serialize};
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::timeout;

pub use view::{KeyState, KeyView, ResponseView, Was};

/// How many records are looked at for one page, at most; with a filter, few of them may match.
const MAX_LOOKED_AT: u32 = 10_000;

/// How many pages of the store are read for one, at most. Large records fill a page of the store
/// before they are as many as were asked for.
const MAX_PAGES: u32 = 320;

/// How many read records at one time; further ones wait for their turn, in order. Records may be
/// large.
const READERS: usize = 2;

/// How many are read from the store at once.
const PAGE: NonZeroU32 = NonZeroU32::MIN.saturating_add(255);

/// The records of a store, for operators.
#[derive(Clone, Debug)]
pub struct Keys {
    engine: Idempotency,
    store: Arc<dyn Inspect>,
    patience: Duration,
    turns: Arc<Semaphore>,
}

/// Which records to list.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct List {
    /// In this state only.
    #[serde(default)]
    pub state: Option<KeyState>,
    /// After this id.
    #[serde(default, deserialize_with = "view::id_or_none")]
    pub after: Option<StoreKey>,
    /// At most so many; 1 to 1,000. Default 100.
    #[serde(default)]
    pub limit: Option<u32>,
}

/// A page of records, in the order of their ids.
#[derive(Debug, Serialize, Deserialize)]
pub struct Listed {
    /// The records.
    pub keys: Vec<KeyView>,
    /// Records that cannot be read: id and reason.
    pub damaged: Vec<(String, String)>,
    /// Where to go on, as `after`; `None` at the end.
    pub next: Option<String>,
}

/// What an operator says of an operation.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Decision {
    /// The fence that was seen: what changed since is not touched.
    pub fence: u64,
    /// Even if it is in flight and its lease is live.
    #[serde(default)]
    pub force: bool,
    /// Even if it is done: its answer is forgotten, and it executes again.
    #[serde(default)]
    pub forget: bool,
    /// What became of it.
    pub outcome: Became,
    /// With which status it is answered from now on, 200 to 599. Default 200.
    #[serde(default)]
    pub status: Option<u16>,
    /// With which headers.
    #[serde(default)]
    pub headers: Vec<(String, String)>,
    /// With which body, as text.
    #[serde(default)]
    pub body: Option<String>,
    /// With which body, as base64; instead of `body`.
    #[serde(default)]
    pub body_base64: Option<String>,
}

/// What became of an operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Became {
    /// It happened, and this is the answer.
    Happened,
    /// It did not happen: the next request executes.
    DidNotHappen,
}

/// Why an operator's wish was not fulfilled.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KeysError {
    /// There is no such record, or it has expired.
    #[error("there is no record of this key for this caller, or it has expired")]
    NotFound,
    /// It was released before.
    #[error("the key was released at {at} already: the next request with it executes")]
    Released {
        /// When.
        at: String,
    },
    /// Somebody is executing it.
    #[error("the key is in flight; to decide all the same, force it")]
    InFlight,
    /// It is done, and was to be something else.
    #[error("{}", done(at, *status, *wanted))]
    Done {
        /// Since when.
        at: String,
        /// The status it is answered with; `None` if it is no HTTP response.
        status: Option<u16>,
        /// What was said of it.
        wanted: Became,
    },
    /// Another execution or decision came in between.
    #[error("the record changed in between: it is {state} now, its fence is {fence}; look again")]
    Changed {
        /// What it is now.
        state: KeyState,
        /// Its fence now.
        fence: u64,
    },
    /// What was said makes no response.
    #[error("{0}")]
    Invalid(&'static str),
    /// It is no request over HTTP: nobody but its own program could read a response there.
    #[error(
        "the record is none of a request over HTTP ({scheme}): only its own program can say that it \
         happened, and with which answer"
    )]
    NotHttp {
        /// What its fingerprint is made by.
        scheme: String,
    },
    /// Others kept changing it.
    #[error("the record changes too fast")]
    Contended,
    /// The store.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The engine.
    #[error(transparent)]
    Engine(ClaimError),
}

impl KeysError {
    /// Its name in the API.
    #[must_use]
    pub const fn code(&self) -> &'static str {
        match self {
            Self::NotFound => "not-found",
            Self::Released { .. } => "released",
            Self::InFlight => "in-flight",
            Self::Done { .. } => "done",
            Self::Changed { .. } => "changed",
            Self::Invalid(_) | Self::NotHttp { .. } => "bad-request",
            Self::Contended => "contended",
            Self::Store(StoreError::Corrupt(_))
            | Self::Engine(ClaimError::Store(StoreError::Corrupt(_))) => "corrupt",
            Self::Store(_) | Self::Engine(_) => "store-unavailable",
        }
    }
}

impl Keys {
    /// The records of `store`, on which `engine` runs; a read may take as long as `patience`.
    #[must_use]
    pub fn new(engine: Idempotency, store: Arc<dyn Inspect>, patience: Duration) -> Self {
        Self { engine, store, patience, turns: Arc::new(Semaphore::new(READERS)) }
    }

    /// The id of `key` in the scope that these headers make.
    #[must_use]
    pub fn id(&self, scope: &[(HeaderName, HeaderValue)], key: &Key) -> StoreKey {
        let scope = Scope::of(scope.iter().map(|(name, value)| (name.as_str(), value.as_bytes())));
        self.engine.store_key(&scope, key)
    }

    /// A page of records. Expired and released ones are left out unless asked for by state.
    ///
    /// # Errors
    /// [`KeysError::Store`].
    pub async fn list(&self, list: List) -> Result<Listed, KeysError> {
        let limit = list.limit.unwrap_or(100).clamp(1, 1000) as usize;
        let mut listed = Listed { keys: Vec::new(), damaged: Vec::new(), next: None };
        let (mut after, mut looked_at) = (list.after, 0);
        let _turn = self.turn().await;
        for _ in 0..MAX_PAGES {
            // On Redis a page is a walk over all keys: as long as it takes, each of its steps
            // being bounded by the store.
            let page = self.store.page(after, PAGE).await?;
            for (key, cell) in page.cells {
                if listed.keys.len() + listed.damaged.len() == limit {
                    listed.next = after.map(|id| id.to_string());
                    return Ok(listed);
                }
                after = Some(key);
                looked_at += 1;
                match cell {
                    Err(error) => listed.damaged.push((key.to_string(), error.to_string())),
                    Ok(cell) => {
                        // A page names records; `show` has what was answered.
                        let view = KeyView::named(&key, &cell, page.now);
                        let wanted = match list.state {
                            Some(state) => view.state == state,
                            None => !matches!(view.state, KeyState::Expired | KeyState::Released),
                        };
                        if wanted {
                            listed.keys.push(view);
                        }
                    }
                }
            }
            if !page.more {
                return Ok(listed);
            }
            if looked_at >= MAX_LOOKED_AT {
                break;
            }
        }
        listed.next = after.map(|id| id.to_string());
        Ok(listed)
    }

    /// What is known of a record.
    ///
    /// # Errors
    /// [`KeysError::NotFound`], [`KeysError::Store`].
    pub async fn show(&self, id: &StoreKey) -> Result<KeyView, KeysError> {
        let _turn = self.turn().await;
        let seen = self.within(self.store.load(id)).await?;
        let cell = seen.cell.ok_or(KeysError::NotFound)?;
        Ok(KeyView::of(id, &cell, seen.now))
    }

    /// Decides what became of an operation; copies that wait for it hear of it. Returns what it
    /// was just before.
    ///
    /// # Errors
    /// [`KeysError`]; after a store's error it may have been written: look again.
    pub async fn resolve(&self, id: &StoreKey, decision: Decision) -> Result<Was, KeysError> {
        let (expected, wanted) = (FencingToken::new(decision.fence), decision.outcome);
        let resolve = Resolve {
            expected,
            force: decision.force,
            forget: decision.forget,
            resolution: resolution(decision)?,
        };
        if wanted == Became::Happened {
            self.is_http(id).await?;
        }
        let Resolved { wrote, was } =
            self.engine.resolve(*id, resolve).await.map_err(KeysError::Engine)?;
        let (now, cell) = (was.now, was.cell.ok_or(KeysError::NotFound)?);
        let was = Was::of(&cell, now);
        match wrote {
            Wrote::Recorded(_) => Ok(was),
            Wrote::Refused | Wrote::NotFound | Wrote::Changed => {
                Err(why_not(was, cell.fence, expected, wanted))
            }
            Wrote::Contended | Wrote::Lost | Wrote::Gone => Err(KeysError::Contended),
        }
    }

    /// A record keeps its scheme for as long as it has the fence that is decided about.
    async fn is_http(&self, id: &StoreKey) -> Result<(), KeysError> {
        let _turn = self.turn().await;
        let seen = self.within(self.store.load(id)).await?;
        match seen.cell.map(|cell| cell.record.scheme) {
            Some(scheme) if !scheme.of_request().starts_with("http/") => {
                Err(KeysError::NotHttp { scheme: scheme.of_request().to_owned() })
            }
            _ => Ok(()),
        }
    }

    /// Removes records that have expired, in rounds of `limit`; how many, and whether there are
    /// more.
    ///
    /// # Errors
    /// [`KeysError::Store`]; what was removed until then stays removed.
    pub async fn purge(&self, limit: NonZeroU32) -> Result<(u32, bool), KeysError> {
        let reaped = self.store.reap(limit).await?;
        Ok((reaped.removed, reaped.more))
    }

    /// Whether the store answers in time.
    pub async fn store_answers(&self) -> bool {
        // Any key: nothing is known of it, and nothing is changed.
        let probe = StoreKey::from_bytes([0; 32]);
        match self.within(self.store.load(&probe)).await {
            Ok(_) | Err(StoreError::Corrupt(_)) => true,
            Err(error) => {
                tracing::warn!(%error, "the store does not answer");
                false
            }
        }
    }

    /// Dropped while it waits, the turn goes to the next one.
    async fn turn(&self) -> Option<SemaphorePermit<'_>> {
        // The semaphore is never closed.
        self.turns.acquire().await.ok()
    }

    async fn within<T>(
        &self,
        read: impl Future<Output = Result<T, StoreError>>,
    ) -> Result<T, StoreError> {
        timeout(self.patience, read)
            .await
            .unwrap_or_else(|_| Err(StoreError::unavailable("no answer in time")))
    }
}

/// What the record was, under which fence, instead of what was decided about.
fn why_not(was: Was, fence: FencingToken, expected: FencingToken, wanted: Became) -> KeysError {
    let Was { state, ended, status } = was;
    let is_it = fence == expected;
    match (state, ended) {
        (KeyState::Expired, _) => KeysError::NotFound,
        (KeyState::Released, Some(at)) => KeysError::Released { at },
        (KeyState::InFlight, _) if is_it => KeysError::InFlight,
        (KeyState::Done, Some(at)) if is_it => KeysError::Done { at, status, wanted },
        _ => KeysError::Changed { state, fence: fence.get() },
    }
}

fn done(at: &str, status: Option<u16>, wanted: Became) -> String {
    let answer = status.map_or_else(String::new, |status| format!(" with status {status}"));
    let done = format!("the key is done since {at}{answer}, and retries get that answer");
    match wanted {
        Became::DidNotHappen => {
            format!("{done}; forget it, and the next request with this key executes again")
        }
        Became::Happened => format!("{done}; it cannot be given another one"),
    }
}

/// What a replay can carry. With the others it would contradict itself on the wire.
fn may_be_given(name: &HeaderName) -> bool {
    !(hop_by_hop(name)
        || name.as_str().starts_with("idempotency-")
        || [CONTENT_LENGTH, DATE, TRAILER].contains(name))
}

fn resolution(decision: Decision) -> Result<Resolution, KeysError> {
    let Decision { outcome, status, headers, body, body_base64, .. } = decision;
    if outcome == Became::DidNotHappen {
        if status.is_some() || !headers.is_empty() || body.is_some() || body_base64.is_some() {
            return Err(KeysError::Invalid("what did not happen has no response"));
        }
        return Ok(Resolution::DidNotHappen);
    }
    let status = StatusCode::from_u16(status.unwrap_or(200))
        .ok()
        .filter(|status| (200..=599).contains(&status.as_u16()))
        .ok_or(KeysError::Invalid("a status is 200 to 599"))?;
    let body = match (body, body_base64) {
        (Some(_), Some(_)) => {
            return Err(KeysError::Invalid("either `body` or `body_base64`, not both"));
        }
        (Some(text), None) => Bytes::from(text),
        (None, Some(coded)) => view::from_base64(&coded)
            .ok_or(KeysError::Invalid("`body_base64` is not base64"))?
            .into(),
        (None, None) => Bytes::new(),
    };
    if body.len() > view::MAX_BODY {
        return Err(KeysError::Invalid("the body is larger than 1 MiB"));
    }
    let mut map = HeaderMap::new();
    for (name, value) in headers {
        let name = HeaderName::from_bytes(name.as_bytes());
        let value = HeaderValue::from_bytes(value.as_bytes());
        let (Ok(name), Ok(value)) = (name, value) else {
            return Err(KeysError::Invalid("a header has an invalid name or value"));
        };
        if !may_be_given(&name) {
            return Err(KeysError::Invalid(
                "a header cannot be given that belongs to a connection or is made anew for each \
                 answer: Connection, Transfer-Encoding, Content-Length, Date, Idempotency-* and \
                 the like",
            ));
        }
        map.append(name, value);
    }
    if bodiless(status) && !body.is_empty() {
        return Err(KeysError::Invalid("a response of status 204, 205 or 304 has no body"));
    }
    let grpc = is_grpc(&map);
    let whole = Whole { status, headers: map, body, trailers: None };
    let whole = if grpc { whole.for_grpc() } else { whole };
    Ok(Resolution::Happened(Stored::Whole(whole).outcome()))
}
