//! Configuration of bearer tokens by which callers are named.

use std::path::PathBuf;

use hapax_http::server::{ScopePart, TokenClaims};
use hapax_proxy::Origin;
use http::Uri;
use http::uri::PathAndQuery;

use super::{Config, ConfigError, PolicyConfig, is_self};

/// Verification of JSON Web Tokens, for scopes with [`ScopePart::Claim`]. All three fields are set, or none: then
/// [`Config::auth`] verifies the tokens.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct JwtConfig {
    /// The keys of the issuer, as a JWK Set (RFC 7517).
    pub keys: Option<JwtKeys>,
    /// The issuer: the value that `iss` of a token must have.
    pub issuer: Option<String>,
    /// The audience: a value that `aud` of a token must have or contain.
    pub audience: Option<String>,
}

/// The place of a JWK Set.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum JwtKeys {
    /// A file, which is read at the start and on a reload.
    File(PathBuf),
    /// A URL, which is requested at the start and every five minutes: `https://HOST[:PORT]/PATH`, or `http`.
    Url(Uri),
}

/// Verification of tokens.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum TokenCheck {
    /// By the auth server, which has allowed the request.
    ByAuth,
    /// By the gateway.
    Here { keys: KeySource, expected: ExpectedToken },
}

/// The issuer and the audience that tokens must have.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct ExpectedToken {
    pub(crate) issuer: String,
    pub(crate) audience: String,
}

/// The source of the keys.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum KeySource {
    File(PathBuf),
    Url(Origin, PathAndQuery),
}

impl JwtConfig {
    /// Returns how tokens are verified; `None` if they name no caller.
    pub(super) fn resolve(&self, config: &Config) -> Result<Option<TokenCheck>, ConfigError> {
        let fields = [
            ("jwt_keys", self.keys.is_some()),
            ("jwt_issuer", self.issuer.is_some()),
            ("jwt_audience", self.audience.is_some()),
        ];
        let given = fields.iter().find(|(_, is_given)| *is_given).map(|(field, _)| *field);
        let missing = fields.iter().find(|(_, is_given)| !is_given).map(|(field, _)| *field);
        let is_used = config.policies().any(PolicyConfig::has_claim);
        match (given, missing) {
            (Some(field), _) if !is_used => {
                return Err(ConfigError::needs(
                    field,
                    "scope",
                    " jwt:CLAIM: no token names a caller",
                ));
            }
            (Some(given), Some(missing)) => {
                let why = ": a token is verified by keys, issuer and audience";
                return Err(ConfigError::needs(given, missing, why));
            }
            _ => {}
        }
        let Self { keys: Some(keys), issuer: Some(issuer), audience: Some(audience) } = self else {
            return Ok(is_used.then_some(TokenCheck::ByAuth));
        };
        if let Err(error) = TokenClaims::new(issuer) {
            return Err(ConfigError::Value { field: "jwt_issuer", error: error.to_string() });
        }
        if audience.is_empty() {
            let error = "expected an audience, like https://api.example, found nothing".to_owned();
            return Err(ConfigError::Value { field: "jwt_audience", error });
        }
        let expected = ExpectedToken { issuer: issuer.clone(), audience: audience.clone() };
        Ok(Some(TokenCheck::Here { keys: keys.source(config)?, expected }))
    }

    /// Returns whether the gateway verifies tokens itself.
    pub(super) const fn is_complete(&self) -> bool {
        self.keys.is_some() && self.issuer.is_some() && self.audience.is_some()
    }
}

impl JwtKeys {
    fn source(&self, config: &Config) -> Result<KeySource, ConfigError> {
        let uri = match self {
            Self::File(path) => return Ok(KeySource::File(path.clone())),
            Self::Url(uri) => uri,
        };
        let origin = Origin::of(uri).ok_or(ConfigError::JwtKeysTarget)?;
        if is_self(&origin, config.listen) {
            return Err(ConfigError::JwtKeysLoop { address: config.listen });
        }
        let path = uri.path_and_query().cloned();
        Ok(KeySource::Url(origin, path.unwrap_or_else(|| PathAndQuery::from_static("/"))))
    }

    /// Returns whether the keys come over a network without TLS, so that others may replace them.
    pub(crate) fn is_unprotected(&self) -> bool {
        let Self::Url(uri) = self else { return false };
        let Some(origin) = Origin::of(uri).filter(|origin| !origin.secure) else { return false };
        let is_loopback = |ip: std::net::IpAddr| ip.is_loopback();
        let host = origin.host().trim_start_matches('[').trim_end_matches(']');
        !host.eq_ignore_ascii_case("localhost") && !host.parse().is_ok_and(is_loopback)
    }
}

impl PolicyConfig {
    /// Returns whether a claim of a token names the caller.
    pub(crate) fn has_claim(&self) -> bool {
        let is_claim = |part: &ScopePart| matches!(part, ScopePart::Claim(_));
        self.scope.as_ref().is_some_and(|scope| scope.parts().iter().any(is_claim))
    }
}
