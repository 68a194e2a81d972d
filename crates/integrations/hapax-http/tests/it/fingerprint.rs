use hapax_core::{Fingerprint, FingerprintScheme, JsonPointers, OperationRequest};
use hapax_http::fingerprint::{BodyForm, HttpFingerprintScheme, HttpRequest, JsonParts};
use http::header::{HeaderMap, HeaderName, HeaderValue};
use http::{Method, Uri};
use proptest::prelude::*;

fn scheme(body: BodyForm, headers: &[&'static str]) -> HttpFingerprintScheme {
    let names = headers.iter().map(|name| HeaderName::from_static(name));
    HttpFingerprintScheme::new(body, names).unwrap()
}

fn canonical(uri: &str, kind: &str, body: &[u8]) -> Fingerprint {
    of(&HttpFingerprintScheme::default(), Method::POST, uri, &[("content-type", kind)], body)
}

fn of(
    scheme: &HttpFingerprintScheme,
    method: Method,
    uri: &str,
    headers: &[(&'static str, &str)],
    body: &[u8],
) -> Fingerprint {
    let mut map = HeaderMap::new();
    for (name, value) in headers {
        map.append(*name, HeaderValue::from_str(value).unwrap());
    }
    scheme.fingerprint(&method, &uri.parse::<Uri>().unwrap(), &map, body)
}

#[test]
fn wire_07_method_path_and_body_count() {
    let scheme = HttpFingerprintScheme::default();
    let base = of(&scheme, Method::POST, "/a", &[], b"x");
    assert_eq!(of(&scheme, Method::POST, "/a", &[("x-other", "1")], b"x"), base);
    assert_eq!(of(&scheme, Method::POST, "http://host/a", &[], b"x"), base);
    for other in [
        of(&scheme, Method::PATCH, "/a", &[], b"x"),
        of(&scheme, Method::POST, "/A", &[], b"x"),
        of(&scheme, Method::POST, "/%61", &[], b"x"),
        of(&scheme, Method::POST, "/a/", &[], b"x"),
        of(&scheme, Method::POST, "/a", &[], b"y"),
        of(&scheme, Method::POST, "/a", &[], b""),
        of(&scheme, Method::POST, "/a?", &[], b"x"),
    ] {
        assert_ne!(other, base);
    }
}

#[test]
fn wire_07_query_pairs_sort_by_name_and_keep_the_order_of_values() {
    let of = |query: &str| canonical(&format!("/a?{query}"), "text/plain", b"");
    assert_eq!(of("b=1&a=2&c"), of("c&a=2&b=1"));
    assert_eq!(of("a=1&b=0&a=2"), of("b=0&a=1&a=2"));
    assert_ne!(of("a=1&a=2"), of("a=2&a=1"));
    assert_ne!(of("a=1"), of("a=%31"));
    assert_ne!(of("a"), of("a="));
    assert_ne!(of("a=1&&b=2"), of("a=1&b=2"));
    assert_ne!(of("ab=c"), of("a=bc"));
}

#[test]
fn wire_07_chosen_headers_count_with_all_their_values() {
    let chosen = scheme(BodyForm::Canonical, &["x-tenant", "x-a"]);
    let of = |headers: &[(&'static str, &str)]| of(&chosen, Method::POST, "/", headers, b"");
    let base = of(&[("x-tenant", "1"), ("x-tenant", "2")]);
    assert_eq!(of(&[("x-tenant", "1"), ("x-other", "3"), ("x-tenant", "2")]), base);
    for other in [
        of(&[("x-tenant", "2"), ("x-tenant", "1")]),
        of(&[("x-tenant", "1, 2")]),
        of(&[("x-tenant", "1"), ("x-a", "2")]),
        of(&[("x-tenant", "1"), ("x-tenant", "2"), ("x-a", "")]),
        of(&[]),
    ] {
        assert_ne!(other, base);
    }
}

/// Two overrides under one key are two requests; without one nothing changes.
#[test]
fn wire_07_a_method_override_header_is_part_of_the_fingerprint() {
    for scheme in [HttpFingerprintScheme::default(), scheme(BodyForm::Ignored, &["x-http-method"])]
    {
        let of = |headers: &[(&'static str, &str)]| of(&scheme, Method::POST, "/", headers, b"x");
        let mut found = vec![of(&[])];
        for name in ["x-http-method-override", "x-http-method", "x-method-override"] {
            found.extend([of(&[(name, "PUT")]), of(&[(name, "DELETE")]), of(&[(name, "")])]);
            found.push(of(&[(name, "PUT"), (name, "PUT")]));
        }
        found.push(of(&[("x-http-method", "PUT"), ("x-method-override", "PUT")]));
        for (at, one) in found.iter().enumerate() {
            assert!(!found[..at].contains(one), "{at}");
        }
    }
}

#[test]
fn wire_07_json_is_compared_by_its_content() {
    let json = |body: &str| canonical("/", "application/json", body.as_bytes());
    assert_eq!(json(r#"{"b":[1.0,2],"a":"\u00e9"}"#), json(r#" { "a" : "é", "b":[ 1.0, 2 ] } "#));
    assert_ne!(json("[1]"), json("[1.0]"));
    assert_ne!(json("[9007199254740993]"), json("[9007199254740992]"));
    assert_ne!(json("[1,2]"), json("[2,1]"));
    for kind in ["Application/JSON; charset=utf-8", "application/vnd.api+json", "a/b+JSON ;x"] {
        let one = canonical("/", kind, br#"{"a":1,"b":2}"#);
        assert_eq!(one, canonical("/", kind, br#"{ "b":2, "a":1 }"#), "{kind}");
    }
    for kind in ["text/json", "application/jsonl", "text/plain", "+json"] {
        let one = canonical("/", kind, br#"{"a":1,"b":2}"#);
        assert_ne!(one, canonical("/", kind, br#"{"a":1, "b":2}"#), "{kind}");
    }
}

#[test]
fn json_without_a_canonical_form_is_compared_by_its_bytes() {
    let json = |body: &str| canonical("/", "application/json", body.as_bytes());
    let deep = "[".repeat(129) + &"]".repeat(129);
    for text in [r#"{"a":1,"a":1}"#, r#"["\ud800"]"#, "\u{feff}1", "{", &deep] {
        assert_eq!(json(text), json(text));
        assert_ne!(json(text), json(&format!("{text} ")), "{text}");
    }
}

#[test]
fn canonical_and_raw_are_separate_domains() {
    // As bytes this is the canonical form of the other; it was not read as JSON, so it differs.
    let body = br#"{"a":1}"#;
    assert_ne!(canonical("/", "application/json", body), canonical("/", "text/plain", body));
    let raw = scheme(BodyForm::Raw, &[]);
    let of_raw = |kind| of(&raw, Method::POST, "/", &[("content-type", kind)], body);
    assert_eq!(of_raw("application/json"), of_raw("text/plain"));
    assert_ne!(of_raw("application/json"), canonical("/", "application/json", body));
    let none = scheme(BodyForm::Ignored, &[]);
    assert_eq!(of(&none, Method::POST, "/", &[], b"1"), of(&none, Method::POST, "/", &[], b"2"));
    assert_ne!(of(&none, Method::POST, "/", &[], b""), of(&raw, Method::POST, "/", &[], b""));
}

fn form(boundary: &str, parts: &[&str]) -> Vec<u8> {
    let mut body = String::new();
    for part in parts {
        body +=
            &format!("--{boundary}\r\ncontent-disposition: form-data; name=a\r\n\r\n{part}\r\n");
    }
    (body + &format!("--{boundary}--\r\n")).into_bytes()
}

#[test]
fn form_data_counts_without_its_boundary() {
    let of = |kind: &str, body: &[u8]| canonical("/", kind, body);
    let one = of("multipart/form-data; boundary=X", &form("X", &["1", "two"]));
    assert_eq!(one, of("multipart/form-data;boundary=\"y z\"", &form("y z", &["1", "two"])));
    assert_eq!(
        one,
        of("Multipart/Form-Data; charset=\"a;b\\\"\"; Boundary=q", &form("q", &["1", "two"]))
    );
    let same_kind = "multipart/form-data; boundary=X";
    assert_ne!(one, of(same_kind, &form("X", &["two", "1"])));
    assert_ne!(one, of(same_kind, &form("X", &["1two"])));
    // Anything that is not just parts counts by its bytes.
    for odd in [&b"preamble\r\n--X--"[..], b"--X", b"--X--epilogue", b"--Xa\r\n--X--", b""] {
        let with = |boundary: &str| of(&format!("multipart/form-data; boundary={boundary}"), odd);
        assert_eq!(with("X"), of("text/plain", odd), "{odd:?}");
    }
}

/// Boundaries as clients write them: of asterisks around the time, as many Java programs have it;
/// of characters that a token may hold; and with an empty line before the first delimiter.
#[test]
fn wire_07_form_data_counts_without_any_boundary_that_clients_use() {
    let of = |edge: &str, quote: &str, head: &str| {
        let kind = format!("multipart/form-data; boundary={quote}{edge}{quote}");
        let body = [head.as_bytes(), &form(edge, &["1", "two"])].concat();
        (canonical("/", &kind, &body), canonical("/", "text/plain", &body))
    };
    let (one, _) = of("X", "", "");
    for edge in ["*****1763641234567*****", "*****", "!#$%&'*+-.^_`|~", "'()+_,-./:=?", "a b"] {
        for head in ["", "\r\n"] {
            assert_eq!(of(edge, "\"", head).0, one, "{edge} {head:?}");
        }
    }
    assert_eq!(of("*****1763641234567*****", "", "\r\n").0, one);
    for odd in ["\r\n\r\n", "\n", " \r\n", "x\r\n"] {
        let (parts, raw) = of("X", "", odd);
        assert_eq!(parts, raw, "{odd:?}");
    }
}

#[test]
fn wire_07_form_data_without_a_valid_boundary_is_compared_by_its_bytes() {
    let body = form("X", &["1"]);
    let raw = canonical("/", "text/plain", &body);
    let kinds = [
        "multipart/form-data; boundary=X; boundary=X",
        "multipart/form-data; boundary=\"X\" y",
        "multipart/form-data; boundary=\"X",
        "multipart/form-data; boundary=\"\"",
        "multipart/form-data; flag; boundary=X",
        "multipart/mixed; boundary=X",
        "multipart/form-data",
    ];
    for kind in kinds {
        assert_eq!(canonical("/", kind, &body), raw, "{kind}");
    }
    for edge in ["a\"b", "a;b", "a b ", "a@b", "ü", &"x".repeat(71)] {
        let kind = format!("multipart/form-data; boundary=\"{}\"", edge.replace('"', "\\\""));
        let body = form(edge, &["1"]);
        assert_eq!(canonical("/", &kind, &body), canonical("/", "text/plain", &body), "{edge}");
    }
    let kind = "multipart/form-data; boundary=X";
    for odd in ["--X\r\n--X--", "--X\r\n--X\r\na\r\n--X--", "--X \r\na\r\n--X--", "--X\na\n--X--\n"]
    {
        let odd = odd.as_bytes();
        assert_eq!(canonical("/", kind, odd), canonical("/", "text/plain", odd), "{odd:?}");
    }
    let fields = [("content-type", kind), ("content-type", kind)];
    let mut headers = HeaderMap::new();
    for (name, value) in fields {
        headers.append(name, value.parse().unwrap());
    }
    let (method, uri) = (Method::POST, Uri::from_static("/"));
    assert_eq!(HttpFingerprintScheme::default().fingerprint(&method, &uri, &headers, &body), raw);
}

#[test]
fn wire_07_a_form_has_at_most_4096_parts() {
    let of = |edge: &str, count: usize| {
        let kind = format!("multipart/form-data; boundary={edge}");
        canonical("/", &kind, &form(edge, &vec!["1"; count]))
    };
    assert_eq!(of("X", 4096), of("Y", 4096));
    assert_ne!(of("X", 4097), of("Y", 4097));
}

const FORM: &str = "application/x-www-form-urlencoded";

fn decoded() -> HttpFingerprintScheme {
    HttpFingerprintScheme::named(&FingerprintScheme::new("http/3;body=canonical").unwrap()).unwrap()
}

#[test]
fn wire_37_form_data_is_compared_by_its_decoded_pairs_in_order() {
    let pairs = |kind: &str, body: &[u8]| {
        of(&decoded(), Method::POST, "/pay", &[("content-type", kind)], body)
    };
    let form = |body: &str| pairs(FORM, body.as_bytes());
    for (one, other) in [
        ("a+b=c+d", "a%20b=%63%20d"),
        ("a=%2f&b", "%61=%2F&%62"),
        ("a=1%2B1", "a=1%2b1"),
        ("a==", "a=%3D"),
        ("", ""),
    ] {
        assert_eq!(form(one), form(other), "{one} {other}");
    }
    for (one, other) in [
        ("a", "a="),
        ("a=1&b=2", "b=2&a=1"),
        ("a=1&", "a=1"),
        ("a=1&&b=2", "a=1&b=2"),
        ("a=1%2B1", "a=1+1"),
        ("a%3D=1", "a==1"),
        ("a=1%26b=2", "a=1&b=2"),
        ("a=1;b=2", "a=1&b=2"),
        ("=a", "a"),
        // Only what both sides decode alike is decoded.
        ("a=1;b+c", "a=1;b%20c"),
        ("a=1;b", "a=1%3Bb"),
        ("a=1& b=2", "a=1&+b=2"),
        ("a=é", "a=%C3%A9"),
        ("a=1\r\n", "a=1%0D%0A"),
        ("a+b=%", "a%20b=%"),
        ("a+b=%4", "a%20b=%4"),
        ("a+b=%+4", "a%20b=%+4"),
        ("a+b&_charset_=utf-8", "a%20b&_charset_=utf-8"),
        ("a+b&%5fcharset_", "a%20b&%5fcharset_"),
    ] {
        assert_ne!(form(one), form(other), "{one} {other}");
    }
    let same = |kind: &str| pairs(kind, b"a+b") == pairs(kind, b"a%20b");
    for kind in
        ["Application/X-WWW-Form-Urlencoded ;Charset=\"UTF-8\"", "; charset=utf-8; x=y", ";"]
    {
        let kind = if kind.starts_with(';') { format!("{FORM}{kind}") } else { kind.to_owned() };
        assert!(same(&kind), "{kind}");
        assert_eq!(pairs(&kind, b"a=b"), form("a=b"), "{kind}");
    }
    for more in ["; charset=latin1", "; charset=utf-8; charset=utf-8", "; charset=", "2"] {
        assert!(!same(&format!("{FORM}{more}")), "{more}");
    }
    assert_ne!(form("a=b"), pairs("text/plain", b"a=b"));
    assert_eq!(form("%"), pairs("text/plain", b"%"));
    let many = |pairs: usize, space: &str| form(&format!("{space}{}", "&".repeat(pairs - 1)));
    assert_eq!(many(4096, "+"), many(4096, "%20"));
    assert_ne!(many(4097, "+"), many(4097, "%20"));
}

#[test]
fn wire_37_records_of_earlier_releases_are_compared_by_the_bytes_of_form_data() {
    let scheme = HttpFingerprintScheme::default();
    let headers =
        HeaderMap::from_iter([(http::header::CONTENT_TYPE, HeaderValue::from_static(FORM))]);
    let (method, uri) = (Method::POST, Uri::from_static("/pay"));
    let request =
        |body| HttpRequest { scheme: &scheme, method: &method, uri: &uri, headers: &headers, body };
    let [one, other] = [&b"a+b"[..], b"a%20b"].map(request);
    assert_eq!(one.scheme().as_str(), "http/3;body=canonical");
    assert_eq!(one.fingerprint(&one.scheme()), other.fingerprint(&one.scheme()));
    let before = scheme.name();
    assert_eq!(one.fingerprint(before), Some(scheme.fingerprint(&method, &uri, &headers, b"a+b")));
    assert_ne!(one.fingerprint(before), other.fingerprint(before));
    // Other requests, and forms whose bytes count, keep the scheme that they had.
    let raw = self::scheme(BodyForm::Raw, &[]);
    assert_eq!(HttpRequest { scheme: &raw, ..one.clone() }.scheme(), *raw.name());
    assert_eq!(HttpRequest { headers: &HeaderMap::new(), ..one }.scheme(), *before);
}

#[test]
fn wire_07_a_retry_is_compared_by_the_scheme_of_the_record() {
    let (old, new) = (scheme(BodyForm::Raw, &["x-a"]), HttpFingerprintScheme::default());
    let (method, uri) = (Method::POST, Uri::from_static("/"));
    let headers = HeaderMap::new();
    let asked =
        |scheme| HttpRequest { scheme, method: &method, uri: &uri, headers: &headers, body: b"" };
    let by_old = asked(&old).fingerprint(old.name());
    assert_eq!(asked(&new).fingerprint(old.name()), by_old);
    assert_ne!(asked(&new).fingerprint(new.name()), by_old);
    assert_eq!(asked(&new).scheme(), *new.name());
}

fn parts(make: fn(JsonPointers) -> JsonParts, pointers: &[&str]) -> HttpFingerprintScheme {
    HttpFingerprintScheme::default().json(make(JsonPointers::new(pointers).unwrap())).unwrap()
}

#[test]
fn wire_07_json_pointers_select_the_compared_parts() {
    let json = |scheme: &HttpFingerprintScheme, body: &str| {
        of(scheme, Method::POST, "/", &[("content-type", "application/json")], body.as_bytes())
    };
    let except = parts(JsonParts::Except, &["/at", "/meta/trace"]);
    let base = json(&except, r#"{"at":1,"meta":{"trace":"x"},"amount":5}"#);
    assert_eq!(base, json(&except, r#"{"amount":5,"meta":{}}"#));
    assert_ne!(base, json(&except, r#"{"at":1,"meta":{"trace":"x"},"amount":6}"#));
    assert_ne!(base, json(&except, r#"{"amount":5}"#));

    let only = parts(JsonParts::Only, &["/amount", "/to"]);
    let base = json(&only, r#"{"amount":5,"to":null}"#);
    assert_eq!(base, json(&only, r#"{"to":null,"x":[1],"amount":5}"#));
    for other in [r#"{"amount":5}"#, r#"{"amount":5.0,"to":null}"#, r#"{"to":5,"amount":null}"#] {
        assert_ne!(base, json(&only, other), "{other}");
    }
    assert_ne!(json(&only, r#"{"to":1}"#), json(&only, r#"{"amount":1}"#));
    // Without a canonical form, all of it counts.
    assert_ne!(json(&only, r#"{"x":1,"x":1}"#), json(&only, r#"{"x":2,"x":2}"#));
}

#[test]
fn wire_07_names_of_pointers_have_one_form() {
    let pointers = ["", "/a,b;c=d", "/~1~0", "/é%", "/a b"];
    for scheme in [
        parts(JsonParts::Except, &pointers),
        parts(JsonParts::Only, &pointers),
        parts(JsonParts::Only, &[""]),
        parts(JsonParts::Only, &[]),
        parts(JsonParts::Except, &[]),
    ] {
        assert_eq!(HttpFingerprintScheme::named(scheme.name()), Some(scheme.clone()));
    }
    assert_eq!(
        parts(JsonParts::Except, &pointers).name().as_str(),
        "http/1;body=canonical;except=,/a%20b,/a%2Cb%3Bc%3Dd,/~1~0,/%C3%A9%25"
    );
    let raw = scheme(BodyForm::Raw, &[]);
    let json = JsonParts::Only(JsonPointers::new(["/a"]).unwrap());
    assert_eq!(raw.clone().json(json), Ok(raw));
}

#[test]
fn wire_07_scheme_names_have_one_form_and_unknown_ones_are_rejected() {
    for known in [scheme(BodyForm::Canonical, &[]), scheme(BodyForm::Ignored, &["b", "a", "b"])] {
        assert_eq!(HttpFingerprintScheme::named(known.name()), Some(known.clone()));
    }
    assert_eq!(
        scheme(BodyForm::Raw, &["b", "a", "b"]).name().as_str(),
        "http/1;body=raw;headers=a,b"
    );
    for name in [
        "",
        "http/1",
        "http/3;body=raw",
        "http/4;body=none",
        "http/5;body=canonical",
        "http/2;body=xml",
        "http/1;body=xml",
        "http/1;body=raw;headers=",
        "http/1;body=raw;headers=b,a",
        "http/1;body=raw;headers=A",
        "http/1;body=raw;headers=a,a",
        "http/1;body=raw;only=/a",
        "http/1;body=canonical;only=/b,/a",
        "http/1;body=canonical;only=a",
        "http/1;body=canonical;only=/%61",
        "http/1;body=canonical;only=/a;except=/b",
        "http/1;body=canonical;headers=a;only=/a",
        "http/1;body=raw;headers",
        "http/1;body=raw;headers=a;x=1",
        "http/1;body=raw ",
    ] {
        assert_eq!(
            HttpFingerprintScheme::named(&FingerprintScheme::new(name).unwrap()),
            None,
            "{name}"
        );
    }
    let many = (0..1000).map(|at| HeaderName::try_from(format!("header-{at}")).unwrap());
    assert!(HttpFingerprintScheme::new(BodyForm::Raw, many).is_err());
}

/// The parts of a form by another reading: what is left between delimiters once they are cut out.
fn cut(edge: &str, body: &[u8]) -> Option<Vec<Vec<u8>>> {
    let delimiter = format!("\r\n--{edge}").into_bytes();
    let text = [b"\r\n", body].concat();
    let (mut pieces, mut from, mut at) = (Vec::new(), 0, 0);
    while at < text.len() {
        if text[at..].starts_with(&delimiter) {
            pieces.push(text[from..at].to_vec());
            at += delimiter.len();
            from = at;
        } else {
            at += 1;
        }
    }
    let last = &text[from..];
    let closed = last == b"--" || last == b"--\r\n";
    // A line that begins like the end of the form is the end of it.
    let early = pieces.iter().skip(1).any(|piece| piece.starts_with(b"--"));
    // Before the first delimiter is nothing, or an empty line.
    let begins = pieces.first().is_some_and(|piece| piece.is_empty() || piece == b"\r\n");
    if !begins || !closed || early {
        return None;
    }
    pieces[1..].iter().map(|piece| piece.strip_prefix(b"\r\n").map(<[u8]>::to_vec)).collect()
}

proptest! {
    /// Forms are the same exactly if their parts are, read in another way; or, where they have
    /// none, their bytes.
    #[test]
    fn forms_are_compared_by_their_parts(
        edges in prop::sample::select(vec![("a", "a"), ("a", "b"), ("ab", "a"), ("a-", "a")]),
        one in r"(--a|--b|--ab|--|\r\n|x|-){0,12}",
        other in r"(--a|--b|--ab|--|\r\n|x|-){0,12}",
        whole in prop::collection::vec(r"(x|\r\n|--){0,3}", 0..4),
        form_one in any::<bool>(),
        form_other in any::<bool>(),
    ) {
        let parts: Vec<&str> = whole.iter().map(String::as_str).collect();
        let body = |whole, edge, text: &str| if whole { form(edge, &parts) } else { text.as_bytes().to_vec() };
        let one = body(form_one, edges.0, &one);
        let other = body(form_other, edges.1, &other);
        let of = |edge: &str, body: &[u8]| {
            let kind = format!("multipart/form-data; boundary={edge}");
            (canonical("/", &kind, body), cut(edge, body).ok_or(body.to_vec()))
        };
        let (one, other) = (of(edges.0, &one), of(edges.1, &other));
        prop_assert_eq!(one.0 == other.0, one.1 == other.1);
    }

    /// Forms are the same exactly if their pairs are, encoded in another way.
    #[test]
    fn wire_37_forms_are_compared_by_their_pairs(
        one in prop::collection::vec(("[ab+%&= ]{0,2}", prop::option::of("[ab+%&= ]{0,2}")), 1..3),
        other in prop::collection::vec(("[ab+%&= ]{0,2}", prop::option::of("[ab+%&= ]{0,2}")), 1..3),
        is_same in any::<bool>(),
    ) {
        let other = if is_same { one.clone() } else { other };
        let encoded = |text: &str, all: bool| -> String {
            let byte = |it: u8| match it {
                b' ' if !all => "+".to_owned(),
                b'a' | b'b' if !all => char::from(it).to_string(),
                _ => format!("%{it:02x}"),
            };
            text.bytes().map(byte).collect()
        };
        let body = |pairs: &[(String, Option<String>)], all: bool| {
            let pair = |(name, value): &(String, Option<String>)| {
                let value = value.iter().map(|it| format!("={}", encoded(it, all)));
                encoded(name, all) + &value.collect::<String>()
            };
            pairs.iter().map(pair).collect::<Vec<_>>().join("&")
        };
        let of = |body: &str| {
            of(&decoded(), Method::POST, "/", &[("content-type", FORM)], body.as_bytes())
        };
        prop_assert_eq!(of(&body(&one, false)) == of(&body(&other, true)), one == other);
    }

    /// Whatever the bytes and their type: nothing panics, and the body decides.
    #[test]
    fn different_bodies_of_any_type_have_different_fingerprints(
        kind in prop::sample::select(vec![
            "application/json", "multipart/form-data; boundary=a", "multipart/form-data", "",
            "multipart/form-data; boundary=\"", "multipart/form-data; =; boundary=b",
        ]),
        one in r#"(--a|--b|--|\r\n|x|[0-9\[\]{}":,])*"#,
        other in r#"(--a|--b|--|\r\n|x|[0-9\[\]{}":,])*"#,
    ) {
        let same = canonical("/", kind, one.as_bytes()) == canonical("/", kind, other.as_bytes());
        let json = |text: &str| kind == "application/json"
            && hapax_core::canonicalize(text.as_bytes()).is_ok();
        if one == other {
            prop_assert!(same);
        } else if !json(&one) || !json(&other) {
            // The line breaks around a form are optional; nothing else is.
            let trimmed = |text: &str| text.trim_matches(&['\r', '\n'][..]).to_owned();
            prop_assert!(!same || trimmed(&one) == trimmed(&other));
        }
    }
}
