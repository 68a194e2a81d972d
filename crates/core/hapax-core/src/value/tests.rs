use std::collections::{BTreeMap, HashMap};
use std::fmt::Debug;
use std::net::IpAddr;

use proptest::prelude::*;
use serde::de::Visitor;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::*;

const LIMIT: usize = 1 << 20;

fn round_trips<T: Serialize + DeserializeOwned + PartialEq + Debug>(value: T) {
    let bytes = write(&value, LIMIT).unwrap();
    assert_eq!(read::<T>(&bytes).unwrap(), value);
}

#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
struct Unit;

#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
struct New(Option<u8>);

#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
enum Plain {
    #[serde(rename = "not found")]
    A,
    B(Option<()>),
    #[serde(rename = "")]
    C(u8, String),
    D {
        #[serde(rename = "@id")]
        x: Option<Option<u8>>,
    },
}

#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(tag = "kind")]
enum Tagged {
    A,
    B { x: Option<Option<u8>>, c: char, f: f32 },
    C(BTreeMap<String, Plain>),
}

#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(tag = "kind", content = "of")]
enum Adjacent {
    A,
    B(u128),
    C(u8, char),
    D { x: Option<Option<u8>> },
}

#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(untagged)]
enum Untagged {
    Bool(bool),
    Integer(i64),
    Float(f64),
    Character(char),
    Text(String),
    Nested(Option<Option<bool>>),
    Bytes(Raw),
    List(Vec<Untagged>),
    Fields { x: u8 },
}

#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
struct Flat {
    a: u8,
    #[serde(flatten)]
    plain: Plain,
    #[serde(flatten)]
    rest: BTreeMap<String, Option<Option<u8>>>,
}

/// Bytes as such, not as a list of numbers.
#[derive(Clone, PartialEq, Debug)]
struct Raw(Vec<u8>);

impl Serialize for Raw {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(&self.0)
    }
}

impl<'de> Deserialize<'de> for Raw {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Bytes;
        impl Visitor<'_> for Bytes {
            type Value = Raw;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("bytes")
            }
            fn visit_bytes<E>(self, bytes: &[u8]) -> Result<Raw, E> {
                Ok(Raw(bytes.to_vec()))
            }
        }
        deserializer.deserialize_bytes(Bytes)
    }
}

#[test]
fn nested_options_round_trip() {
    round_trips::<Option<Option<u8>>>(Some(None));
    round_trips::<Vec<Option<Option<()>>>>(vec![None, Some(None), Some(Some(()))]);
    round_trips(Some(Unit));
    round_trips(Some(New(None)));
    round_trips((Some(Plain::D { x: Some(None) }), Plain::D { x: None }, Plain::B(Some(()))));
    let flat = Flat {
        a: 1,
        plain: Plain::D { x: Some(None) },
        rest: BTreeMap::from([("y".into(), Some(None)), ("z".into(), None)]),
    };
    round_trips(flat);
}

#[test]
fn numbers_round_trip_bit_for_bit() {
    round_trips((u128::MAX, u128::from(u64::MAX) + 1, i128::MIN, i128::MAX, i64::MIN, -1i8, 0u8));
    round_trips((f64::MIN_POSITIVE, f64::INFINITY, f32::MAX, 0.1f32));
    for bits in [0x7ff8_0000_0000_0000, 0xfff8_0000_0000_0123, 0x8000_0000_0000_0000, 1] {
        let bytes = write(&f64::from_bits(bits), LIMIT).unwrap();
        assert_eq!(read::<f64>(&bytes).unwrap().to_bits(), bits);
    }
}

#[test]
fn maps_with_any_keys_round_trip() {
    round_trips(BTreeMap::from([((1u8, "a".to_owned()), 1u8), ((1, "b".to_owned()), 2)]));
    round_trips(BTreeMap::from([(Some(true), 1u8), (None, 2)]));
    round_trips(BTreeMap::from([(u128::MAX, ()), (0, ())]));
    let plain = [Plain::A, Plain::B(None), Plain::C(1, "x".into()), Plain::D { x: Some(None) }];
    round_trips(plain.into_iter().zip(0u8..).collect::<BTreeMap<_, _>>());
}

#[test]
fn every_kind_of_enum_round_trips() {
    round_trips(vec![Plain::A, Plain::B(None), Plain::C(0, String::new()), Plain::D { x: None }]);
    round_trips(Tagged::A);
    round_trips(Tagged::B { x: Some(None), c: 'é', f: 0.1 });
    round_trips(Tagged::C(BTreeMap::from([("q".into(), Plain::C(1, "x".into()))])));
    round_trips([Adjacent::A, Adjacent::B(u128::MAX), Adjacent::C(1, 'x')]);
    round_trips(Adjacent::D { x: Some(None) });
    round_trips(vec![
        Untagged::Bool(true),
        Untagged::Integer(-3),
        Untagged::Float(1.0),
        Untagged::Character('x'),
        Untagged::Text("xy".into()),
        Untagged::Nested(Some(None)),
        Untagged::Nested(None),
        Untagged::Bytes(Raw(vec![1, 255])),
        Untagged::List(vec![Untagged::Fields { x: 1 }]),
    ]);
    round_trips::<Result<u8, String>>(Err("no".into()));
}

#[test]
fn values_of_other_crates_and_of_std_round_trip() {
    round_trips(serde_json::json!({"a": [1, 2.5, null, "x", {"b": -1}]}));
    round_trips(std::time::Duration::from_nanos(5));
    round_trips((Raw((0..=255).collect()), 'é', "\0\u{10ffff}".to_owned(), ()));
}

/// Types with a text form and a binary form, in every position.
#[test]
fn addresses_round_trip_where_serde_buffers_them() {
    #[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
    #[serde(tag = "kind")]
    enum Host {
        Up { at: IpAddr },
    }
    #[derive(PartialEq, Debug, Serialize, Deserialize)]
    #[serde(untagged)]
    enum Either {
        Number(u8),
        Host(Host),
        Address(IpAddr),
    }
    #[derive(PartialEq, Debug, Serialize, Deserialize)]
    struct Main {
        at: IpAddr,
    }
    #[derive(PartialEq, Debug, Serialize, Deserialize)]
    struct Page {
        number: u8,
        #[serde(flatten)]
        main: Main,
        #[serde(flatten)]
        others: BTreeMap<String, IpAddr>,
    }
    for at in ["127.0.0.1", "::1"].map(|text| text.parse::<IpAddr>().unwrap()) {
        let host = Host::Up { at };
        round_trips(at);
        round_trips(host.clone());
        round_trips([Either::Number(1), Either::Host(host), Either::Address(at)]);
        round_trips(Page {
            number: 1,
            main: Main { at },
            others: BTreeMap::from([("other".into(), at)]),
        });
    }
}

/// Serde guesses again: the bytes do not say which variant it was.
#[test]
fn an_untagged_enum_is_read_as_the_first_variant_that_fits() {
    let bytes = write(&Untagged::Bytes(Raw(b"ab".to_vec())), LIMIT).unwrap();
    assert_eq!(read::<Untagged>(&bytes).unwrap(), Untagged::Text("ab".into()));
}

#[test]
fn errors_do_not_show_values() {
    fn shown<T: DeserializeOwned + Debug>(value: impl Serialize) -> String {
        read::<T>(&write(&value, LIMIT).unwrap()).unwrap_err().to_string()
    }
    let text = "4111 1111";
    assert_eq!(shown::<u8>(text), "invalid type: a string, expected u8");
    assert_eq!(shown::<u8>(4111), "invalid value: an integer, expected u8");
    assert_eq!(shown::<u8>(u128::MAX), "invalid type: something else, expected u8");
    assert_eq!(shown::<char>(text), "invalid value: a string, expected a character");
    assert_eq!(shown::<Plain>(text), "found a variant that the type does not have");
    assert_eq!(shown::<Tagged>(BTreeMap::from([("kind", text)])), shown::<Plain>(text));
    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Nothing {}
    let field = BTreeMap::from([(text, 1)]);
    assert_eq!(shown::<Nothing>(field), "found a field that the type does not have");
}

fn form<T: Serialize>(value: T) -> Vec<u8> {
    canonical(&write(&value, LIMIT).unwrap()).unwrap()
}

#[test]
fn equal_values_have_the_same_canonical_form() {
    #[derive(Serialize)]
    struct One {
        a: Option<u8>,
        b: HashMap<(u8, String), Plain>,
    }
    #[derive(Serialize)]
    struct Other {
        b: BTreeMap<(u64, String), Plain>,
        a: u64,
    }
    let entries = || (0..50).map(|n| ((n, n.to_string()), Plain::C(n, "x".into())));
    let other =
        Other { b: entries().map(|((n, text), plain)| ((n.into(), text), plain)).collect(), a: 1 };
    assert_eq!(form(One { a: Some(1), b: entries().collect() }), form(other));
    assert_eq!(form([Some(Some("x"))]), form(["x"]));
}

#[test]
fn different_values_have_different_canonical_forms() {
    let forms = [
        form(None::<()>),
        form(Some(None::<()>)),
        form(Some(Some(None::<()>))),
        form(()),
        form(Some(())),
        form(Some(Some(()))),
        form(f64::NAN),
        form(1.0f64),
        form(1),
        form("1"),
        form('1'),
        form([1]),
        form((1, 2)),
        form((2, 1)),
        form(Raw(vec![b'1'])),
        form(BTreeMap::from([(1, 2)])),
        form(BTreeMap::from([("1", 2)])),
        form(Plain::D { x: None }),
        form(Plain::D { x: Some(None) }),
        form(Plain::D { x: Some(Some(0)) }),
    ];
    for (at, form) in forms.iter().enumerate() {
        assert!(!forms[..at].contains(form), "{at}");
    }
}

#[test]
fn a_changed_type_reads_earlier_values() {
    #[derive(Serialize)]
    struct Old {
        a: u8,
        gone: Vec<Plain>,
        b: u8,
    }
    #[derive(PartialEq, Debug, Deserialize)]
    struct New {
        b: Option<u64>,
        #[serde(default)]
        c: u8,
        a: i32,
    }
    let bytes = write(&Old { a: 1, gone: vec![Plain::A, Plain::D { x: None }], b: 2 }, LIMIT);
    assert_eq!(read::<New>(&bytes.unwrap()).unwrap(), New { b: Some(2), c: 0, a: 1 });
    // Another type is an error, not another value.
    let bytes = write(&(1u8, "x"), LIMIT).unwrap();
    assert!(matches!(read::<(u8, u8)>(&bytes), Err(ValueError::Type(_))));
    assert!(matches!(read::<(u8,)>(&bytes), Err(ValueError::Type(_))));
    assert!(matches!(read::<Plain>(&bytes), Err(ValueError::Type(_))));
}

#[test]
fn values_that_are_too_deep_or_too_large_are_rejected() {
    #[derive(PartialEq, Debug, Serialize, Deserialize)]
    struct Deep(Option<Box<Deep>>);
    let deep = |levels| (0..levels).fold(Deep(None), |deep, _| Deep(Some(Box::new(deep))));
    round_trips(deep(MAX_DEPTH));
    assert_eq!(write(&deep(MAX_DEPTH + 1), LIMIT), Err(ValueError::TooDeep));
    let bytes = [vec![tag::SOME; 1 << 20], vec![tag::NONE]].concat();
    assert_eq!(read::<Deep>(&bytes), Err(ValueError::TooDeep));
    assert_eq!(read::<serde::de::IgnoredAny>(&bytes).map(drop), Err(ValueError::TooDeep));

    let text = "x".repeat(100);
    let length = write(&text, LIMIT).unwrap().len();
    assert!(write(&text, length).is_ok());
    assert_eq!(write(&text, length - 1), Err(ValueError::TooLarge));
}

#[test]
fn the_bytes_are_those_of_earlier_versions() {
    let value = (1u8, -2i8, 'a', Some(None::<()>), Plain::C(9, "x".into()), Plain::A, true, 1.0f64);
    let expected = "0d 0601 0701 0a61 0201 0e 0b00 0d 0609 0b0178 00 00 0b096e6f7420666f756e64 05 \
                    09000000000000f03f 00";
    let hex: String = expected.split_whitespace().collect();
    let bytes = write(&value, LIMIT).unwrap();
    assert_eq!(bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>(), hex);
}

/// So few values that two of them are often the same.
type Few = (Option<Option<Option<bool>>>, Option<Option<()>>, BTreeMap<bool, Option<()>>);

type Anything = (
    Vec<(Option<Option<u64>>, i128, char, bool)>,
    BTreeMap<String, Result<Vec<u16>, f32>>,
    Option<(String, u128)>,
);

/// The number of cases. It is small, since the fuzz target `value` tries many more;
/// `PROPTEST_CASES` sets another one for a long run.
fn cases() -> ProptestConfig {
    let mut config = ProptestConfig::default();
    if std::env::var_os("PROPTEST_CASES").is_none() {
        config.cases = 64;
    }
    config
}

proptest! {
    #![proptest_config(cases())]

    #[test]
    fn any_value_round_trips(value: Anything) {
        let bytes = write(&value, LIMIT).unwrap();
        prop_assert_eq!(read::<Anything>(&bytes).unwrap(), value);
    }

    #[test]
    fn canonical_forms_are_equal_where_values_are(one: Anything, other: Anything, few: [Few; 2]) {
        prop_assert_eq!(form(&one) == form(&other), one == other);
        prop_assert_eq!(form(&few[0]) == form(&few[1]), few[0] == few[1]);
        // The form is one of the value itself, and can be read.
        prop_assert_eq!(&read::<Anything>(&form(&one)).unwrap(), &one);
        prop_assert_eq!(&read::<Few>(&form(&few[0])).unwrap(), &few[0]);
    }

    #[test]
    fn damage_is_an_error_or_another_value_never_a_panic(
        value: Anything,
        at: prop::sample::Index,
        byte: u8,
        cut: prop::sample::Index,
    ) {
        let mut bytes = write(&value, LIMIT).unwrap().to_vec();
        prop_assert!(read::<Anything>(&bytes[..cut.index(bytes.len())]).is_err());
        let at = at.index(bytes.len());
        bytes[at] = byte;
        drop(read::<Anything>(&bytes));
        drop(read::<Untagged>(&bytes));
    }

    #[test]
    fn any_bytes_are_read_without_a_panic(bytes: Vec<u8>) {
        drop(read::<Anything>(&bytes));
        drop(read::<Untagged>(&bytes));
        drop(read::<serde_json::Value>(&bytes));
        drop(canonical(&bytes));
    }
}
