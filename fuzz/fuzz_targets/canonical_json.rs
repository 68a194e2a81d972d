//! Canonical JSON against serde_json with numbers as written, which sorts members as we do.
//!
//! 1. A canonical form is what serde_json writes for the value it reads, but for exponents, which
//!    it rewrites; so two texts have one form exactly if they have one value.
//! 2. It is its own canonical form, and no longer than the text.
//! 3. A refusal has a reason that serde_json confirms.
#![no_main]

use std::collections::BTreeSet;
use std::fmt;

use hapax_core::{CanonicalJsonError, canonicalize};
use libfuzzer_sys::fuzz_target;
use serde::Deserialize;
use serde::de::{Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::Value;

/// By which serde_json passes numbers through its data model; as a member's name it would be
/// taken for one.
const NUMBER: &str = "$serde_json::private::Number";

fuzz_target!(|text: &[u8]| {
    if text.windows(NUMBER.len()).any(|part| part == NUMBER.as_bytes()) {
        return;
    }
    let value = parse::<Value>(text);
    match canonicalize(text) {
        Ok(canonical) => {
            let value = value.expect("what has a canonical form is JSON");
            let written = serde_json::to_vec(&value).expect("a value can be written");
            assert_eq!(outside_strings(&canonical).0, written);
            assert_eq!(numbers(&canonical), numbers(text), "a number was rewritten");
            assert_eq!(canonicalize(&canonical).as_ref(), Ok(&canonical), "not stable");
            assert!(canonical.len() <= text.len());
            assert!(outside_strings(text).1 <= 128);
            parse::<Distinct>(text).expect("a member twice has no canonical form");
        }
        Err(CanonicalJsonError::TooDeep) => assert!(outside_strings(text).1 > 128),
        // There may be another error further on, which neither of the two got to.
        Err(CanonicalJsonError::DuplicateMember) => assert!(parse::<Distinct>(text).is_err()),
        Err(_) => assert!(value.is_err() || outside_strings(text).1 > 128, "this is JSON"),
    }
});

fn parse<'de, T: Deserialize<'de>>(text: &'de [u8]) -> Result<T, serde_json::Error> {
    let mut reader = serde_json::Deserializer::from_slice(text);
    // 10,000 levels fit the stack of a fuzzer; longer texts are not made.
    reader.disable_recursion_limit();
    let value = T::deserialize(&mut reader)?;
    reader.end().map(|()| value)
}

/// The text with exponents as serde_json writes them, `1E5` as `1e+5`; and how many arrays and
/// objects are open at once, at most.
fn outside_strings(text: &[u8]) -> (Vec<u8>, usize) {
    let (mut open, mut deepest, mut quoted, mut escaped) = (0usize, 0, false, false);
    let mut out = Vec::with_capacity(text.len());
    for (at, &byte) in text.iter().enumerate() {
        let after_digit = at > 0 && text[at - 1].is_ascii_digit();
        out.push(byte);
        match byte {
            _ if escaped => escaped = false,
            b'\\' if quoted => escaped = true,
            b'"' => quoted = !quoted,
            _ if quoted => {}
            b'{' | b'[' => open += 1,
            b'}' | b']' => open = open.saturating_sub(1),
            b'e' | b'E' if after_digit => {
                out.pop();
                let signed = matches!(text.get(at + 1), Some(b'+' | b'-'));
                out.extend(if signed { &b"e"[..] } else { b"e+" });
            }
            _ => {}
        }
        deepest = deepest.max(open);
    }
    (out, deepest)
}

/// The numbers of a JSON text as they are written, in any order.
fn numbers(text: &[u8]) -> Vec<Vec<u8>> {
    let mut numbers: Vec<Vec<u8>> = Vec::new();
    let (mut quoted, mut escaped, mut inside) = (false, false, false);
    for &byte in text {
        let part = !quoted && matches!(byte, b'-' | b'0'..=b'9')
            || inside && matches!(byte, b'+' | b'.' | b'e' | b'E');
        match byte {
            _ if escaped => escaped = false,
            b'\\' if quoted => escaped = true,
            b'"' => quoted = !quoted,
            _ if part && inside => numbers.last_mut().expect("one is open").push(byte),
            _ if part => numbers.push(vec![byte]),
            _ => {}
        }
        inside = part;
    }
    numbers.sort();
    numbers
}

/// Any JSON without a member twice.
struct Distinct;

impl<'de> Deserialize<'de> for Distinct {
    fn deserialize<D: Deserializer<'de>>(reader: D) -> Result<Self, D::Error> {
        struct Any;
        impl<'de> Visitor<'de> for Any {
            type Value = Distinct;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("JSON without a member twice")
            }

            fn visit_unit<E>(self) -> Result<Distinct, E> {
                Ok(Distinct)
            }

            fn visit_bool<E>(self, _: bool) -> Result<Distinct, E> {
                Ok(Distinct)
            }

            fn visit_u64<E>(self, _: u64) -> Result<Distinct, E> {
                Ok(Distinct)
            }

            fn visit_i64<E>(self, _: i64) -> Result<Distinct, E> {
                Ok(Distinct)
            }

            fn visit_str<E>(self, _: &str) -> Result<Distinct, E> {
                Ok(Distinct)
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Distinct, A::Error> {
                while items.next_element::<Distinct>()?.is_some() {}
                Ok(Distinct)
            }

            fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Distinct, A::Error> {
                let mut names = BTreeSet::new();
                while let Some(name) = members.next_key::<String>()? {
                    if name == NUMBER {
                        members.next_value::<IgnoredAny>()?;
                        continue;
                    }
                    members.next_value::<Distinct>()?;
                    if !names.insert(name) {
                        return Err(A::Error::custom("a member twice"));
                    }
                }
                Ok(Distinct)
            }
        }
        reader.deserialize_any(Any)
    }
}
