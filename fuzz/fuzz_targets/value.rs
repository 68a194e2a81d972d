//! Any bytes are a value or an error; and what is a value is written and read as it is.
#![no_main]

use std::collections::BTreeMap;
use std::net::IpAddr;

use hapax_core::value;
use libfuzzer_sys::fuzz_target;
use serde::de::{DeserializeOwned, IgnoredAny};
use serde::{Deserialize, Serialize};

#[derive(PartialEq, Debug, Serialize, Deserialize)]
enum Plain {
    Unit,
    New(Option<Option<()>>),
    Pair(u128, i128),
    Fields {
        #[serde(default)]
        a: Option<char>,
        b: BTreeMap<(bool, String), Vec<Plain>>,
    },
}

/// What has a form for people and another one, where serde buffers it too.
#[derive(PartialEq, Debug, Serialize, Deserialize)]
struct Page {
    at: IpAddr,
    host: Host,
    #[serde(flatten)]
    rest: Rest,
}

#[derive(PartialEq, Debug, Serialize, Deserialize)]
#[serde(tag = "kind")]
enum Host {
    Down,
    Up { at: IpAddr },
}

#[derive(PartialEq, Debug, Serialize, Deserialize)]
struct Rest {
    also: Option<IpAddr>,
}

#[derive(Deserialize)]
#[serde(untagged)]
#[allow(dead_code)]
enum Untagged {
    Integer(i64),
    Plain(Plain),
    List(Vec<Untagged>),
    Map(BTreeMap<String, Untagged>),
}

/// What is read is written, and read again as the same. Damage may be another value: it must then
/// be as good as any.
fn kept<T: DeserializeOwned + Serialize + PartialEq + std::fmt::Debug>(bytes: &[u8]) {
    let Ok(read) = value::read::<T>(bytes) else { return };
    let written = value::write(&read, usize::MAX).expect("what was read is not too deep");
    assert_eq!(value::read::<T>(&written).expect("what was written is read"), read);
}

fuzz_target!(|bytes: &[u8]| {
    kept::<Plain>(bytes);
    kept::<serde_json::Value>(bytes);
    kept::<Page>(bytes);
    kept::<Host>(bytes);
    // Which variant it is, serde guesses: a member that is there twice may make it another.
    drop(value::read::<Untagged>(bytes));
    drop(value::read::<IgnoredAny>(bytes));
    drop(value::read::<(String, f64, Option<u8>)>(bytes));
});
