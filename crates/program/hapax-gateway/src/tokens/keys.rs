//! Keys of an issuer: a JWK Set (RFC 7517), and signatures by its keys (RFC 7518, RFC 8037).

use std::fmt;
use std::fs::File;
use std::io::Read as _;
use std::path::Path;

use base64::Engine as _;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use ring::signature::{self, RsaPublicKeyComponents, UnparsedPublicKey};
use serde_json::{Map, Value};

use super::JwtKeysError;

/// Largest set, in bytes.
pub(super) const MAX_BYTES: usize = 256 * 1024;

/// Largest number of keys. A token without `kid` is tried with each that fits.
const MAX_KEYS: usize = 64;

/// Sizes of the modulus of an RSA key that signatures are accepted of, in bits.
const RSA_BITS: std::ops::RangeInclusive<usize> = 2048..=8192;

/// Keys that verify signatures.
#[derive(Debug)]
pub(super) struct KeySet(Vec<Jwk>);

/// A public key.
#[derive(Debug)]
pub(super) struct Jwk {
    pub(super) id: Option<String>,
    /// The one algorithm that the key is for, if it names one.
    algorithm: Option<Algorithm>,
    material: Material,
}

enum Material {
    Rsa { n: Vec<u8>, e: Vec<u8> },
    P256(Vec<u8>),
    P384(Vec<u8>),
    Ed25519(Vec<u8>),
}

/// Algorithms of signatures by a private key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Algorithm {
    Rs256,
    Rs384,
    Rs512,
    Ps256,
    Ps384,
    Ps512,
    Es256,
    Es384,
    Ed25519,
}

impl Algorithm {
    /// Returns the algorithm with this name (RFC 7518, 3.1; RFC 8037; RFC 9864); `None` for `none`, for a secret that
    /// both sides share, and for any that is not known.
    pub(super) fn read(name: &str) -> Option<Self> {
        Some(match name {
            "RS256" => Self::Rs256,
            "RS384" => Self::Rs384,
            "RS512" => Self::Rs512,
            "PS256" => Self::Ps256,
            "PS384" => Self::Ps384,
            "PS512" => Self::Ps512,
            "ES256" => Self::Es256,
            "ES384" => Self::Es384,
            "EdDSA" | "Ed25519" => Self::Ed25519,
            _ => return None,
        })
    }
}

/// Reasons for which a set has no keys.
#[derive(Debug, thiserror::Error)]
pub(super) enum KeySetError {
    #[error("expected a JWK Set, {{\"keys\": […]}}, of at most {MAX_BYTES} bytes, found more")]
    TooLarge,
    #[error("expected a JWK Set, {{\"keys\": […]}}, found something else")]
    NotASet,
    #[error("expected at most {MAX_KEYS} keys, found {0}")]
    TooMany(usize),
    #[error(
        "expected a public key for signatures (RSA from 2048 bits, P-256, P-384 or Ed25519), found none among {0} keys"
    )]
    NoKey(usize),
}

impl KeySet {
    /// Reads a file.
    pub(super) fn read(path: &Path) -> Result<Self, JwtKeysError> {
        let mut bytes = Vec::new();
        let read = File::open(path)
            .and_then(|file| file.take(MAX_BYTES as u64 + 1).read_to_end(&mut bytes));
        if let Err(error) = read {
            return Err(JwtKeysError::Read { path: path.into(), error: error.to_string() });
        }
        Self::parse(&bytes)
            .map_err(|error| JwtKeysError::Invalid { path: path.into(), error: error.to_string() })
    }

    /// Reads a set. Keys of other kinds or for other uses are left out (RFC 7517, 5).
    pub(super) fn parse(bytes: &[u8]) -> Result<Self, KeySetError> {
        if bytes.len() > MAX_BYTES {
            return Err(KeySetError::TooLarge);
        }
        let set: Map<String, Value> =
            serde_json::from_slice(bytes).map_err(|_| KeySetError::NotASet)?;
        let Some(Value::Array(all)) = set.get("keys") else { return Err(KeySetError::NotASet) };
        if all.len() > MAX_KEYS {
            return Err(KeySetError::TooMany(all.len()));
        }
        let keys: Vec<_> = all.iter().filter_map(Value::as_object).filter_map(Jwk::read).collect();
        if keys.is_empty() {
            return Err(KeySetError::NoKey(all.len()));
        }
        Ok(Self(keys))
    }

    pub(super) fn keys(&self) -> &[Jwk] {
        &self.0
    }
}

impl Jwk {
    /// Reads a key; `None` if it is not for signatures, or of another kind.
    fn read(jwk: &Map<String, Value>) -> Option<Self> {
        let text = |name: &str| jwk.get(name).and_then(Value::as_str);
        let bytes = |name: &str| BASE64_URL_SAFE_NO_PAD.decode(text(name)?).ok();
        if text("use").is_some_and(|it| it != "sig") {
            return None;
        }
        if let Some(uses) = jwk.get("key_ops") {
            uses.as_array()?.iter().find(|it| *it == "verify")?;
        }
        let point = |length: usize| {
            let (x, y) = (bytes("x")?, bytes("y")?);
            (x.len() == length && y.len() == length).then(|| [&[4][..], &x, &y].concat())
        };
        let material = match (text("kty")?, text("crv")) {
            ("RSA", _) => {
                let without_zeros = |name: &str| {
                    let bytes = bytes(name)?;
                    let begin = bytes.iter().position(|byte| *byte != 0)?;
                    Some(bytes[begin..].to_vec())
                };
                let (n, e) = (without_zeros("n")?, without_zeros("e")?);
                let bits = n.len() * 8 - n.first()?.leading_zeros() as usize;
                RSA_BITS.contains(&bits).then_some(Material::Rsa { n, e })?
            }
            ("EC", Some("P-256")) => Material::P256(point(32)?),
            ("EC", Some("P-384")) => Material::P384(point(48)?),
            ("OKP", Some("Ed25519")) => Material::Ed25519(bytes("x").filter(|it| it.len() == 32)?),
            _ => return None,
        };
        let algorithm = match text("alg") {
            None => None,
            Some(name) => Some(Algorithm::read(name)?),
        };
        let key = Self { id: text("kid").map(str::to_owned), algorithm, material };
        algorithm.is_none_or(|algorithm| key.fits(algorithm)).then_some(key)
    }

    /// Returns whether signatures of this key may have this algorithm.
    pub(super) fn fits(&self, algorithm: Algorithm) -> bool {
        use Algorithm::*;
        let is_of_kind = match self.material {
            Material::Rsa { .. } => {
                matches!(algorithm, Rs256 | Rs384 | Rs512 | Ps256 | Ps384 | Ps512)
            }
            Material::P256(_) => algorithm == Es256,
            Material::P384(_) => algorithm == Es384,
            Material::Ed25519(_) => algorithm == Ed25519,
        };
        is_of_kind && self.algorithm.is_none_or(|it| it == algorithm)
    }

    /// Returns whether this is the key's signature of `message`.
    pub(super) fn verifies(&self, algorithm: Algorithm, message: &[u8], signed: &[u8]) -> bool {
        if !self.fits(algorithm) {
            return false;
        }
        match &self.material {
            Material::Rsa { n, e } => rsa(algorithm).is_some_and(|parameters| {
                RsaPublicKeyComponents { n, e }.verify(parameters, message, signed).is_ok()
            }),
            Material::P256(key) => UnparsedPublicKey::new(&signature::ECDSA_P256_SHA256_FIXED, key)
                .verify(message, signed)
                .is_ok(),
            Material::P384(key) => UnparsedPublicKey::new(&signature::ECDSA_P384_SHA384_FIXED, key)
                .verify(message, signed)
                .is_ok(),
            Material::Ed25519(key) => {
                UnparsedPublicKey::new(&signature::ED25519, key).verify(message, signed).is_ok()
            }
        }
    }
}

fn rsa(algorithm: Algorithm) -> Option<&'static signature::RsaParameters> {
    Some(match algorithm {
        Algorithm::Rs256 => &signature::RSA_PKCS1_2048_8192_SHA256,
        Algorithm::Rs384 => &signature::RSA_PKCS1_2048_8192_SHA384,
        Algorithm::Rs512 => &signature::RSA_PKCS1_2048_8192_SHA512,
        Algorithm::Ps256 => &signature::RSA_PSS_2048_8192_SHA256,
        Algorithm::Ps384 => &signature::RSA_PSS_2048_8192_SHA384,
        Algorithm::Ps512 => &signature::RSA_PSS_2048_8192_SHA512,
        Algorithm::Es256 | Algorithm::Es384 | Algorithm::Ed25519 => return None,
    })
}

impl fmt::Debug for Material {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Rsa { .. } => "RSA",
            Self::P256(_) => "P-256",
            Self::P384(_) => "P-384",
            Self::Ed25519(_) => "Ed25519",
        })
    }
}
