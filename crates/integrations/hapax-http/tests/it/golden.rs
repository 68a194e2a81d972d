//! Fingerprints, byte by byte.
//!
//! Never change a value here. A record holds its fingerprint and the name of its scheme, and a retry
//! after an upgrade is compared by that scheme: if one name came to stand for another hash, the retry
//! would be refused as another request. What is to be compared otherwise gets a scheme of a new name
//! (`http/2`), and lines of its own below.

use hapax_core::JsonPointers;
use hapax_http::fingerprint::{BodyForm, HttpFingerprintScheme, JsonParts};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Uri};

type Fields = &'static [(&'static str, &'static str)];

const JSON: Fields = &[("content-type", "application/json")];
const FORM: Fields = &[("content-type", "multipart/form-data; boundary=X")];
const PAIRS: Fields = &[("content-type", "application/x-www-form-urlencoded")];
const TEXT: Fields = &[("content-type", "text/plain")];
const OVERRIDE: Fields = &[("content-type", "text/plain"), ("x-http-method-override", "DELETE")];
const TENANT: Fields = &[("x-tenant", "1"), ("x-tenant", "2")];

const BODY: &str = r#"{"b":[1.0,true],"a":"\u00e9","at":7}"#;
const PARTS: &str = "--X\r\ncontent-disposition: form-data; name=a\r\n\r\n1\r\n--X--\r\n";

/// The name of a scheme, headers, a body, and the fingerprint of
/// `POST /payments?b=2&a=1&b=1` with them.
const GOLDEN: &[(&str, Fields, &str, &str)] = &[
    (
        "http/1;body=canonical",
        JSON,
        BODY,
        "40125e2211fbbc5e547034d84f6ff7cfcb0350f21fd5e97171babdc286f9803e",
    ),
    // Of the target that reached the outermost router.
    (
        "http/2;body=canonical",
        JSON,
        BODY,
        "40125e2211fbbc5e547034d84f6ff7cfcb0350f21fd5e97171babdc286f9803e",
    ),
    (
        "http/1;body=canonical",
        FORM,
        PARTS,
        "6beead4b751921d349d0804bd6e7dc6be9ec04207924bf5e91d18d7367c48560",
    ),
    (
        "http/1;body=canonical",
        TEXT,
        BODY,
        "1767da23c8fe6608f72d582fc1c6d2ebda105f67e78b6169b33e0e2e45cedabe",
    ),
    (
        "http/1;body=canonical",
        TEXT,
        "",
        "6427921fb74886a94326296aad86713f1ea2e0f7aabf1e7f901398afb4337ae4",
    ),
    (
        "http/1;body=canonical",
        &[],
        BODY,
        "1767da23c8fe6608f72d582fc1c6d2ebda105f67e78b6169b33e0e2e45cedabe",
    ),
    (
        "http/1;body=canonical",
        JSON,
        "{",
        "9433b596764564240357678e50e2ace1abe9e7cf4d130492018f6ea9453a47d1",
    ),
    (
        "http/1;body=canonical",
        OVERRIDE,
        BODY,
        "5bfa5de4eb04e560738f8bc8cc7901ceeb7ebf6fafb77bf7bbd7292dec244278",
    ),
    (
        "http/1;body=canonical;except=/at,/b/0",
        JSON,
        BODY,
        "2be09c0e41dc42bb75a8a53b3b89d176bda1e89cae5f2a6589687d06beab7f10",
    ),
    (
        "http/1;body=canonical;only=/at,/b/0",
        JSON,
        BODY,
        "d811760839d5537e97c5b924c78e57447f8dbd30c8df63d600164baaa459ecd2",
    ),
    (
        "http/1;body=canonical;headers=x-tenant",
        TENANT,
        BODY,
        "998b47e7bf84bace60528a00e1b0646daecad79206a6634459097aba63f5a26b",
    ),
    (
        "http/1;body=raw",
        JSON,
        BODY,
        "1767da23c8fe6608f72d582fc1c6d2ebda105f67e78b6169b33e0e2e45cedabe",
    ),
    (
        "http/1;body=raw",
        FORM,
        PARTS,
        "9bebe1f975af30a4804ea22cf6bfdfdebad2d1b734c36d4c1cae7cfd8e01e584",
    ),
    (
        "http/1;body=raw;headers=x-tenant",
        TENANT,
        BODY,
        "998b47e7bf84bace60528a00e1b0646daecad79206a6634459097aba63f5a26b",
    ),
    (
        "http/1;body=canonical",
        PAIRS,
        "a+b=%31&c",
        "45b77af0ea20efbf8d4db2913318bbcb3e4dc8f899c552c878051a3d5a3a8c4d",
    ),
    // Of the decoded pairs of form data.
    (
        "http/3;body=canonical",
        PAIRS,
        "a+b=%31&c",
        "6726497e56bb2e7ae0ba0b13baa1c4615c91b465217da51374326511a7c1e60a",
    ),
    (
        "http/4;body=canonical",
        PAIRS,
        "a+b=%31&c",
        "6726497e56bb2e7ae0ba0b13baa1c4615c91b465217da51374326511a7c1e60a",
    ),
    (
        "http/1;body=none",
        JSON,
        BODY,
        "2358c7c007713a630ce852bd9defcc94476774c53b42e60ebf9182166177eec3",
    ),
    (
        "http/1;body=none;headers=x-tenant",
        TENANT,
        BODY,
        "faf978ea3dd5180e9f018eca970d30ec84fdd4dbe08ae97442ece6ec28ade3fa",
    ),
];

fn scheme(name: &str) -> HttpFingerprintScheme {
    HttpFingerprintScheme::named(&hapax_core::FingerprintScheme::new(name).unwrap()).unwrap()
}

#[test]
fn wire_07_fingerprints_never_change() {
    let uri = Uri::from_static("/payments?b=2&a=1&b=1");
    let found: Vec<String> = GOLDEN
        .iter()
        .map(|(name, headers, body, _)| {
            let headers: HeaderMap = headers
                .iter()
                .map(|(name, value)| {
                    (HeaderName::from_static(name), HeaderValue::from_static(value))
                })
                .collect();
            let found = scheme(name).fingerprint(&Method::POST, &uri, &headers, body.as_bytes());
            found.as_bytes().iter().map(|byte| format!("{byte:02x}")).collect()
        })
        .collect();
    let pinned: Vec<_> = GOLDEN.iter().map(|line| line.3).collect();
    assert_eq!(found, pinned);
}

/// The names that records have.
#[test]
fn wire_07_names_of_schemes_never_change() {
    let pointers = || JsonPointers::new(["/at", "/b/0"]).unwrap();
    let tenant = || [HeaderName::from_static("x-tenant")];
    let json = |parts| HttpFingerprintScheme::default().json(parts).unwrap();
    for (scheme, name) in [
        (HttpFingerprintScheme::default(), "http/1;body=canonical"),
        (json(JsonParts::Except(pointers())), "http/1;body=canonical;except=/at,/b/0"),
        (json(JsonParts::Only(pointers())), "http/1;body=canonical;only=/at,/b/0"),
        (HttpFingerprintScheme::new(BodyForm::Raw, []).unwrap(), "http/1;body=raw"),
        (HttpFingerprintScheme::new(BodyForm::Ignored, []).unwrap(), "http/1;body=none"),
        (
            HttpFingerprintScheme::new(BodyForm::Raw, tenant()).unwrap(),
            "http/1;body=raw;headers=x-tenant",
        ),
    ] {
        assert_eq!(scheme.name().as_str(), name);
    }
}
