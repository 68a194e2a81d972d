//! TLS on both sides.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use hapax_core::OnUnknown;
use hapax_gateway::{Config, ForwardAuth, ListenTls, UpstreamProtocol, UpstreamTls};
use http::{Uri, Version};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::client::TlsStream;
use tokio_rustls::{TlsAcceptor, TlsConnector};

use crate::two::Two;
use crate::world::{Raw, Upstream, config, post, request, start, text};

/// Somebody who signs, and a folder of what was signed.
pub(crate) struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
    folder: TempDir,
}

impl Authority {
    pub(crate) fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        // Another name than those it signs, which would look as if they had signed themselves.
        params.distinguished_name.push(DnType::CommonName, "an authority");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("ca.pem"), issuer.pem()).unwrap();
        Self { issuer, folder }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// A certificate for 127.0.0.1 and its key, as text.
    fn signed(&self) -> (String, String) {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec!["127.0.0.1".into()]).unwrap();
        (params.signed_by(&key, &self.issuer).unwrap().pem(), key.serialize_pem())
    }

    /// The same as files `NAME.pem` and `NAME.key`.
    pub(crate) fn files(&self, name: &str) -> (PathBuf, PathBuf) {
        let (certificate, key) = self.signed();
        let paths = (self.path(&format!("{name}.pem")), self.path(&format!("{name}.key")));
        std::fs::write(&paths.0, certificate).unwrap();
        std::fs::write(&paths.1, key).unwrap();
        paths
    }

    fn roots(&self) -> RootCertStore {
        let mut roots = RootCertStore::empty();
        roots.add(self.issuer.der().clone()).unwrap();
        roots
    }

    /// For an upstream of its own; `known` clients only.
    fn server(&self, known: bool, alpn: &[&[u8]]) -> Arc<ServerConfig> {
        let (certificate, key) = self.signed();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()
            .unwrap();
        let builder = if known {
            let roots = Arc::new(self.roots());
            let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider);
            builder.with_client_cert_verifier(verifier.build().unwrap())
        } else {
            builder.with_no_client_auth()
        };
        let mut config = builder.with_single_cert(chain(&certificate), key_of(&key)).unwrap();
        config.alpn_protocols = alpn.iter().map(|name| name.to_vec()).collect();
        Arc::new(config)
    }

    /// A client that believes in it.
    async fn connect(
        &self,
        address: SocketAddr,
        own: bool,
        alpn: &[&[u8]],
    ) -> std::io::Result<TlsStream<TcpStream>> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(self.roots());
        let mut config = if own {
            let (certificate, key) = self.signed();
            builder.with_client_auth_cert(chain(&certificate), key_of(&key)).unwrap()
        } else {
            builder.with_no_client_auth()
        };
        config.alpn_protocols = alpn.iter().map(|name| name.to_vec()).collect();
        let stream = TcpStream::connect(address).await?;
        let name = ServerName::try_from("127.0.0.1").unwrap();
        TlsConnector::from(Arc::new(config)).connect(name, stream).await
    }
}

fn chain(pem: &str) -> Vec<CertificateDer<'static>> {
    CertificateDer::pem_slice_iter(pem.as_bytes()).collect::<Result<_, _>>().unwrap()
}

fn key_of(pem: &str) -> PrivateKeyDer<'static> {
    PrivateKeyDer::from_pem_slice(pem.as_bytes()).unwrap()
}

pub(crate) fn listening(
    config: &mut Config,
    (certificate, key): (PathBuf, PathBuf),
    ca: Option<PathBuf>,
) {
    config.transport.tls = Some(ListenTls { certificate, key, client_ca: ca });
}

fn https(upstream: &Upstream, path: &str) -> Uri {
    format!("https://{}{path}", upstream.address).parse().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_negotiate_the_protocol_by_alpn() {
    let authority = Authority::new();
    let upstream = Upstream::counting().await;
    let mut config = config(upstream.url());
    listening(&mut config, authority.files("own"), None);
    let gateway = start(config).await;
    let address = gateway.local_addr();
    let http2 = authority.connect(address, false, &[b"h2", b"http/1.1"]).await.unwrap();
    let first = Two::on(http2).await.post("/", "k", "x").await;
    assert_eq!((first.status, first.text().as_str()), (201, "1"));
    for alpn in [&[b"http/1.1".as_slice()][..], &[]] {
        let mut one = Raw::on(authority.connect(address, false, alpn).await.unwrap());
        one.send(request("POST", "/", &[("idempotency-key", "k")], "x")).await;
        let again = one.answer().await;
        assert_eq!((again.header("idempotency-replayed"), again.text().as_str()), ("true", "1"));
    }
    let seen = upstream.seen();
    assert_eq!((seen.len(), seen[0].header("x-forwarded-proto")), (1, "https"));
    // Without TLS nobody is served, and nobody is kept waiting for ever.
    let mut plain = Raw::connect(address).await;
    plain.send(request("POST", "/", &[], "x")).await;
    assert!(plain.answer_to(false).await.is_none());
}

#[tokio::test(flavor = "multi_thread")]
async fn with_a_client_ca_clients_without_a_certificate_are_rejected() {
    let (ours, theirs) = (Authority::new(), Authority::new());
    let upstream = Upstream::counting().await;
    let mut config = config(upstream.url());
    listening(&mut config, ours.files("own"), Some(ours.path("ca.pem")));
    let gateway = start(config).await;
    let known = ours.connect(gateway.local_addr(), true, &[]).await.unwrap();
    let mut known = Raw::on(known);
    known.send(request("POST", "/", &[], "x")).await;
    assert_eq!(known.answer().await.status, 201);
    // A client learns that it is refused when it first reads.
    let unknown = ours.connect(gateway.local_addr(), false, &[]).await.unwrap();
    let mut unknown = Raw::on(unknown);
    unknown.try_send(request("POST", "/", &[], "x")).await;
    assert!(unknown.answer_to(false).await.is_none());
    assert!(theirs.connect(gateway.local_addr(), true, &[]).await.is_err());
    assert_eq!(upstream.seen().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn upstreams_negotiate_the_protocol_by_alpn() {
    let authority = Authority::new();
    let all: &[&[u8]] = &[b"h2", b"http/1.1"];
    let one: &[&[u8]] = &[b"http/1.1"];
    for (offered, protocol, spoken) in [
        (all, UpstreamProtocol::Auto, Some(Version::HTTP_2)),
        (one, UpstreamProtocol::Auto, Some(Version::HTTP_11)),
        (&[], UpstreamProtocol::Auto, Some(Version::HTTP_11)),
        (all, UpstreamProtocol::Http1, Some(Version::HTTP_11)),
        (all, UpstreamProtocol::Http2, Some(Version::HTTP_2)),
        (one, UpstreamProtocol::Http2, None),
    ] {
        let tls = authority.server(false, offered);
        let upstream = Upstream::start_with(Some(tls), |_| async { text(201, "done") }).await;
        let mut config = config(https(&upstream, ""));
        config.transport.upstream_protocol = protocol;
        config.transport.upstream_tls.ca = Some(authority.path("ca.pem"));
        let gateway = start(config).await;
        let answer = post(gateway.local_addr(), "/", "k", "x").await;
        match spoken {
            Some(version) => {
                assert_eq!((answer.status, upstream.seen()[0].version), (201, version));
            }
            // Nothing was sent: the key is free.
            None => assert_eq!(answer.code(), "upstream-unreachable"),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn upstream_certificates_are_verified_and_client_certificates_are_sent() {
    let (ours, theirs) = (Authority::new(), Authority::new());
    let server = ours.server(true, &[b"h2"]);
    let upstream = Upstream::start_with(Some(server), |_| async { text(201, "done") }).await;
    let with = |ca: PathBuf, client: Option<(PathBuf, PathBuf)>| {
        let mut config = config(https(&upstream, ""));
        config.transport.upstream_tls = UpstreamTls { ca: Some(ca), client };
        config
    };
    let own = ours.files("gateway");
    let gateway = start(with(ours.path("ca.pem"), Some(own.clone()))).await;
    assert_eq!(post(gateway.local_addr(), "/", "k", "x").await.status, 201);
    let gateway = start(with(theirs.path("ca.pem"), Some(own))).await;
    assert_eq!(post(gateway.local_addr(), "/", "k", "x").await.code(), "upstream-unreachable");
    let gateway = start(with(ours.path("ca.pem"), None)).await;
    let answer = post(gateway.local_addr(), "/", "k", "x").await;
    assert_eq!(answer.status, 502);
    assert_eq!(upstream.seen().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn auth_and_reconcile_urls_may_be_behind_tls() {
    let authority = Authority::new();
    let server = authority.server(false, &[b"h2", b"http/1.1"]);
    let asked = Upstream::start_with(Some(server), |seen| async move {
        text(if seen.uri.path() == "/auth" { 200 } else { 201 }, "it happened")
    })
    .await;
    let upstream = Upstream::start(|_| async { text(500, "who knows") }).await;
    let mut config = config(upstream.url());
    config.transport.upstream_tls.ca = Some(authority.path("ca.pem"));
    config.auth = Some(ForwardAuth::new(https(&asked, "/auth")));
    config.policy.on_unknown = hapax_core::OnUnknown::Reconcile;
    config.policy.reconcile_url = Some(https(&asked, "/outcome"));
    let gateway = start(config).await;
    assert_eq!(post(gateway.local_addr(), "/", "k", "x").await.status, 500);
    let again = post(gateway.local_addr(), "/", "k", "x").await;
    assert_eq!((again.status, again.text().as_str()), (201, "it happened"));
    let paths: Vec<_> = asked.seen().iter().map(|seen| seen.uri.path().to_owned()).collect();
    assert_eq!(paths, ["/auth", "/auth", "/outcome"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn unusable_certificates_are_rejected_at_start() {
    let authority = Authority::new();
    let (certificate, key) = authority.files("own");
    let (_, other) = authority.files("other");
    let empty = authority.path("empty");
    std::fs::write(&empty, "").unwrap();
    let missing = authority.path("missing");
    for (certificate, key, says) in [
        (&missing, &key, "missing"),
        (&certificate, &missing, "missing"),
        (&empty, &key, "no certificate"),
        (&certificate, &empty, "empty"),
        (&certificate, &other, "own.pem"),
    ] {
        let mut config = config("http://127.0.0.1:1".parse().unwrap());
        listening(&mut config, (certificate.clone(), key.clone()), None);
        let error = hapax_gateway::Gateway::start(config).await.unwrap_err();
        assert!(matches!(error, hapax_gateway::StartError::Tls(_)), "{error:?}");
        assert!(error.to_string().contains(says), "{error}");
    }
}

/// Replaces a file as careful programs do.
fn replace(path: &Path, with: &str) {
    let beside = path.with_extension("new");
    std::fs::write(&beside, with).unwrap();
    std::fs::rename(&beside, path).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn certificates_are_replaced_without_a_rejected_connection() {
    let authority = Arc::new(Authority::new());
    let upstream = Upstream::counting().await;
    let mut config = config(upstream.url());
    let (certificate, key) = authority.files("own");
    listening(&mut config, (certificate.clone(), key.clone()), None);
    let gateway = start(config).await;
    let address = gateway.local_addr();
    let shown = async || {
        let stream = authority.connect(address, false, &[]).await.unwrap();
        stream.get_ref().1.peer_certificates().unwrap()[0].clone()
    };
    // Clients come and go all the time.
    let (done, served) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let clients: Vec<_> = (0..4)
        .map(|_| {
            let (authority, done, served) =
                (Arc::clone(&authority), Arc::clone(&done), Arc::clone(&served));
            tokio::spawn(async move {
                while !done.load(Ordering::Acquire) {
                    let stream = authority.connect(address, false, &[]).await.unwrap();
                    let mut raw = Raw::on(stream);
                    raw.send(request("GET", "/", &[], "")).await;
                    assert_eq!(raw.answer().await.status, 201);
                    served.fetch_add(1, Ordering::AcqRel);
                }
            })
        })
        .collect();
    let mut before = shown().await;
    // Kept from before all changes.
    let mut kept = Raw::on(authority.connect(address, false, &[]).await.unwrap());
    for round in 0..5 {
        let (new, new_key) = authority.signed();
        // In between the certificate has another's key, which changes nothing.
        replace(&certificate, &new);
        let error = gateway.reload_certificates().await.unwrap_err();
        assert!(error.to_string().contains("own.pem"), "{error}");
        assert_eq!(shown().await, before, "round {round}");
        replace(&key, &new_key);
        gateway.reload_certificates().await.unwrap();
        let now = shown().await;
        assert_eq!(now, chain(&new)[0], "round {round}");
        before = now;
        let count = served.load(Ordering::Acquire);
        crate::world::until("clients are served", || served.load(Ordering::Acquire) > count + 8)
            .await;
    }
    std::fs::remove_file(&key).unwrap();
    gateway.reload_certificates().await.unwrap_err();
    assert_eq!(shown().await, before);
    done.store(true, Ordering::Release);
    for client in clients {
        client.await.unwrap();
    }
    kept.send(request("GET", "/", &[], "")).await;
    assert_eq!(kept.answer().await.status, 201);
}

#[tokio::test(flavor = "multi_thread")]
async fn changed_certificate_files_are_reloaded() {
    let authority = Authority::new();
    let upstream = Upstream::counting().await;
    let mut config = config(upstream.url());
    let (certificate, key) = authority.files("own");
    listening(&mut config, (certificate.clone(), key.clone()), None);
    let gateway = start(config).await;
    let (new, new_key) = authority.signed();
    replace(&key, &new_key);
    replace(&certificate, &new);
    let wanted = chain(&new)[0].clone();
    let noticed = async {
        loop {
            let stream = authority.connect(gateway.local_addr(), false, &[]).await.unwrap();
            if stream.get_ref().1.peer_certificates().unwrap()[0] == wanted {
                break;
            }
            tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        }
    };
    tokio::time::timeout(crate::world::TIMEOUT, noticed).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tls_response_that_ends_with_its_connection_needs_close_notify() {
    for says in [true, false] {
        let authority = Authority::new();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("https://{}", listener.local_addr().unwrap());
        let acceptor = TlsAcceptor::from(authority.server(false, &[]));
        let serving = tokio::spawn(async move {
            let (stream, _) = listener.accept().await.unwrap();
            let mut stream = acceptor.accept(stream).await.unwrap();
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\nx") {
                assert!(stream.read_buf(&mut head).await.unwrap() > 0);
            }
            stream.write_all(b"HTTP/1.1 200 OK\r\n\r\nhalf").await.unwrap();
            stream.flush().await.unwrap();
            if says {
                stream.shutdown().await.unwrap();
            }
            // Without the word only TCP ends.
            drop(stream.into_inner().0);
        });
        let mut config = config(url.parse().unwrap());
        config.policy.on_unknown = OnUnknown::Block;
        config.transport.upstream_tls.ca = Some(authority.path("ca.pem"));
        let gateway = start(config).await;
        let first = post(gateway.local_addr(), "/", "k", "x").await;
        serving.await.unwrap();
        let again = post(gateway.local_addr(), "/", "k", "x").await;
        if says {
            assert_eq!((first.status, first.text().as_str()), (200, "half"));
            assert_eq!(again.header("idempotency-replayed"), "true");
        } else {
            assert_eq!(first.code(), "upstream-broken");
            assert_eq!(again.code(), "outcome-unknown");
        }
    }
}
