//! Ids of records by their first digits.

use std::num::NonZeroU32;

use hapax_core::OperationId;

use super::{OperatorError, OperatorRecords};
use crate::register::register_id;

/// Least number of digits that identify a record.
const MIN_PREFIX: usize = 8;

/// Largest number of ids that the error of an ambiguous prefix lists.
const MAX_LISTED: usize = 8;

/// Number of records that are read at once.
const PAGE: NonZeroU32 = NonZeroU32::MIN.saturating_add(MAX_LISTED as u32);

/// Returns whether a text may be the first digits of an operation id: 8 hexadecimal digits or more, and not a
/// whole id.
#[must_use]
pub fn is_id_prefix(text: &str) -> bool {
    (MIN_PREFIX..64).contains(&text.len()) && text.bytes().all(|it| it.is_ascii_hexdigit())
}

impl OperatorRecords {
    /// Returns the id that a text names: a whole id, which need not be that of a record, or the first digits, at
    /// least 8, of the id of one record.
    ///
    /// # Errors
    /// [`OperatorError::NoId`], [`OperatorError::SeveralIds`], [`OperatorError::Invalid`],
    /// [`OperatorError::Store`].
    pub async fn whole_id(&self, text: &str) -> Result<OperationId, OperatorError> {
        if let Some(id) = OperationId::from_hex(text) {
            return Ok(id);
        }
        if !is_id_prefix(text) {
            return Err(OperatorError::Invalid(
                "expected an id of 64 hexadecimal digits or its first 8 or more, found another text: copy it from the \
                 list",
            ));
        }
        let (ids, more) = self.beginning_with(&text.to_ascii_lowercase()).await?;
        match ids[..] {
            [] => Err(OperatorError::NoId),
            [id] => Ok(id),
            _ => {
                let ids = ids.iter().map(ToString::to_string).collect();
                Err(OperatorError::SeveralIds { ids, more })
            }
        }
    }

    /// Returns the first ids of records that begin with these digits, and whether there are further ones.
    async fn beginning_with(
        &self,
        prefix: &str,
    ) -> Result<(Vec<OperationId>, bool), OperatorError> {
        let mut after = OperationId::from_hex(&format!("{prefix:0<64}")).and_then(before);
        let mut ids = Vec::new();
        let _turn = self.permit().await;
        loop {
            let page = self.store.page(after, PAGE).await?;
            let last = page.records.last().map(|(id, _)| *id);
            for (id, stored) in page.records {
                if !id.to_string().starts_with(prefix) {
                    // A damaged part of a file is shown as one record, at its end: it may hide ids.
                    return stored.map(|_| (ids, false)).map_err(OperatorError::HiddenIds);
                }
                if ids.len() == MAX_LISTED {
                    return Ok((ids, true));
                }
                if id != register_id() {
                    ids.push(id);
                }
            }
            if !page.more || last.is_none() {
                return Ok((ids, false));
            }
            after = last;
        }
    }
}

/// Returns the id before this one; `None` if it is the first.
fn before(id: OperationId) -> Option<OperationId> {
    let mut bytes = *id.as_bytes();
    for byte in bytes.iter_mut().rev() {
        let (less, borrows) = byte.overflowing_sub(1);
        *byte = less;
        if !borrows {
            return Some(OperationId::from_bytes(bytes));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_id_before_another_is_the_largest_smaller_one() {
        let id = |text: &str| OperationId::from_hex(&format!("{text:0<64}")).unwrap();
        let found = before(id("abcdef01")).unwrap().to_string();
        assert_eq!(found, format!("{:f<64}", "abcdef00"));
        assert_eq!(before(id("0")), None);
    }
}
