//! Secrets that replace one another.

use super::Secret;
use crate::seal::Sealer;

/// The secrets of a store: one that names its records, one that seals them, and earlier ones that
/// open what they sealed.
///
/// Only the sealing secret rotates. A record is found by its name, so a new naming secret would
/// make every retry of an earlier request a new operation. The naming secret also reveals less: it
/// verifies a guessed key, and opens nothing.
///
/// # The file
///
/// ```text
/// # lines are a word and 64 hexadecimal digits; a single line of digits alone names and seals
/// name 8d969eef6ecad3c29a3a629280e686cf0c3f5d5a86aff3ca12020c923adc6c92
/// seal 5e884898da28047151d0e56f8dc6292773603d0d6aabbdd62a11ef721d1542d8
/// open 8d969eef6ecad3c29a3a629280e686cf0c3f5d5a86aff3ca12020c923adc6c92
/// ```
///
/// To rotate while several processes share a store: add the new secret as `open` everywhere; then
/// make it `seal`, and the one before it `open`, everywhere; remove that when nothing is left that
/// it sealed: after the longest retention, or never while records are stored for ever under
/// `Block`.
///
/// ```
/// use hapax_core::{KeyRing, Secret};
/// let old = Secret::new([6; 32]); // from a random source, in earnest
/// let new = Secret::new([7; 32]);
/// let ring = KeyRing::new(old.clone()).sealing(new.clone());
/// assert_eq!(ring.naming(), &old);
/// assert_eq!(KeyRing::parse(&ring.to_text()), Ok(ring));
/// assert_eq!(KeyRing::parse(&new.to_hex()), Ok(KeyRing::new(new)));
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct KeyRing {
    naming: Secret,
    sealing: Secret,
    opening: Vec<Secret>,
}

impl KeyRing {
    /// The largest number of `open` secrets in a file: more are a sign that they are never removed.
    /// Secrets that a program adds are not counted.
    pub const MAX_OPENING: usize = 16;

    /// Creates a ring with one secret for everything.
    #[must_use]
    pub fn new(secret: Secret) -> Self {
        Self { naming: secret.clone(), sealing: secret, opening: Vec::new() }
    }

    /// Makes `secret` the one that seals, and the one before it one that opens.
    #[must_use]
    pub fn sealing(mut self, secret: Secret) -> Self {
        self.opening.retain(|it| *it != secret && *it != self.sealing);
        let before = std::mem::replace(&mut self.sealing, secret);
        if before != self.sealing {
            self.opening.insert(0, before);
        }
        self
    }

    /// Adds a `secret` that opens: it sealed before, or will soon in another process.
    #[must_use]
    pub fn opening(mut self, secret: Secret) -> Self {
        if secret != self.sealing && !self.opening.contains(&secret) {
            self.opening.push(secret);
        }
        self
    }

    /// Returns the secret that names records, which a store returns in its
    /// [`Capabilities`](crate::store::Capabilities).
    #[must_use]
    pub const fn naming(&self) -> &Secret {
        &self.naming
    }

    /// Returns the sealer of this ring.
    #[must_use]
    pub fn sealer(&self) -> Sealer {
        self.opening.iter().fold(Sealer::keyed(&self.sealing), Sealer::previously)
    }

    /// Parses the text of a file.
    ///
    /// # Errors
    /// [`KeyRingError`], which never shows a secret.
    pub fn parse(text: &str) -> Result<Self, KeyRingError> {
        let (mut naming, mut sealing, mut opening) = (None, None, Vec::new());
        for (number, line) in (1..).zip(text.lines()) {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let (word, digits) = line.split_once(char::is_whitespace).unwrap_or(("", line));
            let secret = Secret::from_hex(digits).ok_or(KeyRingError::Line(number))?;
            let twice = match word {
                "" => naming.replace(secret.clone()).is_some() | sealing.replace(secret).is_some(),
                "name" => naming.replace(secret).is_some(),
                "seal" => sealing.replace(secret).is_some(),
                "open" if opening.len() < Self::MAX_OPENING => {
                    opening.push(secret);
                    false
                }
                "open" => return Err(KeyRingError::TooMany),
                _ => return Err(KeyRingError::Line(number)),
            };
            if twice {
                return Err(KeyRingError::Twice(number));
            }
        }
        let naming = naming.ok_or(KeyRingError::Missing("name"))?;
        let sealing = sealing.ok_or(KeyRingError::Missing("seal"))?;
        Ok(Self { naming, sealing, opening })
    }

    /// Returns the text of a file, which [`parse`](Self::parse) accepts unless too many secrets
    /// open.
    #[must_use]
    pub fn to_text(&self) -> String {
        if self.naming == self.sealing && self.opening.is_empty() {
            return format!("{}\n", self.naming.to_hex());
        }
        let mut text = format!("name {}\nseal {}\n", self.naming.to_hex(), self.sealing.to_hex());
        for secret in &self.opening {
            text.push_str("open ");
            text.push_str(&secret.to_hex());
            text.push('\n');
        }
        text
    }
}

/// Errors of parsing a ring.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KeyRingError {
    /// A line is not a word and a secret.
    #[error("line {0} is not `name`, `seal` or `open` and 64 hexadecimal digits")]
    Line(usize),
    /// A second line `name` or `seal`.
    #[error(
        "line {0} is a second `name` or `seal` line: expected one of each; use `open` for earlier secrets"
    )]
    Twice(usize),
    /// The naming or the sealing secret is missing.
    #[error("expected a line `{0}`, or a single line of 64 hexadecimal digits")]
    Missing(&'static str),
    /// There are more than [`KeyRing::MAX_OPENING`].
    #[error(
        "expected at most {} `open` lines, found more: remove secrets that sealed no stored record",
        KeyRing::MAX_OPENING
    )]
    TooMany,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn secret(byte: u8) -> Secret {
        Secret::new([byte; 32])
    }

    #[test]
    fn a_written_ring_is_read_back() {
        let one = KeyRing::new(secret(1));
        let two = one.clone().sealing(secret(2));
        let three = two.clone().sealing(secret(3)).opening(secret(4));
        for ring in [one, two, three] {
            assert_eq!(KeyRing::parse(&ring.to_text()), Ok(ring));
        }
    }

    #[test]
    fn a_rotated_ring_opens_with_earlier_secrets() {
        let ring = KeyRing::new(secret(1)).sealing(secret(2)).sealing(secret(3));
        assert_eq!(ring.opening, [secret(2), secret(1)]);
        assert_eq!((ring.naming(), &ring.sealing), (&secret(1), &secret(3)));
        // Back again, as when a rotation is undone.
        let back = ring.sealing(secret(2));
        assert_eq!((back.sealing, back.opening), (secret(2), vec![secret(3), secret(1)]));
    }

    #[test]
    fn a_ring_drops_no_secret() {
        let ring = (0..40).map(secret).fold(KeyRing::new(secret(99)), KeyRing::opening);
        let ring = (40..80).map(secret).fold(ring, KeyRing::sealing);
        assert_eq!(ring.opening.len(), 80);
        assert_eq!(KeyRing::parse(&ring.to_text()), Err(KeyRingError::TooMany));
    }

    #[test]
    fn errors_name_the_mistake_and_show_no_secret() {
        let hex = secret(0xab).to_hex();
        for (text, error) in [
            (String::new(), KeyRingError::Missing("name")),
            (format!("name {hex}"), KeyRingError::Missing("seal")),
            (format!("# x\nseal {hex}\nfoo {hex}\n"), KeyRingError::Line(3)),
            (format!("{hex}\n{hex}"), KeyRingError::Twice(2)),
            (format!("{hex}\nseal {hex}"), KeyRingError::Twice(2)),
            (format!("name {}", &hex[1..]), KeyRingError::Line(1)),
            (format!("{hex}\n{}", format!("open {hex}\n").repeat(17)), KeyRingError::TooMany),
        ] {
            assert_eq!(KeyRing::parse(&text), Err(error), "{text}");
            assert!(!error.to_string().contains("abab"));
        }
    }
}
