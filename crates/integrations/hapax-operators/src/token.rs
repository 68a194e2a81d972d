//! The token of the operators' API, and the file that holds it.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use hapax_core::{Entropy, EntropyError};
use http::header::{AUTHORIZATION, HeaderMap, HeaderValue};
use subtle::ConstantTimeEq;

/// The longest file that is read.
const MAX_FILE: u64 = 4096;

/// The name of the file where the store has none of its own.
const IN_WORKING_DIRECTORY: &str = "./hapax.admin-token";

/// The bearer token of the operators' API. Its `Debug` form does not show it.
#[derive(Clone, PartialEq, Eq)]
pub struct AdminToken(String);

/// Errors of reading or creating a token.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TokenError {
    /// The text cannot be a token.
    #[error(
        "expected one line of {} or more visible ASCII characters, found {found}: write another \
         token, or remove the file to have one made",
        AdminToken::MIN_LEN
    )]
    Text {
        /// The defect that was found; never the text itself.
        found: &'static str,
    },
    /// The file cannot be read.
    #[error("the token file cannot be read: {0}: make it readable for this user")]
    Read(#[source] io::Error),
    /// The file does not exist and cannot be made.
    #[error(
        "cannot be made: {0}; name a path in a folder that the process can write to, or write the \
         token there"
    )]
    Make(#[source] io::Error),
    /// There is no randomness for a new token.
    #[error(transparent)]
    Entropy(#[from] EntropyError),
}

impl AdminToken {
    /// The shortest token, in characters.
    pub const MIN_LEN: usize = 16;

    /// Creates a token from this text.
    ///
    /// # Errors
    /// [`TokenError::Text`].
    pub fn new(text: impl Into<String>) -> Result<Self, TokenError> {
        let text = text.into();
        if !text.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(TokenError::Text { found: "other characters" });
        }
        if text.len() < Self::MIN_LEN {
            return Err(TokenError::Text { found: "fewer" });
        }
        Ok(Self(text))
    }

    /// Reads the token in the file at `path`; white space around it does not count.
    ///
    /// # Errors
    /// [`TokenError::Read`] and [`TokenError::Text`].
    pub fn read(path: &Path) -> Result<Self, TokenError> {
        let mut text = String::new();
        let file = File::open(path).map_err(TokenError::Read)?;
        file.take(MAX_FILE + 1).read_to_string(&mut text).map_err(TokenError::Read)?;
        if text.len() as u64 > MAX_FILE {
            return Err(TokenError::Text { found: "more than 4096 bytes" });
        }
        Self::new(text.trim())
    }

    /// Reads the token in the file at `path`. Where there is no file, makes one with a new token
    /// that only the file's owner can read.
    ///
    /// Any number of processes may do it at once: all of them get the same token.
    ///
    /// # Errors
    /// [`TokenError`].
    pub fn read_or_make(path: &Path, entropy: &dyn Entropy) -> Result<Self, TokenError> {
        match Self::read(path) {
            Err(TokenError::Read(error)) if error.kind() == io::ErrorKind::NotFound => {
                let mut bytes = [0; 40];
                entropy.fill(&mut bytes)?;
                let (token, name) = bytes.split_at(32);
                make(path, &crate::hex(token), &crate::hex(name)).map_err(TokenError::Make)?;
                // It may be that of another process that was faster.
                Self::read(path)
            }
            read => read,
        }
    }

    /// Returns the path of the file where neither the operator nor the configuration names one:
    /// beside a store that is a file, otherwise in the working directory.
    #[must_use]
    pub fn default_path(store: Option<&Path>) -> PathBuf {
        match store {
            Some(store) => {
                let mut path = store.to_owned().into_os_string();
                path.push(".admin-token");
                path.into()
            }
            None => IN_WORKING_DIRECTORY.into(),
        }
    }

    /// Returns the value of `Authorization` with this token. The value is marked as sensitive, so
    /// logs do not show it.
    #[must_use]
    pub fn header(&self) -> HeaderValue {
        // Visible ASCII is always a valid value.
        let mut value = HeaderValue::try_from(format!("Bearer {}", self.0))
            .unwrap_or(HeaderValue::from_static(""));
        value.set_sensitive(true);
        value
    }

    /// Returns whether these headers contain the token. The time of the comparison depends on the
    /// length of the sent text only.
    pub(crate) fn is_shown_in(&self, headers: &HeaderMap) -> bool {
        let shown = headers.get(AUTHORIZATION).map_or(&b""[..], HeaderValue::as_bytes);
        let (scheme, shown) = shown.split_at_checked(7).unwrap_or((b"", b""));
        scheme.eq_ignore_ascii_case(b"bearer ") && bool::from(shown.ct_eq(self.0.as_bytes()))
    }
}

impl fmt::Debug for AdminToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("AdminToken(..)")
    }
}

/// Returns whether users other than its owner can read or write the file at `path`.
#[cfg(unix)]
#[must_use]
pub fn is_open_to_others(path: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt;
    path.metadata().is_ok_and(|found| found.permissions().mode() & 0o077 != 0)
}

/// Opens the regular file with a secret at `path`. Returns it, and whether users other than its owner can read or write it.
///
/// # Errors
/// Any error of opening, and [`io::ErrorKind::InvalidInput`] for what is no regular file: a read of a pipe would wait.
pub fn open_secret_file(path: &Path) -> io::Result<(File, bool)> {
    let mut options = OpenOptions::new();
    options.read(true);
    #[cfg(unix)]
    {
        use std::os::unix::fs::OpenOptionsExt;
        // The opening of a pipe would wait for its writer.
        options.custom_flags(rustix::fs::OFlags::NONBLOCK.bits().cast_signed());
    }
    let file = options.open(path)?;
    let found = file.metadata()?;
    if !found.is_file() {
        let text = "expected a regular file, found another kind of file";
        return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
    }
    #[cfg(unix)]
    let is_open_to_others = std::os::unix::fs::MetadataExt::mode(&found) & 0o077 != 0;
    #[cfg(not(unix))]
    let is_open_to_others = false;
    Ok((file, is_open_to_others))
}

/// Returns whether users other than its owner can read or write the private key at `path`. As in libpq, the group of a
/// file of root may read it.
#[cfg(unix)]
#[must_use]
pub fn is_key_open_to_others(path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    path.metadata().is_ok_and(|found| {
        let of_others = if found.uid() == 0 { 0o037 } else { 0o077 };
        found.mode() & of_others != 0
    })
}

/// Returns false: on this platform the permissions are not checked.
#[cfg(not(unix))]
#[must_use]
pub const fn is_key_open_to_others(_: &Path) -> bool {
    false
}

/// Returns false: on this platform the permissions are not checked.
#[cfg(not(unix))]
#[must_use]
pub const fn is_open_to_others(_: &Path) -> bool {
    false
}

/// Makes the file whole, under a random name first, so that no reader ever finds half a token.
/// A link, unlike a rename, keeps the file of another process that was faster.
fn make(path: &Path, token: &str, name: &str) -> io::Result<()> {
    let mut unfinished = path.to_owned().into_os_string();
    unfinished.push(format!(".{name}.new"));
    let unfinished = PathBuf::from(unfinished);
    let linked = write(&unfinished, token).and_then(|()| std::fs::hard_link(&unfinished, path));
    let made = match linked {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        // A file system without links.
        Err(error)
            if matches!(
                error.kind(),
                io::ErrorKind::Unsupported | io::ErrorKind::PermissionDenied
            ) && unfinished.exists() =>
        {
            match write(path, token) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
                written => written,
            }
        }
        linked => linked,
    };
    let _ = std::fs::remove_file(&unfinished);
    made
}

fn write(path: &Path, token: &str) -> io::Result<()> {
    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    let mut file = options.open(path)?;
    file.write_all(format!("{token}\n").as_bytes())?;
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use hapax_core::SystemEntropy;

    use super::*;

    #[test]
    fn a_token_is_created_once_and_readable_by_its_owner_only() {
        let folder = tempfile::tempdir().unwrap();
        let path = AdminToken::default_path(Some(&folder.path().join("hapax.db")));
        assert_eq!(path, folder.path().join("hapax.db.admin-token"));
        let tokens: Vec<_> = std::thread::scope(|scope| {
            let makers: Vec<_> = (0..8)
                .map(|_| scope.spawn(|| AdminToken::read_or_make(&path, &SystemEntropy).unwrap()))
                .collect();
            makers.into_iter().map(|maker| maker.join().unwrap()).collect()
        });
        assert!(tokens.iter().all(|token| *token == tokens[0]), "{tokens:?}");
        assert_eq!(tokens[0].0.len(), 64);
        assert!(!is_open_to_others(&path));
        let files: Vec<_> = folder.path().read_dir().unwrap().map(|it| it.unwrap()).collect();
        assert_eq!(files.len(), 1, "{files:?}");
        assert_eq!(format!("{:?}", tokens[0]), "AdminToken(..)");
    }

    #[test]
    fn text_that_is_no_token_is_rejected() {
        for bad in ["", "fifteen-letters", "sixteen letters!", "sixteen-letters-\u{e9}"] {
            assert!(matches!(AdminToken::new(bad), Err(TokenError::Text { .. })), "{bad}");
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("token");
        std::fs::write(&path, " sixteen-letters!\n").unwrap();
        assert_eq!(AdminToken::read(&path).unwrap(), AdminToken::new("sixteen-letters!").unwrap());
        std::fs::write(&path, "x".repeat(5000)).unwrap();
        assert!(matches!(AdminToken::read(&path), Err(TokenError::Text { .. })));
        let missing = folder.path().join("no").join("token");
        let error = AdminToken::read_or_make(&missing, &SystemEntropy).unwrap_err();
        assert!(matches!(error, TokenError::Make(_)), "{error:?}");
    }

    #[test]
    fn only_the_complete_token_is_accepted() {
        let token = AdminToken::new("sixteen-letters!").unwrap();
        let shown = |value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(AUTHORIZATION, value.parse().unwrap());
            token.is_shown_in(&headers)
        };
        assert!(shown("Bearer sixteen-letters!") && shown("bearer sixteen-letters!"));
        for bad in ["Bearer sixteen-letters", "Bearer sixteen-letters!1", "sixteen-letters!", ""] {
            assert!(!shown(bad), "{bad}");
        }
        assert!(!shown("Basic sixteen-letters!") && !shown("Bearer "));
        assert!(!token.is_shown_in(&HeaderMap::new()));
        assert_eq!(token.header(), "Bearer sixteen-letters!");
    }

    #[cfg(unix)]
    #[test]
    fn a_file_with_a_secret_is_a_regular_one_and_its_mode_is_that_of_what_is_read() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let (path, link) = (folder.path().join("secret"), folder.path().join("link"));
        std::fs::write(&path, "x").unwrap();
        std::os::unix::fs::symlink(&path, &link).unwrap();
        for (mode, open) in [(0o600, false), (0o640, true), (0o604, true)] {
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            for path in [&path, &link] {
                assert_eq!(open_secret_file(path).unwrap().1, open, "{mode:o}");
            }
        }
        let pipe = folder.path().join("pipe");
        let mode = rustix::fs::Mode::from_raw_mode(0o600);
        rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, mode).unwrap();
        for other in [&*pipe, folder.path()] {
            let error = open_secret_file(other).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{error}");
        }
    }

    #[cfg(unix)]
    #[test]
    fn the_group_of_a_file_of_root_may_read_a_private_key() {
        use std::os::unix::fs::{MetadataExt, PermissionsExt};
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("key.pem");
        std::fs::write(&path, "x").unwrap();
        let is_roots = path.metadata().unwrap().uid() == 0;
        for (mode, open) in [(0o600, false), (0o640, !is_roots), (0o660, true), (0o604, true)] {
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            assert_eq!(is_key_open_to_others(&path), open, "{mode:o}");
        }
        assert!(!is_key_open_to_others(&folder.path().join("none")));
    }
}
