//! Certificates: read from files, and read again while connections are made.
//!
//! A connection takes what holds when its handshake begins, so that a change of certificates refuses
//! nobody. Files that cannot be used, such as a certificate whose key is not there yet, change nothing.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, RootCertStore, ServerConfig};

use crate::config::{ListenTls, UpstreamTls};

/// Why certificates cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TlsError {
    /// A file cannot be read.
    #[error("{}: {source}", path.display())]
    Read {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A file is not what it should be, or does not go with the others.
    #[error("{}: {reason}", path.display())]
    Useless {
        /// Which.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// The system has no root certificates, and none were given.
    #[error("there are no root certificates on this system; --upstream-ca names a file of them")]
    NoRoots,
}

/// All that a gateway has.
#[derive(Clone, Debug)]
pub(crate) struct AllCertificates {
    pub(crate) listener: Option<Arc<ServerTls>>,
    /// There where any server is behind TLS.
    pub(crate) upstream: Option<Arc<ClientTls>>,
}

impl AllCertificates {
    /// Reads what is needed.
    pub(crate) async fn read(
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

    /// Reads all again and checks it; nothing changes before [`ReadCertificates::replace`].
    pub(crate) async fn read_again(&self) -> Result<ReadCertificates, TlsError> {
        let all = self.clone();
        blocking(move || {
            let listener = all.listener.map(look).transpose()?;
            let upstream = all.upstream.map(look).transpose()?;
            Ok(ReadCertificates { listener, upstream })
        })
        .await
    }

    /// Reads all again, and says what holds now. The first error; the others are read all the same.
    pub(crate) async fn reload(&self) -> Result<(), TlsError> {
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

/// Certificates that were read again and can be used. Dropped, what held before holds on.
#[must_use = "nothing is replaced yet"]
pub struct ReadCertificates {
    /// Where there are any: whose, and what differs.
    listener: Option<Looked<ListenTls, ServerConfig>>,
    upstream: Option<Looked<UpstreamTls, ClientConfig>>,
}

impl ReadCertificates {
    /// Whether there are none, so that there was nothing to read.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.listener.is_none() && self.upstream.is_none()
    }

    /// Has them hold for connections that begin from now on.
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
        // A key is among what was read.
        f.write_str("ReadCertificates(..)")
    }
}

/// What files hold that differ from what holds.
struct TlsChange<C> {
    /// What held.
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

/// Files are read where reading may block. Dropped, it ends by itself.
async fn blocking<T: Send + 'static>(
    read: impl FnOnce() -> Result<T, TlsError> + Send + 'static,
) -> Result<T, TlsError> {
    let done = tokio::task::spawn_blocking(read).await;
    done.unwrap_or_else(|error| {
        let source = io::Error::other(error);
        Err(TlsError::Read { path: PathBuf::from("certificates"), source })
    })
}

/// What files say now, and what was made of them.
pub(crate) struct ReloadableTls<S, C> {
    said: S,
    now: RwLock<Arc<C>>,
    /// What it was made of: a change is told by it.
    read: Mutex<Arc<Vec<Vec<u8>>>>,
}

/// For the listener.
pub(crate) type ServerTls = ReloadableTls<ListenTls, ServerConfig>;
/// For servers.
pub(crate) type ClientTls = ReloadableTls<UpstreamTls, ClientConfig>;

/// What is made of files.
pub(crate) trait TlsSource: Send + Sync + 'static {
    /// What is made.
    type Config: Send + Sync + 'static;

    /// The files.
    fn files(&self) -> Vec<&Path>;

    /// Makes it of what they hold, in the same order.
    fn make(&self, read: &[Vec<u8>]) -> Result<Self::Config, TlsError>;
}

impl<S: TlsSource> ReloadableTls<S, S::Config> {
    /// Reads for the first time. Blocks for as long as files take to be read.
    pub(crate) fn new(said: S) -> Result<Self, TlsError> {
        let read = read_all(&said)?;
        let now = RwLock::new(Arc::new(said.make(&read)?));
        Ok(Self { said, now, read: Mutex::new(Arc::new(read)) })
    }

    /// What holds now.
    pub(crate) fn now(&self) -> Arc<S::Config> {
        Arc::clone(&self.now.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Reads again; `None` where nothing differs. Blocks for as long as files take to be read.
    fn look(&self) -> Result<Option<TlsChange<S::Config>>, TlsError> {
        // One at a time: of two looks, the one that began later read later.
        let before = self.read.lock().unwrap_or_else(PoisonError::into_inner);
        let read = read_all(&self.said)?;
        if **before == read {
            return Ok(None);
        }
        let made = Arc::new(self.said.make(&read)?);
        Ok(Some(TlsChange { before: Arc::clone(&before), read: Arc::new(read), made }))
    }

    /// Whether anything else holds now.
    fn replace(&self, look: Option<TlsChange<S::Config>>) -> bool {
        let Some(TlsChange { before, read, made }) = look else { return false };
        let mut now = self.read.lock().unwrap_or_else(PoisonError::into_inner);
        if !Arc::ptr_eq(&now, &before) {
            // What replaced it in between was read later.
            return false;
        }
        *now = read;
        *self.now.write().unwrap_or_else(PoisonError::into_inner) = made;
        true
    }
}

impl<S: fmt::Debug, C> fmt::Debug for ReloadableTls<S, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // A key is among what was read.
        f.debug_tuple("Reloading").field(&self.said).finish()
    }
}

fn read_all(said: &impl TlsSource) -> Result<Vec<Vec<u8>>, TlsError> {
    let read = |path: &Path| {
        std::fs::read(path).map_err(|source| TlsError::Read { path: path.to_owned(), source })
    };
    said.files().into_iter().map(read).collect()
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
            .map_err(|error| useless(&self.certificate, &error))?;
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
                // One that nobody can read is no reason to do without the others.
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
                .map_err(|error| useless(own, &error)),
            _ => Ok(builder.with_no_client_auth()),
        }
    }
}

/// The process may have chosen another one; this one is always there.
fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

fn chain(path: &Path, pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    let chain = chain.map_err(|error| useless(path, &error))?;
    if chain.is_empty() { Err(useless(path, &"there is no certificate in it")) } else { Ok(chain) }
}

fn private_key(path: &Path, pem: &[u8]) -> Result<PrivateKeyDer<'static>, TlsError> {
    PrivateKeyDer::from_pem_slice(pem).map_err(|error| useless(path, &error))
}

fn roots_of(path: &Path, pem: &[u8]) -> Result<RootCertStore, TlsError> {
    let mut roots = RootCertStore::empty();
    for root in chain(path, pem)? {
        roots.add(root).map_err(|error| useless(path, &error))?;
    }
    Ok(roots)
}

fn useless(path: &Path, reason: &dyn fmt::Display) -> TlsError {
    TlsError::Useless { path: path.to_owned(), reason: reason.to_string() }
}

#[cfg(test)]
mod tests {
    use rcgen::{CertifiedKey, generate_simple_self_signed};

    use super::*;

    fn write(said: &ListenTls) {
        let CertifiedKey { cert, signing_key } =
            generate_simple_self_signed(["127.0.0.1".to_owned()]).unwrap();
        std::fs::write(&said.certificate, cert.pem()).unwrap();
        std::fs::write(&said.key, signing_key.serialize_pem()).unwrap();
    }

    #[tokio::test]
    async fn what_was_read_holds_when_it_is_told_to() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let said =
            ListenTls { certificate: path("own.pem"), key: path("own.key"), client_ca: None };
        write(&said);
        let all = AllCertificates::read(Some(said.clone()), None).await.unwrap();
        let listener = all.listener.clone().unwrap();
        let first = listener.now();
        let unchanged = all.read_again().await.unwrap();
        assert!(!unchanged.is_empty());
        unchanged.replace();
        write(&said);
        drop(all.read_again().await.unwrap());
        let second = all.read_again().await.unwrap();
        assert!(Arc::ptr_eq(&listener.now(), &first));
        // Somebody reads later and is the first to have it hold.
        write(&said);
        all.reload().await.unwrap();
        let third = listener.now();
        second.replace();
        assert!(Arc::ptr_eq(&listener.now(), &third) && !Arc::ptr_eq(&first, &third));
        write(&said);
        all.read_again().await.unwrap().replace();
        assert!(!Arc::ptr_eq(&listener.now(), &third));
        std::fs::write(&said.key, "none").unwrap();
        all.read_again().await.unwrap_err();
        assert!(
            AllCertificates::read(None, None).await.unwrap().read_again().await.unwrap().is_empty()
        );
    }
}
