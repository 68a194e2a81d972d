//! One form for what counts as the same value.

use super::read::Reader;
use super::{ValueError, tag};

/// The same for the same value: what is under keys, in the order of their bytes, and an option that
/// is set as what is in it, so that neither the order of a map or of fields matters nor that a field
/// became optional. `Some(None)` and `Some(())` stay what they are.
///
/// It is injective for a type: an option in an option is the bare value only where that is neither
/// `None` nor `()`, at whichever level that stands, and otherwise as many `Some` as there were.
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
            // Stable: of a key that is there twice, which comes first is part of the value.
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
