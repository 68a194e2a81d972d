//! Whatever joins fields: no two lists of fields give the same scope, fingerprint or store key.
#![no_main]

use hapax_core::{Fingerprint, Key, Namespace, OperationId, Scope, Secret};
use libfuzzer_sys::fuzz_target;

type Fields = Vec<(Vec<u8>, Vec<u8>)>;

fuzz_target!(|input: (Fields, Fields, String, String, [u8; 32])| {
    let (one, other, key, other_key, secret) = input;
    assert_eq!(scope(&one) == scope(&other), one == other);
    assert_eq!(fingerprint(&one) == fingerprint(&other), flat(&one) == flat(&other));
    if let Some((name, value)) = one.last() {
        assert_eq!(scope(&one[..one.len() - 1]).within(name, value), scope(&one));
    }

    let (Ok(key), Ok(other_key)) = (Key::new(&key), Key::new(&other_key)) else { return };
    assert_eq!(Key::new(key.as_str()).as_ref(), Ok(&key));
    let secret = Secret::new(secret);
    for secret in [None, Some(&secret)] {
        let name = OperationId::derive(secret, &Namespace::default(), &scope(&one), &key);
        let other_name =
            OperationId::derive(secret, &Namespace::default(), &scope(&other), &other_key);
        assert_eq!(name == other_name, one == other && key == other_key);
        assert_eq!(OperationId::from_hex(&name.to_string()), Some(name));
    }
});

fn scope(fields: &[(Vec<u8>, Vec<u8>)]) -> Scope {
    Scope::of(fields.iter().map(|(name, value)| (name, value)))
}

fn flat(fields: &[(Vec<u8>, Vec<u8>)]) -> Vec<&[u8]> {
    fields.iter().flat_map(|(name, value)| [&name[..], value]).collect()
}

fn fingerprint(fields: &[(Vec<u8>, Vec<u8>)]) -> Fingerprint {
    let mut builder = Fingerprint::builder("fuzz");
    for field in flat(fields) {
        builder.field(field);
    }
    builder.finish()
}
