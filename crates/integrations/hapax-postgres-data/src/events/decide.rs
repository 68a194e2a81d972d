//! The reasons for which nothing was appended.

use super::AppendResult;

/// An event of the call's whose id is there.
#[derive(Clone, Debug)]
pub(crate) struct Found {
    pub(crate) position: u64,
    /// Where it is in another stream than the call's.
    pub(crate) other_stream: Option<String>,
    /// The first field in which it differs.
    pub(crate) different: Option<String>,
}

/// Returns the result of an append, from one snapshot of the table. Ids take precedence over
/// versions: a writer that repeats an append need not remember the version that it created.
///
/// `None`: nothing is in the way. (For no events: the version is the expected one.)
pub(crate) fn decide(expected: u64, current: u64, found: &[Option<Found>]) -> Option<AppendResult> {
    for (index, found) in found.iter().enumerate() {
        if let Some(Found { position, other_stream: Some(stream), .. }) = found {
            let (stream, position) = (stream.clone(), *position);
            return Some(AppendResult::SameIdInOtherStream { index, stream, position });
        }
    }
    for (index, found) in found.iter().enumerate() {
        if let Some(Found { position, different: Some(field), .. }) = found {
            let (position, field) = (*position, field.clone());
            return Some(AppendResult::SameIdDifferentBody { index, position, field });
        }
    }
    let position = |found: &Option<Found>| found.as_ref().map(|found| found.position);
    let positions: Vec<Option<u64>> = found.iter().map(position).collect();
    if positions.iter().any(Option::is_some) {
        let first = positions[0];
        let in_a_row = |first: u64| (first..).map(Some).take(positions.len());
        return Some(match first {
            Some(first) if in_a_row(first).eq(positions.iter().copied()) => {
                AppendResult::AlreadyAppended { positions: first..first + positions.len() as u64 }
            }
            _ => AppendResult::PartialOverlap { positions, current },
        });
    }
    match current.cmp(&expected) {
        std::cmp::Ordering::Less => Some(AppendResult::Gap { current }),
        std::cmp::Ordering::Equal => None,
        std::cmp::Ordering::Greater => Some(AppendResult::Conflict { current }),
    }
}
