//! Seals, which bind the bytes of a record to its operation id and write id.
//!
//! 1. A sealed record opens only with the operation id and the write id that it was sealed with: a
//!    record that was copied to another id, restored from an earlier write or damaged is an error.
//! 2. Without a secret the seal is a checksum (BLAKE3): it detects accidents, not attacks.
//! 3. With a secret it is XChaCha20-Poly1305 with a random nonce: only owners of the secret can
//!    read or create records. A record that was not sealed with a known secret is then an error as
//!    well, because otherwise a writer to the store could leave the seal out.
//! 4. Secrets rotate: new records are sealed with the current one, and a record names its secret,
//!    so that earlier ones still open it.
//! 5. A store that began without a secret has records with a checksum, and opens them beside sealed
//!    ones: [`KeyRing::unnamed`](crate::KeyRing::unnamed). There a writer to the store can leave the
//!    seal out, so only that ring accepts it.
//!
//! ```
//! use hapax_core::{Sealer, Secret};
//! let secret = Secret::new([7; 32]); // from a random source, in earnest
//! let old = Secret::new([6; 32]);
//! let sealer = Sealer::keyed(&secret).previously(&old);
//! assert!(sealer.is_keyed());
//! ```

use std::fmt;

use bytes::Bytes;
use chacha20poly1305::aead::{Aead, KeyInit, Payload};
use chacha20poly1305::{XChaCha20Poly1305, XNonce};

use crate::codec::{self, DecodeError, EncodeError};
use crate::entropy::{Entropy, EntropyError};
use crate::record::{Notes, Record, WriteId};
use crate::schedule::{EntryKey, MAX_NOTE};
use crate::scope::OperationId;
use crate::secret::Secret;

const MAGIC: [u8; 3] = *b"hxs";
const NOTE_MAGIC: [u8; 3] = *b"hxn";
const VERSION: u8 = 1;
const CHECKSUM: u8 = 0;
const ENCRYPTED: u8 = 1;

const NONCE_LEN: usize = 24;
const CHECKSUM_LEN: usize = 32;

/// The seal of a store.
#[derive(Clone)]
pub struct Sealer {
    /// Seals; `None`: a checksum does.
    sealing: Option<RingKey>,
    /// Open what they sealed.
    opening: Vec<RingKey>,
    /// Whether a record with a checksum opens. False for every ring whose secret names records: all its
    /// records are sealed, so one with a checksum was written by an attacker (a downgrade), who could
    /// otherwise forge outcomes without the secret.
    checksums: bool,
}

#[derive(Clone)]
struct RingKey {
    id: [u8; 4],
    cipher: XChaCha20Poly1305,
}

impl Sealer {
    /// Creates a seal with a checksum only.
    #[must_use]
    pub const fn checksum() -> Self {
        Self { sealing: None, opening: Vec::new(), checksums: true }
    }

    /// Creates a seal with `secret`.
    #[must_use]
    pub fn keyed(secret: &Secret) -> Self {
        Self { sealing: Some(RingKey::new(secret)), opening: Vec::new(), checksums: false }
    }

    /// Adds another `secret` that opens, such as an earlier one.
    #[must_use]
    pub fn previously(mut self, secret: &Secret) -> Self {
        self.opening.push(RingKey::new(secret));
        self
    }

    /// Sets whether a record with a checksum opens. True is safe only where records were written without a
    /// secret, and their names are those without one.
    #[must_use]
    pub(crate) const fn accepting_checksums(mut self, accept: bool) -> Self {
        self.checksums = accept;
        self
    }

    /// Returns [`Sealer::keyed`] for `Some`, [`Sealer::checksum`] for `None`.
    #[must_use]
    pub fn new(secret: Option<&Secret>) -> Self {
        secret.map_or_else(Self::checksum, Self::keyed)
    }

    /// Returns whether it seals with a secret.
    #[must_use]
    pub const fn is_keyed(&self) -> bool {
        self.sealing.is_some()
    }

    /// Seals `record` for the operation id `key` and a write id. A seal that opens what secrets sealed, and
    /// seals with a checksum, leaves the description out.
    ///
    /// # Errors
    /// [`SealError::TooLong`] and [`SealError::Entropy`].
    pub fn seal(
        &self,
        key: &OperationId,
        write_id: WriteId,
        record: &Record,
        entropy: &dyn Entropy,
    ) -> Result<Vec<u8>, SealError> {
        // Another process has sealed the description that this one would write for everyone to read.
        let is_revealed = !self.is_keyed() && !self.opening.is_empty();
        let payload = match record.notes.description.is_some() && is_revealed {
            true => codec::encode(&undescribed(record))?,
            false => codec::encode(record)?,
        };
        self.seal_payload(&Binding::record(key, write_id), &payload, entropy)
    }

    /// Seals the note of a schedule's entry for its key.
    ///
    /// # Errors
    /// [`SealError::NoteTooLong`] and [`SealError::Entropy`].
    pub fn seal_note(
        &self,
        key: &EntryKey,
        note: &[u8],
        entropy: &dyn Entropy,
    ) -> Result<Vec<u8>, SealError> {
        if note.len() > MAX_NOTE {
            return Err(SealError::NoteTooLong { found: note.len() });
        }
        self.seal_payload(&Binding::note(key), note, entropy)
    }

    fn seal_payload(
        &self,
        binding: &Binding,
        payload: &[u8],
        entropy: &dyn Entropy,
    ) -> Result<Vec<u8>, SealError> {
        let mut out = Vec::with_capacity(MAGIC.len() + 2 + 4 + NONCE_LEN + payload.len() + 32);
        out.extend_from_slice(&binding.magic);
        out.push(VERSION);
        match &self.sealing {
            None => {
                out.push(CHECKSUM);
                out.extend_from_slice(payload);
                out.extend_from_slice(&binding.checksum(payload));
            }
            Some(RingKey { id, cipher }) => {
                // 24 random bytes, which never repeat with one secret, however many records.
                let mut nonce = [0; NONCE_LEN];
                entropy.fill(&mut nonce)?;
                let aad = binding.associated(*id);
                let sealed = cipher
                    .encrypt(&XNonce::from(nonce), Payload { msg: payload, aad: &aad })
                    .map_err(|_| SealError::Broken)?;
                out.push(ENCRYPTED);
                out.extend_from_slice(id);
                out.extend_from_slice(&nonce);
                out.extend_from_slice(&sealed);
            }
        }
        Ok(out)
    }

    /// Opens what [`Sealer::seal`] returned for the same operation id and write id.
    ///
    /// # Errors
    /// Every [`SealError`] except [`SealError::TooLong`] and [`SealError::Entropy`].
    pub fn open(
        &self,
        key: &OperationId,
        write_id: WriteId,
        sealed: &[u8],
    ) -> Result<Record, SealError> {
        let payload = self.open_payload(&Binding::record(key, write_id), sealed)?;
        Ok(codec::decode(&payload)?)
    }

    /// Opens what [`Sealer::seal_note`] returned for the same key.
    ///
    /// # Errors
    /// As [`Sealer::open`].
    pub fn open_note(&self, key: &EntryKey, sealed: &[u8]) -> Result<Bytes, SealError> {
        self.open_payload(&Binding::note(key), sealed)
    }

    fn open_payload(&self, binding: &Binding, sealed: &[u8]) -> Result<Bytes, SealError> {
        let rest = sealed.strip_prefix(&binding.magic).ok_or(SealError::NotSealed)?;
        let (&version, rest) = rest.split_first().ok_or(SealError::Broken)?;
        if version != VERSION {
            return Err(SealError::Version { found: version });
        }
        let (&kind, body) = rest.split_first().ok_or(SealError::Broken)?;
        match kind {
            CHECKSUM if !self.checksums => Err(SealError::NotKeyed),
            CHECKSUM => {
                let (payload, sum) =
                    body.split_last_chunk::<CHECKSUM_LEN>().ok_or(SealError::Broken)?;
                if binding.checksum(payload) != *sum {
                    return Err(SealError::Broken);
                }
                Ok(Bytes::copy_from_slice(payload))
            }
            ENCRYPTED => self.decrypt(binding, body),
            _ => Err(SealError::Broken),
        }
    }

    fn decrypt(&self, binding: &Binding, body: &[u8]) -> Result<Bytes, SealError> {
        let (id, body) = body.split_first_chunk::<4>().ok_or(SealError::Broken)?;
        let (nonce, msg) = body.split_first_chunk::<NONCE_LEN>().ok_or(SealError::Broken)?;
        let aad = binding.associated(*id);
        let mut known = false;
        // Two secrets may have the same id, if unlikely: each is tried.
        let ring = self.sealing.iter().chain(&self.opening);
        for RingKey { cipher, .. } in ring.filter(|entry| entry.id == *id) {
            known = true;
            if let Ok(payload) = cipher.decrypt(&XNonce::from(*nonce), Payload { msg, aad: &aad }) {
                return Ok(payload.into());
            }
        }
        Err(if known { SealError::Broken } else { SealError::UnknownSecret { id: *id } })
    }
}

impl fmt::Debug for Sealer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Sealer({} secrets)", self.sealing.iter().len() + self.opening.len())
    }
}

/// Returns `record` without its description.
fn undescribed(record: &Record) -> Record {
    let notes = Notes { description: None, ..record.notes.clone() };
    Record { notes, ..record.clone() }
}

impl RingKey {
    fn new(secret: &Secret) -> Self {
        let cipher = XChaCha20Poly1305::new(&secret.subkey("hapax 1 seal").into());
        Self { id: secret.id(), cipher }
    }
}

/// Errors of sealing and opening.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SealError {
    /// A field is longer than its limit.
    #[error(transparent)]
    TooLong(#[from] EncodeError),
    /// A note is longer than [`MAX_NOTE`].
    #[error(
        "expected a note of at most {MAX_NOTE} bytes, found {found}: store a reference instead"
    )]
    NoteTooLong {
        /// Its length, in bytes.
        found: usize,
    },
    /// There was no randomness for a nonce.
    #[error("the source of randomness failed: there is no nonce")]
    Entropy,
    /// The bytes do not begin as a sealed record.
    #[error("the bytes are not a sealed record")]
    NotSealed,
    /// The version is that of a newer Hapax, or invalid.
    #[error("a seal of version {found}; this build reads version 1")]
    Version {
        /// The version.
        found: u8,
    },
    /// There is a secret, but the record has only a checksum.
    #[error("the record was not sealed under a secret, but one is configured")]
    NotKeyed,
    /// The record was sealed with a secret that is not in the ring.
    #[error("the record was sealed under another secret ({:08x})", u32::from_be_bytes(*.id))]
    UnknownSecret {
        /// The id of that secret.
        id: [u8; 4],
    },
    /// The record is damaged, or was sealed for another operation id or write id.
    #[error("the record is damaged, or belongs to another operation id or write id")]
    Broken,
    /// The seal is intact, and its content is no record.
    #[error(transparent)]
    NotARecord(#[from] DecodeError),
}

impl From<EntropyError> for SealError {
    fn from(_: EntropyError) -> Self {
        Self::Entropy
    }
}

/// The names that a seal binds its payload to: the operation id, and the write id or entry id.
struct Binding {
    magic: [u8; 3],
    kind: u8,
    operation: [u8; 32],
    id: [u8; 16],
}

impl Binding {
    fn record(operation: &OperationId, write_id: WriteId) -> Self {
        let (operation, id) = (*operation.as_bytes(), *write_id.as_bytes());
        Self { magic: MAGIC, kind: VERSION, operation, id }
    }

    fn note(EntryKey { operation, id }: &EntryKey) -> Self {
        let (operation, id) = (*operation.as_bytes(), *id.as_bytes());
        // Another kind: a record under the same names does not open as a note.
        Self { magic: NOTE_MAGIC, kind: VERSION | 0x80, operation, id }
    }

    /// The payload, which is everything after the fields of fixed length, has no length of its own.
    fn checksum(&self, payload: &[u8]) -> [u8; CHECKSUM_LEN] {
        let mut hasher = blake3::Hasher::new_derive_key("hapax 1 checksum");
        hasher.update(&[self.kind]);
        hasher.update(&self.operation);
        hasher.update(&self.id);
        hasher.update(payload);
        *hasher.finalize().as_bytes()
    }

    fn associated(&self, secret: [u8; 4]) -> [u8; 53] {
        let mut bytes = [0; 53];
        bytes[0] = self.kind;
        bytes[1..33].copy_from_slice(&self.operation);
        bytes[33..49].copy_from_slice(&self.id);
        bytes[49..].copy_from_slice(&secret);
        bytes
    }
}
