//! Tokens, keys and their verification.

mod fetching;

use base64::Engine as _;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use hapax_testkit::http::TestIssuer;
use ring::hmac;
use ring::rand::SystemRandom;
use ring::signature::{
    self, EcdsaKeyPair, EcdsaSigningAlgorithm, KeyPair as _, RsaEncoding, RsaKeyPair,
    RsaPublicKeyComponents,
};
use serde_json::{Value, json};

use super::keys::KeySet;
use super::verify::{InvalidToken, Token, Verified};
use crate::config::ExpectedToken;

/// A key of 2048 bits, for these tests alone.
const RSA: &[u8] = include_bytes!("tests/rsa.pk8");

const NOW: f64 = 1_700_000_000.0;

type Sign = Box<dyn Fn(&[u8]) -> Vec<u8>>;

/// An algorithm with its signatures and its public key.
struct Signer {
    alg: &'static str,
    sign: Sign,
    key: Value,
}

fn coded(bytes: impl AsRef<[u8]>) -> String {
    BASE64_URL_SAFE_NO_PAD.encode(bytes)
}

fn rsa(alg: &'static str, encoding: &'static dyn RsaEncoding) -> Signer {
    let pair = RsaKeyPair::from_pkcs8(RSA).unwrap();
    let public: RsaPublicKeyComponents<Vec<u8>> = pair.public_key().into();
    let key = json!({ "kty": "RSA", "n": coded(public.n), "e": coded(public.e) });
    let sign = move |message: &[u8]| {
        let mut signed = vec![0; pair.public_key().modulus_len()];
        pair.sign(encoding, &SystemRandom::new(), message, &mut signed).unwrap();
        signed
    };
    Signer { alg, sign: Box::new(sign), key }
}

fn ecdsa(alg: &'static str, curve: &str, signing: &'static EcdsaSigningAlgorithm) -> Signer {
    let random = SystemRandom::new();
    let pkcs8 = EcdsaKeyPair::generate_pkcs8(signing, &random).unwrap();
    let pair = EcdsaKeyPair::from_pkcs8(signing, pkcs8.as_ref(), &random).unwrap();
    let (x, y) = pair.public_key().as_ref()[1..].split_at(pair.public_key().as_ref().len() / 2);
    let key = json!({ "kty": "EC", "crv": curve, "x": coded(x), "y": coded(y) });
    let sign = move |message: &[u8]| pair.sign(&random, message).unwrap().as_ref().to_vec();
    Signer { alg, sign: Box::new(sign), key }
}

fn signers() -> Vec<Signer> {
    vec![
        rsa("RS256", &signature::RSA_PKCS1_SHA256),
        rsa("RS384", &signature::RSA_PKCS1_SHA384),
        rsa("RS512", &signature::RSA_PKCS1_SHA512),
        rsa("PS256", &signature::RSA_PSS_SHA256),
        rsa("PS384", &signature::RSA_PSS_SHA384),
        rsa("PS512", &signature::RSA_PSS_SHA512),
        ecdsa("ES256", "P-256", &signature::ECDSA_P256_SHA256_FIXED_SIGNING),
        ecdsa("ES384", "P-384", &signature::ECDSA_P384_SHA384_FIXED_SIGNING),
    ]
}

impl Signer {
    fn token(&self, header: &Value) -> String {
        let claims = json!({
            "iss": TestIssuer::ISSUER, "aud": TestIssuer::AUDIENCE, "exp": NOW + 300.0, "sub": "anna",
        });
        let message = format!("{}.{}", coded(header.to_string()), coded(claims.to_string()));
        format!("{message}.{}", coded((self.sign)(message.as_bytes())))
    }

    /// The key with these members as well.
    fn key(&self, more: &Value) -> Value {
        let mut key = self.key.clone();
        key.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        key
    }
}

fn set(keys: &[Value]) -> KeySet {
    KeySet::parse(json!({ "keys": keys }).to_string().as_bytes()).unwrap()
}

fn expected() -> ExpectedToken {
    ExpectedToken {
        issuer: TestIssuer::ISSUER.to_owned(),
        audience: TestIssuer::AUDIENCE.to_owned(),
    }
}

fn verify(token: &str, keys: &KeySet) -> Result<Verified, InvalidToken> {
    Token::read(token)?.verify(keys, &expected(), NOW)
}

fn error(token: &str, keys: &KeySet) -> InvalidToken {
    verify(token, keys).unwrap_err()
}

#[test]
fn each_algorithm_verifies_by_its_own_key() {
    let signers = signers();
    for signer in &signers {
        let keys: Vec<_> = signers
            .iter()
            .filter(|it| it.alg == signer.alg)
            .map(|it| it.key(&json!({ "kid": "a", "alg": it.alg, "use": "sig" })))
            .collect();
        let token = signer.token(&json!({ "alg": signer.alg, "kid": "a" }));
        verify(&token, &set(&keys)).unwrap();
        // Without names of key and algorithm.
        verify(
            &signer.token(&json!({ "alg": signer.alg })),
            &set(std::slice::from_ref(&signer.key)),
        )
        .unwrap();
        let (message, signed) = token.rsplit_once('.').unwrap();
        let mut bytes = BASE64_URL_SAFE_NO_PAD.decode(signed).unwrap();
        bytes[0] ^= 1;
        let forged = format!("{message}.{}", coded(bytes));
        assert_eq!(error(&forged, &set(&keys)), InvalidToken::Signature, "{}", signer.alg);
        assert_eq!(error(&format!("{message}."), &set(&keys)), InvalidToken::Signature);
    }
    let issuer = TestIssuer::new("a", 1);
    let keys = KeySet::parse(issuer.key_set().as_bytes()).unwrap();
    let claims = json!({ "exp": NOW + 1.0 });
    verify(&issuer.token(&claims), &keys).unwrap();
    assert_eq!(error(&TestIssuer::new("a", 2).token(&claims), &keys), InvalidToken::Signature);
}

#[test]
fn a_key_is_for_its_own_algorithm() {
    let signers = signers();
    for signer in &signers {
        for other in signers.iter().filter(|it| it.alg != signer.alg) {
            // The key says what it is for, or its kind does.
            let keys = set(&[other.key(&json!({ "kid": "a", "alg": other.alg }))]);
            let token = signer.token(&json!({ "alg": signer.alg, "kid": "a" }));
            let misfit = InvalidToken::KeyMisfit;
            assert_eq!(error(&token, &keys), misfit, "{} by {}", signer.alg, other.alg);
        }
    }
}

/// The attacks of RFC 8725, 2.1 and 3.1.
#[test]
fn a_token_without_a_signature_by_a_private_key_is_rejected() {
    let signer = rsa("RS256", &signature::RSA_PKCS1_SHA256);
    let keys = set(&[signer.key(&json!({ "kid": "a" }))]);
    for alg in ["none", "None", "HS256", "HS512", "RS1", "ES256K", "ES512", ""] {
        let token = signer.token(&json!({ "alg": alg, "kid": "a" }));
        assert_eq!(error(&token, &keys), InvalidToken::Algorithm, "{alg}");
        let (message, _) = token.rsplit_once('.').unwrap();
        assert_eq!(error(&format!("{message}."), &keys), InvalidToken::Algorithm, "{alg}");
    }
    // The public key as the secret of an HMAC.
    let public = RsaKeyPair::from_pkcs8(RSA).unwrap();
    let public = public.public_key().as_ref().to_vec();
    let hmac = hmac::Key::new(hmac::HMAC_SHA256, &public);
    let sign: Sign = Box::new(move |message| hmac::sign(&hmac, message).as_ref().to_vec());
    let forger = Signer { alg: "HS256", sign, key: signer.key.clone() };
    for alg in ["HS256", "RS256"] {
        assert!(verify(&forger.token(&json!({ "alg": alg, "kid": "a" })), &keys).is_err());
    }
    // Its own key, in its header.
    let thief = TestIssuer::new("b", 9);
    let header = json!({ "alg": "EdDSA", "kid": "a", "jwk": thief.key(), "jku": "https://evil" });
    assert_eq!(error(&thief.token_of(&header, &json!({})), &keys), InvalidToken::KeyMisfit);
}

#[test]
fn issuer_audience_and_times_are_checked() {
    let issuer = TestIssuer::new("a", 1);
    let keys = KeySet::parse(issuer.key_set().as_bytes()).unwrap();
    let audience = TestIssuer::AUDIENCE;
    let later = NOW + 1000.0;
    for (claims, result) in [
        (json!({}), None),
        (json!({ "aud": ["https://other", audience] }), None),
        (json!({ "aud": "https://other" }), Some(InvalidToken::Audience)),
        (json!({ "aud": [] }), Some(InvalidToken::Audience)),
        (json!({ "aud": [[audience]] }), Some(InvalidToken::Audience)),
        (json!({ "aud": null }), Some(InvalidToken::Audience)),
        (json!({ "aud": format!("{audience}/") }), Some(InvalidToken::Audience)),
        (json!({ "iss": "https://other" }), Some(InvalidToken::Issuer)),
        (json!({ "iss": null }), Some(InvalidToken::Issuer)),
        (json!({ "iss": [TestIssuer::ISSUER] }), Some(InvalidToken::Issuer)),
        (json!({ "exp": null }), Some(InvalidToken::NoExpiry)),
        (json!({ "exp": "4102444800" }), Some(InvalidToken::NoExpiry)),
        (json!({ "exp": NOW - 61.0 }), Some(InvalidToken::Expired)),
        (json!({ "exp": NOW - 60.0 }), Some(InvalidToken::Expired)),
        (json!({ "exp": NOW - 59.5 }), None),
        (json!({ "exp": NOW as u64 - 30 }), None),
        (json!({ "exp": -1 }), Some(InvalidToken::Expired)),
        (json!({ "nbf": NOW + 61.0 }), Some(InvalidToken::NotYet)),
        (json!({ "nbf": NOW + 60.0 }), None),
        // CVE-2026-25537: a time of another type is no time.
        (json!({ "nbf": "99999999999" }), Some(InvalidToken::NotYet)),
    ] {
        let mut all = json!({ "exp": later });
        all.as_object_mut().unwrap().extend(claims.as_object().unwrap().clone());
        assert_eq!(verify(&issuer.token(&all), &keys).err(), result, "{claims}");
    }
}

#[test]
fn what_is_no_signed_token_is_rejected() {
    let issuer = TestIssuer::new("a", 1);
    let keys = KeySet::parse(issuer.key_set().as_bytes()).unwrap();
    let token = issuer.token(&json!({}));
    let parts: Vec<_> = token.split('.').collect();
    let [header, claims, signed] = parts[..] else { panic!("{token}") };
    let array = coded("[1]");
    for text in [
        "",
        ".",
        "..",
        "opaque",
        header,
        &format!("{header}.{claims}"),
        &format!("{token}.{signed}"),
        &format!("{header}.{claims}.{signed}="),
        &format!("{array}.{claims}.{signed}"),
        &format!("{}.{claims}.{signed}", coded("{}")),
        &format!("{header}.{claims}.+{signed}"),
        &format!("{header}.{claims}.{}", "A".repeat(16 * 1024)),
        &issuer.token_of(&json!({ "alg": "EdDSA", "kid": 1 }), &json!({})),
    ] {
        assert_eq!(error(text, &keys), InvalidToken::Malformed, "{text}");
    }
    let critical = json!({ "alg": "EdDSA", "kid": "a", "crit": ["b64"], "b64": false });
    assert_eq!(error(&issuer.token_of(&critical, &json!({})), &keys), InvalidToken::Critical);
    // A member that is there twice.
    for (header, claims) in [
        (r#"{"alg":"none","alg":"EdDSA"}"#, "{}"),
        (r#"{"alg":"EdDSA"}"#, r#"{"exp":1700000001,"sub":"anna","s\u0075b":"ben"}"#),
    ] {
        let message = format!("{}.{}", coded(header), coded(claims));
        let token = format!("{message}.{}", coded(issuer.sign(message.as_bytes())));
        assert_eq!(error(&token, &keys), InvalidToken::Malformed, "{token}");
    }
    // Signed, and no object.
    let message = format!("{header}.{array}");
    let other = ecdsa("ES256", "P-256", &signature::ECDSA_P256_SHA256_FIXED_SIGNING);
    let header = coded(json!({ "alg": "ES256" }).to_string());
    let message = message.replace(message.split('.').next().unwrap(), &header);
    let token = format!("{message}.{}", coded((other.sign)(message.as_bytes())));
    assert_eq!(error(&token, &set(std::slice::from_ref(&other.key))), InvalidToken::Malformed);
}

#[test]
fn an_unknown_key_is_told_from_a_wrong_signature() {
    let [one, two] = [("a", 1), ("b", 2)].map(|(kid, number)| TestIssuer::new(kid, number));
    let keys = set(&[one.key()]);
    assert_eq!(error(&two.token(&json!({})), &keys), InvalidToken::UnknownKey);
    verify(&two.token(&json!({ "exp": NOW + 1.0 })), &set(&[one.key(), two.key()])).unwrap();
    // Without a name it may be a new key.
    let nameless = |issuer: &TestIssuer| {
        issuer.token_of(&json!({ "alg": "EdDSA" }), &json!({ "exp": NOW + 1.0 }))
    };
    assert_eq!(error(&nameless(&two), &keys), InvalidToken::UnknownKey);
    verify(&nameless(&two), &set(&[one.key(), two.key()])).unwrap();
}

#[test]
fn keys_of_other_kinds_are_left_out_of_a_set() {
    let key = |more: &Value| {
        let mut key = TestIssuer::new("a", 1).key();
        key.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        key
    };
    let usable = |jwk: &Value| {
        let set = json!({ "keys": [jwk] }).to_string();
        KeySet::parse(set.as_bytes()).is_ok()
    };
    assert!(usable(&key(&json!({ "key_ops": ["verify"], "x5c": ["…"] }))));
    let small = coded([0xff; 128]);
    for other in [
        json!({ "kty": "oct", "k": "AAAA" }),
        json!({ "kty": "EC", "crv": "secp256k1" }),
        json!({ "kty": "RSA", "n": small, "e": "AQAB" }),
        json!({ "use": "enc" }),
        json!({ "key_ops": ["encrypt"] }),
        json!({ "alg": "ES256" }),
        json!({ "alg": "HS256" }),
        json!({ "x": "AAAA" }),
        json!({ "x": null }),
        json!({ "kty": null }),
    ] {
        assert!(!usable(&key(&other)), "{other}");
    }
    // One of them makes no others unusable.
    set(&[json!({ "kty": "new" }), json!(7), key(&json!({}))]);
    for (text, found) in [
        (json!({ "keys": [] }).to_string(), "found none among 0 keys"),
        (json!([]).to_string(), "found something else"),
        ("<html>".to_owned(), "found something else"),
        (json!({ "keys": vec![key(&json!({})); 65] }).to_string(), "found 65"),
        (" ".repeat(256 * 1024 + 1), "found more"),
    ] {
        let error = KeySet::parse(text.as_bytes()).unwrap_err().to_string();
        assert!(error.starts_with("expected ") && error.ends_with(found), "{error}");
    }
}

#[test]
fn claims_are_texts_and_integers() {
    let issuer = TestIssuer::new("a", 1);
    let names: Vec<_> = ["jwt:sub", "jwt:id"]
        .into_iter()
        .map(|it| match it.parse() {
            Ok(hapax_http::server::ScopePart::Claim(name)) => name,
            other => panic!("{other:?}"),
        })
        .collect();
    let read = |claims: Value| {
        let verified = Verified::by_auth(&issuer.token(&claims), NOW)?;
        verified.claims(&names).map(|claims| format!("{claims:?}"))
    };
    for (claims, found) in [
        (json!({ "sub": "anna", "id": u64::MAX, "other": {} }), r#"{"id", "sub"}"#),
        (json!({ "sub": "", "id": i64::MIN }), r#"{"id"}"#),
        (json!({ "sub": null }), "{}"),
    ] {
        assert_eq!(read(claims.clone()).as_deref(), Ok(found), "{claims}");
    }
    for claims in [
        json!({ "sub": ["anna"] }),
        json!({ "sub": { "id": 7 } }),
        json!({ "sub": true }),
        json!({ "sub": 7.5 }),
        json!({ "sub": "a\nb" }),
    ] {
        assert_eq!(read(claims), Err(InvalidToken::Claim("sub".to_owned())));
    }
    // The auth server has verified it; what has expired since then, or names no issuer, is still rejected.
    assert_eq!(read(json!({ "exp": NOW - 60.0 })), Err(InvalidToken::Expired));
    assert_eq!(read(json!({ "exp": null })).as_deref(), Ok("{}"));
    assert_eq!(read(json!({ "iss": null })), Err(InvalidToken::Issuer));
    assert_eq!(read(json!({ "iss": "two words" })), Err(InvalidToken::Issuer));
}

/// A server that reads up to the first space, or the first token of several, has verified another text.
#[test]
fn a_token_that_the_auth_server_has_verified_is_the_whole_text() {
    let issuer = TestIssuer::new("a", 1);
    let by_auth = |text: &str| Verified::by_auth(text, NOW).err();
    let token = issuer.token(&json!({ "sub": "anna" }));
    assert_eq!(by_auth(&token), None);
    // Its algorithm is the server's decision, unless there is no signature.
    assert_eq!(by_auth(&issuer.token_of(&json!({ "alg": "HS256" }), &json!({}))), None);
    let (message, signature) = token.rsplit_once('.').unwrap();
    let (header, claims) = message.split_once('.').unwrap();
    for text in [
        format!("opaque {token}"),
        format!("opaque,{token}"),
        format!("opaque {header}.{claims}.x"),
        format!("opaque .{claims}."),
        format!("{token} {token}"),
        format!("{token},"),
        format!("{message}."),
        format!(".{claims}.{signature}"),
        format!("opaque.{claims}.{signature}"),
        issuer.token_of(&json!({ "alg": "None" }), &json!({})),
        issuer.token_of(&json!({}), &json!({})),
    ] {
        assert_eq!(by_auth(&text), Some(InvalidToken::Malformed), "{text}");
    }
}
