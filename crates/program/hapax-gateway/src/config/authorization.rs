//! Credentials of reconcile requests without a retry.

use std::fmt::Display;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use hapax_operators::open_secret_file;
use http::HeaderValue;

use super::ConfigError;

/// Longest value of an `Authorization` header, in bytes.
const MAX_AUTHORIZATION: u64 = 8 << 10;

/// Credentials of reconcile requests without a retry, in place of those of the caller, which no record has.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ReconcileAuthorization {
    /// File with the value of `Authorization`.
    File(PathBuf),
    /// None: the reconcile URL needs none.
    Nothing,
}

/// The `Authorization` of reconcile requests without a retry, in place of a caller's credentials.
#[derive(Clone, Debug)]
pub(crate) struct UnretriedAuthorization {
    /// The value; `None` if the reconcile URL needs none.
    pub(crate) value: Option<HeaderValue>,
    /// Its file, if users other than its owner could read or write it when it was read.
    pub(crate) open_file: Option<PathBuf>,
}

impl ReconcileAuthorization {
    /// Reads the credentials.
    pub(super) fn read(&self) -> Result<UnretriedAuthorization, ConfigError> {
        match self {
            Self::Nothing => Ok(UnretriedAuthorization { value: None, open_file: None }),
            Self::File(path) => {
                let (value, is_open) = read(path)?;
                let open_file = is_open.then(|| path.clone());
                Ok(UnretriedAuthorization { value: Some(value), open_file })
            }
        }
    }
}

/// Reads the value of an `Authorization` header from a file, without the end of its line. Returns whether other users can
/// read or write the file, too.
fn read(path: &Path) -> Result<(HeaderValue, bool), ConfigError> {
    let unusable = |reason: &dyn Display, is_missing| {
        let (path, reason) = (path.display().to_string(), reason.to_string());
        ConfigError::ReconcileAuthorization { path, reason, is_missing }
    };
    let failed = |error: io::Error| unusable(&error, error.kind() == io::ErrorKind::NotFound);
    let mut text = String::new();
    let (file, is_open) = open_secret_file(path).map_err(failed)?;
    file.take(MAX_AUTHORIZATION + 1).read_to_string(&mut text).map_err(failed)?;
    let value = HeaderValue::from_str(text.trim_end()).ok().filter(|value| !value.is_empty());
    let Some(mut value) = value.filter(|_| text.len() as u64 <= MAX_AUTHORIZATION) else {
        let reason = "expected one line with the value of an Authorization header, at most 8 KiB, found another content";
        return Err(unusable(&reason, false));
    };
    value.set_sensitive(true);
    Ok((value, is_open))
}
