//! Keys of business identifiers.

use std::fmt;

use super::Key;

/// A key of business identifiers: any device that has them creates the same key, also after losing
/// everything else.
///
/// Parts are named, typed and length-prefixed, and their order does not matter: `("ab", "c")` is
/// not `("a", "bc")`, the number 1 is not the text `1`, and a missing part is not an empty one. A
/// text counts byte by byte: normalise capitals, blanks and Unicode forms before. There are no
/// floating-point numbers, because 0.1 + 0.2 is not 0.3.
///
/// A part identifies the operation; what may be corrected, such as an amount, is no part. It belongs
/// to the request that the key is compared by: then a correction is rejected, where another key would
/// be a second operation beside the first.
///
/// Risks. The same identifiers are the same operation for the retention: a customer who orders the
/// same cart twice needs a part that differs. A party that has the identifiers can compute the key:
/// use it within the caller's [`Scope`](crate::Scope).
///
/// ```
/// use hapax_core::NaturalKey;
/// let refund = NaturalKey::new("refund").part("order", "o-17").part("line", 3);
/// assert_eq!(refund.key(), NaturalKey::new("refund").part("line", 3u8).part("order", "o-17").key());
/// assert_ne!(refund.key(), NaturalKey::new("refund").part("order", "o-17").part("line", "3").key());
/// ```
///
/// ```compile_fail
/// hapax_core::NaturalKey::new("payment").part("amount", 19.99);
/// ```
#[derive(Clone, PartialEq, Eq)]
#[must_use]
pub struct NaturalKey {
    kind: Box<str>,
    /// Name and value of each part, encoded.
    parts: Vec<(Box<str>, Vec<u8>)>,
}

impl NaturalKey {
    /// Begins the key of an operation of this kind. Two kinds never give the same key.
    pub fn new(kind: impl Into<Box<str>>) -> Self {
        Self { kind: kind.into(), parts: Vec::new() }
    }

    /// Creates the key of an order: customer and cart. A cart that is ordered twice on purpose must
    /// have another identifier.
    pub fn order(customer: &(impl KeyPart + ?Sized), cart: &(impl KeyPart + ?Sized)) -> Self {
        Self::new("order").part("customer", customer).part("cart", cart)
    }

    /// Creates the key of a payment: its order. Amount and currency belong to the request, so that
    /// another amount for the order is rejected. An order that is paid by instalments needs a part
    /// that distinguishes them.
    pub fn payment(order: &(impl KeyPart + ?Sized)) -> Self {
        Self::new("payment").part("order", order)
    }

    /// Creates the key of a transfer: sender, receiver and reference. The amount belongs to the
    /// request, so that the same reference with another amount is rejected. A reference must not be
    /// used twice.
    pub fn transfer(
        sender: &(impl KeyPart + ?Sized),
        receiver: &(impl KeyPart + ?Sized),
        reference: &(impl KeyPart + ?Sized),
    ) -> Self {
        Self::new("transfer")
            .part("sender", sender)
            .part("receiver", receiver)
            .part("reference", reference)
    }

    /// Adds a part. Parts of the same name keep their order.
    pub fn part(mut self, name: impl Into<Box<str>>, value: impl KeyPart) -> Self {
        let mut bytes = Vec::new();
        value.write(&mut bytes);
        self.parts.push((name.into(), bytes));
        self.parts.sort_by(|(one, _), (other, _)| one.cmp(other));
        self
    }

    /// Returns the key for a call without a request: its parts are all that the operation executes
    /// with. A call with the same parts gets the outcome of the first, whatever else it would do.
    pub const fn identifies_alone(self) -> (Self, ()) {
        (self, ())
    }

    /// Returns the key: 64 hexadecimal digits, a hash of the parts. It is the same in every
    /// version.
    #[must_use]
    pub fn key(&self) -> Key {
        Key::hash(&self.hasher("hapax 1 natural key"))
    }

    pub(super) fn hasher(&self, context: &str) -> blake3::Hasher {
        let mut hasher = blake3::Hasher::new_derive_key(context);
        let mut field = |bytes: &[u8]| {
            hasher.update(&(bytes.len() as u64).to_be_bytes());
            hasher.update(bytes);
        };
        field(self.kind.as_bytes());
        for (name, value) in &self.parts {
            field(name.as_bytes());
            field(value);
        }
        hasher
    }
}

/// Shows the names of parts, not their values.
impl fmt::Debug for NaturalKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<_> = self.parts.iter().map(|(name, _)| name).collect();
        f.debug_struct("NaturalKey").field("kind", &self.kind).field("parts", &names).finish()
    }
}

/// A value that can be a part of a [`NaturalKey`]: a text, a whole number of any width (1 of a `u8`
/// is 1 of an `i64`), a truth value, or bytes.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be a part of a key",
    note = "texts, whole numbers, `bool` and bytes can; give amounts in minor units: a floating \
            point number is not exact"
)]
pub trait KeyPart: sealed::Sealed {
    /// Appends the value, after its type.
    #[doc(hidden)]
    fn write(&self, bytes: &mut Vec<u8>);
}

mod sealed {
    pub trait Sealed {}
}

macro_rules! parts {
    ($($type:ty: $write_id:literal, $bytes:expr;)*) => {$(
        impl sealed::Sealed for $type {}
        impl KeyPart for $type {
            fn write(&self, bytes: &mut Vec<u8>) {
                bytes.push($write_id);
                let of: fn(&Self) -> &[u8] = $bytes;
                bytes.extend_from_slice(of(self));
            }
        }
    )*};
}

parts! {
    str: b't', str::as_bytes;
    String: b't', |text| text.as_bytes();
    [u8]: b'b', |bytes| bytes;
    Vec<u8>: b'b', |bytes| bytes;
    bool: b'?', |truth| if *truth { b"1" } else { b"0" };
}

macro_rules! numbers {
    ($($type:ty)*) => {$(
        impl sealed::Sealed for $type {}
        impl KeyPart for $type {
            fn write(&self, bytes: &mut Vec<u8>) {
                // In decimal digits, so that all widths are equal.
                bytes.push(b'i');
                bytes.extend_from_slice(self.to_string().as_bytes());
            }
        }
    )*};
}

numbers!(u8 u16 u32 u64 u128 usize i8 i16 i32 i64 i128 isize);

impl<T: KeyPart + ?Sized> sealed::Sealed for &T {}

impl<T: KeyPart + ?Sized> KeyPart for &T {
    fn write(&self, bytes: &mut Vec<u8>) {
        T::write(self, bytes);
    }
}
