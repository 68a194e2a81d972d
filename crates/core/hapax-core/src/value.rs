//! Serde values as bytes, without loss. Values of functions are stored in this format.
//!
//! Other formats lose something. JSON has no `NaN`, no map keys but text, and no difference between
//! `None` and `Some(None)`. The crates for MessagePack and CBOR do not distinguish these either.
//! Formats without names, such as postcard, read a changed type as other values instead of an
//! error, and cannot read `flatten`, `untagged` or `tag = ".."` back. RON rejects variants and
//! fields whose names are not identifiers.
//!
//! Here a tag precedes every value, so that the value that is read is the one that was written.
//! Fields and variants have their names: fields may be added with a default, removed and reordered.
//! Types with a text form, such as addresses, are written in it.
//!
//! Values that serde itself buffers have serde's limits. Integers of more than 64 bits are
//! impossible within `flatten`, `untagged` or `tag = ".."`. Serde guesses the variant of an
//! `untagged` enum again on reading, and takes the first that fits: a `String` variant takes bytes
//! that happen to be UTF-8 if it is declared before theirs. A type must also read what it writes: a
//! field that `skip_serializing` leaves out needs a `default`.
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

/// The deepest nesting that is written and read.
pub const MAX_DEPTH: u32 = 128;

/// Tags. Integers are varints: seven bits in each byte, the lowest first.
mod tag {
    /// Ends a `SEQ` or `MAP`.
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
    /// Keys and values in turn: a map, a struct, or a variant with data (its name and its data).
    pub(super) const MAP: u8 = 14;
}

/// Writes `value` in at most `limit` bytes.
///
/// # Errors
/// [`ValueError`] if it is too large or nested too deep, or if its `Serialize` fails.
pub fn write<T: Serialize + ?Sized>(value: &T, limit: usize) -> Result<Bytes, ValueError> {
    let mut writer = write::Writer::new(limit);
    value.serialize(&mut writer)?;
    Ok(writer.finish().into())
}

/// Reads bytes that [`write()`] returned for this type or for an earlier type of the same shape.
/// Other bytes give an error, never a panic, and take memory of at most a multiple of their own
/// length.
///
/// # Errors
/// [`ValueError`] if the bytes are damaged, nested too deep, or do not fit the type.
pub fn read<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ValueError> {
    let mut reader = read::Reader::new(bytes);
    let value = T::deserialize(&mut reader)?;
    reader.end()?;
    Ok(value)
}

/// Errors of writing and reading values.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ValueError {
    /// The value takes more bytes than the limit.
    #[error("the value is larger than its limit")]
    TooLarge,
    /// The value is nested deeper than [`MAX_DEPTH`].
    #[error("the value is nested deeper than {MAX_DEPTH} levels")]
    TooDeep,
    /// The bytes are not from [`write()`].
    #[error("the bytes are damaged")]
    Damaged,
    /// An error of the value's type. It states the kind of the value that was found, not the value;
    /// a message of the type itself is unchanged.
    #[error("{0}")]
    Type(String),
}

impl serde::ser::Error for ValueError {
    fn custom<T: fmt::Display>(message: T) -> Self {
        Self::Type(message.to_string())
    }
}

/// Omits the values that were found: errors are shown, and values must not be.
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
        // Serde reports integers of 128 bits as this.
        Unexpected::Other(_) => "something else",
    }
}

#[cfg(test)]
mod tests;
