//! The store over TLS.

use hapax_core::Store;
use hapax_redis::{RedisConnectError, RedisOptions, RedisStore};
use hapax_testkit::servers::{RedisServer, RedisServerOptions, free_port};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};

use super::support::{claim, expect_stored, key};

type Authority = CertifiedIssuer<'static, KeyPair>;

/// A server that wants a certificate of its clients, by whoever signed its own.
struct Encrypted {
    server: RedisServer,
    port: u16,
    authority: Authority,
}

fn authority() -> Authority {
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    // Another name than those it signs, which would look as if they had signed themselves.
    params.distinguished_name.push(DnType::CommonName, "an authority");
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap()
}

/// A certificate for 127.0.0.1, and its key.
fn signed(authority: &Authority) -> (String, String) {
    let key = KeyPair::generate().unwrap();
    let params = CertificateParams::new(vec!["127.0.0.1".into()]).unwrap();
    (params.signed_by(&key, authority).unwrap().pem(), key.serialize_pem())
}

impl Encrypted {
    async fn start() -> Self {
        Self::start_with(RedisServerOptions::new(), authority()).await
    }

    async fn start_with(mut options: RedisServerOptions, authority: Authority) -> Self {
        let (folder, port) = (tempfile::tempdir().unwrap(), free_port());
        let (chain, key) = signed(&authority);
        options = options.set("tls-port", port.to_string());
        for (directive, pem) in
            [("tls-cert-file", chain), ("tls-key-file", key), ("tls-ca-cert-file", authority.pem())]
        {
            let file = folder.path().join(directive);
            std::fs::write(&file, pem).unwrap();
            options = options.set(directive, file.display().to_string());
        }
        // It has read them once it runs.
        let server = RedisServer::start_with(options).await;
        Self { server, port, authority }
    }

    fn options(&self) -> RedisOptions {
        let (chain, key) = signed(&self.authority);
        RedisOptions::new(format!("rediss://127.0.0.1:{}", self.port))
            .tls_roots(self.authority.pem())
            .tls_client(chain, key)
    }
}

#[tokio::test]
async fn client_and_server_verify_each_others_certificates() {
    let encrypted = Encrypted::start().await;
    let store = RedisStore::connect(encrypted.options()).await.unwrap();
    expect_stored(&store, &claim(1)).await;
    assert!(store.load(&key(1)).await.unwrap().stored.is_some());
    let clients = encrypted.server.command("INFO clients").await;
    assert!(clients.contains("connected_clients:2"), "{clients}");
}

#[tokio::test]
async fn untrusted_certificates_are_rejected_by_client_and_server() {
    let encrypted = Encrypted::start().await;
    let other = authority();
    let (chain, key) = signed(&other);
    let of_another = encrypted.options().tls_client(chain, key);
    let to_another = encrypted.options().tls_roots(other.pem());
    let to_the_system = RedisOptions::new(format!("rediss://127.0.0.1:{}", encrypted.port));
    for options in [of_another, to_another, to_the_system] {
        let error = RedisStore::connect(options).await.unwrap_err();
        assert!(matches!(error, RedisConnectError::Unreachable(_)), "{error:?}");
    }
}

#[tokio::test]
async fn a_url_names_the_roots_and_the_certificate_of_the_client() {
    let encrypted = Encrypted::start().await;
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, text: String| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let (chain, own) = signed(&encrypted.authority);
    let roots = file("roots", encrypted.authority.pem());
    let (chain, own) = (file("chain", chain), file("key", own));
    let password = "ACL SETUSER app on >p@ss ~* &* +@all";
    assert_eq!(encrypted.server.command(password).await, "+OK");
    let url = |parameters: &str| {
        RedisOptions::new(format!(
            "rediss://app:p%40ss@127.0.0.1:{}/0?{parameters}",
            encrypted.port
        ))
    };
    let right = format!("sslrootcert={roots}&sslcert={chain}&sslkey={own}");
    let store = RedisStore::connect(url(&right)).await.unwrap();
    expect_stored(&store, &claim(1)).await;
    assert!(store.load(&key(1)).await.unwrap().stored.is_some());
    url(&right).check().unwrap();
    let missing = |options: &RedisOptions| {
        let error = options.check().unwrap_err();
        assert!(matches!(error, RedisConnectError::CertificateFile { .. }), "{error}");
        error.to_string()
    };
    assert!(missing(&url("sslrootcert=/none/ca.pem")).contains("/none/ca.pem"));
    // An error does not repeat what may be a password.
    assert!(!missing(&url("sslrootcert=/ca.pem?password=s3cret")).contains("s3cret"));
    for (options, expected) in [
        (url(&format!("sslcert={chain}")), "expected sslcert and sslkey together"),
        (RedisOptions::new(format!("redis://127.0.0.1?sslrootcert={roots}")), "need rediss://"),
    ] {
        let error = options.check().unwrap_err();
        assert!(matches!(error, RedisConnectError::Url(_)), "{error}");
        assert!(error.to_string().contains(expected), "{error}");
    }
}

#[cfg(feature = "sentinel")]
#[tokio::test]
async fn certificates_of_a_url_are_also_those_for_sentinels() {
    use std::time::Duration;

    let master = Encrypted::start().await;
    let options = RedisServerOptions::sentinel()
        .set("tls-replication", "yes")
        .set("sentinel monitor orders", format!("127.0.0.1 {} 1", master.port));
    let Encrypted { server, authority, .. } = master;
    let sentinel = Encrypted::start_with(options, authority).await;
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, text: String| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        format!("{name}={}", path.display())
    };
    let (chain, own) = signed(&sentinel.authority);
    let roots = file("sslrootcert", sentinel.authority.pem());
    let client = [file("sslcert", chain), file("sslkey", own)].join("&");
    let password = "ACL SETUSER app on >word ~* &* +@all";
    assert_eq!(server.command(password).await, "+OK");
    let connect = async |parameters: &str| {
        let at = format!("app:word@127.0.0.1:{}/orders/1", sentinel.port);
        let options = RedisOptions::new(format!("rediss+sentinel://{at}?{parameters}"));
        RedisStore::connect(options.timeout(Duration::from_secs(10))).await
    };
    let store = connect(&format!("{roots}&{client}")).await.unwrap();
    expect_stored(&store, &claim(1)).await;
    assert!(store.load(&key(1)).await.unwrap().stored.is_some());
    // In the database of the URL.
    let keyspace = server.command("INFO keyspace").await;
    assert!(keyspace.contains("db1:"), "{keyspace}");
    let error = connect(&roots).await.unwrap_err();
    assert!(matches!(error, RedisConnectError::Unreachable(_)), "{error:?}");
}
