//! Certificates that a URL names, as a URL of PostgreSQL does.

use percent_encoding::percent_decode_str;

#[cfg(feature = "tls")]
use crate::error::RedisConnectError;
#[cfg(feature = "tls")]
use crate::options::TlsFiles;

/// Parameters of a URL: the files of the roots, of the client's certificate and of its key.
const PARAMETERS: [&str; 3] = ["sslrootcert", "sslcert", "sslkey"];

/// The largest file that is read, in bytes.
#[cfg(feature = "tls")]
const MAX_FILE: u64 = 4 << 20;

/// Paths of certificates, in the order of their parameters.
#[derive(Clone, Default)]
pub(crate) struct CertificatePaths([Option<String>; 3]);

impl CertificatePaths {
    /// Returns the paths that a URL names, and the URL without them: the client does not know these parameters.
    pub(crate) fn of(url: &str) -> (String, Self) {
        let mut paths = Self::default();
        let Some((start, rest)) = url.split_once('?') else { return (url.to_owned(), paths) };
        let (query, fragment) = rest.split_at(rest.find('#').unwrap_or(rest.len()));
        let others = query.split('&').filter(|pair| {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            let at = PARAMETERS.iter().position(|it| *it == name);
            if let Some(at) = at {
                paths.0[at] = Some(percent_decode_str(value).decode_utf8_lossy().into_owned());
            }
            at.is_none()
        });
        let others = others.collect::<Vec<_>>().join("&");
        let mark = if others.is_empty() { "" } else { "?" };
        (format!("{start}{mark}{others}{fragment}"), paths)
    }

    pub(crate) fn are_given(&self) -> bool {
        self.0.iter().any(Option::is_some)
    }

    /// Returns whether a certificate has its key.
    pub(crate) const fn are_complete(&self) -> bool {
        let [_, certificate, key] = &self.0;
        certificate.is_some() == key.is_some()
    }

    /// Reads the files, which prevail over `files`. They are small, and read once for each connection.
    #[cfg(feature = "tls")]
    pub(crate) fn read(&self, files: &TlsFiles) -> Result<TlsFiles, RedisConnectError> {
        let [roots, certificate, key] = &self.0;
        let mut files = files.clone();
        if let Some(roots) = roots {
            files.roots = Some(read(roots)?);
        }
        if let (Some(certificate), Some(key)) = (certificate, key) {
            files.client = Some((read(certificate)?, read(key)?));
        }
        Ok(files)
    }
}

/// Reads a file. An error does not repeat a text that may be more than a path.
#[cfg(feature = "tls")]
fn read(path: &str) -> Result<Vec<u8>, RedisConnectError> {
    let read = || {
        let metadata = std::fs::metadata(path)?;
        if !metadata.is_file() || metadata.len() > MAX_FILE {
            let text = "it is no regular file of at most 4 MiB";
            return Err(std::io::Error::new(std::io::ErrorKind::InvalidData, text));
        }
        std::fs::read(path)
    };
    read().map_err(|error| {
        let is_path = !path.contains(['?', '&', '=', '@', '\n']);
        let path = if is_path { path } else { "a file named in the URL" };
        RedisConnectError::CertificateFile { path: path.to_owned(), error: error.to_string() }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_keeps_its_other_parameters() {
        for (url, rest, found) in [
            ("rediss://h/1", "rediss://h/1", [None, None, None]),
            ("rediss://h?sslrootcert=%2Fa%20b", "rediss://h", [Some("/a b"), None, None]),
            (
                "rediss://h/1?sslcert=c&protocol=resp3&sslkey=k#insecure",
                "rediss://h/1?protocol=resp3#insecure",
                [None, Some("c"), Some("k")],
            ),
        ] {
            let (without, paths) = CertificatePaths::of(url);
            assert_eq!((&*without, paths.0.each_ref().map(Option::as_deref)), (rest, found));
        }
    }
}
