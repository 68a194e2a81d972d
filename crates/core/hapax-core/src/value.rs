//! An encoding of any value that serde supports, for the values of functions.
//!
//! JSON has no `NaN`, no map whose keys are not text, and no difference between `None` and
//! `Some(None)`, which MessagePack and CBOR (with the options of their crates) do not have either;
//! formats without names, such as postcard, give a changed type other values instead of an error,
//! and cannot decode `flatten`, `untagged` or `tag = ".."`; RON rejects variants and fields whose
//! names are no identifiers. So this encoding has a type byte before everything, and decodes
//! exactly what was encoded. Fields and variants go by their names: fields may be added with a
//! default, removed, and reordered. Types that have a text form, such as addresses, use that.
//!
//! Serde's own buffering has limits. Integers of more than 64 bits are impossible within `flatten`,
//! `untagged` or `tag = ".."`. The variant of an `untagged` enum is not stored: decoding takes the
//! first variant that accepts the content. So bytes that are valid UTF-8 become a `String` if a
//! `String` variant precedes the bytes variant. A type must decode what it encodes: a field with
//! `skip_serializing` needs a `default`.
//!
//! ```
//! use std::collections::BTreeMap;
//! use hapax_core::value;
//! let kept = BTreeMap::from([((1u8, 'a'), Some(None::<f64>)), ((2, 'b'), Some(Some(f64::INFINITY)))]);
//! let bytes = value::write(&kept, 1024)?;
//! assert_eq!(value::read::<BTreeMap<(u8, char), Option<Option<f64>>>>(&bytes)?, kept);
//! # Ok::<(), value::ValueError>(())
//! ```

mod canonical;
mod read;
mod write;

use std::fmt;

use bytes::Bytes;
use serde::Serialize;
use serde::de::{DeserializeOwned, Expected, Unexpected};

pub(crate) use canonical::canonical;

/// The deepest nesting.
pub const MAX_DEPTH: u32 = 128;

/// Type bytes. Integers are varints, little end first, seven bits in a byte.
mod tag {
    /// Ends `SEQ` and `MAP`.
    pub(super) const END: u8 = 0;
    pub(super) const NONE: u8 = 1;
    pub(super) const SOME: u8 = 2;
    pub(super) const UNIT: u8 = 3;
    pub(super) const FALSE: u8 = 4;
    pub(super) const TRUE: u8 = 5;
    /// An integer of at least zero.
    pub(super) const NATURAL: u8 = 6;
    /// The integer -1 - n, where n follows.
    pub(super) const NEGATIVE: u8 = 7;
    /// IEEE 754 bits, little-endian.
    pub(super) const F32: u8 = 8;
    pub(super) const F64: u8 = 9;
    pub(super) const CHAR: u8 = 10;
    /// A length and UTF-8. A variant without data is written as its name.
    pub(super) const STR: u8 = 11;
    pub(super) const BYTES: u8 = 12;
    pub(super) const SEQ: u8 = 13;
    /// Keys and values in turn: maps, structs, and a variant with data as its name and content.
    pub(super) const MAP: u8 = 14;
}

/// Encodes `value` in at most `limit` bytes.
///
/// # Errors
/// [`ValueError`]: it is too large or too deep, or its `Serialize` failed.
pub fn write<T: Serialize + ?Sized>(value: &T, limit: usize) -> Result<Bytes, ValueError> {
    let mut writer = write::Writer::new(limit);
    value.serialize(&mut writer)?;
    Ok(writer.finish().into())
}

/// Decodes what [`write()`] encoded, or what an earlier type of the same shape did. Anything else
/// is an error, never a panic; the memory is at most a multiple of the input.
///
/// # Errors
/// [`ValueError`]: the bytes are damaged, nested too deep, or do not fit the type.
pub fn read<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ValueError> {
    let mut reader = read::Reader::new(bytes);
    let value = T::deserialize(&mut reader)?;
    reader.end()?;
    Ok(value)
}

/// Returns whether two values of one type that [`write()`] encoded are the same, in whichever order
/// their maps and fields were written.
#[must_use]
pub fn is_same(one: &[u8], other: &[u8]) -> bool {
    let canonical = || canonical(one).ok().zip(canonical(other).ok());
    one == other || canonical().is_some_and(|(one, other)| one == other)
}

/// Errors of encoding and decoding.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ValueError {
    /// The value needs more bytes than the limit.
    #[error("the value is larger than the limit")]
    TooLarge,
    /// The value is nested deeper than [`MAX_DEPTH`].
    #[error("the value is nested deeper than {MAX_DEPTH} levels")]
    TooDeep,
    /// The bytes are not an encoded value.
    #[error("the bytes are damaged")]
    Damaged,
    /// An error of the type's own `Serialize` or `Deserialize`. It names the kind of the value that
    /// was found, not its content; a message of the type itself is unchanged.
    #[error("{0}")]
    Type(String),
}

impl serde::ser::Error for ValueError {
    fn custom<T: fmt::Display>(message: T) -> Self {
        Self::Type(message.to_string())
    }
}

/// The message without the value that was found: errors are shown, and values are not.
impl serde::de::Error for ValueError {
    fn custom<T: fmt::Display>(message: T) -> Self {
        Self::Type(message.to_string())
    }

    fn invalid_type(found: Unexpected<'_>, expected: &dyn Expected) -> Self {
        Self::Type(format!("invalid type: {}, expected {expected}", kind(found)))
    }

    fn invalid_value(found: Unexpected<'_>, expected: &dyn Expected) -> Self {
        Self::Type(format!("invalid value: {}, expected {expected}", kind(found)))
    }

    fn unknown_variant(_: &str, _: &'static [&'static str]) -> Self {
        Self::Type("found a variant that the type does not have".into())
    }

    fn unknown_field(_: &str, _: &'static [&'static str]) -> Self {
        Self::Type("found a field that the type does not have".into())
    }
}

fn kind(found: Unexpected<'_>) -> &'static str {
    match found {
        Unexpected::Bool(_) => "a boolean",
        Unexpected::Unsigned(_) | Unexpected::Signed(_) => "an integer",
        Unexpected::Float(_) => "a floating point number",
        Unexpected::Char(_) => "a character",
        Unexpected::Str(_) => "a string",
        Unexpected::Bytes(_) => "bytes",
        Unexpected::Unit => "a unit",
        Unexpected::Option => "an option",
        Unexpected::NewtypeStruct => "a newtype struct",
        Unexpected::Seq => "a sequence",
        Unexpected::Map => "a map",
        Unexpected::Enum => "an enum",
        Unexpected::UnitVariant => "a unit variant",
        Unexpected::NewtypeVariant => "a newtype variant",
        Unexpected::TupleVariant => "a tuple variant",
        Unexpected::StructVariant => "a struct variant",
        // Serde calls this for integers of 128 bits too.
        Unexpected::Other(_) => "something else",
    }
}

#[cfg(test)]
mod tests;
