//! Redirects: responses with which a service said that a request is to be repeated elsewhere.

use std::sync::Arc;

use bytes::{Buf, BufMut, Bytes, BytesMut};

use super::{Extensions, Outcome};
use crate::fingerprint::{Fingerprint, FingerprintScheme};

/// A response that released its key and sent its request elsewhere. A request with this fingerprint gets it
/// again, whatever the record's state: the one that executes under the key has another fingerprint.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Redirect {
    /// Scheme of the fingerprint.
    pub scheme: FingerprintScheme,
    /// Fingerprint of the request that was redirected.
    pub fingerprint: Fingerprint,
    /// The response.
    pub outcome: Outcome,
}

/// Number of the redirects, which belong to the key. Each is the length of its scheme (`u16`) and the scheme,
/// the fingerprint, the length of the format (`u8`) and the format, the length of the bytes (`u16`) and the
/// bytes.
const REDIRECTS: u16 = Extensions::FIRST_OF_KEY;

impl Extensions {
    /// The most redirects of a key.
    pub const MAX_REDIRECTS: usize = 8;

    /// Returns the redirects of the key, the first one first; none if the field cannot be read.
    #[must_use]
    pub fn redirects(&self) -> Vec<Redirect> {
        let Some(field) = self.field(REDIRECTS) else { return Vec::new() };
        let mut rest = field.clone();
        let mut redirects = Vec::new();
        while !rest.is_empty() {
            let Some(redirect) = read(&mut rest) else { return Vec::new() };
            redirects.push(redirect);
        }
        redirects
    }

    /// Returns whether there is a redirect.
    #[must_use]
    pub fn has_redirects(&self) -> bool {
        self.get(REDIRECTS).is_some()
    }

    /// Adds a redirect, in place of an earlier one of the same request. It is left out beyond
    /// [`MAX_REDIRECTS`](Self::MAX_REDIRECTS), and if all together are longer than
    /// [`MAX_FIELD`](Self::MAX_FIELD): then a request with its fingerprint is compared like any other.
    pub fn add_redirect(&mut self, redirect: Redirect) {
        let mut redirects = self.redirects();
        let is_of_request =
            |it: &Redirect| it.scheme == redirect.scheme && it.fingerprint == redirect.fingerprint;
        redirects.retain(|it| !is_of_request(it));
        redirects.push(redirect);
        let mut field = BytesMut::new();
        let written = redirects.iter().all(|it| write(&mut field, it).is_some());
        if written && redirects.len() <= Self::MAX_REDIRECTS && field.len() <= Self::MAX_FIELD {
            self.set(REDIRECTS, Some(field.freeze()));
        }
    }
}

fn write(out: &mut BytesMut, redirect: &Redirect) -> Option<()> {
    let Redirect { scheme, fingerprint, outcome } = redirect;
    out.put_u16(u16::try_from(scheme.as_str().len()).ok()?);
    out.put_slice(scheme.as_str().as_bytes());
    out.put_slice(fingerprint.as_bytes());
    out.put_u8(u8::try_from(outcome.format().len()).ok()?);
    out.put_slice(outcome.format().as_bytes());
    out.put_u16(u16::try_from(outcome.bytes().len()).ok()?);
    out.put_slice(outcome.bytes());
    Some(())
}

fn read(rest: &mut Bytes) -> Option<Redirect> {
    let length = rest.try_get_u16().ok()?;
    let scheme = FingerprintScheme::new(text(rest, length.into())?).ok()?;
    let fingerprint = <[u8; 32]>::try_from(take(rest, 32)?.as_ref()).ok()?;
    let length = rest.try_get_u8().ok()?;
    let format: Arc<str> = text(rest, length.into())?.into();
    let length = rest.try_get_u16().ok()?;
    let outcome = Outcome::new(format, take(rest, length.into())?);
    Some(Redirect { scheme, fingerprint: Fingerprint::from_bytes(fingerprint), outcome })
}

fn take(rest: &mut Bytes, length: usize) -> Option<Bytes> {
    (length <= rest.len()).then(|| rest.split_to(length))
}

fn text(rest: &mut Bytes, length: usize) -> Option<String> {
    String::from_utf8(take(rest, length)?.into()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn redirect(number: u8, length: usize) -> Redirect {
        Redirect {
            scheme: FingerprintScheme::new("test").unwrap(),
            fingerprint: Fingerprint::from_bytes([number; 32]),
            outcome: Outcome::new("http/1", vec![number; length]),
        }
    }

    #[test]
    fn redirects_are_read_as_written_and_one_of_a_request_is_replaced() {
        let mut extensions = Extensions::default();
        assert!(!extensions.has_redirects());
        for number in 0..3 {
            extensions.add_redirect(redirect(number, 100));
        }
        extensions.add_redirect(redirect(1, 7));
        let expected = [redirect(0, 100), redirect(2, 100), redirect(1, 7)];
        assert_eq!(extensions.of_key().redirects(), expected);
    }

    #[test]
    fn the_bytes_of_a_redirect_do_not_change() {
        let mut extensions = Extensions::default();
        extensions.add_redirect(redirect(0xab, 2));
        let expected =
            [&b"\0\x04test"[..], &[0xab; 32], b"\x06http/1", b"\0\x02", &[0xab; 2]].concat();
        assert_eq!(extensions.get(0x8000).unwrap(), &expected[..]);
    }

    #[test]
    fn redirects_beyond_the_limits_are_left_out() {
        let mut extensions = Extensions::default();
        for number in 0..=Extensions::MAX_REDIRECTS as u8 {
            extensions.add_redirect(redirect(number, 10));
        }
        assert_eq!(extensions.redirects().len(), Extensions::MAX_REDIRECTS);
        let before = extensions.redirects();
        for length in [Extensions::MAX_FIELD, 1 << 17] {
            extensions.add_redirect(redirect(0, length));
            assert_eq!(extensions.redirects(), before);
        }
    }

    #[test]
    fn a_field_that_cannot_be_read_has_no_redirect() {
        let mut extensions = Extensions::default();
        extensions.add_redirect(redirect(1, 10));
        let field = extensions.field(REDIRECTS).unwrap().clone();
        for length in 1..field.len() {
            extensions.set(REDIRECTS, Some(field.slice(..length)));
            assert_eq!(extensions.redirects(), []);
        }
        extensions.set(REDIRECTS, Some(Bytes::from_static(&[0xff; 99])));
        assert_eq!(extensions.redirects(), []);
    }
}
