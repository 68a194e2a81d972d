//! Verification of a JSON Web Token (RFC 7519), without I/O and without a clock.

use base64::Engine as _;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use hapax_core::canonicalize;
use hapax_http::server::{ClaimName, TokenClaims};
use serde_json::{Map, Value};

use super::keys::{Algorithm, Jwk, KeySet};
use crate::config::ExpectedToken;

/// Largest token, in bytes.
const MAX_TOKEN: usize = 16 * 1024;

/// Difference between the clocks of issuer and gateway that is allowed, in seconds.
const LEEWAY: f64 = 60.0;

/// Reasons for which a token names no caller. As text, a clause about the token.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub(super) enum InvalidToken {
    #[error("it is no signed JSON Web Token")]
    Malformed,
    #[error("it has an algorithm other than RS, PS or ES with 256 or 384, RS512, PS512 and EdDSA")]
    Algorithm,
    #[error("its header has extensions (`crit`) that are not known here")]
    Critical,
    #[error("none of the issuer's keys has signed it")]
    UnknownKey,
    #[error("its key is for another algorithm")]
    KeyMisfit,
    #[error("its signature does not match")]
    Signature,
    #[error("it has another issuer")]
    Issuer,
    #[error("it is for another audience")]
    Audience,
    #[error("it has no valid time at which it expires (`exp`)")]
    NoExpiry,
    #[error("it has expired")]
    Expired,
    #[error("it is not valid yet")]
    NotYet,
    #[error("its claim `{0}` is neither a text nor an integer")]
    Claim(String),
}

/// A token that is not verified yet.
#[derive(Debug)]
pub(super) struct Token<'a> {
    algorithm: Algorithm,
    key: Option<String>,
    message: &'a str,
    payload: &'a str,
    signature: Vec<u8>,
}

/// The claims of a token that is verified.
#[derive(Debug)]
pub(super) struct Verified {
    issuer: String,
    claims: Map<String, Value>,
}

impl<'a> Token<'a> {
    /// Reads a token in its compact form.
    pub(super) fn read(text: &'a str) -> Result<Self, InvalidToken> {
        let [header, payload, signature] = parts(text)?;
        let fields = object(header)?;
        if fields.contains_key("crit") {
            return Err(InvalidToken::Critical);
        }
        let name = fields.get("alg").and_then(Value::as_str).ok_or(InvalidToken::Malformed)?;
        let algorithm = Algorithm::read(name).ok_or(InvalidToken::Algorithm)?;
        let key = match fields.get("kid") {
            None => None,
            Some(Value::String(id)) => Some(id.clone()),
            Some(_) => return Err(InvalidToken::Malformed),
        };
        let message = &text[..header.len() + 1 + payload.len()];
        Ok(Self { algorithm, key, message, payload, signature: decode(signature)? })
    }

    /// Verifies signature, issuer, audience and times; `now` is in seconds since 1970.
    pub(super) fn verify(
        &self,
        keys: &KeySet,
        expected: &ExpectedToken,
        now: f64,
    ) -> Result<Verified, InvalidToken> {
        self.verify_signature(keys)?;
        let claims = object(self.payload)?;
        if claims.get("iss").and_then(Value::as_str) != Some(&expected.issuer) {
            return Err(InvalidToken::Issuer);
        }
        let is_audience = match claims.get("aud") {
            Some(Value::Array(all)) => all.iter().any(|it| *it == expected.audience.as_str()),
            Some(one) => *one == expected.audience.as_str(),
            None => false,
        };
        if !is_audience {
            return Err(InvalidToken::Audience);
        }
        if !claims.contains_key("exp") {
            return Err(InvalidToken::NoExpiry);
        }
        check_times(&claims, now)?;
        Ok(Verified { issuer: expected.issuer.clone(), claims })
    }

    fn verify_signature(&self, keys: &KeySet) -> Result<(), InvalidToken> {
        let is_named = |key: &&Jwk| match &self.key {
            Some(id) => key.id.as_ref() == Some(id),
            None => true,
        };
        let named: Vec<_> = keys.keys().iter().filter(is_named).collect();
        let mut fitting = named.iter().filter(|key| key.fits(self.algorithm)).peekable();
        match (&self.key, fitting.peek()) {
            (Some(_), None) if !named.is_empty() => return Err(InvalidToken::KeyMisfit),
            (_, None) => return Err(InvalidToken::UnknownKey),
            _ => {}
        }
        let message = self.message.as_bytes();
        if fitting.any(|key| key.verifies(self.algorithm, message, &self.signature)) {
            return Ok(());
        }
        // Without the name of a key, it may be a new one.
        Err(if self.key.is_some() { InvalidToken::Signature } else { InvalidToken::UnknownKey })
    }
}

impl Verified {
    /// Reads a token that the auth server has verified.
    ///
    /// The server may read `Authorization` in another way, such as up to the first space. So each of the three parts must
    /// be that of a signed token: then no other token is in the same text.
    pub(super) fn by_auth(text: &str, now: f64) -> Result<Self, InvalidToken> {
        let [header, payload, signature] = parts(text)?;
        let fields = object(header)?;
        let name = fields.get("alg").and_then(Value::as_str).ok_or(InvalidToken::Malformed)?;
        if name.eq_ignore_ascii_case("none") || decode(signature)?.is_empty() {
            return Err(InvalidToken::Malformed);
        }
        let claims = object(payload)?;
        check_times(&claims, now)?;
        let issuer = claims.get("iss").and_then(Value::as_str).ok_or(InvalidToken::Issuer)?;
        Ok(Self { issuer: issuer.to_owned(), claims })
    }

    /// Returns the claims `wanted` that the token has.
    pub(super) fn claims(&self, wanted: &[ClaimName]) -> Result<TokenClaims, InvalidToken> {
        let none = TokenClaims::new(&self.issuer).map_err(|_| InvalidToken::Issuer)?;
        wanted.iter().map(ClaimName::as_str).try_fold(none, |found, name| {
            Ok(match self.claims.get(name) {
                None | Some(Value::Null) => found,
                Some(Value::String(text)) if !text.contains(char::is_control) => {
                    found.text(name, text)
                }
                Some(Value::Number(number)) if number.is_i64() || number.is_u64() => {
                    // Either of them holds it.
                    let value = number.as_i64().map(i128::from).or(number.as_u64().map(i128::from));
                    found.integer(name, value.unwrap_or_default())
                }
                Some(_) => return Err(InvalidToken::Claim(name.to_owned())),
            })
        })
    }
}

/// Checks `exp` and `nbf`, where the token has them.
fn check_times(claims: &Map<String, Value>, now: f64) -> Result<(), InvalidToken> {
    if let Some(expiry) = claims.get("exp") {
        let expiry = expiry.as_f64().ok_or(InvalidToken::NoExpiry)?;
        if now >= expiry + LEEWAY {
            return Err(InvalidToken::Expired);
        }
    }
    if let Some(begin) = claims.get("nbf") {
        let begin = begin.as_f64().ok_or(InvalidToken::NotYet)?;
        if now + LEEWAY < begin {
            return Err(InvalidToken::NotYet);
        }
    }
    Ok(())
}

fn parts(text: &str) -> Result<[&str; 3], InvalidToken> {
    if text.len() > MAX_TOKEN {
        return Err(InvalidToken::Malformed);
    }
    let mut parts = text.split('.');
    match (parts.next(), parts.next(), parts.next(), parts.next()) {
        (Some(header), Some(payload), Some(signature), None) => Ok([header, payload, signature]),
        _ => Err(InvalidToken::Malformed),
    }
}

/// Returns the members of a part. A member that is there twice has no value on which all readers agree, and is rejected
/// (RFC 7519, 4; RFC 7515, 4).
fn object(part: &str) -> Result<Map<String, Value>, InvalidToken> {
    let text = canonicalize(&decode(part)?).map_err(|_| InvalidToken::Malformed)?;
    serde_json::from_slice(&text).map_err(|_| InvalidToken::Malformed)
}

fn decode(part: &str) -> Result<Vec<u8>, InvalidToken> {
    BASE64_URL_SAFE_NO_PAD.decode(part).map_err(|_| InvalidToken::Malformed)
}
