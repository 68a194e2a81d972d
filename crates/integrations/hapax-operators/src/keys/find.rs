//! Searches for the records of a key.
//!
//! 1. A record is named by a hash of key and caller, so that a key alone does not lead to it. With a secret each
//!    record has a sealed description that contains the key: a search opens the description of every record.
//! 2. It goes in steps, each of which ends after half a second or with a number of found records. A caller shows
//!    what was found, and ends the search by not requesting the next step.
//! 3. A record that is written during the search, by a gateway or by the removal of expired records, may be missed, or
//!    be found twice.

use std::num::NonZeroU32;
use std::time::Duration;

use hapax_core::store::{Cursor, StoredRecord};
use hapax_core::{Key, OperationId, StoreError, Timestamp};
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use super::view::{OperationDescription, RecordView, described, from_base64, to_base64};
use super::{OperatorError, OperatorRecords};
use crate::register::register_id;

/// Numbers of records that are read from the store at once: at first, and at most, where they are read fast. They may
/// be large, and a step ends only between two pages.
const FIRST_PAGE: NonZeroU32 = NonZeroU32::MIN.saturating_add(63);
const MAX_PAGE: NonZeroU32 = NonZeroU32::MIN.saturating_add(511);

/// Time within which a page is read fast.
const FAST: Duration = Duration::from_millis(50);

/// Time after which a step ends.
const STEP: Duration = Duration::from_millis(500);

/// Number of found records with which a step ends, once its page is searched.
const ENOUGH: usize = 100;

/// Largest length of a position, in bytes.
const MAX_POSITION: usize = 128;

/// A step of a search for the records of a key, of all callers and namespaces.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FindQuery {
    /// The idempotency key.
    pub key: String,
    /// Only records whose last execution began at most so many seconds ago.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since_seconds: Option<u64>,
    /// Only requests to this path, or to one below it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// Only requests of the route with this name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub route: Option<String>,
    /// The position at which the step begins, [`FoundRecords::next`] of the one before; `None` for the first step.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<String>,
}

/// Records that a step of a search found.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct FoundRecords {
    /// The records.
    pub keys: Vec<RecordView>,
    /// The number of records that the step read.
    pub searched: u64,
    /// The number of those that are damaged, or are requests without a readable description.
    pub unreadable: u64,
    /// The position for [`FindQuery::from`] of the next step; `None` at the end.
    pub next: Option<String>,
}

impl OperatorRecords {
    /// Takes a step of a search. Dropping the future ends it; nothing is changed.
    ///
    /// # Errors
    /// [`OperatorError::NoSecret`], [`OperatorError::Invalid`], [`OperatorError::Store`].
    pub async fn find(&self, query: &FindQuery) -> Result<FoundRecords, OperatorError> {
        if !self.opens_descriptions() {
            return Err(OperatorError::NoSecret);
        }
        if Key::new(&query.key).is_err() {
            return Err(OperatorError::Invalid(
                "expected an idempotency key of 1 to 255 printable ASCII characters in `key`, found another text",
            ));
        }
        let mut place = position(query.from.as_deref())?;
        let mut found = FoundRecords::default();
        let (began, mut page) = (Instant::now(), FIRST_PAGE);
        let since = query.since_seconds.map(Duration::from_secs);
        let _turn = self.permit().await;
        loop {
            let page_began = Instant::now();
            let mut visit =
                |id: &OperationId, stored: &Result<StoredRecord, StoreError>, now: Timestamp| {
                    found.visit(query, id, stored, now);
                };
            let step = self.store.scan_all(place, page, since, &mut visit).await?;
            let Some(next) = step.next else { return Ok(found) };
            if found.keys.len() >= ENOUGH || began.elapsed() >= STEP {
                found.next = Some(to_base64(next.as_bytes()));
                return Ok(found);
            }
            page = match page_began.elapsed() <= FAST {
                true => page.saturating_add(page.get()).min(MAX_PAGE),
                false => FIRST_PAGE,
            };
            place = next;
        }
    }
}

impl FindQuery {
    fn selects(&self, described: &OperationDescription, began: Timestamp, now: Timestamp) -> bool {
        let is_recent = |seconds: u64| now.since(began) <= Duration::from_secs(seconds);
        let is_below = |path: &String| {
            let rest = described.target.as_ref().and_then(|it| it.strip_prefix(path.as_str()));
            rest.is_some_and(|it| it.is_empty() || it.starts_with('/') || path.ends_with('/'))
        };
        described.key == self.key
            && self.since_seconds.is_none_or(is_recent)
            && self.path.as_ref().is_none_or(is_below)
            && self.route.as_ref().is_none_or(|route| described.route.as_ref() == Some(route))
    }
}

impl FoundRecords {
    fn visit(
        &mut self,
        query: &FindQuery,
        id: &OperationId,
        stored: &Result<StoredRecord, StoreError>,
        now: Timestamp,
    ) {
        // It is no operation.
        if *id == register_id() {
            return;
        }
        self.searched += 1;
        let Ok(stored) = stored else {
            self.unreadable += 1;
            return;
        };
        match described(&stored.record) {
            Some(described) if query.selects(&described, stored.fence.issued_at(), now) => {
                self.keys.push(RecordView::named(id, stored, now));
            }
            Some(_) => {}
            None => {
                let is_request = stored.record.scheme.of_request().starts_with("http/");
                self.unreadable += u64::from(is_request);
            }
        }
    }
}

/// Parses the position of a step.
fn position(text: Option<&str>) -> Result<Cursor, OperatorError> {
    let Some(text) = text else { return Ok(Cursor::default()) };
    let bytes = from_base64(text).filter(|bytes| bytes.len() <= MAX_POSITION);
    bytes.map(Cursor::new).ok_or(OperatorError::Invalid(
        "expected the `next` of an earlier step in `from`, found another text",
    ))
}
