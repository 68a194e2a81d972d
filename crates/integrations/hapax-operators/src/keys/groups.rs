//! Undecided records in groups, so that one cause is one line.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::view::{OperationDescription, RecordView};

/// Undecided records with one route, reason and minute.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct UndecidedGroup {
    /// The name of the route; else method and path, or the name of a function; `None` without a description.
    pub operation: Option<String>,
    /// The reason, as in [`RecordView::reason`].
    pub reason: String,
    /// The minute in which the executions began, as in `2026-11-28T20:14Z`.
    pub minute: String,
    /// The number of records.
    pub records: usize,
    /// The time from which none of their requests executes any more, if that is later than now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub may_execute_until: Option<String>,
}

/// The undecided records that wait for a decision.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct UndecidedGroups {
    /// The groups, by minute, route and reason.
    pub groups: Vec<UndecidedGroup>,
    /// The number of records in all groups.
    pub records: usize,
    /// Whether the census is full, so that there may be more records.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub more: bool,
    /// The beginning of the last complete walk, as in [`RecordList::as_of`](super::RecordList::as_of).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub as_of: Option<String>,
}

impl UndecidedGroups {
    /// Groups records.
    pub(crate) fn of<'a>(views: impl Iterator<Item = &'a RecordView>) -> Self {
        let mut groups = BTreeMap::new();
        let mut records = 0;
        for view in views {
            let operation = view.described.as_ref().and_then(operation);
            let name = (view.minute(), operation, view.reason.clone().unwrap_or_default());
            let (count, until): &mut (usize, Option<String>) = groups.entry(name).or_default();
            *count += 1;
            records += 1;
            // Times of RFC 3339 to the millisecond, in UTC, are in order as texts.
            if *until < view.may_execute_until {
                until.clone_from(&view.may_execute_until);
            }
        }
        let group = |((minute, operation, reason), (records, may_execute_until))| UndecidedGroup {
            operation,
            reason,
            minute,
            records,
            may_execute_until,
        };
        Self { groups: groups.into_iter().map(group).collect(), records, ..Self::default() }
    }
}

/// Returns the name of the route; else method and path, or the name of a function.
fn operation(described: &OperationDescription) -> Option<String> {
    let OperationDescription { route, method, target, function, .. } = described;
    if route.is_some() {
        return route.clone();
    }
    let words: Vec<&str> =
        [method, target, function].into_iter().flatten().map(|it| &**it).collect();
    (!words.is_empty()).then(|| words.join(" "))
}
