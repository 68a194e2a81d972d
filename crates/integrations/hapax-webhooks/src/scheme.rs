//! Signature schemes: the head of a delivery, before its body is read.

use std::time::Duration;

use hapax_core::{Clock, JsonPointers, PointerError, Timestamp};
use http::{HeaderMap, HeaderName};

use crate::rejection::{Rejected, WebhookRejection};
use crate::secret::{Mac, SecretForm, mac_from_base64, mac_from_hex};
#[cfg(feature = "sink")]
use crate::secret::{SigningSecrets, mac_to_base64};
#[cfg(feature = "sink")]
use hapax_core::Key;

/// The largest number of signatures in a header. A sender that rotates its secret sends two.
const MAX_SIGNATURES: usize = 32;

pub(crate) const STANDARD_HEADERS: StandardHeaders = StandardHeaders {
    id: HeaderName::from_static("webhook-id"),
    timestamp: HeaderName::from_static("webhook-timestamp"),
    signature: HeaderName::from_static("webhook-signature"),
};
const SVIX_HEADERS: StandardHeaders = StandardHeaders {
    id: HeaderName::from_static("svix-id"),
    timestamp: HeaderName::from_static("svix-timestamp"),
    signature: HeaderName::from_static("svix-signature"),
};
const STRIPE_SIGNATURE: HeaderName = HeaderName::from_static("stripe-signature");

/// The pointer to the id of Stripe's events.
const STRIPE_ID: &str = "/id";

/// The headers of Standard Webhooks, under one of their names.
pub(crate) struct StandardHeaders {
    pub(crate) id: HeaderName,
    pub(crate) timestamp: HeaderName,
    pub(crate) signature: HeaderName,
}

/// A scheme by which a sender signs.
#[derive(Clone, Debug)]
pub(crate) enum SignatureScheme {
    Standard,
    Stripe,
    Hmac(HmacScheme),
}

/// The signature of a sender that signs its body alone: an HMAC-SHA256 in a header.
///
/// ```
/// use hapax_webhooks::{DeliveryIdLocation, HmacScheme, SignatureEncoding};
/// use http::HeaderName;
/// // Shopify
/// let header = HeaderName::from_static("x-shopify-hmac-sha256");
/// let id = DeliveryIdLocation::header(HeaderName::from_static("x-shopify-event-id"));
/// let shopify = HmacScheme::new(header, SignatureEncoding::Base64, id);
/// # drop(shopify);
/// ```
#[derive(Clone, Debug)]
pub struct HmacScheme {
    header: HeaderName,
    encoding: SignatureEncoding,
    prefix: String,
    id: DeliveryIdLocation,
}

impl HmacScheme {
    /// Creates the scheme of a signature in `header`, with the delivery's id at `id`.
    #[must_use]
    pub fn new(header: HeaderName, encoding: SignatureEncoding, id: DeliveryIdLocation) -> Self {
        Self { header, encoding, prefix: String::new(), id }
    }

    /// Sets the text before the signature, such as `sha256=`. A value without it is not valid.
    /// Default: none.
    #[must_use]
    pub fn prefix(mut self, prefix: impl Into<String>) -> Self {
        self.prefix = prefix.into();
        self
    }
}

/// Encodings of a signature.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum SignatureEncoding {
    /// Hexadecimal digits of either case.
    Hex,
    /// Base64 with the standard alphabet and padding.
    Base64,
}

/// Location of a delivery's id in the request. All attempts of one delivery have the same id.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum DeliveryIdLocation {
    /// The value of a header. The signature does not cover it.
    Header(HeaderName),
    /// The strings or integers at these pointers into the JSON body, each of which must exist.
    /// Several of them are one JSON array, in the order of the sorted pointers.
    Json(JsonPointers),
}

impl DeliveryIdLocation {
    /// Creates the location of an id in a header.
    #[must_use]
    pub const fn header(name: HeaderName) -> Self {
        Self::Header(name)
    }

    /// Creates the location of an id at pointers into the JSON body, such as `/id`.
    ///
    /// # Errors
    /// [`PointerError`] if one is not a pointer.
    pub fn json<T: AsRef<str>>(
        pointers: impl IntoIterator<Item = T>,
    ) -> Result<Self, PointerError> {
        JsonPointers::new(pointers).map(Self::Json)
    }
}

/// Contents of the signature headers of a delivery: signatures, signed bytes before the body, id
/// and timestamp.
#[derive(Debug)]
pub(crate) struct SignedHead {
    /// The signatures, at least one.
    pub(crate) signatures: Vec<Mac>,
    /// The bytes that are signed before the body.
    pub(crate) before_body: Vec<u8>,
    pub(crate) id: FoundId,
    pub(crate) timestamp: Option<Timestamp>,
}

/// The delivery's id, as far as the head has it.
#[derive(Debug)]
pub(crate) enum FoundId {
    Text(Vec<u8>),
    /// At these JSON pointers into the body.
    InBody(Vec<String>),
}

impl SignatureScheme {
    pub(crate) const fn secret_form(&self) -> SecretForm {
        match self {
            Self::Standard => SecretForm::Standard,
            Self::Stripe => SecretForm::Stripe,
            Self::Hmac(_) => SecretForm::Text,
        }
    }

    pub(crate) const fn has_timestamp(&self) -> bool {
        !matches!(self, Self::Hmac(_))
    }

    /// Returns the place of the id, if it is a setting.
    pub(crate) const fn id(&self) -> Option<&DeliveryIdLocation> {
        match self {
            Self::Standard | Self::Stripe => None,
            Self::Hmac(HmacScheme { id, .. }) => Some(id),
        }
    }

    /// Reads the head of a delivery.
    pub(crate) fn head(&self, headers: &HeaderMap) -> Result<SignedHead, Rejected> {
        match self {
            Self::Standard => standard(headers),
            Self::Stripe => stripe(headers),
            Self::Hmac(scheme) => hmac(headers, scheme),
        }
    }
}

/// Checks that a timestamp is within the tolerance.
pub(crate) fn check_time(
    timestamp: Timestamp,
    clock: &dyn Clock,
    tolerance: Duration,
) -> Result<(), Rejected> {
    let now = clock.now();
    let (side, difference) = match timestamp > now {
        true => ("ahead of", timestamp.since(now)),
        false => ("behind", now.since(timestamp)),
    };
    if difference <= tolerance {
        return Ok(());
    }
    let detail = format!(
        "Expected a timestamp within {} s of the receiver's clock, found one {} s {side} it: send \
         the delivery again with a new timestamp, and check the clocks.",
        tolerance.as_secs(),
        difference.as_secs()
    );
    Err(Rejected::new(WebhookRejection::TimestampOutsideTolerance, detail))
}

fn standard(headers: &HeaderMap) -> Result<SignedHead, Rejected> {
    let names = match headers.contains_key(STANDARD_HEADERS.signature) {
        false if headers.contains_key(SVIX_HEADERS.signature) => SVIX_HEADERS,
        _ => STANDARD_HEADERS,
    };
    let signature = signature_header(headers, &names.signature)?;
    let timestamp = one_line(headers, &names.timestamp)
        .and_then(|line| std::str::from_utf8(line).map_err(|_| "bytes that are not UTF-8"))
        .map_err(|found| invalid(&names.timestamp, "seconds since 1970", found))?;
    let id = id_header(headers, &names.id)?;
    if id.contains(&b'.') {
        // `a.1.2.b` is signed for the id `a` as well as for `a.1`.
        let name = &names.id;
        let detail = format!(
            "Expected an id without a full stop in `{name}`, found one with it, which could be read \
             as another delivery: send another id."
        );
        return Err(Rejected::new(WebhookRejection::InvalidDeliveryId, detail));
    }
    let signatures = signature.split(' ').filter_map(|one| one.strip_prefix("v1,"));
    let signatures =
        macs_of(signatures.map(mac_from_base64), &names.signature, "`v1,` and base64")?;
    let before_body = standard_content(&id, timestamp);
    let timestamp = Some(seconds(timestamp, &names.timestamp)?);
    Ok(SignedHead { signatures, before_body, id: FoundId::Text(id), timestamp })
}

/// Returns what a signature of Standard Webhooks covers before the body.
pub(crate) fn standard_content(id: &[u8], timestamp: &str) -> Vec<u8> {
    [id, b".", timestamp.as_bytes(), b"."].concat()
}

/// Returns the signatures of a delivery of Standard Webhooks, one for each secret.
#[cfg(feature = "sink")]
pub(crate) fn standard_signature(
    secrets: &SigningSecrets,
    id: &Key,
    timestamp: &str,
    body: &[u8],
) -> String {
    let content = standard_content(id.as_str().as_bytes(), timestamp);
    let parts = [&content, body];
    let signatures = secrets.macs(&parts);
    signatures.map(|mac| format!("v1,{}", mac_to_base64(&mac))).collect::<Vec<_>>().join(" ")
}

fn stripe(headers: &HeaderMap) -> Result<SignedHead, Rejected> {
    let name = &STRIPE_SIGNATURE;
    let line = signature_header(headers, name)?;
    let fields = || line.split(',').filter_map(|field| field.trim().split_once('='));
    let mut times = fields().filter_map(|(field, value)| (field == "t").then_some(value));
    let (Some(time), None) = (times.next(), times.next()) else {
        return Err(invalid(name, "one timestamp `t=`", "none or several"));
    };
    let signatures = fields().filter_map(|(field, value)| (field == "v1").then_some(value));
    let signatures =
        macs_of(signatures.map(mac_from_hex), name, "`v1=` and 64 hexadecimal digits")?;
    let before_body = [time.as_bytes(), b"."].concat();
    let timestamp = Some(seconds(time, name)?);
    Ok(SignedHead {
        signatures,
        before_body,
        id: FoundId::InBody(vec![STRIPE_ID.to_owned()]),
        timestamp,
    })
}

fn hmac(headers: &HeaderMap, scheme: &HmacScheme) -> Result<SignedHead, Rejected> {
    let HmacScheme { header, encoding, prefix, id } = scheme;
    let line = signature_header(headers, header)?;
    let mac = line.strip_prefix(prefix.as_str()).map(|text| match encoding {
        SignatureEncoding::Hex => mac_from_hex(text),
        SignatureEncoding::Base64 => mac_from_base64(text),
    });
    let expected = match encoding {
        SignatureEncoding::Hex => format!("`{prefix}` and 64 hexadecimal digits"),
        SignatureEncoding::Base64 => format!("`{prefix}` and the base64 of 32 bytes"),
    };
    let signatures = macs_of(mac.into_iter(), header, &expected)?;
    let id = found_id(headers, id)?;
    Ok(SignedHead { signatures, before_body: Vec::new(), id, timestamp: None })
}

/// Returns the signatures that can be decoded, at least one; ignores the others.
fn macs_of(
    signatures: impl Iterator<Item = Option<Mac>>,
    name: &HeaderName,
    expected: &str,
) -> Result<Vec<Mac>, Rejected> {
    let signatures: Vec<_> = signatures.take(MAX_SIGNATURES + 1).collect();
    if signatures.len() > MAX_SIGNATURES {
        return Err(invalid(name, "at most 32 signatures", "more"));
    }
    let signatures: Vec<_> = signatures.into_iter().flatten().collect();
    match signatures.is_empty() {
        true => Err(invalid(name, expected, "another text")),
        false => Ok(signatures),
    }
}

fn found_id(headers: &HeaderMap, id: &DeliveryIdLocation) -> Result<FoundId, Rejected> {
    match id {
        DeliveryIdLocation::Header(name) => id_header(headers, name).map(FoundId::Text),
        DeliveryIdLocation::Json(pointers) => {
            Ok(FoundId::InBody(pointers.iter().map(str::to_owned).collect()))
        }
    }
}

fn id_header(headers: &HeaderMap, name: &HeaderName) -> Result<Vec<u8>, Rejected> {
    one_line(headers, name).map(<[u8]>::to_vec).map_err(|found| {
        let detail = format!(
            "Expected one header `{name}` with the delivery's id, found {found}: send one."
        );
        Rejected::new(WebhookRejection::InvalidDeliveryId, detail)
    })
}

fn signature_header<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Result<&'a str, Rejected> {
    let line = one_line(headers, name);
    line.and_then(|line| std::str::from_utf8(line).map_err(|_| "bytes that are not UTF-8"))
        .map_err(|found| invalid(name, "one signature header", found))
}

/// Returns the only line of a header, or the reason why there is none.
fn one_line<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Result<&'a [u8], &'static str> {
    let mut lines = headers.get_all(name).iter();
    match (lines.next(), lines.next()) {
        (Some(line), None) => Ok(line.as_bytes()),
        (None, _) => Err("none"),
        (Some(_), Some(_)) => Err("several"),
    }
}

/// Returns the time of decimal seconds since 1970.
fn seconds(text: &str, name: &HeaderName) -> Result<Timestamp, Rejected> {
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let micros = text.parse::<u64>().ok().and_then(|seconds| seconds.checked_mul(1_000_000));
    micros
        .filter(|_| digits)
        .map(Timestamp::from_micros)
        .ok_or_else(|| invalid(name, "seconds since 1970", "another text"))
}

fn invalid(name: &HeaderName, expected: &str, found: &str) -> Rejected {
    let detail = format!(
        "Expected {expected} in `{name}`, found {found}: sign the delivery, and send it whole."
    );
    Rejected::new(WebhookRejection::InvalidSignature, detail)
}
