//! The canonical form of values: one form for all values that count as the same.

use super::read::Reader;
use super::{ValueError, tag};

/// Returns the canonical form of a written value. Entries are sorted by the bytes of their keys,
/// and an option that is set is written as its content. So neither the order of a map or of fields
/// matters, nor that a field became optional. `Some(None)` and `Some(())` stay as they are.
///
/// The form is injective for a type. Nested options are written as the bare value only if that
/// value is neither `None` nor `()`, at whichever level it stands; otherwise every `Some` is
/// written.
pub(crate) fn canonical(bytes: &[u8]) -> Result<Vec<u8>, ValueError> {
    let mut reader = Reader::new(bytes);
    let mut out = Vec::with_capacity(bytes.len());
    copy(&mut reader, &mut out)?;
    reader.end()?;
    Ok(out)
}

fn copy(reader: &mut Reader<'_>, out: &mut Vec<u8>) -> Result<(), ValueError> {
    let mut set = 0;
    while reader.peek()? == tag::SOME {
        reader.next()?;
        set += 1;
    }
    if matches!(reader.peek()?, tag::NONE | tag::UNIT) {
        out.resize(out.len() + set, tag::SOME);
    }
    match reader.peek()? {
        tag::SEQ => {
            out.push(reader.next()?);
            reader.nested(|reader| {
                while reader.peek()? != tag::END {
                    copy(reader, out)?;
                }
                Ok(())
            })?;
            out.push(reader.next()?);
        }
        tag::MAP => {
            out.push(reader.next()?);
            let mut entries = reader.nested(|reader| {
                let mut entries = Vec::new();
                while reader.peek()? != tag::END {
                    let mut entry = Vec::new();
                    copy(reader, &mut entry)?;
                    let key = entry.len();
                    copy(reader, &mut entry)?;
                    entries.push((key, entry));
                }
                Ok(entries)
            })?;
            // The sort is stable: the order of two entries with the same key is part of the value.
            entries.sort_by(|(key, entry), (other_key, other)| {
                entry[..*key].cmp(&other[..*other_key])
            });
            entries.iter().for_each(|(_, entry)| out.extend_from_slice(entry));
            out.push(reader.next()?);
        }
        _ => out.extend_from_slice(reader.scalar()?),
    }
    Ok(())
}
