//! Lists of records.

use std::num::NonZeroU32;
use std::time::Duration;

use hapax_core::store::{Cursor, ScanStep, StoredRecord};
use hapax_core::{OperationId, StoreError, Timestamp};
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use super::view::{RecordView, StateView, id_or_none};
use super::{OperatorError, OperatorRecords, UndecidedGroups};
use crate::census::{Census, CensusList, LARGE_PAGE};
use crate::register::register_id;

/// Largest number of records that are read for one page; with a filter, few of them may match.
const MAX_LOOKED_AT: u32 = 10_000;

/// Largest number of pages of the store that are read for one page of a list. Large records fill a
/// page of the store before it has the requested number.
const MAX_PAGES: u32 = 320;

/// Number of records that are read from the store at once.
const PAGE: NonZeroU32 = NonZeroU32::MIN.saturating_add(255);

/// Number of records after which a page of a walk ends, and the time after which it does.
const UNDECIDED_PAGE: usize = 100;
const STEP: Duration = Duration::from_secs(1);

/// The longest position of a walk, in hexadecimal digits.
const MAX_POSITION: usize = 256;

/// A choice of records to list.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ListQuery {
    /// The state of the records; `None` for all that are neither expired nor released.
    #[serde(default)]
    pub state: Option<StateView>,
    /// The id after which the page begins.
    #[serde(default, deserialize_with = "id_or_none")]
    pub after: Option<OperationId>,
    /// The largest number of records; 1 to 1,000. Default 100.
    #[serde(default)]
    pub limit: Option<u32>,
    /// Hash of the caller ([`OperatorRecords::caller_hash`]).
    #[serde(default)]
    pub caller: Option<String>,
}

/// A page of records, in the order of their ids.
#[derive(Debug, Serialize, Deserialize)]
pub struct RecordList {
    /// The records.
    pub keys: Vec<RecordView>,
    /// Records that cannot be read: id and reason.
    pub damaged: Vec<(String, String)>,
    /// The id for `after` of the next page; `None` at the end.
    pub next: Option<String>,
    /// Whether there are more records than the limit, in a list ordered by age.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub more: bool,
    /// For a list of a census, oldest first: the beginning of the last complete walk. Decisions of
    /// other processes since then may be missing. `None` during the first walk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub as_of: Option<String>,
}

/// A part of a walk over the records whose outcome is unknown.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct UndecidedPage {
    /// The records, in the order in which the store has them. One that is written during the walk may be there twice.
    pub keys: Vec<RecordView>,
    /// Records that cannot be read: id and reason.
    pub damaged: Vec<(String, String)>,
    /// The position at which the walk continues, for `from`; `None` at its end.
    pub next: Option<String>,
}

impl RecordList {
    /// Creates the list from the list of a census.
    pub(crate) fn of(counted: CensusList) -> Self {
        let CensusList { keys, more, as_of } = counted;
        Self { keys, damaged: Vec::new(), next: None, more, as_of }
    }
}

impl OperatorRecords {
    /// Returns the hash by which records name the caller with this value of a scope header, if it may
    /// be a credential; `None` if the store seals nothing, so that records name no callers.
    #[must_use]
    pub fn caller_hash(&self, value: &str) -> Option<String> {
        self.engine.pseudonym(value.as_bytes())
    }

    fn is_by(&self, view: &RecordView, hash: &str) -> bool {
        let callers = view.described.iter().flat_map(|described| &described.caller);
        let hashes = callers.map(|caller| match &caller.value {
            Some(value) => self.caller_hash(value),
            None => caller.hash.clone(),
        });
        hashes.flatten().any(|it| it == hash)
    }

    /// Returns a page of records. Expired and released ones are left out unless `state` selects
    /// them.
    ///
    /// # Errors
    /// [`OperatorError::Store`].
    pub async fn list(&self, list: ListQuery) -> Result<RecordList, OperatorError> {
        let limit = list.limit.unwrap_or(100).clamp(1, 1000) as usize;
        let mut listed = RecordList {
            keys: Vec::new(),
            damaged: Vec::new(),
            next: None,
            more: false,
            as_of: None,
        };
        let (mut after, mut looked_at) = (list.after, 0);
        let _turn = self.permit().await;
        for _ in 0..MAX_PAGES {
            // On Redis a page is a walk over all keys: as long as it takes, each of its steps
            // being bounded by the store.
            let page = self.store.page(after, PAGE).await?;
            for (key, stored) in page.records {
                // It is no operation. The next page begins after it all the same: it may fill a page alone.
                if key == register_id() {
                    after = Some(key);
                    continue;
                }
                if listed.keys.len() + listed.damaged.len() == limit {
                    listed.next = after.map(|id| id.to_string());
                    return Ok(listed);
                }
                after = Some(key);
                looked_at += 1;
                match stored {
                    Err(error) => listed.damaged.push((key.to_string(), error.to_string())),
                    Ok(stored) => {
                        // A page names records; `show` has what was answered.
                        let view = RecordView::named(&key, &stored, page.now);
                        let wanted = match list.state {
                            Some(state) => view.state == state,
                            None => !matches!(view.state, StateView::Expired | StateView::Released),
                        };
                        let by = list.caller.as_deref();
                        if wanted && by.is_none_or(|hash| self.is_by(&view, hash)) {
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

    /// Reads the whole store and returns the oldest records whose outcome is unknown.
    ///
    /// # Errors
    /// [`OperatorError::Store`].
    pub async fn unknown(&self, list: &ListQuery) -> Result<RecordList, OperatorError> {
        let census = Census::default();
        let _turn = self.permit().await;
        census.walk(&*self.store, false).await?;
        Ok(self.known(&census, list))
    }

    /// Takes steps of a walk through the store, for about a second or until there are some records whose outcome is
    /// unknown. The walk begins without a position, and continues at that of the last page.
    ///
    /// # Errors
    /// [`OperatorError::Invalid`], [`OperatorError::Store`].
    pub async fn undecided(&self, from: Option<&str>) -> Result<UndecidedPage, OperatorError> {
        let invalid =
            OperatorError::Invalid("expected the `next` of a page as `from`, found another text");
        let mut place = match from {
            Some(text) => Cursor::new(from_hex(text).ok_or(invalid)?),
            None => Cursor::default(),
        };
        let mut page = UndecidedPage::default();
        let _turn = self.permit().await;
        let begun = Instant::now();
        loop {
            let mut visit =
                |id: &OperationId, stored: &Result<StoredRecord, StoreError>, now: Timestamp| {
                    match stored {
                        Ok(stored) if StateView::of(stored, now) == StateView::Unknown => {
                            page.keys.push(RecordView::named(id, stored, now));
                        }
                        Ok(_) => {}
                        Err(error) => page.damaged.push((id.to_string(), error.to_string())),
                    }
                };
            let ScanStep { next, .. } = self.store.scan(place, LARGE_PAGE, &mut visit).await?;
            let Some(next) = next else { return Ok(page) };
            place = next;
            if page.keys.len() >= UNDECIDED_PAGE || begun.elapsed() >= STEP {
                page.next = Some(crate::hex(place.as_bytes()));
                return Ok(page);
            }
        }
    }

    /// Reads the whole store and returns the records that wait for a decision, in groups.
    ///
    /// # Errors
    /// [`OperatorError::Store`].
    pub async fn count(&self) -> Result<UndecidedGroups, OperatorError> {
        let census = Census::default();
        let _turn = self.permit().await;
        census.walk(&*self.store, false).await?;
        Ok(census.groups())
    }

    /// Returns the oldest records in the list of a census.
    pub(crate) fn known(&self, census: &Census, list: &ListQuery) -> RecordList {
        let limit = list.limit.unwrap_or(100).clamp(1, 1000) as usize;
        let Some(hash) = &list.caller else { return RecordList::of(census.oldest(limit)) };
        let mut listed = RecordList::of(census.oldest(usize::MAX));
        listed.keys.retain(|view| self.is_by(view, hash));
        listed.more = listed.keys.len() > limit;
        listed.keys.truncate(limit);
        listed
    }
}

/// Returns the bytes of a position in hexadecimal digits.
fn from_hex(text: &str) -> Option<Vec<u8>> {
    if !text.is_ascii() || !text.len().is_multiple_of(2) || text.len() > MAX_POSITION {
        return None;
    }
    let digits = (0..text.len()).step_by(2).map(|at| text.get(at..at + 2));
    digits.map(|pair| u8::from_str_radix(pair?, 16).ok()).collect()
}
