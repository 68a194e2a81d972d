use hapax_core::{Key, KeyError};
use hapax_http::header::{Grammar, IDEMPOTENCY_KEY, InvalidKey, decode, encode, key};
use http::{HeaderMap, HeaderValue};
use proptest::prelude::*;

#[track_caller]
fn lenient(value: &[u8]) -> Result<String, InvalidKey> {
    decode(value, Grammar::Lenient).map(|key| key.as_str().to_owned())
}

#[test]
fn wire_01_quoted_and_bare_are_the_same_key() {
    for value in
        [&b"abc"[..], b"\"abc\"", b" \"abc\" ", b"\tabc ", b"\"abc\";a=1;b", b"\"abc\"; x=\"y\""]
    {
        assert_eq!(lenient(value).unwrap(), "abc", "{value:?}");
    }
    assert_eq!(lenient(br#""a\"b\\c""#).unwrap(), r#"a"b\c"#);
    assert_eq!(lenient(br#"" ""#).unwrap(), " ");
    // Bare values of other types of structured fields are words like any other.
    for word in ["12", "?1", ":YWJj:", "1.5", "@123", "key=value", "(a)", "8e03978e-40d5-43dd"] {
        assert_eq!(lenient(word.as_bytes()).unwrap(), word);
    }
}

#[test]
fn wire_01_strict_takes_strings_only() {
    for value in ["abc", "12", "?1", ":YWJj:"] {
        assert_eq!(
            decode(value.as_bytes(), Grammar::Strict),
            Err(InvalidKey::Malformed),
            "{value}"
        );
    }
    assert_eq!(decode(b"\"abc\"", Grammar::Strict).unwrap().as_str(), "abc");
}

#[test]
fn a_key_has_1_to_255_characters() {
    let quoted = |length| format!("\"{}\"", "k".repeat(length));
    assert_eq!(lenient(quoted(255).as_bytes()).unwrap().len(), 255);
    assert_eq!(lenient("k".repeat(255).as_bytes()).unwrap().len(), 255);
    let too_long = Err(InvalidKey::Key(KeyError::TooLong { length: 256 }));
    assert_eq!(lenient(quoted(256).as_bytes()), too_long);
    assert_eq!(lenient("k".repeat(256).as_bytes()), too_long);
    for empty in [&b""[..], b" ", b"\"\"", b"\"\";a=1"] {
        assert_eq!(lenient(empty), Err(InvalidKey::Key(KeyError::Empty)), "{empty:?}");
    }
}

#[test]
fn wire_03_invalid_values_are_no_key() {
    let values: [&[u8]; 17] = [
        b"\"a\", \"b\"",
        b"a, b",
        b"a,b",
        b"a b",
        b"a;x=1",
        b"a\\b",
        b"a\"b",
        b"\"a",
        b"\"a\"b",
        br#""a\nb""#,
        b"\"\xc3\xa9\"",
        b"\xc3\xa9",
        b"\"a\tb\"",
        b"a\tb",
        b"\"a\";",
        b"\"a\";A=1",
        b"\"\x7f\"",
    ];
    for value in values {
        assert_eq!(lenient(value), Err(InvalidKey::Malformed), "{value:?}");
    }
}

#[test]
fn wire_03_two_field_lines_are_no_key() {
    let mut headers = HeaderMap::new();
    assert_eq!(key(&headers, Grammar::Lenient), Ok(None));
    headers.append(IDEMPOTENCY_KEY, HeaderValue::from_static("a"));
    assert_eq!(key(&headers, Grammar::Lenient), Ok(Some(Key::new("a").unwrap())));
    headers.append(IDEMPOTENCY_KEY, HeaderValue::from_static("a"));
    assert_eq!(key(&headers, Grammar::Lenient), Err(InvalidKey::Repeated));
}

proptest! {
    #[test]
    fn every_key_can_be_sent_and_read(text in "[ -~]{1,255}") {
        let key = Key::new(&text).unwrap();
        let value = encode(&key);
        prop_assert_eq!(decode(value.as_bytes(), Grammar::Strict), Ok(key.clone()));
        prop_assert_eq!(decode(value.as_bytes(), Grammar::Lenient), Ok(key));
    }

    #[test]
    fn a_bare_word_and_its_quoted_form_are_the_same_key(word in r#"[!#-+\--:<-\[\]-~]{1,255}"#) {
        let quoted = format!("\"{word}\"");
        let bare = decode(word.as_bytes(), Grammar::Lenient);
        prop_assert_eq!(bare, decode(quoted.as_bytes(), Grammar::Strict));
    }

    #[test]
    fn any_bytes_give_a_valid_key_or_an_error(value in prop::collection::vec(any::<u8>(), 0..300)) {
        for grammar in [Grammar::Lenient, Grammar::Strict] {
            if let Ok(key) = decode(&value, grammar) {
                prop_assert!(Key::new(key.as_str()).is_ok());
            }
        }
    }

    /// What one grammar reads, the other never reads as another key.
    #[test]
    fn a_key_of_the_strict_grammar_is_the_same_in_the_lenient_one(value in r#"[ "\\a-c;,=]{0,12}"#) {
        if let Ok(key) = decode(value.as_bytes(), Grammar::Strict) {
            prop_assert_eq!(decode(value.as_bytes(), Grammar::Lenient), Ok(key));
        }
    }
}
