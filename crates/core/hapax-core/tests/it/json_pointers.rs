//! Canonical JSON of parts of a text, compared with the pointers of `serde_json`.

use hapax_core::{
    CanonicalJsonError, JsonPointers, PointerError, canonicalize, canonicalize_except,
    canonicalize_only,
};
use proptest::prelude::*;
use serde_json::{Value, json};

fn value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(json!(null)),
        any::<u8>().prop_map(Value::from),
        name().prop_map(Value::from)
    ];
    leaf.prop_recursive(4, 32, 5, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..5).prop_map(Value::Array),
            prop::collection::btree_map(name(), inner, 0..5)
                .prop_map(|members| Value::Object(members.into_iter().collect())),
        ]
    })
}

fn name() -> impl Strategy<Value = String> {
    prop::sample::select(vec!["", "a", "b", "0", "1", "~", "/", "~1", "é"]).prop_map(str::to_owned)
}

fn pointer() -> impl Strategy<Value = String> {
    prop::collection::vec(name(), 0..4).prop_map(|steps| {
        steps.iter().fold(String::new(), |text, step| {
            text + "/" + &step.replace('~', "~0").replace('/', "~1")
        })
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1024))]

    #[test]
    fn canonicalize_only_finds_the_values_of_the_oracle(
        value in value(),
        pointers in prop::collection::vec(pointer(), 0..4),
    ) {
        let only = JsonPointers::new(&pointers).unwrap();
        let found = canonicalize_only(value.to_string().as_bytes(), &only).unwrap();
        prop_assert_eq!(found.len(), only.iter().len());
        for (text, found) in only.iter().zip(found) {
            let expected = value.pointer(text).map(|part| {
                canonicalize(part.to_string().as_bytes()).unwrap()
            });
            prop_assert_eq!(found, expected, "{}", text);
        }
    }

    /// Values that are left out are not distinguished; all others are.
    #[test]
    fn canonicalize_except_leaves_out_the_values_at_its_pointers_only(
        value in value(),
        other in value(),
        pointer in pointer(),
        elsewhere in pointer(),
    ) {
        let except = JsonPointers::new([&pointer]).unwrap();
        let form = |value: &Value| canonicalize_except(value.to_string().as_bytes(), &except).unwrap();
        let mut changed = value.clone();
        if let Some(part) = changed.pointer_mut(&pointer) {
            *part = other.clone();
        }
        prop_assert_eq!(form(&changed), form(&value));

        let apart = !(elsewhere.clone() + "/").starts_with(&(pointer.clone() + "/"))
            && !(pointer + "/").starts_with(&(elsewhere.clone() + "/"));
        let mut changed = value.clone();
        if let Some(part) = changed.pointer_mut(&elsewhere).filter(|_| apart) {
            let differs = *part != other;
            *part = other;
            prop_assert_eq!(form(&changed) != form(&value), differs);
        }
    }

    #[test]
    fn pointers_without_a_value_change_nothing(value in value()) {
        let text = value.to_string();
        let except = JsonPointers::new(["/nowhere", "/a/nowhere"]).unwrap();
        let all = canonicalize(text.as_bytes()).unwrap();
        prop_assert_eq!(canonicalize_except(text.as_bytes(), &except).unwrap(), all);
    }
}

#[test]
fn left_out_values_leave_valid_objects_and_placeholders_in_arrays() {
    let except = JsonPointers::new(["/a", "/b/0", "/b/2", "/d/x"]).unwrap();
    for (text, expected) in [
        (r#"{"a":1}"#, "{}"),
        (r#"{"a":1,"c":2}"#, r#"{"c":2}"#),
        (r#"{"c":2,"a":1}"#, r#"{"c":2}"#),
        (r#"{"c":2,"a":1,"b":[1,2,3,4]}"#, r#"{"b":[_,2,_,4],"c":2}"#),
        (r#"{"d":{"x":1,"y":{"x":2}},"\u0061":[1,{"b":[1]}]}"#, r#"{"d":{"y":{"x":2}}}"#),
        (r#"{"b":[1]}"#, r#"{"b":[_]}"#),
        (r#"{"b":[]}"#, r#"{"b":[]}"#),
        (r#"{"b":["_",2]}"#, r#"{"b":[_,2]}"#),
        ("[1]", "[1]"),
    ] {
        let form = canonicalize_except(text.as_bytes(), &except).unwrap();
        assert_eq!(String::from_utf8(form).unwrap(), expected);
    }
    let whole = JsonPointers::new([""]).unwrap();
    assert_eq!(canonicalize_except(b"[1]", &whole).unwrap(), b"");
    assert_eq!(canonicalize_only(b"[1]", &whole).unwrap(), [Some(b"[1]".to_vec())]);
}

#[test]
fn a_defect_in_a_left_out_value_is_an_error() {
    let except = JsonPointers::new(["/a"]).unwrap();
    for text in [
        r#"{"a":{"b":1,"b":2}}"#,
        r#"{"c":[{"b":1,"b":2}]}"#,
        r#"{"a":1,"a":2}"#,
        r#"{"c":1,"a":1,"b":2,"\u0061":2}"#,
    ] {
        let none = CanonicalJsonError::DuplicateMember;
        assert_eq!(canonicalize_except(text.as_bytes(), &except), Err(none));
        assert_eq!(canonicalize_only(text.as_bytes(), &except), Err(none));
    }
    assert!(canonicalize_except(br#"{"a":1,}"#, &except).is_err());
    assert!(canonicalize_except(br#"{"a":1 "b":2}"#, &except).is_err());
}

#[test]
fn pointers_are_rfc_6901() {
    for bad in ["a", "a/b", "/~", "/~2", "/a~", "#/a"] {
        assert_eq!(JsonPointers::new([bad]), Err(PointerError), "{bad}");
    }
    let set = JsonPointers::new(["/b", "", "/a", "/b"]).unwrap();
    assert_eq!(set.iter().collect::<Vec<_>>(), ["", "/a", "/b"]);
}
