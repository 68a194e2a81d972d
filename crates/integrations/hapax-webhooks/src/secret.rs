//! Signing secrets, and the HMACs of content under them.

use std::fmt;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use hmac::{Hmac, KeyInit, Mac as _};
use sha2::Sha256;
use subtle::ConstantTimeEq;

use crate::config::SecretError;

/// The largest number of secrets. A rotation needs two; each one costs a hash of the body.
pub(crate) const MAX_SECRETS: usize = 8;

/// The shortest secret, in bytes. A shorter one could be found by trials on a captured delivery.
pub(crate) const MIN_SECRET: usize = 16;

/// The shortest secret of Standard Webhooks, in decoded bytes, as its specification demands.
pub(crate) const MIN_STANDARD_SECRET: usize = 24;

/// The beginning of the secrets of Standard Webhooks and of Stripe.
const PREFIX: &str = "whsec_";

/// An HMAC-SHA256.
pub(crate) type Mac = [u8; 32];

/// The forms in which senders hand out secrets.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum SecretForm {
    /// `whsec_` and base64; the decoded bytes are the secret.
    Standard,
    /// `whsec_` and letters; the whole text is the secret.
    Stripe,
    /// Any text; its bytes are the secret.
    Text,
}

/// The secrets of a source. A signature under any of them is valid.
#[derive(Clone)]
pub(crate) struct SigningSecrets(Vec<Hmac<Sha256>>);

impl SigningSecrets {
    /// Returns the secrets; the number of the first one that is not valid, from 1, with the reason.
    pub(crate) fn parse(form: SecretForm, texts: &[Vec<u8>]) -> Result<Self, (usize, SecretError)> {
        let parse = |(at, text): (usize, &Vec<u8>)| {
            form.key(text).and_then(|key| mac(&key)).map_err(|error| (at + 1, error))
        };
        texts.iter().enumerate().map(parse).collect::<Result<_, _>>().map(Self)
    }

    /// Returns the MAC of `parts` under each secret.
    pub(crate) fn macs(&self, parts: &[&[u8]]) -> impl Iterator<Item = Mac> {
        self.0.iter().map(|mac| {
            let mut mac = mac.clone();
            parts.iter().for_each(|part| mac.update(part));
            mac.finalize().into_bytes().into()
        })
    }

    /// Returns whether one of `macs` is the MAC of `parts` under one of the secrets. The time
    /// depends on the numbers and lengths of its arguments only, and on which secret fits.
    pub(crate) fn verify(&self, parts: &[&[u8]], macs: &[Mac]) -> bool {
        self.macs(parts).any(|expected| {
            let equal = macs.iter().map(|mac| expected.as_slice().ct_eq(mac));
            equal.fold(subtle::Choice::from(0), |one, other| one | other).into()
        })
    }
}

impl fmt::Debug for SigningSecrets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SigningSecrets({})", self.0.len())
    }
}

impl SecretForm {
    fn key(self, text: &[u8]) -> Result<Vec<u8>, SecretError> {
        if text.is_empty() {
            return Err(SecretError::Empty);
        }
        if text.trim_ascii() != text {
            return Err(SecretError::WhiteSpace);
        }
        let (key, least) = match self {
            Self::Text => (text.to_vec(), MIN_SECRET),
            Self::Stripe => {
                text.strip_prefix(PREFIX.as_bytes()).ok_or(SecretError::Prefix)?;
                (text.to_vec(), MIN_SECRET)
            }
            Self::Standard => {
                let coded = text.strip_prefix(PREFIX.as_bytes()).ok_or(SecretError::Prefix)?;
                let key = STANDARD.decode(coded).map_err(|_| SecretError::Base64)?;
                (key, MIN_STANDARD_SECRET)
            }
        };
        match key.len() {
            found if found < least => Err(SecretError::TooShort { found, least }),
            _ => Ok(key),
        }
    }
}

fn mac(key: &[u8]) -> Result<Hmac<Sha256>, SecretError> {
    // HMAC accepts keys of every length.
    Hmac::new_from_slice(key).map_err(|_| SecretError::Empty)
}

/// Returns the MAC that hexadecimal digits of either case denote.
pub(crate) fn mac_from_hex(text: &str) -> Option<Mac> {
    let mut mac = [0; 32];
    let (pairs, rest) = text.as_bytes().as_chunks::<2>();
    if pairs.len() != mac.len() || !rest.is_empty() {
        return None;
    }
    for (byte, pair) in mac.iter_mut().zip(pairs) {
        let [high, low] = pair.map(|digit| char::from(digit).to_digit(16));
        *byte = u8::try_from(high? << 4 | low?).ok()?;
    }
    Some(mac)
}

/// Returns a MAC as padded base64.
#[cfg(feature = "sink")]
pub(crate) fn mac_to_base64(mac: &Mac) -> String {
    STANDARD.encode(mac)
}

/// Returns the MAC that padded base64 denotes.
pub(crate) fn mac_from_base64(text: &str) -> Option<Mac> {
    STANDARD.decode(text).ok()?.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The event and the signature of the tests of Stripe's library for .NET.
    const STRIPE_EVENT: &str = include_str!("../tests/it/stripe_event.json");
    const STRIPE_MAC: &str = "f0bdba6d4eacbd8ad8a3bbadd7248e633ec1477f7899c124c51b39405fa36613";

    #[test]
    fn stripes_published_signature_is_valid() {
        let secrets = SigningSecrets(vec![mac(b"webhook_secret").unwrap()]);
        let mac = mac_from_hex(STRIPE_MAC).unwrap();
        let parts: [&[u8]; 2] = [b"1533204620.", STRIPE_EVENT.as_bytes()];
        assert!(secrets.verify(&parts, &[[0; 32], mac]));
        assert!(!secrets.verify(&parts[1..], &[mac]));
        assert!(!secrets.verify(&parts, &[]));
    }

    #[test]
    fn macs_have_32_bytes_in_either_case() {
        let mac = mac_from_hex(STRIPE_MAC).unwrap();
        assert_eq!(mac_from_hex(&STRIPE_MAC.to_uppercase()), Some(mac));
        for text in ["", "f0", &STRIPE_MAC[1..], &format!("{STRIPE_MAC}00"), &"g".repeat(64)] {
            assert_eq!(mac_from_hex(text), None, "{text}");
        }
        assert_eq!(mac_from_base64(&STANDARD.encode(mac)), Some(mac));
        for text in ["", "AAAA", &STANDARD.encode([0; 33]), &STRIPE_MAC[..43]] {
            assert_eq!(mac_from_base64(text), None, "{text}");
        }
    }
}
