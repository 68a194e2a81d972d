//! Decoding. Recursion is bounded by the depth, which encoding checks as well.

use serde::de::value::StrDeserializer;
use serde::de::{self, DeserializeSeed, Error as _, Visitor};

use super::{MAX_DEPTH, ValueError, tag};

pub(super) struct Reader<'de> {
    input: &'de [u8],
    depth: u32,
}

impl<'de> Reader<'de> {
    pub(super) const fn new(input: &'de [u8]) -> Self {
        Self { input, depth: 0 }
    }

    /// Rejects bytes after the value.
    pub(super) fn end(&self) -> Result<(), ValueError> {
        if self.input.is_empty() { Ok(()) } else { Err(ValueError::Damaged) }
    }

    pub(super) fn peek(&self) -> Result<u8, ValueError> {
        self.input.first().copied().ok_or(ValueError::Damaged)
    }

    pub(super) fn next(&mut self) -> Result<u8, ValueError> {
        Ok(self.take(1)?[0])
    }

    fn take(&mut self, length: usize) -> Result<&'de [u8], ValueError> {
        let (taken, rest) = self.input.split_at_checked(length).ok_or(ValueError::Damaged)?;
        self.input = rest;
        Ok(taken)
    }

    fn varint(&mut self) -> Result<u128, ValueError> {
        let mut number = 0u128;
        for shift in (0..128).step_by(7) {
            let byte = self.next()?;
            let bits = u128::from(byte & 0x7f);
            // Only two bits of the last byte fit.
            if bits.leading_zeros() < shift {
                return Err(ValueError::Damaged);
            }
            number |= bits << shift;
            if byte < 0x80 {
                return Ok(number);
            }
        }
        Err(ValueError::Damaged)
    }

    fn text(&mut self) -> Result<&'de [u8], ValueError> {
        let length = usize::try_from(self.varint()?).map_err(|_| ValueError::Damaged)?;
        self.take(length)
    }

    fn string(&mut self) -> Result<&'de str, ValueError> {
        std::str::from_utf8(self.text()?).map_err(|_| ValueError::Damaged)
    }

    /// Skips a value that has no nested values, and returns its bytes.
    pub(super) fn scalar(&mut self) -> Result<&'de [u8], ValueError> {
        let from = self.input;
        match self.next()? {
            tag::NONE | tag::UNIT | tag::FALSE | tag::TRUE => {}
            tag::NATURAL | tag::NEGATIVE | tag::CHAR => drop(self.varint()?),
            tag::F32 => drop(self.take(4)?),
            tag::F64 => drop(self.take(8)?),
            tag::STR | tag::BYTES => drop(self.text()?),
            _ => return Err(ValueError::Damaged),
        }
        Ok(&from[..from.len() - self.input.len()])
    }

    /// Reads a nested value.
    pub(super) fn nested<T>(
        &mut self,
        read: impl FnOnce(&mut Self) -> Result<T, ValueError>,
    ) -> Result<T, ValueError> {
        if self.depth == MAX_DEPTH {
            return Err(ValueError::TooDeep);
        }
        self.depth += 1;
        let value = read(self)?;
        self.depth -= 1;
        Ok(value)
    }

    /// Reads elements up to `END`. It is an error if `read` leaves some.
    fn list<T>(
        &mut self,
        read: impl FnOnce(&mut Items<'_, 'de>) -> Result<T, ValueError>,
    ) -> Result<T, ValueError> {
        self.nested(|reader| {
            let value = read(&mut Items { reader: &mut *reader })?;
            match reader.next()? {
                tag::END => Ok(value),
                _ => Err(ValueError::custom("found more elements than the type has")),
            }
        })
    }
}

impl<'de> de::Deserializer<'de> for &mut Reader<'de> {
    type Error = ValueError;

    // As in JSON: values that serde buffers for `tag`, `flatten` and `untagged` are read in text
    // form.
    fn is_human_readable(&self) -> bool {
        true
    }

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ValueError> {
        match self.next()? {
            tag::NONE => visitor.visit_none(),
            tag::SOME => self.nested(|reader| visitor.visit_some(reader)),
            tag::UNIT => visitor.visit_unit(),
            tag::FALSE => visitor.visit_bool(false),
            tag::TRUE => visitor.visit_bool(true),
            tag::NATURAL => {
                let number = self.varint()?;
                // The smallest type that fits: serde cannot buffer integers of 128 bits.
                match u64::try_from(number) {
                    Ok(number) => visitor.visit_u64(number),
                    Err(_) => visitor.visit_u128(number),
                }
            }
            tag::NEGATIVE => {
                let number = i128::try_from(self.varint()?).map_err(|_| ValueError::Damaged)?;
                match i64::try_from(!number) {
                    Ok(number) => visitor.visit_i64(number),
                    Err(_) => visitor.visit_i128(!number),
                }
            }
            tag::F32 => {
                let bits = self.take(4)?.try_into().map_err(|_| ValueError::Damaged)?;
                visitor.visit_f32(f32::from_bits(u32::from_le_bytes(bits)))
            }
            tag::F64 => {
                let bits = self.take(8)?.try_into().map_err(|_| ValueError::Damaged)?;
                visitor.visit_f64(f64::from_bits(u64::from_le_bytes(bits)))
            }
            tag::CHAR => {
                let code = u32::try_from(self.varint()?).ok().and_then(char::from_u32);
                visitor.visit_char(code.ok_or(ValueError::Damaged)?)
            }
            tag::STR => visitor.visit_borrowed_str(self.string()?),
            tag::BYTES => visitor.visit_borrowed_bytes(self.text()?),
            tag::SEQ => self.list(|items| visitor.visit_seq(items)),
            tag::MAP => self.list(|items| visitor.visit_map(items)),
            _ => Err(ValueError::Damaged),
        }
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ValueError> {
        match self.peek()? {
            tag::NONE | tag::SOME => self.deserialize_any(visitor),
            // The value was written when the field was not optional yet.
            _ => visitor.visit_some(self),
        }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        visitor: V,
    ) -> Result<V::Value, ValueError> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, ValueError> {
        match self.next()? {
            tag::STR => visitor.visit_enum(StrDeserializer::new(self.string()?)),
            tag::MAP => self.list(|items| visitor.visit_enum(items)),
            _ => Err(ValueError::custom("expected a variant")),
        }
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit
        unit_struct seq tuple tuple_struct map struct identifier ignored_any
    }
}

/// The content between a begin and its end.
struct Items<'a, 'de> {
    reader: &'a mut Reader<'de>,
}

impl<'de> Items<'_, 'de> {
    fn one<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<Option<S::Value>, ValueError> {
        // The end stays: the caller that began the list reads it.
        match self.reader.peek()? {
            tag::END => Ok(None),
            _ => seed.deserialize(&mut *self.reader).map(Some),
        }
    }
}

impl<'de> de::SeqAccess<'de> for &mut Items<'_, 'de> {
    type Error = ValueError;

    fn next_element_seed<S: DeserializeSeed<'de>>(
        &mut self,
        seed: S,
    ) -> Result<Option<S::Value>, ValueError> {
        self.one(seed)
    }
}

impl<'de> de::MapAccess<'de> for &mut Items<'_, 'de> {
    type Error = ValueError;

    fn next_key_seed<S: DeserializeSeed<'de>>(
        &mut self,
        seed: S,
    ) -> Result<Option<S::Value>, ValueError> {
        self.one(seed)
    }

    fn next_value_seed<S: DeserializeSeed<'de>>(
        &mut self,
        seed: S,
    ) -> Result<S::Value, ValueError> {
        seed.deserialize(&mut *self.reader)
    }
}

impl<'de> de::EnumAccess<'de> for &mut Items<'_, 'de> {
    type Error = ValueError;
    type Variant = Self;

    fn variant_seed<S: DeserializeSeed<'de>>(
        self,
        seed: S,
    ) -> Result<(S::Value, Self), ValueError> {
        let name = seed.deserialize(&mut *self.reader)?;
        Ok((name, self))
    }
}

impl<'de> de::VariantAccess<'de> for &mut Items<'_, 'de> {
    type Error = ValueError;

    fn unit_variant(self) -> Result<(), ValueError> {
        Err(ValueError::custom("found a variant with data, expected one without"))
    }

    fn newtype_variant_seed<S: DeserializeSeed<'de>>(
        self,
        seed: S,
    ) -> Result<S::Value, ValueError> {
        seed.deserialize(&mut *self.reader)
    }

    fn tuple_variant<V: Visitor<'de>>(self, _: usize, visitor: V) -> Result<V::Value, ValueError> {
        de::Deserializer::deserialize_any(&mut *self.reader, visitor)
    }

    fn struct_variant<V: Visitor<'de>>(
        self,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, ValueError> {
        de::Deserializer::deserialize_any(&mut *self.reader, visitor)
    }
}
