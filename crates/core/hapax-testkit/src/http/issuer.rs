//! An issuer of bearer tokens.

use std::sync::Arc;

use base64::Engine as _;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use hapax_core::{Clock, SystemClock};
use ring::signature::{ED25519, Ed25519KeyPair, KeyPair as _, UnparsedPublicKey};
use serde_json::{Map, Value, json};

/// An issuer that signs JSON Web Tokens by an Ed25519 key.
///
/// Its claims are those of [`ISSUER`](Self::ISSUER), for [`AUDIENCE`](Self::AUDIENCE), and valid for an hour, unless a
/// token is requested with others.
#[derive(Clone, Debug)]
pub struct TestIssuer {
    pair: Arc<Ed25519KeyPair>,
    /// The name of the key.
    kid: String,
}

impl TestIssuer {
    /// The issuer of all tokens.
    pub const ISSUER: &str = "https://login.example";

    /// The audience of all tokens.
    pub const AUDIENCE: &str = "https://pay.example";

    /// Returns the issuer whose tokens the instances of scenarios accept.
    #[must_use]
    pub fn of_scenarios() -> Self {
        Self::new("scenarios", 1)
    }

    /// Creates an issuer with a key of this name; the number decides which key it is.
    #[must_use]
    pub fn new(kid: &str, number: u8) -> Self {
        let pair = Ed25519KeyPair::from_seed_unchecked(&[number; 32]).unwrap();
        Self { pair: Arc::new(pair), kid: kid.to_owned() }
    }

    /// Returns its public key, as a member of a JWK Set.
    #[must_use]
    pub fn key(&self) -> Value {
        let x = BASE64_URL_SAFE_NO_PAD.encode(self.pair.public_key());
        json!({ "kty": "OKP", "crv": "Ed25519", "use": "sig", "alg": "EdDSA", "kid": self.kid, "x": x })
    }

    /// Returns its keys, as a JWK Set.
    #[must_use]
    pub fn key_set(&self) -> String {
        json!({ "keys": [self.key()] }).to_string()
    }

    /// Returns a token with these claims, and those of every token that they do not have. A claim that is `null` is left
    /// out.
    #[must_use]
    pub fn token(&self, claims: &Value) -> String {
        self.token_of(&json!({ "alg": "EdDSA", "kid": self.kid }), claims)
    }

    /// Returns a token with this header, signed by the key all the same.
    #[must_use]
    pub fn token_of(&self, header: &Value, claims: &Value) -> String {
        let mut all = json!({ "iss": Self::ISSUER, "aud": Self::AUDIENCE, "exp": now() + 3600 });
        let all = all.as_object_mut().unwrap();
        all.extend(claims.as_object().unwrap().clone());
        all.retain(|_, value| !value.is_null());
        let part = |value: &[u8]| BASE64_URL_SAFE_NO_PAD.encode(value);
        let (header, claims) = (header.to_string(), Value::Object(all.clone()).to_string());
        let message = format!("{}.{}", part(header.as_bytes()), part(claims.as_bytes()));
        format!("{message}.{}", part(&self.sign(message.as_bytes())))
    }

    /// Returns its signature of any bytes.
    #[must_use]
    pub fn sign(&self, message: &[u8]) -> Vec<u8> {
        self.pair.sign(message).as_ref().to_vec()
    }

    /// Returns the claims of a token of this issuer that has not expired, as a service in front of a layer verifies it.
    #[must_use]
    pub fn verify(&self, token: &str) -> Option<Map<String, Value>> {
        let (message, signature) = token.rsplit_once('.')?;
        let (header, claims) = message.split_once('.')?;
        let [header, claims, signature] =
            [header, claims, signature].map(|part| BASE64_URL_SAFE_NO_PAD.decode(part));
        let header: Value = serde_json::from_slice(&header.ok()?).ok()?;
        let claims: Map<String, Value> = serde_json::from_slice(&claims.ok()?).ok()?;
        let key = UnparsedPublicKey::new(&ED25519, self.pair.public_key());
        key.verify(message.as_bytes(), &signature.ok()?).ok()?;
        let is_valid = header["alg"] == "EdDSA" && claims.get("exp")?.as_u64()? > now();
        is_valid.then_some(claims)
    }
}

/// Returns the seconds since 1970.
fn now() -> u64 {
    SystemClock.now().as_micros() / 1_000_000
}
