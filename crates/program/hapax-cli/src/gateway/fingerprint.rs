//! What of a request counts, as it is said.

use std::convert::Infallible;
use std::fmt::{self, Display};
use std::str::FromStr;

use clap::ValueEnum;
use hapax_core::JsonPointers;
use hapax_http::fingerprint::{BodyForm, HttpFingerprintScheme, JsonParts};
use http::HeaderName;
use serde::{Deserialize, Serialize};

use super::build::names;
use super::fields::PolicyFields;
use super::value_args::HeaderArg;

/// How a body counts.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum BodyFormArg {
    Canonical,
    Raw,
    None,
}

/// A JSON pointer, or `none` alone. What is no pointer is refused with all that is said beside it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct PointerArg(String);

impl FromStr for PointerArg {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        Ok(Self(text.trim().to_owned()))
    }
}

impl Display for PointerArg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

const NONE: &str = "none";

impl PolicyFields {
    /// What of a request counts.
    pub(super) fn fingerprint(&self) -> Result<HttpFingerprintScheme, String> {
        let body = match self.fingerprint_body {
            None | Some(BodyFormArg::Canonical) => BodyForm::Canonical,
            Some(BodyFormArg::Raw) => BodyForm::Raw,
            Some(BodyFormArg::None) => BodyForm::Ignored,
        };
        let only = pointers("--fingerprint-only", self.fingerprint_only.as_deref())?;
        let except = pointers("--fingerprint-except", self.fingerprint_except.as_deref())?;
        let json = match (only, except) {
            (None, None) => JsonParts::All,
            (Some(only), None) => JsonParts::Only(only),
            (None, Some(except)) => JsonParts::Except(except),
            (Some(_), Some(_)) => {
                return Err("--fingerprint-except contradicts --fingerprint-only".into());
            }
        };
        if json != JsonParts::All && body != BodyForm::Canonical {
            return Err("--fingerprint-body must be `canonical` with --fingerprint-only or \
                 --fingerprint-except: they are about what JSON says"
                .into());
        }
        let mut headers = names(self.fingerprint_headers.clone()).unwrap_or_default();
        match &headers[..] {
            [only] if only == NONE => headers.clear(),
            all if all.iter().any(|name| name == NONE) => {
                return Err("--fingerprint-headers: `none` stands alone".into());
            }
            _ => {}
        }
        let scheme = HttpFingerprintScheme::new(body, headers).and_then(|scheme| scheme.json(json));
        scheme.map_err(|error| {
            format!("--fingerprint-headers, --fingerprint-only and --fingerprint-except: {error}")
        })
    }
}

fn pointers(flag: &str, said: Option<&[PointerArg]>) -> Result<Option<JsonPointers>, String> {
    match said {
        None => Ok(None),
        Some([only]) if only.0 == NONE => Ok(None),
        Some(parts) => {
            let pointers = JsonPointers::new(parts.iter().map(|part| &part.0));
            pointers.map(Some).map_err(|error| format!("{flag}: {error}"))
        }
    }
}

/// Body, only, except, headers.
type FingerprintFields =
    (Option<BodyFormArg>, Option<Vec<PointerArg>>, Option<Vec<PointerArg>>, Option<Vec<HeaderArg>>);

/// What would have to be said for this scheme.
pub(super) fn said(scheme: &HttpFingerprintScheme) -> FingerprintFields {
    let none = || vec![PointerArg(NONE.into())];
    let parts =
        |pointers: &JsonPointers| pointers.iter().map(|text| PointerArg(text.into())).collect();
    let (only, except) = match scheme.json_parts() {
        JsonParts::All => (none(), none()),
        JsonParts::Only(pointers) => (parts(pointers), none()),
        JsonParts::Except(pointers) => (none(), parts(pointers)),
    };
    let form = match scheme.body_form() {
        BodyForm::Canonical => BodyFormArg::Canonical,
        BodyForm::Raw => BodyFormArg::Raw,
        BodyForm::Ignored => BodyFormArg::None,
    };
    let headers: Vec<_> = scheme.headers().iter().cloned().map(HeaderArg).collect();
    let headers =
        if headers.is_empty() { vec![HeaderArg(HeaderName::from_static(NONE))] } else { headers };
    (Some(form), Some(only), Some(except), Some(headers))
}
