//! The hashes by which the inbox knows messages: those of the SQL functions `hapax_scoped_hash` and
//! `hapax_payload_digest`. Computed here, they cost the server nothing.

use hapax_core::Fingerprint;
use hapax_messages::{Message, MessageId};
use sha2::{Digest as _, Sha256};

/// The hash of a consumer's name, to which ids are added.
#[derive(Clone, Debug)]
pub(crate) struct IdHasher(Sha256);

impl IdHasher {
    pub(crate) fn new(consumer: &str) -> Self {
        Self(Sha256::new().chain_update(consumer).chain_update([0]))
    }

    /// Returns `hapax_scoped_hash` as text for an array of `uuid`.
    pub(crate) fn hash(&self, id: &MessageId) -> String {
        hex(&self.0.clone().chain_update(id.as_str()).finalize())
    }
}

/// Returns `hapax_payload_digest` of a message's fingerprint as text for an array of `uuid`.
pub(crate) fn payload_digest(message: &Message) -> String {
    let mut fingerprint = Fingerprint::builder("hapax 1 message");
    hex(&Sha256::digest(fingerprint.field(&message.payload).finish().as_bytes()))
}

/// Returns the first 16 bytes in hexadecimal digits.
fn hex(hash: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let digit = |value: u8| char::from(DIGITS[usize::from(value)]);
    hash.iter().take(16).flat_map(|byte| [digit(byte >> 4), digit(byte & 15)]).collect()
}
