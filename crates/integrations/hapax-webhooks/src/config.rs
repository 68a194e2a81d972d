//! The builder of the layer, and the errors of its settings.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use hapax_core::{Clock, SystemClock};
use http::HeaderValue;

use crate::layer::{WebhookLayer, WebhookSettings};
use crate::scheme::{DeliveryIdLocation, SignatureScheme};
use crate::secret::{MAX_SECRETS, SigningSecrets};

/// The longest name of a source, in characters.
const MAX_NAME: usize = 64;

/// A builder of a [`WebhookLayer`]. [`WebhookLayer::standard`] and its siblings return one.
///
/// By default:
/// 1. A body has at most 1 MiB.
/// 2. A timestamp differs from the clock by at most five minutes, in either direction.
/// 3. The clock is that of the operating system.
///
/// There is no default secret. The `Debug` form shows the number of secrets only.
#[must_use = "`build` makes the layer"]
pub struct WebhookLayerBuilder {
    source: String,
    scheme: SignatureScheme,
    secrets: Vec<Vec<u8>>,
    tolerance: Option<Duration>,
    body_limit: usize,
    clock: Arc<dyn Clock>,
}

impl WebhookLayerBuilder {
    /// The default of [`tolerance`](Self::tolerance).
    pub const TOLERANCE: Duration = Duration::from_secs(5 * 60);

    /// The default of [`body_limit`](Self::body_limit), in bytes.
    pub const BODY_LIMIT: usize = 1 << 20;

    pub(crate) fn new(source: String, scheme: SignatureScheme) -> Self {
        Self {
            source,
            scheme,
            secrets: Vec::new(),
            tolerance: None,
            body_limit: Self::BODY_LIMIT,
            clock: Arc::new(SystemClock),
        }
    }

    /// Adds a signing secret, as the sender shows it. A delivery is valid under any of them, at
    /// most eight: during a rotation there are the new one and the earlier one. A secret has at
    /// least 16 bytes, one of Standard Webhooks 24 decoded ones.
    pub fn secret(mut self, secret: impl AsRef<[u8]>) -> Self {
        self.secrets.push(secret.as_ref().to_vec());
        self
    }

    /// Sets the largest difference between a delivery's timestamp and the clock, in either
    /// direction. Senders sign each attempt anew, so it need not cover their retries.
    pub const fn tolerance(mut self, tolerance: Duration) -> Self {
        self.tolerance = Some(tolerance);
        self
    }

    /// Sets the largest body, in bytes. A larger one gets 413.
    pub const fn body_limit(mut self, bytes: usize) -> Self {
        self.body_limit = bytes;
        self
    }

    /// Sets the clock with which timestamps are compared.
    pub fn clock(mut self, clock: Arc<dyn Clock>) -> Self {
        self.clock = clock;
        self
    }

    /// Builds the layer.
    ///
    /// # Errors
    /// [`WebhookConfigError`] names the setting that is not valid; it never contains a secret.
    pub fn build(self) -> Result<WebhookLayer, WebhookConfigError> {
        let Self { source, scheme, secrets, tolerance, body_limit, clock } = self;
        let name = source_name(&source)?;
        match secrets.len() {
            0 => return Err(WebhookConfigError::NoSecret),
            found if found > MAX_SECRETS => {
                return Err(WebhookConfigError::TooManySecrets { found });
            }
            _ => {}
        }
        let secrets = SigningSecrets::parse(scheme.secret_form(), &secrets)
            .map_err(|(number, error)| WebhookConfigError::Secret { number, error })?;
        let tolerance = match (tolerance, scheme.has_timestamp()) {
            (Some(Duration::ZERO), _) => return Err(WebhookConfigError::ZeroTolerance),
            (Some(_), false) => return Err(WebhookConfigError::ToleranceWithoutTimestamp),
            (tolerance, _) => tolerance.unwrap_or(Self::TOLERANCE),
        };
        if body_limit == 0 {
            return Err(WebhookConfigError::ZeroBodyLimit);
        }
        if let Some(DeliveryIdLocation::Json(pointers)) = scheme.id()
            && pointers.iter().len() == 0
        {
            return Err(WebhookConfigError::NoPointers);
        }
        let source = Arc::from(source);
        let settings =
            WebhookSettings { source, name, scheme, secrets, tolerance, body_limit, clock };
        Ok(WebhookLayer::new(settings))
    }
}

impl fmt::Debug for WebhookLayerBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WebhookLayerBuilder")
            .field("source", &self.source)
            .field("scheme", &self.scheme)
            .field("secrets", &self.secrets.len())
            .field("tolerance", &self.tolerance)
            .field("body_limit", &self.body_limit)
            .finish_non_exhaustive()
    }
}

/// Returns the name as a header has it. It is typed by operators, so it needs no quotes anywhere.
fn source_name(name: &str) -> Result<HeaderValue, WebhookConfigError> {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    let value = HeaderValue::from_str(name)
        .ok()
        .filter(|_| !name.is_empty() && name.len() <= MAX_NAME && name.bytes().all(plain));
    value.ok_or_else(|| WebhookConfigError::Source { found: name.chars().take(80).collect() })
}

/// Reasons for which a [`WebhookLayer`] cannot be built.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WebhookConfigError {
    /// The name of the source is not valid.
    #[error(
        "expected a source's name of 1 to 64 characters (letters, digits, `-`, `_`, `.`), found \
         {found:?}: choose such a name, different from every other source's"
    )]
    Source {
        /// The name, cut off after 80 characters.
        found: String,
    },
    /// There is no secret.
    #[error(
        "expected a signing secret, found none: pass the one that the sender shows to `secret`"
    )]
    NoSecret,
    /// There are too many secrets.
    #[error("expected at most 8 signing secrets, found {found}: remove those that have expired")]
    TooManySecrets {
        /// The number of secrets.
        found: usize,
    },
    /// A secret is not valid.
    #[error("signing secret {number}: {error}")]
    Secret {
        /// The number of the secret, from 1, in the order of the calls.
        number: usize,
        /// The reason for which it is not valid.
        error: SecretError,
    },
    /// The tolerance is zero.
    #[error(
        "expected a tolerance of some seconds or minutes, found zero, which no delivery meets: set \
         a longer one, or leave the default of five minutes"
    )]
    ZeroTolerance,
    /// There is a tolerance for a scheme whose deliveries have no timestamp.
    #[error(
        "expected no tolerance, found one: deliveries of this kind have no signed timestamp; \
         remove the call of `tolerance`"
    )]
    ToleranceWithoutTimestamp,
    /// The limit of the body is zero.
    #[error(
        "expected a limit of at least one byte for the body, found zero: set a larger one, or \
         leave the default of 1 MiB"
    )]
    ZeroBodyLimit,
    /// The delivery's id has no pointer.
    #[error("expected a JSON pointer to the delivery's id, found none: pass one, such as `/id`")]
    NoPointers,
}

/// Reasons for which a signing secret is not valid.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SecretError {
    /// The secret is empty.
    #[error("expected a secret, found an empty text: check the place from which it is read")]
    Empty,
    /// The secret is too short.
    #[error("expected at least {least} bytes, found {found}: have the sender make a longer secret")]
    TooShort {
        /// The length, in bytes.
        found: usize,
        /// The smallest length, in bytes.
        least: usize,
    },
    /// The secret begins or ends with white space, such as the line break of a file.
    #[error("expected no white space around the secret, found some: remove it")]
    WhiteSpace,
    /// The secret lacks its prefix.
    #[error(
        "expected a secret that begins with `whsec_`, found another text: copy the signing secret \
         of the endpoint, not an API key"
    )]
    Prefix,
    /// The secret is not base64.
    #[error("expected padded base64 after `whsec_`, found another text: copy the whole secret")]
    Base64,
}
