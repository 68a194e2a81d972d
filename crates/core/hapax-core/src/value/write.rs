//! Encoding.

use serde::ser::{self, Serialize};

use super::{MAX_DEPTH, ValueError, tag};

pub(super) struct Writer {
    out: Vec<u8>,
    depth: u32,
    limit: usize,
}

impl Writer {
    pub(super) const fn new(limit: usize) -> Self {
        Self { out: Vec::new(), depth: 0, limit }
    }

    pub(super) fn finish(self) -> Vec<u8> {
        self.out
    }

    fn put(&mut self, bytes: &[u8]) -> Result<(), ValueError> {
        // Checked before it grows: a value that is too large is never built.
        if bytes.len() > self.limit - self.out.len() {
            return Err(ValueError::TooLarge);
        }
        self.out.extend_from_slice(bytes);
        Ok(())
    }

    fn varint(&mut self, tag: u8, mut number: u128) -> Result<(), ValueError> {
        self.put(&[tag])?;
        while number > 0x7f {
            self.put(&[number as u8 | 0x80])?;
            number >>= 7;
        }
        self.put(&[number as u8])
    }

    fn signed(&mut self, number: i128) -> Result<(), ValueError> {
        match u128::try_from(number) {
            Ok(natural) => self.varint(tag::NATURAL, natural),
            Err(_) => self.varint(tag::NEGATIVE, !number as u128),
        }
    }

    fn text(&mut self, tag: u8, bytes: &[u8]) -> Result<(), ValueError> {
        self.varint(tag, bytes.len() as u128)?;
        self.put(bytes)
    }

    fn begin(&mut self, tag: u8) -> Result<(), ValueError> {
        if self.depth == MAX_DEPTH {
            return Err(ValueError::TooDeep);
        }
        self.depth += 1;
        self.put(&[tag])
    }

    /// Begins the data of a variant, after its name.
    fn variant(&mut self, name: &str, tag: u8) -> Result<(), ValueError> {
        self.begin(tag::MAP)?;
        self.text(tag::STR, name.as_bytes())?;
        self.begin(tag)
    }

    fn close(&mut self) -> Result<(), ValueError> {
        self.depth -= 1;
        self.put(&[tag::END])
    }
}

/// A sequence, map or variant that has begun. `levels` times `END` closes it.
pub(super) struct Compound<'a> {
    writer: &'a mut Writer,
    levels: u8,
}

impl Compound<'_> {
    fn entry<T: Serialize + ?Sized>(&mut self, key: &str, value: &T) -> Result<(), ValueError> {
        self.writer.text(tag::STR, key.as_bytes())?;
        value.serialize(&mut *self.writer)
    }

    fn close(self) -> Result<(), ValueError> {
        (0..self.levels).try_for_each(|_| self.writer.close())
    }
}

impl<'a> ser::Serializer for &'a mut Writer {
    type Ok = ();
    type Error = ValueError;
    type SerializeSeq = Compound<'a>;
    type SerializeTuple = Compound<'a>;
    type SerializeTupleStruct = Compound<'a>;
    type SerializeTupleVariant = Compound<'a>;
    type SerializeMap = Compound<'a>;
    type SerializeStruct = Compound<'a>;
    type SerializeStructVariant = Compound<'a>;

    fn is_human_readable(&self) -> bool {
        true
    }

    fn serialize_bool(self, v: bool) -> Result<(), ValueError> {
        self.put(&[if v { tag::TRUE } else { tag::FALSE }])
    }

    fn serialize_i8(self, v: i8) -> Result<(), ValueError> {
        self.signed(v.into())
    }

    fn serialize_i16(self, v: i16) -> Result<(), ValueError> {
        self.signed(v.into())
    }

    fn serialize_i32(self, v: i32) -> Result<(), ValueError> {
        self.signed(v.into())
    }

    fn serialize_i64(self, v: i64) -> Result<(), ValueError> {
        self.signed(v.into())
    }

    fn serialize_i128(self, v: i128) -> Result<(), ValueError> {
        self.signed(v)
    }

    fn serialize_u8(self, v: u8) -> Result<(), ValueError> {
        self.varint(tag::NATURAL, v.into())
    }

    fn serialize_u16(self, v: u16) -> Result<(), ValueError> {
        self.varint(tag::NATURAL, v.into())
    }

    fn serialize_u32(self, v: u32) -> Result<(), ValueError> {
        self.varint(tag::NATURAL, v.into())
    }

    fn serialize_u64(self, v: u64) -> Result<(), ValueError> {
        self.varint(tag::NATURAL, v.into())
    }

    fn serialize_u128(self, v: u128) -> Result<(), ValueError> {
        self.varint(tag::NATURAL, v)
    }

    fn serialize_f32(self, v: f32) -> Result<(), ValueError> {
        self.put(&[tag::F32])?;
        self.put(&v.to_bits().to_le_bytes())
    }

    fn serialize_f64(self, v: f64) -> Result<(), ValueError> {
        self.put(&[tag::F64])?;
        self.put(&v.to_bits().to_le_bytes())
    }

    fn serialize_char(self, v: char) -> Result<(), ValueError> {
        self.varint(tag::CHAR, u32::from(v).into())
    }

    fn serialize_str(self, v: &str) -> Result<(), ValueError> {
        self.text(tag::STR, v.as_bytes())
    }

    fn serialize_bytes(self, v: &[u8]) -> Result<(), ValueError> {
        self.text(tag::BYTES, v)
    }

    fn serialize_none(self) -> Result<(), ValueError> {
        self.put(&[tag::NONE])
    }

    fn serialize_some<T: Serialize + ?Sized>(self, value: &T) -> Result<(), ValueError> {
        self.begin(tag::SOME)?;
        value.serialize(&mut *self)?;
        // One value follows, without an `END`.
        self.depth -= 1;
        Ok(())
    }

    fn serialize_unit(self) -> Result<(), ValueError> {
        self.put(&[tag::UNIT])
    }

    fn serialize_unit_struct(self, _: &'static str) -> Result<(), ValueError> {
        self.serialize_unit()
    }

    fn serialize_unit_variant(
        self,
        _: &'static str,
        _: u32,
        variant: &'static str,
    ) -> Result<(), ValueError> {
        self.serialize_str(variant)
    }

    fn serialize_newtype_struct<T: Serialize + ?Sized>(
        self,
        _: &'static str,
        value: &T,
    ) -> Result<(), ValueError> {
        value.serialize(self)
    }

    fn serialize_newtype_variant<T: Serialize + ?Sized>(
        self,
        _: &'static str,
        _: u32,
        variant: &'static str,
        value: &T,
    ) -> Result<(), ValueError> {
        self.begin(tag::MAP)?;
        self.text(tag::STR, variant.as_bytes())?;
        value.serialize(&mut *self)?;
        self.close()
    }

    fn serialize_seq(self, _: Option<usize>) -> Result<Compound<'a>, ValueError> {
        self.begin(tag::SEQ)?;
        Ok(Compound { writer: self, levels: 1 })
    }

    fn serialize_tuple(self, _: usize) -> Result<Compound<'a>, ValueError> {
        self.serialize_seq(None)
    }

    fn serialize_tuple_struct(self, _: &'static str, _: usize) -> Result<Compound<'a>, ValueError> {
        self.serialize_seq(None)
    }

    fn serialize_tuple_variant(
        self,
        _: &'static str,
        _: u32,
        variant: &'static str,
        _: usize,
    ) -> Result<Compound<'a>, ValueError> {
        self.variant(variant, tag::SEQ)?;
        Ok(Compound { writer: self, levels: 2 })
    }

    fn serialize_map(self, _: Option<usize>) -> Result<Compound<'a>, ValueError> {
        self.begin(tag::MAP)?;
        Ok(Compound { writer: self, levels: 1 })
    }

    fn serialize_struct(self, _: &'static str, _: usize) -> Result<Compound<'a>, ValueError> {
        self.serialize_map(None)
    }

    fn serialize_struct_variant(
        self,
        _: &'static str,
        _: u32,
        variant: &'static str,
        _: usize,
    ) -> Result<Compound<'a>, ValueError> {
        self.variant(variant, tag::MAP)?;
        Ok(Compound { writer: self, levels: 2 })
    }
}

/// Elements that are encoded one after the other.
macro_rules! elements {
    ($($kind:ident $method:ident),*) => {$(
        impl ser::$kind for Compound<'_> {
            type Ok = ();
            type Error = ValueError;

            fn $method<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), ValueError> {
                value.serialize(&mut *self.writer)
            }

            fn end(self) -> Result<(), ValueError> {
                self.close()
            }
        }
    )*};
}

/// Elements that are encoded by name.
macro_rules! fields {
    ($($kind:ident),*) => {$(
        impl ser::$kind for Compound<'_> {
            type Ok = ();
            type Error = ValueError;

            fn serialize_field<T: Serialize + ?Sized>(
                &mut self,
                key: &'static str,
                value: &T,
            ) -> Result<(), ValueError> {
                self.entry(key, value)
            }

            fn end(self) -> Result<(), ValueError> {
                self.close()
            }
        }
    )*};
}

elements! {
    SerializeSeq serialize_element,
    SerializeTuple serialize_element,
    SerializeTupleStruct serialize_field,
    SerializeTupleVariant serialize_field
}

fields!(SerializeStruct, SerializeStructVariant);

impl ser::SerializeMap for Compound<'_> {
    type Ok = ();
    type Error = ValueError;

    fn serialize_key<T: Serialize + ?Sized>(&mut self, key: &T) -> Result<(), ValueError> {
        key.serialize(&mut *self.writer)
    }

    fn serialize_value<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), ValueError> {
        value.serialize(&mut *self.writer)
    }

    fn end(self) -> Result<(), ValueError> {
        self.close()
    }
}
