//! Certificates, which are read from files, and reloaded without closing connections.
//!
//! A connection uses the certificates that are in force when its handshake begins, so a replacement
//! rejects no connection. Unusable files, such as a certificate whose key is still missing, change
//! nothing.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use arc_swap::ArcSwap;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, RootCertStore, ServerConfig};

/// Files of the listener's certificate, in PEM.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ListenTls {
    /// The certificate, followed by the intermediate certificates up to its root.
    pub certificate: PathBuf,
    /// Private key of the certificate: PKCS#8, PKCS#1 or SEC1.
    pub key: PathBuf,
    /// Issuers of clients' certificates: with these, clients without a certificate are not served.
    /// `None`: clients need no certificate.
    pub client_ca: Option<PathBuf>,
}

/// Files for TLS connections to servers, in PEM.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct UpstreamTls {
    /// Trusted roots; `None` for the system's.
    pub ca: Option<PathBuf>,
    /// Certificate of the proxy and its key, for servers that require one.
    pub client: Option<(PathBuf, PathBuf)>,
}

/// Errors of certificate files.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TlsError {
    /// A file cannot be read.
    #[error("{}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// A file has an invalid content, or does not match the others.
    #[error("{}: {reason}", path.display())]
    Invalid {
        /// The file.
        path: PathBuf,
        /// The cause.
        reason: String,
    },
    /// The system has no root certificates, and none were given.
    #[error("this system has no root certificates: name a file of them by --upstream-ca")]
    NoRoots,
}

/// Certificates of the listener and of the connections to servers. (this crate has no gateway)
#[derive(Clone, Debug)]
pub struct AllCertificates {
    /// Set if the listener uses TLS.
    pub listener: Option<Arc<ServerTls>>,
    /// Set if any server is reached over TLS.
    pub upstream: Option<Arc<ClientTls>>,
}

impl AllCertificates {
    /// Reads the certificates that are needed.
    ///
    /// # Errors
    /// The first [`TlsError`].
    pub async fn read(
        listener: Option<ListenTls>,
        upstream: Option<UpstreamTls>,
    ) -> Result<Self, TlsError> {
        blocking(move || {
            let listener = listener.map(ServerTls::new).transpose()?.map(Arc::new);
            let upstream = upstream.map(ClientTls::new).transpose()?.map(Arc::new);
            Ok(Self { listener, upstream })
        })
        .await
    }

    /// Reads and checks all files again; nothing changes before [`ReadCertificates::replace`].
    ///
    /// # Errors
    /// The first [`TlsError`].
    pub async fn read_again(&self) -> Result<ReadCertificates, TlsError> {
        let all = self.clone();
        blocking(move || {
            let listener = all.listener.map(look).transpose()?;
            let upstream = all.upstream.map(look).transpose()?;
            Ok(ReadCertificates { listener, upstream })
        })
        .await
    }

    /// Reads all files again and applies those that are usable. Returns the first error; the other
    /// files are read nevertheless.
    ///
    /// # Errors
    /// The first [`TlsError`].
    pub async fn reload(&self) -> Result<(), TlsError> {
        let all = self.clone();
        blocking(move || {
            let listener = all.listener.map(look).transpose();
            let upstream = all.upstream.map(look).transpose();
            let mut read = ReadCertificates { listener: None, upstream: None };
            let listener = listener.map(|look| read.listener = look);
            let upstream = upstream.map(|look| read.upstream = look);
            read.replace();
            listener.and(upstream)
        })
        .await
    }
}

/// Certificates that were read again and are usable. Dropping them leaves the previous ones in
/// force.
#[must_use = "nothing is replaced yet"]
pub struct ReadCertificates {
    /// The certificates in force, and the change if there is one.
    listener: Option<Looked<ListenTls, ServerConfig>>,
    upstream: Option<Looked<UpstreamTls, ClientConfig>>,
}

impl ReadCertificates {
    /// Returns whether the gateway uses no certificates, so that nothing was read.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.listener.is_none() && self.upstream.is_none()
    }

    /// Puts the certificates in force for connections that begin from now on.
    pub fn replace(self) {
        if self.listener.is_some_and(|(tls, look)| tls.replace(look)) {
            tracing::info!("the listener's certificate was replaced");
        }
        if self.upstream.is_some_and(|(tls, look)| tls.replace(look)) {
            tracing::info!("the certificates for the upstream were replaced");
        }
    }
}

impl fmt::Debug for ReadCertificates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The content of the files includes a key.
        f.write_str("ReadCertificates(..)")
    }
}

/// Files whose content differs from the certificates in force.
struct TlsChange<C> {
    /// The previous content.
    before: Arc<Vec<Vec<u8>>>,
    read: Arc<Vec<Vec<u8>>>,
    made: Arc<C>,
}

type Looked<S, C> = (Arc<ReloadableTls<S, C>>, Option<TlsChange<C>>);

fn look<S: TlsSource>(
    tls: Arc<ReloadableTls<S, S::Config>>,
) -> Result<Looked<S, S::Config>, TlsError> {
    let look = tls.look()?;
    Ok((tls, look))
}

/// Reads files on a thread that may block. If the future is dropped, the thread finishes on its
/// own.
async fn blocking<T: Send + 'static>(
    read: impl FnOnce() -> Result<T, TlsError> + Send + 'static,
) -> Result<T, TlsError> {
    let done = tokio::task::spawn_blocking(read).await;
    done.unwrap_or_else(|error| {
        let source = io::Error::other(error);
        Err(TlsError::Read { path: PathBuf::from("certificates"), source })
    })
}

/// Certificates in force, and the files that they are read from.
pub struct ReloadableTls<S, C> {
    files: S,
    now: ArcSwap<C>,
    /// Content of the files, for the detection of changes.
    read: Mutex<Arc<Vec<Vec<u8>>>>,
}

/// Certificates for the listener.
pub type ServerTls = ReloadableTls<ListenTls, ServerConfig>;
/// Certificates for connections to servers.
pub type ClientTls = ReloadableTls<UpstreamTls, ClientConfig>;

/// Files that a TLS configuration is built from.
pub trait TlsSource: Send + Sync + 'static {
    /// The TLS configuration.
    type Config: Send + Sync + 'static;

    /// Returns the files.
    fn files(&self) -> Vec<&Path>;

    /// Builds the configuration from the content of the files, in the same order.
    ///
    /// # Errors
    /// [`TlsError`] if a file has other content, or the files do not match.
    fn make(&self, read: &[Vec<u8>]) -> Result<Self::Config, TlsError>;
}

impl<S: TlsSource> ReloadableTls<S, S::Config> {
    /// Reads the files for the first time. It blocks while the files are read.
    pub(crate) fn new(files: S) -> Result<Self, TlsError> {
        let read = read_all(&files)?;
        let now = ArcSwap::from_pointee(files.make(&read)?);
        Ok(Self { files, now, read: Mutex::new(Arc::new(read)) })
    }

    /// Returns the configuration in force.
    pub(crate) fn now(&self) -> Arc<S::Config> {
        self.now.load_full()
    }

    /// Reads the files again; returns `None` if nothing differs. It blocks while the files are
    /// read.
    fn look(&self) -> Result<Option<TlsChange<S::Config>>, TlsError> {
        // Locked while reading: a look that began later has also read later.
        let before = self.read.lock().unwrap_or_else(PoisonError::into_inner);
        let read = read_all(&self.files)?;
        if **before == read {
            return Ok(None);
        }
        let made = Arc::new(self.files.make(&read)?);
        Ok(Some(TlsChange { before: Arc::clone(&before), read: Arc::new(read), made }))
    }

    /// Replaces the configuration in force; returns whether it changed.
    fn replace(&self, look: Option<TlsChange<S::Config>>) -> bool {
        let Some(TlsChange { before, read, made }) = look else { return false };
        let mut now = self.read.lock().unwrap_or_else(PoisonError::into_inner);
        if !Arc::ptr_eq(&now, &before) {
            // Another reload replaced it meanwhile, with content that was read later.
            return false;
        }
        *now = read;
        self.now.store(made);
        true
    }
}

impl<S: fmt::Debug, C> fmt::Debug for ReloadableTls<S, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The content of the files includes a key.
        f.debug_tuple("ReloadableTls").field(&self.files).finish()
    }
}

fn read_all(files: &impl TlsSource) -> Result<Vec<Vec<u8>>, TlsError> {
    let read = |path: &Path| {
        std::fs::read(path).map_err(|source| TlsError::Read { path: path.to_owned(), source })
    };
    files.files().into_iter().map(read).collect()
}

impl TlsSource for ListenTls {
    type Config = ServerConfig;

    fn files(&self) -> Vec<&Path> {
        let own = [&self.certificate, &self.key].map(PathBuf::as_path);
        own.into_iter().chain(self.client_ca.as_deref()).collect()
    }

    fn make(&self, read: &[Vec<u8>]) -> Result<ServerConfig, TlsError> {
        let [own, key, roots @ ..] = read else {
            return Err(useless(&self.certificate, &"not read"));
        };
        let builder = ServerConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .map_err(|error| useless(&self.certificate, &error))?;
        let builder = match (&self.client_ca, roots.first()) {
            (Some(path), Some(pem)) => {
                let roots = Arc::new(roots_of(path, pem)?);
                let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider())
                    .build()
                    .map_err(|error| useless(path, &error))?;
                builder.with_client_cert_verifier(verifier)
            }
            _ => builder.with_no_client_auth(),
        };
        let mut config = builder
            .with_single_cert(chain(&self.certificate, own)?, private_key(&self.key, key)?)
            .map_err(|error| no_pair(&self.certificate, &self.key, &error))?;
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        Ok(config)
    }
}

impl TlsSource for UpstreamTls {
    type Config = ClientConfig;

    fn files(&self) -> Vec<&Path> {
        let own = self.client.iter().flat_map(|(own, key)| [own.as_path(), key]);
        self.ca.as_deref().into_iter().chain(own).collect()
    }

    fn make(&self, read: &[Vec<u8>]) -> Result<ClientConfig, TlsError> {
        let mut read = read.iter();
        let roots = match self.ca.as_ref().zip(self.ca.as_ref().and_then(|_| read.next())) {
            Some((path, pem)) => roots_of(path, pem)?,
            None => {
                let mut roots = RootCertStore::empty();
                // Unreadable certificates do not prevent the use of the others.
                roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
                if roots.is_empty() {
                    return Err(TlsError::NoRoots);
                }
                roots
            }
        };
        let versions = ClientConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .map_err(|error| useless(Path::new("TLS"), &error))?;
        let builder = versions.with_root_certificates(roots);
        match (&self.client, read.next(), read.next()) {
            (Some((own, key)), Some(own_pem), Some(key_pem)) => builder
                .with_client_auth_cert(chain(own, own_pem)?, private_key(key, key_pem)?)
                .map_err(|error| no_pair(own, key, &error)),
            _ => Ok(builder.with_no_client_auth()),
        }
    }
}

/// Returns the built-in provider; the process's default may be another one.
fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

fn chain(path: &Path, pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    let chain = chain.map_err(|error| useless(path, &no_pem("certificates", &error)))?;
    if chain.is_empty() { Err(useless(path, &"there is no certificate in it")) } else { Ok(chain) }
}

fn private_key(path: &Path, pem: &[u8]) -> Result<PrivateKeyDer<'static>, TlsError> {
    PrivateKeyDer::from_pem_slice(pem)
        .map_err(|error| useless(path, &no_pem("a private key", &error)))
}

fn roots_of(path: &Path, pem: &[u8]) -> Result<RootCertStore, TlsError> {
    let mut roots = RootCertStore::empty();
    for root in chain(path, pem)? {
        roots.add(root).map_err(|error| useless(path, &error))?;
    }
    Ok(roots)
}

/// Returns the error of a certificate and a key that were read. While both are replaced, one of them is the earlier.
fn no_pair(certificate: &Path, key: &Path, error: &rustls::Error) -> TlsError {
    match error {
        rustls::Error::InconsistentKeys(_) => useless(
            certificate,
            &format!(
                "expected the certificate of the key {}, found that of another key",
                key.display()
            ),
        ),
        error => useless(certificate, error),
    }
}

/// Returns an error as text. That of the library has bytes as numbers.
fn no_pem(expected: &str, error: &pem::Error) -> String {
    let found = match error {
        pem::Error::MissingSectionEnd { .. } => "a section without its end: the file is not whole",
        pem::Error::IllegalSectionStart { .. } => "a malformed line that begins a section",
        pem::Error::Base64Decode(_) => "a section that is not Base64",
        pem::Error::NoItemsFound => "none",
        error => return format!("expected {expected} in PEM, found an error: {error}"),
    };
    format!("expected {expected} in PEM, found {found}")
}

fn useless(path: &Path, reason: &dyn fmt::Display) -> TlsError {
    TlsError::Invalid { path: path.to_owned(), reason: reason.to_string() }
}

#[cfg(test)]
mod tests {
    use rcgen::{CertifiedKey, generate_simple_self_signed};

    use super::*;

    fn write(files: &ListenTls) {
        let CertifiedKey { cert, signing_key } =
            generate_simple_self_signed(["127.0.0.1".to_owned()]).unwrap();
        std::fs::write(&files.certificate, cert.pem()).unwrap();
        std::fs::write(&files.key, signing_key.serialize_pem()).unwrap();
    }

    #[tokio::test]
    async fn certificates_that_were_read_apply_after_replace() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let files =
            ListenTls { certificate: path("own.pem"), key: path("own.key"), client_ca: None };
        write(&files);
        let all = AllCertificates::read(Some(files.clone()), None).await.unwrap();
        let listener = all.listener.clone().unwrap();
        let first = listener.now();
        let unchanged = all.read_again().await.unwrap();
        assert!(!unchanged.is_empty());
        unchanged.replace();
        write(&files);
        drop(all.read_again().await.unwrap());
        let second = all.read_again().await.unwrap();
        assert!(Arc::ptr_eq(&listener.now(), &first));
        // A later reload applies its files first.
        write(&files);
        all.reload().await.unwrap();
        let third = listener.now();
        second.replace();
        assert!(Arc::ptr_eq(&listener.now(), &third) && !Arc::ptr_eq(&first, &third));
        write(&files);
        all.read_again().await.unwrap().replace();
        assert!(!Arc::ptr_eq(&listener.now(), &third));
        std::fs::write(&files.key, "none").unwrap();
        all.read_again().await.unwrap_err();
        assert!(
            AllCertificates::read(None, None).await.unwrap().read_again().await.unwrap().is_empty()
        );
    }
}
