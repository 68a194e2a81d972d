//! Parts of JSON texts, against serde_json's own pointers.
//!
//! 1. What has no canonical form has none in parts either.
//! 2. `only` finds what serde_json finds, in canonical form.
//! 3. `except` forgets what the pointers lead to; where they lead nowhere, nothing.
#![no_main]

use hapax_core::{JsonPointers, canonicalize, canonicalize_except, canonicalize_only};
use libfuzzer_sys::fuzz_target;
use serde_json::Value;

fuzz_target!(|input: (&str, Vec<&str>)| {
    let (text, texts) = input;
    let Ok(pointers) = JsonPointers::new(&texts) else {
        assert!(texts.iter().any(|text| !is_pointer(text)), "refused pointers");
        return;
    };
    assert!(texts.iter().all(|text| is_pointer(text)), "took what is no pointer");
    assert!(pointers.iter().is_sorted());

    let (only, except) = (
        canonicalize_only(text.as_bytes(), &pointers),
        canonicalize_except(text.as_bytes(), &pointers),
    );
    let whole = match canonicalize(text.as_bytes()) {
        Ok(whole) => whole,
        Err(error) => {
            assert_eq!(only, Err(error));
            assert_eq!(except, Err(error));
            return;
        }
    };
    // Deeper ones than serde_json reads are none of its business.
    let Ok(value) = serde_json::from_slice::<Value>(&whole) else { return };
    if whole.windows(6).any(|part| part == b"$serde") {
        return;
    }
    let only = only.expect("the text is canonical");
    assert_eq!(only.len(), pointers.iter().len());
    for (pointer, found) in pointers.iter().zip(&only) {
        let read = found.as_ref().map(|part| serde_json::from_slice(part).expect("JSON"));
        assert_eq!(read.as_ref(), value.pointer(pointer), "{pointer}");
        if let Some(part) = found {
            assert_eq!(canonicalize(part).as_ref(), Ok(part));
        }
    }

    let except = except.expect("the text is canonical");
    if only.iter().all(Option::is_none) {
        assert_eq!(except, whole);
    }
    let mut other = value.clone();
    for pointer in pointers.iter() {
        if let Some(part) = other.pointer_mut(pointer) {
            *part = Value::from("another");
        }
    }
    let form = |value: &Value| canonicalize_except(value.to_string().as_bytes(), &pointers);
    assert_eq!(form(&value), form(&other));
});

/// RFC 6901, 3.
fn is_pointer(text: &str) -> bool {
    let escapes = text.split('~').skip(1).all(|rest| rest.starts_with(['0', '1']));
    (text.is_empty() || text.starts_with('/')) && escapes
}
