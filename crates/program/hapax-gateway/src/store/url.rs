//! URLs of stores and caches.

use std::fmt;
use std::net::IpAddr;
use std::path::PathBuf;
use std::str::FromStr;

use hapax_core::driver::StoreDriver;
use hapax_operators::{AdminToken, Audit};
use hapax_redis::RedisDriver;
use percent_encoding::percent_decode_str;

use super::drivers::StoreDrivers;

/// URL of a store. Its text form leaves out secrets.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum StoreUrl {
    /// `memory:`: records are lost when the process ends.
    Memory,
    /// `file:PATH`: a durable file of one process.
    File(PathBuf),
    /// `redis://…`, `rediss://…`, `redis+sentinel://…`, `postgres://…`, or a scheme of another
    /// driver: a server, shared by many processes.
    Server(ServerUrl),
}

impl StoreUrl {
    /// Returns the default file of the admin token: next to a `file:` store, else in the working
    /// directory.
    #[must_use]
    pub fn token_file(&self) -> PathBuf {
        match self {
            Self::File(path) => AdminToken::default_path(Some(path)),
            Self::Memory | Self::Server(_) => AdminToken::default_path(None),
        }
    }

    /// Returns the default file of operators' decisions: next to a `file:` store, else in the
    /// working directory.
    #[must_use]
    pub fn audit_file(&self) -> PathBuf {
        match self {
            Self::File(path) => Audit::default_path(Some(path)),
            Self::Memory | Self::Server(_) => Audit::default_path(None),
        }
    }

    /// Returns the URL as text, without its secrets, and with the absolute path of a file.
    #[must_use]
    pub fn absolute(&self) -> String {
        match self {
            Self::File(path) => {
                let path = std::path::absolute(path).unwrap_or_else(|_| path.clone());
                format!("file:{}", path.display())
            }
            Self::Memory | Self::Server(_) => self.to_string(),
        }
    }

    /// Returns the file of the private key by which the client of a server authenticates, if the URL names one.
    #[must_use]
    pub fn key_file(&self) -> Option<PathBuf> {
        let Self::Server(url) = self else { return None };
        url.key_file()
    }

    /// Returns the file of the secrets that a `file:` store creates next to it.
    #[must_use]
    pub fn secret_file(&self) -> Option<PathBuf> {
        let Self::File(path) = self else { return None };
        let mut beside = path.clone().into_os_string();
        beside.push(".secret");
        Some(beside.into())
    }
}

/// URL of a cache: it stores finished records in front of a store, from which outcomes are
/// replayed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum CacheUrl {
    /// `memory:`: in this process.
    Memory,
    /// `redis://…`, `rediss://…`: shared by many processes; it may evict.
    Redis(ServerUrl),
}

impl CacheUrl {
    /// Returns the file of the private key by which the client of a Redis authenticates, if the URL names one.
    #[must_use]
    pub fn key_file(&self) -> Option<PathBuf> {
        let Self::Redis(url) = self else { return None };
        url.key_file()
    }
}

/// URL of a server. Neither `Debug` nor `Display` show a password or parameters.
#[derive(Clone, PartialEq, Eq)]
pub struct ServerUrl(String);

impl ServerUrl {
    /// Creates the URL of a store whose driver is among
    /// [`StoreOpener::drivers`](super::StoreOpener::drivers).
    pub fn new(url: impl Into<String>) -> Self {
        Self(url.into())
    }

    /// Returns the complete URL.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns the scheme; empty if there is none.
    #[must_use]
    pub fn scheme(&self) -> &str {
        self.0.split_once(':').map_or("", |(scheme, _)| scheme)
    }

    /// Returns whether it is the URL of a Redis.
    #[must_use]
    pub fn is_redis(&self) -> bool {
        RedisDriver.schemes().contains(&self.scheme())
    }

    /// Returns whether the URL contains a password.
    #[must_use]
    pub fn has_password(&self) -> bool {
        let (_, rest) = self.0.split_once("://").unwrap_or_default();
        let user = rest.rsplit_once('@').map_or("", |(user, _)| user);
        user.contains(':') || rest.contains("password=")
    }

    /// Returns the file of the private key that the URL names, by which the client of a PostgreSQL or Redis authenticates.
    #[must_use]
    pub fn key_file(&self) -> Option<PathBuf> {
        let (_, query) = self.0.split_once('?')?;
        let key = query.split('&').rev().find_map(|pair| pair.strip_prefix("sslkey="))?;
        let key = percent_decode_str(key).decode_utf8().ok()?;
        // A key itself has line breaks.
        (!key.contains('\n')).then(|| PathBuf::from(&*key))
    }

    /// Returns whether the connection is unencrypted on a network, so that passwords and data can
    /// be read.
    #[must_use]
    pub fn is_unencrypted(&self) -> bool {
        let query = self.0.split_once('?').map_or("", |(_, query)| query);
        let pairs: Vec<_> = query.split('&').filter_map(|pair| pair.split_once('=')).collect();
        // Of several modes the last one counts. Certificates imply `require`.
        let mode = pairs.iter().rev().find(|(name, _)| *name == "sslmode");
        let has_mode = mode.is_some_and(|(_, it)| *it == "require" || it.starts_with("verify-"));
        let of_certificate = ["sslrootcert", "sslcert", "sslkey"];
        let encrypted = self.0.starts_with("rediss")
            || has_mode
            || pairs.iter().any(|(name, _)| of_certificate.contains(name));
        let (_, rest) = self.0.split_once("://").unwrap_or_default();
        let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
        let hosts = authority.rsplit('@').next().unwrap_or_default();
        let is_here = |host: &str| {
            let name = host.strip_prefix('[').and_then(|host| host.split(']').next());
            let name = name.unwrap_or_else(|| host.split(':').next().unwrap_or_default());
            let address = name.parse::<IpAddr>();
            // Without a name it is a Unix socket.
            name.is_empty()
                || name == "localhost"
                || address.is_ok_and(|address| address.is_loopback())
        };
        !encrypted && !hosts.split(',').all(is_here)
    }
}

impl fmt::Display for ServerUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (scheme, rest) = self.0.split_once("://").unwrap_or(("", &self.0));
        // A password that was not percent-encoded cannot be distinguished from a parameter.
        if rest.split_once('?').is_some_and(|(_, after)| after.contains('@')) {
            return write!(f, "{scheme}://...");
        }
        // Up to the last `@`: a password that was not percent-encoded may contain any of these
        // characters.
        let rest = rest.rsplit_once('@').map_or(rest, |(_, rest)| rest);
        let rest = rest.split(['?', '#']).next().unwrap_or_default();
        write!(f, "{scheme}://{rest}")
    }
}

impl fmt::Debug for ServerUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ServerUrl({self})")
    }
}

impl StoreUrl {
    /// Returns the complete URL with its secrets.
    pub(super) fn whole(&self) -> String {
        match self {
            Self::Server(url) => url.0.clone(),
            Self::Memory | Self::File(_) => self.to_string(),
        }
    }
}

impl fmt::Display for StoreUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Memory => f.write_str("memory:"),
            Self::File(path) => write!(f, "file:{}", path.display()),
            Self::Server(url) => url.fmt(f),
        }
    }
}

impl fmt::Display for CacheUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Memory => f.write_str("memory:"),
            Self::Redis(url) => url.fmt(f),
        }
    }
}

impl FromStr for StoreUrl {
    type Err = StoreUrlError;

    fn from_str(text: &str) -> Result<Self, StoreUrlError> {
        let server = || ServerUrl(text.to_owned());
        match text.split_once(':') {
            Some(("memory", "")) => Ok(Self::Memory),
            Some(("file", path)) if !path.is_empty() => {
                Ok(Self::File(path.strip_prefix("//").unwrap_or(path).into()))
            }
            Some((scheme, rest)) if rest.len() > 2 && rest.starts_with("//") => match scheme {
                _ if StoreDrivers::default().of(scheme).is_some() => Ok(Self::Server(server())),
                _ => Err(StoreUrlError::Store),
            },
            _ => Err(StoreUrlError::Store),
        }
    }
}

impl FromStr for CacheUrl {
    type Err = StoreUrlError;

    fn from_str(text: &str) -> Result<Self, StoreUrlError> {
        match text.parse() {
            Ok(StoreUrl::Memory) => Ok(Self::Memory),
            Ok(StoreUrl::Server(url)) if url.is_redis() => Ok(Self::Redis(url)),
            _ => Err(StoreUrlError::Cache),
        }
    }
}

/// Text in place of a URL of a store or a cache. It is never shown, because even an invalid URL may
/// contain a password.
#[derive(Clone, PartialEq, Eq)]
pub struct UrlText<T>(Result<T, StoreUrlError>);

impl<T> UrlText<T> {
    /// Returns the URL.
    ///
    /// # Errors
    /// [`StoreUrlError`] if the text is not a valid URL.
    pub fn read(self) -> Result<T, StoreUrlError> {
        self.0
    }
}

impl<T: FromStr<Err = StoreUrlError>> FromStr for UrlText<T> {
    type Err = std::convert::Infallible;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(Self(text.parse()))
    }
}

impl<T> From<T> for UrlText<T> {
    fn from(named: T) -> Self {
        Self(Ok(named))
    }
}

impl<T: fmt::Display> fmt::Display for UrlText<T> {
    /// Writes the URL without its secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Ok(named) => named.fmt(f),
            Err(_) => f.write_str("(hidden)"),
        }
    }
}

impl<T> fmt::Debug for UrlText<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Written(..)")
    }
}

/// Errors of parsing a URL.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreUrlError {
    /// The text names no store.
    #[error(
        "a store is `memory:`, `file:PATH`, `redis://HOST`, `rediss://HOST`, `redis+sentinel://HOST/MASTER` or `postgres://USER@HOST/DATABASE`"
    )]
    Store,
    /// The text names no cache.
    #[error("a cache is `memory:`, `redis://HOST` or `rediss://HOST`")]
    Cache,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_of_urls_are_not_shown() {
        for (url, shown) in [
            ("redis://user:p@ss@host:1/2?token=x#y", "redis://host:1/2"),
            ("rediss://:secret@host", "rediss://host"),
            ("postgres://u:secret@host/db?password=secret", "postgres://host/db"),
            ("redis+sentinel://a,b/master", "redis+sentinel://a,b/master"),
            ("postgres://u:Sec#ret@db/x", "postgres://db/x"),
            ("postgres://u:s/e?cret@db/x?a=b", "postgres://..."),
            ("postgres://h/d?password=p@secret", "postgres://..."),
            ("memory:", "memory:"),
            ("file:./x.db", "file:./x.db"),
        ] {
            let url: StoreUrl = url.parse().unwrap();
            assert_eq!(url.to_string(), shown);
            let debug = format!("{url:?}");
            assert!(["ss@", "secret", "Sec", "cret"].iter().all(|word| !debug.contains(word)));
        }
    }

    #[test]
    fn a_password_in_a_url_is_recognised() {
        for (url, has) in [
            ("redis://:secret@host", true),
            ("postgres://u:p@db/x", true),
            ("postgres://u@db/x?password=p", true),
            ("postgres://u@db:5432/x?sslmode=require", false),
            ("redis://host:6379/1", false),
        ] {
            let url: StoreUrl = url.parse().unwrap();
            let StoreUrl::Server(server) = &url else { panic!() };
            assert_eq!(server.has_password(), has, "{url}");
        }
    }

    #[test]
    fn the_file_of_a_private_key_is_found() {
        for (url, file) in [
            ("postgres://u@db/x?sslcert=c.pem&sslkey=/etc/k%20ey.pem", Some("/etc/k ey.pem")),
            ("rediss://u@r/1?sslcert=c.pem&sslkey=k.pem", Some("k.pem")),
            ("postgres://u@db/x?sslkey=-----BEGIN%0Ax", None),
            ("postgres://u@db/x", None),
            ("file:x?sslkey=y", None),
        ] {
            let url: StoreUrl = url.parse().unwrap();
            assert_eq!(url.key_file(), file.map(PathBuf::from), "{url}");
        }
    }

    #[test]
    fn an_unencrypted_url_on_a_network_is_recognised() {
        for (url, clear) in [
            ("redis://127.0.0.1:6379", false),
            ("redis://u:p@localhost", false),
            ("redis://[::1]:6379/1", false),
            ("redis://cache:6379", true),
            ("redis://127.0.0.1:1,10.0.0.2:1", true),
            ("rediss://cache", false),
            ("redis+sentinel://a,b/m", true),
            ("postgres:///db", false),
            ("postgres://u:p@db/x", true),
            ("postgres://u:p@db/x?sslmode=require", false),
            ("postgres://u:p@db/x?sslmode=verify-full", false),
            ("postgres://u:p@db/x?sslrootcert=/etc/ca.pem", false),
            ("postgres://u:p@db/x?sslcert=c.pem&sslkey=k.pem", false),
            ("postgres://u:p@db/x?sslmode=require&sslmode=disable", true),
            ("postgres://u:p@db/x?application_name=a?sslmode=require", true),
            ("postgres://u:sslcert=@db/x", true),
        ] {
            let url: StoreUrl = url.parse().unwrap();
            let StoreUrl::Server(server) = &url else { panic!() };
            assert_eq!(server.is_unencrypted(), clear, "{url}");
        }
    }

    #[test]
    fn a_text_that_names_no_store_is_rejected() {
        for text in ["", "x", "redis:", "redis://", "mysql://host", "memory:x", "file:", "http://a"]
        {
            assert_eq!(text.parse::<StoreUrl>(), Err(StoreUrlError::Store), "{text}");
        }
        for text in ["file:x", "postgres://a/b", ""] {
            assert_eq!(text.parse::<CacheUrl>(), Err(StoreUrlError::Cache), "{text}");
        }
        assert_eq!("memory:".parse(), Ok(CacheUrl::Memory));
    }
}
