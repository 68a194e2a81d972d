//! Canonical JSON, compared with a model of the written value and with `serde_json`.

use std::collections::BTreeMap;

use hapax_core::{CanonicalJsonError, canonicalize};
use proptest::prelude::*;
use serde::de::IgnoredAny;

/// A JSON value whose numbers are text.
#[derive(Clone, Debug)]
enum Json {
    Word(&'static str),
    Number(String),
    Text(String),
    Array(Vec<Json>),
    Object(BTreeMap<String, Json>),
}

fn json() -> impl Strategy<Value = Json> {
    let leaf = prop_oneof![
        prop::sample::select(vec!["true", "false", "null"]).prop_map(Json::Word),
        r"-?(0|[1-9][0-9]{0,20})(\.[0-9]{1,4})?([eE][+-]?[0-9]{1,3})?".prop_map(Json::Number),
        text().prop_map(Json::Text),
    ];
    leaf.prop_recursive(6, 64, 8, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..8).prop_map(Json::Array),
            prop::collection::btree_map(text(), inner, 0..8).prop_map(Json::Object),
        ]
    })
}

/// Texts that are short, so that names share prefixes, with many characters that need escapes or
/// are sorted differently in UTF-16.
fn text() -> impl Strategy<Value = String> {
    let odd = vec!['"', '\\', '/', '\u{0}', '\u{1f}', '\n', 'a', 'b', 'é', '\u{ffff}', '😀'];
    let character = prop_oneof![prop::sample::select(odd), any::<char>()];
    prop::collection::vec(character, 0..5).prop_map(|text| text.into_iter().collect())
}

/// Writes the canonical form from the model: `BTreeMap<String, _>` sorts by UTF-8 bytes.
fn reference(json: &Json, out: &mut String) {
    let separated = |out: &mut String, at: usize| out.push_str(if at > 0 { "," } else { "" });
    match json {
        Json::Word(word) => out.push_str(word),
        Json::Number(number) => out.push_str(number),
        Json::Text(text) => out.push_str(&serde_json::to_string(text).unwrap()),
        Json::Array(items) => {
            out.push('[');
            for (at, item) in items.iter().enumerate() {
                separated(out, at);
                reference(item, out);
            }
            out.push(']');
        }
        Json::Object(members) => {
            out.push('{');
            for (at, (name, value)) in members.iter().enumerate() {
                separated(out, at);
                out.push_str(&serde_json::to_string(name).unwrap());
                out.push(':');
                reference(value, out);
            }
            out.push('}');
        }
    }
}

/// The style in which a value is written, from random bytes that the test generated.
struct Style<'a>(std::iter::Cycle<std::slice::Iter<'a, u8>>);

impl Style<'_> {
    fn choose(&mut self, count: u8) -> u8 {
        self.0.next().map_or(0, |byte| byte % count)
    }

    fn space(&mut self, out: &mut String) {
        out.push_str(["", " ", "\n\t", "", "\r "][usize::from(self.choose(5))]);
    }

    fn text(&mut self, text: &str, out: &mut String) {
        out.push('"');
        for character in text.chars() {
            let must = matches!(character, '"' | '\\' | '\0'..='\u{1f}');
            match (self.choose(4), character) {
                (0, '/') => out.push_str("\\/"),
                (0 | 1, '\n') => out.push_str("\\n"),
                (0 | 1, '"') => out.push_str("\\\""),
                (0, _) => {
                    for unit in character.encode_utf16(&mut [0; 2]) {
                        out.push_str(&format!("\\u{unit:04x}"));
                    }
                }
                _ if must => out.push_str(&format!("\\u{:04X}", u32::from(character))),
                _ => out.push(character),
            }
        }
        out.push('"');
    }

    fn write(&mut self, json: &Json, out: &mut String) {
        self.space(out);
        match json {
            Json::Word(word) => out.push_str(word),
            Json::Number(number) => out.push_str(number),
            Json::Text(text) => self.text(text, out),
            Json::Array(items) => {
                out.push('[');
                for (at, item) in items.iter().enumerate() {
                    out.push_str(if at > 0 { "," } else { "" });
                    self.write(item, out);
                }
                self.space(out);
                out.push(']');
            }
            Json::Object(members) => {
                let mut members: Vec<_> = members.iter().collect();
                let turn = usize::from(self.choose(8)) % members.len().max(1);
                members.rotate_left(turn);
                if self.choose(2) == 0 {
                    members.reverse();
                }
                out.push('{');
                for (at, (name, value)) in members.into_iter().enumerate() {
                    out.push_str(if at > 0 { "," } else { "" });
                    self.space(out);
                    self.text(name, out);
                    self.space(out);
                    out.push(':');
                    self.write(value, out);
                }
                self.space(out);
                out.push('}');
            }
        }
        self.space(out);
    }
}

/// Tokens of JSON in random order: mostly not JSON, sometimes nearly.
fn soup() -> impl Strategy<Value = String> {
    let pieces = vec![
        "{",
        "}",
        "[",
        "]",
        ",",
        ":",
        "\"a\"",
        "\"b\"",
        "\"\\u0061\"",
        "\"\\ud83d\\ude00\"",
        "\"\\ud83d\"",
        "\"\\udc00\\ud800\"",
        "\"\\u12\"",
        "\"\\x\"",
        "\"\n\"",
        "\"",
        "0",
        "01",
        "-",
        "-0",
        "1.",
        ".5",
        "1.5",
        "1e",
        "1e+5",
        "1E999",
        "+1",
        "true",
        "tru",
        "null",
        "nul",
        "NaN",
        " ",
        "\u{a0}",
        "\u{feff}",
        "\u{c}",
        "//",
        "{}",
        "[]",
        "{\"a\":1}",
        "[1,2]",
    ];
    prop::collection::vec(prop::sample::select(pieces), 0..12).prop_map(|pieces| pieces.concat())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1024))]

    #[test]
    fn every_text_of_a_value_has_the_same_form(
        json in json(),
        random in prop::collection::vec(any::<u8>(), 1..64),
    ) {
        let (mut written, mut expected) = (String::new(), String::new());
        Style(random.iter().cycle()).write(&json, &mut written);
        reference(&json, &mut expected);
        let canonical = canonicalize(written.as_bytes()).unwrap();
        prop_assert_eq!(std::str::from_utf8(&canonical).unwrap(), &expected);
        prop_assert_eq!(canonicalize(&canonical).unwrap(), canonical);
    }

    #[test]
    fn the_form_has_the_value_of_the_text(
        json in json(),
        random in prop::collection::vec(any::<u8>(), 1..64),
    ) {
        let mut written = String::new();
        Style(random.iter().cycle()).write(&json, &mut written);
        // `serde_json` rejects numbers out of its range, which have a form nevertheless.
        if let Ok(value) = serde_json::from_str::<serde_json::Value>(&written) {
            let canonical = canonicalize(written.as_bytes()).unwrap();
            prop_assert_eq!(serde_json::from_slice::<serde_json::Value>(&canonical).unwrap(), value);
        }
    }

    #[test]
    fn only_strict_json_has_a_form(text in prop_oneof![soup(), ".{0,16}"]) {
        let found = canonicalize(text.as_bytes());
        match serde_json::from_str::<IgnoredAny>(&text) {
            Ok(_) => prop_assert!(!matches!(found, Err(CanonicalJsonError::Syntax { .. })), "{found:?}"),
            Err(_) => prop_assert!(found.is_err(), "{found:?}"),
        }
    }

    #[test]
    fn one_changed_byte_neither_panics_nor_gives_a_form_to_invalid_json(
        json in json(),
        at in any::<prop::sample::Index>(),
        to: u8,
    ) {
        let mut written = String::new();
        reference(&json, &mut written);
        let mut bytes = written.into_bytes();
        let at = at.index(bytes.len());
        bytes[at] = to;
        if canonicalize(&bytes).is_ok() {
            let text = std::str::from_utf8(&bytes).unwrap();
            prop_assert!(serde_json::from_str::<IgnoredAny>(text).is_ok());
        }
    }
}

#[track_caller]
fn canonical(text: &str) -> String {
    String::from_utf8(canonicalize(text.as_bytes()).unwrap()).unwrap()
}

#[test]
fn numbers_stay_as_written() {
    for number in ["1.0", "1", "1e0", "1E0", "-0", "0", "9007199254740993", "9007199254740992"] {
        assert_eq!(canonical(&format!("[ {number} ]")), format!("[{number}]"));
    }
}

#[test]
fn members_sort_by_unescaped_utf8() {
    // In UTF-16 the emoji would come before U+FF5E; in escaped text, `\u0062` before `a`.
    let text = r#"{"😀":1,"～":2,"\u0062":3,"a":4,"":5,"aa":6}"#;
    assert_eq!(canonical(text), r#"{"":5,"a":4,"aa":6,"b":3,"～":2,"😀":1}"#);
}

#[test]
fn an_object_with_a_repeated_member_has_no_form() {
    for text in [r#"{"a":1,"a":1}"#, r#"{"a":1,"b":2,"\u0061":3}"#, r#"[{"b":{"a":1,"a":1}}]"#] {
        assert_eq!(
            canonicalize(text.as_bytes()),
            Err(CanonicalJsonError::DuplicateMember),
            "{text}"
        );
    }
    assert_eq!(canonical(r#"{"a":{"a":1},"b":{"a":1}}"#), r#"{"a":{"a":1},"b":{"a":1}}"#);
}

#[test]
fn half_a_surrogate_pair_has_no_canonical_form() {
    for text in [r#""\ud800""#, r#""\udc00""#, r#""\ud800\ud800""#, r#""\ud800x""#, r#""\ud800\n""#]
    {
        let found = canonicalize(text.as_bytes());
        assert!(matches!(found, Err(CanonicalJsonError::LoneSurrogate { position: 1 })), "{text}");
    }
    assert_eq!(canonical(r#""\uD83D\uDE00""#), r#""😀""#);
}

#[test]
fn a_byte_order_mark_and_bad_utf8_have_no_form() {
    for bytes in [&b"\xef\xbb\xbf1"[..], b"\xff", b"\"\xc3\"", b"\"\xed\xa0\x80\"", b"", b" "] {
        assert!(matches!(canonicalize(bytes), Err(CanonicalJsonError::Syntax { .. })), "{bytes:?}");
    }
}

#[test]
fn depth_is_bounded() {
    let nested = |depth: usize| "[".repeat(depth) + &"]".repeat(depth);
    assert_eq!(canonical(&nested(128)), nested(128));
    assert_eq!(canonicalize(nested(129).as_bytes()), Err(CanonicalJsonError::TooDeep));
    assert_eq!(canonicalize("[".repeat(1 << 20).as_bytes()), Err(CanonicalJsonError::TooDeep));
    assert_eq!(
        canonicalize("{\"a\":".repeat(1 << 20).as_bytes()),
        Err(CanonicalJsonError::TooDeep)
    );
}

/// Many members in the worst order, and sorting at every level. The test would take seconds if this
/// were slow.
#[test]
fn hostile_texts_are_canonicalized_in_n_log_n_time() {
    let members: Vec<_> = (0..100_000).rev().map(|at| format!("\"{at:06}\":0")).collect();
    let wide = format!("{{{}}}", members.join(","));
    let sorted: Vec<_> = members.iter().rev().map(String::as_str).collect();
    assert_eq!(canonical(&wide), format!("{{{}}}", sorted.join(",")));

    let deep = (0..127).fold(wide, |inner, _| format!("{{\"b\":0,\"a\":{inner}}}"));
    assert_eq!(canonical(&deep).len(), deep.len());
}
