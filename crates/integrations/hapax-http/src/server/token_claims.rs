//! Claims of a verified bearer token.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

/// The longest name of a claim, in bytes.
const MAX_NAME: usize = 256;

pub(super) const CLAIM_PREFIX: &str = "jwt:";

/// The name of a claim of a JSON Web Token (RFC 7519), whose case counts. Contains `jwt:` before it.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct ClaimName(Arc<str>);

/// A request extension: the issuer of a bearer token, and claims by which it names the caller.
///
/// A service in front of the layer inserts it *after it has verified the token*: signature, issuer, audience and times.
/// Nothing else sets it, so that no client can name another caller by a token that it made itself.
///
/// The value of `jwt:CLAIM` in a scope consists of the issuer, a space, and the claim: `https://login.example user-7`.
/// An integer is written with `=` before it, and so is a text that begins with `=`. So two callers never have one
/// value, and an operator can enter it.
///
/// ```
/// use hapax_core::MemoryStore;
/// use hapax_http::server::{IdempotencyLayer, MissingScope, ScopeSource, TokenClaims};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let scope = ScopeSource::parts(["jwt:sub".parse()?], MissingScope::Reject);
/// let layer = IdempotencyLayer::builder(MemoryStore::default()).scope(scope).build()?;
/// # drop(layer);
/// // In the middleware in front of the layer, which has verified the token:
/// let mut request = http::Request::new(());
/// request.extensions_mut().insert(TokenClaims::new("https://login.example")?.text("sub", "user-7"));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct TokenClaims {
    issuer: Arc<str>,
    /// The issuer and each claim, by its name.
    values: BTreeMap<String, String>,
}

/// Error of an issuer that is empty, or has a white space or a control character.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("expected an issuer without white space, like https://login.example")]
pub struct InvalidIssuer;

impl ClaimName {
    /// Reads `jwt:CLAIM`: the outer `None` if the text does not begin so, the inner one if the name is not valid.
    pub(super) fn read(text: &str) -> Option<Option<Self>> {
        let name = text.strip_prefix(CLAIM_PREFIX)?;
        let is_separator =
            |letter: char| letter == ',' || letter.is_whitespace() || letter.is_control();
        let is_valid = !name.is_empty() && name.len() <= MAX_NAME && !name.contains(is_separator);
        Some(is_valid.then(|| Self(text.into())))
    }

    /// Returns the name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0[CLAIM_PREFIX.len()..]
    }

    /// Returns the name with `jwt:` before it.
    pub(super) fn text(&self) -> &str {
        &self.0
    }
}

impl TokenClaims {
    /// Creates the claims of a token of this issuer, without any claim.
    ///
    /// # Errors
    /// [`InvalidIssuer`].
    pub fn new(issuer: &str) -> Result<Self, InvalidIssuer> {
        let is_separator = |letter: char| letter.is_whitespace() || letter.is_control();
        if issuer.is_empty() || issuer.contains(is_separator) {
            return Err(InvalidIssuer);
        }
        Ok(Self { issuer: issuer.into(), values: BTreeMap::new() })
    }

    /// Adds a claim that is a text. One without content names no caller, and is left out.
    #[must_use]
    pub fn text(self, claim: &str, value: &str) -> Self {
        if value.trim().is_empty() {
            return self;
        }
        let mark = if value.starts_with('=') { "=" } else { "" };
        self.with(claim, format_args!("{mark}{value}"))
    }

    /// Adds a claim that is an integer.
    #[must_use]
    pub fn integer(self, claim: &str, value: i128) -> Self {
        self.with(claim, format_args!("={value}"))
    }

    fn with(mut self, claim: &str, value: fmt::Arguments<'_>) -> Self {
        let value = format!("{} {value}", self.issuer);
        self.values.insert(claim.to_owned(), value);
        self
    }

    /// Returns the value of a claim in a scope.
    pub(super) fn value(&self, name: &ClaimName) -> Option<&str> {
        self.values.get(name.as_str()).map(String::as_str)
    }
}

impl fmt::Debug for TokenClaims {
    /// Shows the names of the claims alone.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.values.keys()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::server::ScopePart;

    #[test]
    fn names_of_claims_are_any_text_without_separators() {
        for text in
            ["jwt:sub", "jwt:Sub", "jwt:https://shop.example/claims/tenant", "jwt:é", "jwt:a:b"]
        {
            let part: ScopePart = text.parse().unwrap();
            assert_eq!(part.as_str(), text);
            assert_eq!(part.header(), "authorization");
        }
        let long = format!("jwt:{}", "x".repeat(MAX_NAME + 1));
        for text in ["jwt:", "jwt:a,b", "jwt:a b", "jwt: a", "jwt:a\n", "jwt", "JWT:sub", &long] {
            let part = text.parse::<ScopePart>();
            assert!(
                part.is_err() || part == Ok(ScopePart::Header("jwt".parse().unwrap())),
                "{text}"
            );
        }
        assert_ne!("jwt:sub".parse::<ScopePart>(), "jwt:Sub".parse());
    }

    #[test]
    fn no_two_callers_have_one_value() {
        let of = |issuer: &str| TokenClaims::new(issuer).unwrap();
        let (a, b) = (of("https://a"), of("https://b"));
        let callers = [
            a.clone().text("sub", "7"),
            a.clone().integer("sub", 7),
            a.clone().integer("sub", -7),
            a.clone().text("sub", "=7"),
            a.clone().text("sub", "==7"),
            a.clone().text("sub", "x 7"),
            a.clone().text("sub", " 7"),
            b.clone().text("sub", "7"),
        ];
        let name = ClaimName::read("jwt:sub").unwrap().unwrap();
        let values: Vec<_> = callers.iter().map(|it| it.value(&name).unwrap()).collect();
        assert_eq!(values[..4], ["https://a 7", "https://a =7", "https://a =-7", "https://a ==7"]);
        for (at, value) in values.iter().enumerate() {
            assert!(!values[..at].contains(value), "{value}");
        }
        assert_eq!(a.clone().text("sub", " ").value(&name), None);
        assert_eq!(a.text("other", "7").value(&name), None);
        for issuer in ["", "a b", "a\n", " a"] {
            assert_eq!(TokenClaims::new(issuer), Err(InvalidIssuer));
        }
    }
}
