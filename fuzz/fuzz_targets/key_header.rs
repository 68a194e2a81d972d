//! `Idempotency-Key`: what is a key, and which.
//!
//! 1. A value that both grammars take is the same key; only bare values are for the lenient one.
//! 2. A key is within its limits, and what is written for it is read back.
//! 3. A quoted value is taken apart as RFC 9651 says, and nothing but parameters follows it.
//! 4. Every printable text of the right length is a key when it is quoted, with parameters or not.
//! 5. Of two field lines none is the key.
#![no_main]

use hapax_core::Key;
use hapax_http::header::{Grammar, IDEMPOTENCY_KEY, InvalidKey, decode, encode, key};
use http::{HeaderMap, HeaderValue};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|value: &[u8]| {
    let (lenient, strict) = (decode(value, Grammar::Lenient), decode(value, Grammar::Strict));
    if let Ok(key) = &strict {
        assert_eq!(lenient.as_ref(), Ok(key), "two keys in one value");
        quoted(value, key);
    }
    if let Ok(key) = &lenient {
        let text = key.as_str();
        assert!((1..=Key::MAX_LEN).contains(&text.len()));
        assert!(text.bytes().all(|byte| (0x20..=0x7e).contains(&byte)));
        let written = encode(key);
        for grammar in [Grammar::Lenient, Grammar::Strict] {
            assert_eq!(decode(written.as_bytes(), grammar).as_ref(), Ok(key));
        }
        if strict.is_err() {
            assert_eq!(text.as_bytes(), value.trim_ascii());
            assert!(!text.contains(['"', ',', ';', '\\', ' ']));
        }
    }
    complete(value);
    lines(value);
});

/// Takes `value`, which was found to be quoted, apart by hand.
fn quoted(value: &[u8], key: &Key) {
    let value = value.trim_ascii();
    let mut text = Vec::new();
    let mut rest = value.strip_prefix(b"\"").expect("a String begins with a quote");
    loop {
        match rest {
            [b'"', after @ ..] => {
                rest = after;
                break;
            }
            [b'\\', escaped @ (b'"' | b'\\'), after @ ..] => {
                text.push(*escaped);
                rest = after;
            }
            [plain, after @ ..] => {
                assert_ne!(*plain, b'\\', "a bad escape");
                text.push(*plain);
                rest = after;
            }
            [] => panic!("a String ends with a quote"),
        }
    }
    assert_eq!(key.as_str().as_bytes(), text);
    assert!(rest.is_empty() || rest.starts_with(b";"), "something follows");
}

/// Quotes the input, if it may be a key, and expects it to be one.
fn complete(text: &[u8]) {
    let Ok(Ok(expected)) = std::str::from_utf8(text).map(Key::new) else { return };
    let escaped = expected.as_str().replace('\\', "\\\\").replace('"', "\\\"");
    for parameters in ["", ";a", "; a=\"b, c\";*d=?0", ";  z=1.5"] {
        let value = format!(" \"{escaped}\"{parameters}\t");
        for grammar in [Grammar::Lenient, Grammar::Strict] {
            assert_eq!(decode(value.as_bytes(), grammar).as_ref(), Ok(&expected));
        }
    }
}

fn lines(value: &[u8]) {
    let Ok(value) = HeaderValue::from_bytes(value) else { return };
    let mut headers = HeaderMap::new();
    assert_eq!(key(&headers, Grammar::Lenient), Ok(None));
    headers.append(IDEMPOTENCY_KEY, value.clone());
    let one = key(&headers, Grammar::Lenient);
    assert_eq!(one, decode(value.as_bytes(), Grammar::Lenient).map(Some));
    headers.append(IDEMPOTENCY_KEY, value);
    assert_eq!(key(&headers, Grammar::Lenient), Err(InvalidKey::Repeated));
}
