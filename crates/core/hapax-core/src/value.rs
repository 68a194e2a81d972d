//! Values as bytes: all that serde can say, kept exactly. It is what functions' values are kept in.
//!
//! JSON has no `NaN`, no map whose keys are not text, and no difference between `None` and
//! `Some(None)`, which MessagePack and CBOR (as their crates write options) do not have either;
//! formats without names in them, such as postcard, give a changed type other values instead of an
//! error, and cannot read `flatten`, `untagged` or `tag = ".."` back; RON refuses variants and
//! fields whose names are no identifiers. So there are these bytes: a tag before everything, so that
//! what is read is what was written. Fields and variants go by their names: fields may be added with
//! a default, taken away, and change their order. Types that have a text form, such as addresses,
//! are in that.
//!
//! What serde itself buffers is as serde has it. Integers of more than 64 bits are impossible within
//! `flatten`, `untagged` or `tag = ".."`. Which variant of an `untagged` enum it was, serde guesses
//! again when it reads: the first that takes what is there, as where bytes that happen to be UTF-8 are
//! taken by a `String` that stands before them. And what a type writes, it must also read: a field
//! that `skip_serializing` leaves out needs a `default`.
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

/// The deepest nesting that is written, and so that is read.
pub const MAX_DEPTH: u32 = 128;

/// Tags. Integers are varints, little end first, seven bits in a byte.
mod tag {
    /// Ends what `SEQ` and `MAP` begin.
    pub(super) const END: u8 = 0;
    pub(super) const NONE: u8 = 1;
    pub(super) const SOME: u8 = 2;
    pub(super) const UNIT: u8 = 3;
    pub(super) const FALSE: u8 = 4;
    pub(super) const TRUE: u8 = 5;
    /// An integer from zero up.
    pub(super) const NATURAL: u8 = 6;
    /// -1 - n for the integer n that follows.
    pub(super) const NEGATIVE: u8 = 7;
    /// IEEE 754 bits, little end first.
    pub(super) const F32: u8 = 8;
    pub(super) const F64: u8 = 9;
    pub(super) const CHAR: u8 = 10;
    /// A length and UTF-8. A variant without data is its name.
    pub(super) const STR: u8 = 11;
    pub(super) const BYTES: u8 = 12;
    pub(super) const SEQ: u8 = 13;
    /// Keys and values in turn: maps, structs, and a variant with data as its name and that.
    pub(super) const MAP: u8 = 14;
}

/// Writes `value` in at most `limit` bytes.
///
/// # Errors
/// [`ValueError`]: it is too large or too deep, or its own `Serialize` failed.
pub fn write<T: Serialize + ?Sized>(value: &T, limit: usize) -> Result<Bytes, ValueError> {
    let mut writer = write::Writer::new(limit);
    value.serialize(&mut writer)?;
    Ok(writer.finish().into())
}

/// Reads what [`write()`] wrote, or what an earlier type of the same shape did. Anything else is an
/// error, never a panic and never memory beyond a multiple of what the bytes themselves take.
///
/// # Errors
/// [`ValueError`]: they are damaged, nested too deep, or not what the type takes.
pub fn read<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ValueError> {
    let mut reader = read::Reader::new(bytes);
    let value = T::deserialize(&mut reader)?;
    reader.end()?;
    Ok(value)
}

/// Why a value was not written or read.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ValueError {
    /// It takes more bytes than it may.
    #[error("it is larger than it may be")]
    TooLarge,
    /// It is nested deeper than [`MAX_DEPTH`].
    #[error("it is nested deeper than {MAX_DEPTH} levels")]
    TooDeep,
    /// The bytes are none that were written here.
    #[error("the bytes are damaged")]
    Damaged,
    /// What the value's own type says. Of what was found there is its kind alone; a message that a
    /// type makes itself is as it is.
    #[error("{0}")]
    Type(String),
}

impl serde::ser::Error for ValueError {
    fn custom<T: fmt::Display>(said: T) -> Self {
        Self::Type(said.to_string())
    }
}

/// Without what was found: errors are shown, and values are not.
impl serde::de::Error for ValueError {
    fn custom<T: fmt::Display>(said: T) -> Self {
        Self::Type(said.to_string())
    }

    fn invalid_type(found: Unexpected<'_>, expected: &dyn Expected) -> Self {
        Self::Type(format!("invalid type: {}, expected {expected}", kind(found)))
    }

    fn invalid_value(found: Unexpected<'_>, expected: &dyn Expected) -> Self {
        Self::Type(format!("invalid value: {}, expected {expected}", kind(found)))
    }

    fn unknown_variant(_: &str, _: &'static [&'static str]) -> Self {
        Self::Type("it is a variant that the type does not have".into())
    }

    fn unknown_field(_: &str, _: &'static [&'static str]) -> Self {
        Self::Type("it has a field that the type does not have".into())
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
        // Serde puts integers of 128 bits into it.
        Unexpected::Other(_) => "something else",
    }
}

#[cfg(test)]
mod tests;
