//! Secrets that replace one another.

use super::Secret;
use crate::seal::Sealer;

/// Stands in place of the digits of a secret that names records.
const NONE: &str = "none";

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
/// assert_eq!(ring.naming(), Some(&old));
/// assert_eq!(KeyRing::parse(&ring.to_text()), Ok(ring));
/// assert_eq!(KeyRing::parse(&new.to_hex()), Ok(KeyRing::new(new)));
/// ```
///
/// # A store that began without a secret
///
/// Its records keep their names, and can be sealed all the same: the line `name none`, and the new
/// secret first as `open` everywhere, which seals nothing yet, then as `seal` everywhere. Such a ring
/// also opens records without a seal, so a process that can write to the store can forge them.
///
/// ```
/// use hapax_core::{KeyRing, Secret};
/// let secret = Secret::new([7; 32]); // from a random source, in earnest
/// let first = KeyRing::unnamed(secret.clone());
/// assert_eq!(KeyRing::parse(&format!("name none\nopen {}", secret.to_hex())), Ok(first.clone()));
/// assert!(!first.seals() && first.sealing(secret).seals());
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct KeyRing {
    /// `None`: records have the names that they have without a secret. Else there is one that seals.
    naming: Option<Secret>,
    sealing: Option<Secret>,
    opening: Vec<Secret>,
}

impl KeyRing {
    /// The largest number of `open` secrets in a file: more are a sign that they are never removed.
    /// Secrets that a program adds are not counted.
    pub const MAX_OPENING: usize = 16;

    /// Creates a ring with one secret for everything.
    #[must_use]
    pub fn new(secret: Secret) -> Self {
        Self { naming: Some(secret.clone()), sealing: Some(secret), opening: Vec::new() }
    }

    /// Creates a ring for a store that began without a secret: it names records as without one, and opens
    /// what `secret` sealed. It seals nothing until [`sealing`](Self::sealing).
    #[must_use]
    pub fn unnamed(secret: Secret) -> Self {
        Self { naming: None, sealing: None, opening: vec![secret] }
    }

    /// Makes `secret` the one that seals, and the one before it one that opens.
    #[must_use]
    pub fn sealing(mut self, secret: Secret) -> Self {
        let before = self.sealing.replace(secret.clone());
        self.opening.retain(|it| *it != secret && Some(it) != before.as_ref());
        if let Some(before) = before.filter(|it| *it != secret) {
            self.opening.insert(0, before);
        }
        self
    }

    /// Adds a `secret` that opens: it sealed before, or will soon in another process.
    #[must_use]
    pub fn opening(mut self, secret: Secret) -> Self {
        if self.sealing.as_ref() != Some(&secret) && !self.opening.contains(&secret) {
            self.opening.push(secret);
        }
        self
    }

    /// Returns the secret that names records; `None` if they are named without one.
    #[must_use]
    pub const fn naming(&self) -> Option<&Secret> {
        self.naming.as_ref()
    }

    /// Returns whether records are sealed. If not, they are written with a checksum, for everyone to read.
    #[must_use]
    pub const fn seals(&self) -> bool {
        self.sealing.is_some()
    }

    /// Returns the sealer of a store with this ring.
    #[must_use]
    pub fn sealer(&self) -> Sealer {
        // A store whose records are named by a secret has none without a seal, so one without is an
        // attack: accepting it would let any writer to the store forge outcomes.
        self.strict_sealer().accepting_checksums(self.naming.is_none())
    }

    /// Returns a sealer that opens only what the secrets sealed: for a place that has nothing from the time
    /// before them, such as a cache. If nothing seals, it opens nothing that it writes.
    #[must_use]
    pub fn strict_sealer(&self) -> Sealer {
        let sealer = Sealer::new(self.sealing.as_ref()).accepting_checksums(false);
        self.opening.iter().fold(sealer, Sealer::previously)
    }

    /// Returns the secrets by which values are hashed for operators, the current one first: that which names
    /// records, and never changes. Without it the one that seals, and those by which records that other
    /// secrets sealed have their hashes. None if nothing is sealed.
    #[cfg(feature = "tokio")]
    pub(crate) fn hashing(&self) -> impl Iterator<Item = &Secret> {
        let opening = self.opening.iter().filter(|_| self.naming.is_none() && self.seals());
        self.naming.as_ref().or(self.sealing.as_ref()).into_iter().chain(opening)
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
            let secret = Secret::from_hex(digits);
            let is_twice = match (word, secret) {
                ("name", None) if digits.trim() == NONE => naming.replace(None).is_some(),
                (_, None) => return Err(KeyRingError::Line(number)),
                ("", Some(secret)) => {
                    naming.replace(Some(secret.clone())).is_some()
                        | sealing.replace(secret).is_some()
                }
                ("name", secret) => naming.replace(secret).is_some(),
                ("seal", Some(secret)) => sealing.replace(secret).is_some(),
                ("open", Some(secret)) if opening.len() < Self::MAX_OPENING => {
                    opening.push(secret);
                    false
                }
                ("open", _) => return Err(KeyRingError::TooMany),
                _ => return Err(KeyRingError::Line(number)),
            };
            if is_twice {
                return Err(KeyRingError::Twice(number));
            }
        }
        let naming = naming.ok_or(KeyRingError::Missing("name"))?;
        match (&naming, &sealing, &opening[..]) {
            (Some(_), None, _) => Err(KeyRingError::Missing("seal")),
            (None, None, []) => Err(KeyRingError::Nothing),
            _ => Ok(Self { naming, sealing, opening }),
        }
    }

    /// Returns the text of a file, which [`parse`](Self::parse) accepts unless too many secrets
    /// open.
    #[must_use]
    pub fn to_text(&self) -> String {
        if let Some(secret) = &self.naming
            && self.naming == self.sealing
            && self.opening.is_empty()
        {
            return format!("{}\n", secret.to_hex());
        }
        let naming = self.naming.as_ref().map_or_else(|| NONE.to_owned(), Secret::to_hex);
        let sealing = self.sealing.iter().map(|secret| ("seal", secret.to_hex()));
        let opening = self.opening.iter().map(|secret| ("open", secret.to_hex()));
        let lines = [("name", naming)].into_iter().chain(sealing).chain(opening);
        lines.map(|(word, digits)| format!("{word} {digits}\n")).collect()
    }
}

/// Errors of parsing a ring.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KeyRingError {
    /// A line is not a word and a secret.
    #[error(
        "line {0} is not `name`, `seal` or `open` and 64 hexadecimal digits, and not `name none`"
    )]
    Line(usize),
    /// A second line `name` or `seal`.
    #[error(
        "line {0} is a second `name` or `seal` line: expected one of each; use `open` for earlier secrets"
    )]
    Twice(usize),
    /// The naming or the sealing secret is missing.
    #[error("expected a line `{0}`, or a single line of 64 hexadecimal digits")]
    Missing(&'static str),
    /// The ring has the line `name none`, and no secret.
    #[error("expected a line `seal` or `open` beside `name none`, found neither")]
    Nothing,
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
        let unnamed = KeyRing::unnamed(secret(1)).opening(secret(2));
        let sealing = unnamed.clone().sealing(secret(1));
        for ring in [one, two, three, unnamed, sealing] {
            assert_eq!(KeyRing::parse(&ring.to_text()), Ok(ring));
        }
    }

    #[test]
    fn a_rotated_ring_opens_with_earlier_secrets() {
        let ring = KeyRing::new(secret(1)).sealing(secret(2)).sealing(secret(3));
        assert_eq!(ring.opening, [secret(2), secret(1)]);
        assert_eq!((ring.naming(), &ring.sealing), (Some(&secret(1)), &Some(secret(3))));
        // Back again, as when a rotation is undone.
        let back = ring.sealing(secret(2));
        assert_eq!((back.sealing, back.opening), (Some(secret(2)), vec![secret(3), secret(1)]));
    }

    #[test]
    fn a_ring_without_a_name_is_rolled_out_and_rotated() {
        let first = KeyRing::unnamed(secret(1));
        assert_eq!(
            (first.naming(), first.seals(), &first.opening[..]),
            (None, false, &[secret(1)][..])
        );
        let second = first.sealing(secret(1));
        assert_eq!((second.naming(), second.seals(), &second.opening[..]), (None, true, &[][..]));
        let text = format!("name none\nseal {}\n", secret(1).to_hex());
        assert_eq!(second.to_text(), text);
        let rotated = second.opening(secret(2)).sealing(secret(2));
        assert_eq!((rotated.naming(), &rotated.opening[..]), (None, &[secret(1)][..]));
    }

    #[cfg(feature = "tokio")]
    #[test]
    fn values_are_hashed_by_a_secret_that_names_or_by_all_that_seal() {
        let hashing = |ring: &KeyRing| ring.hashing().cloned().collect::<Vec<_>>();
        let named = KeyRing::new(secret(1)).sealing(secret(2));
        assert_eq!(hashing(&named), [secret(1)]);
        let first = KeyRing::unnamed(secret(1));
        assert_eq!(hashing(&first), []);
        let rotated = first.sealing(secret(1)).sealing(secret(2));
        assert_eq!(hashing(&rotated), [secret(2), secret(1)]);
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
            ("name none".to_owned(), KeyRingError::Nothing),
            (format!("seal none\nopen {hex}"), KeyRingError::Line(1)),
            (format!("open {hex}\nnone"), KeyRingError::Line(2)),
            (format!("name none\nname {hex}\nseal {hex}"), KeyRingError::Twice(2)),
            (format!("name none\n{hex}"), KeyRingError::Twice(2)),
            (format!("{hex}\n{}", format!("open {hex}\n").repeat(17)), KeyRingError::TooMany),
        ] {
            assert_eq!(KeyRing::parse(&text), Err(error), "{text}");
            assert!(!error.to_string().contains("abab"));
        }
    }
}
