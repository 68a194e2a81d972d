//! The store over TLS.

use std::sync::Arc;

use hapax_postgres::{
    PostgresConnectError, PostgresOptions, PostgresStore, Rustls, RustlsCertificates,
};
use hapax_testkit::servers::{PostgresServer, PostgresServerOptions};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};

use super::support::{claim, expect_stored};

type Authority = CertifiedIssuer<'static, KeyPair>;

fn authority() -> Authority {
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    // Another name than those it signs, which would look as if they had signed themselves.
    params.distinguished_name.push(DnType::CommonName, "an authority");
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap()
}

/// A certificate for `name`, and its key.
fn signed(authority: &Authority, name: &str) -> (String, String) {
    let key = KeyPair::generate().unwrap();
    let params = CertificateParams::new(vec![name.into()]).unwrap();
    (params.signed_by(&key, authority).unwrap().pem(), key.serialize_pem())
}

/// A server that encrypts, by a certificate of `authority` for `name`.
async fn server(authority: &Authority, name: &str) -> PostgresServer {
    let (chain, key) = signed(authority, name);
    PostgresServer::start_with(PostgresServerOptions::new().encrypted(chain, key)).await
}

fn options(server: &PostgresServer, roots: &str) -> PostgresOptions {
    let roots =
        RustlsCertificates { roots: Some(roots.as_bytes()), ..RustlsCertificates::default() };
    let url = format!("{}?sslmode=require", server.url("postgres"));
    url.parse::<PostgresOptions>().unwrap().tls(Arc::new(Rustls::new(&roots).unwrap()))
}

#[tokio::test]
async fn traffic_is_encrypted_and_the_server_is_verified() {
    let authority = authority();
    let server = server(&authority, "127.0.0.1").await;
    let store = PostgresStore::connect(options(&server, &authority.pem())).await.unwrap();
    expect_stored(&store, &claim(1)).await;
    let encrypted = "SELECT count(*), bool_and(s.ssl) FROM pg_stat_ssl s
        JOIN pg_stat_activity a USING (pid)
        WHERE a.backend_type = 'client backend' AND a.pid <> pg_backend_pid()";
    assert_eq!(server.sql("postgres", encrypted).await, "1|t");

    // Signed by somebody else; by nobody that the system knows.
    let other = options(&server, &self::authority().pem());
    let system = format!("{}?sslmode=require", server.url("postgres")).parse().unwrap();
    for options in [other, system] {
        let refused = PostgresStore::connect(options).await.unwrap_err();
        assert!(matches!(refused, PostgresConnectError::Connect(_)), "{refused}");
    }
}

#[tokio::test]
async fn a_certificate_for_another_host_is_rejected() {
    let authority = authority();
    let server = server(&authority, "127.0.0.2").await;
    let refused = PostgresStore::connect(options(&server, &authority.pem())).await.unwrap_err();
    assert!(matches!(refused, PostgresConnectError::Connect(_)), "{refused}");
}

#[tokio::test]
async fn a_server_without_tls_is_rejected() {
    let server = PostgresServer::start().await;
    let refused = PostgresStore::connect(options(&server, &authority().pem())).await.unwrap_err();
    assert!(matches!(refused, PostgresConnectError::Connect(_)), "{refused}");
}

#[test]
fn an_invalid_certificate_is_an_error() {
    for certificates in [
        RustlsCertificates { roots: Some(b"nothing"), client: None },
        RustlsCertificates { roots: None, client: Some((b"nothing", b"nothing")) },
    ] {
        let refused = Rustls::new(&certificates).unwrap_err();
        assert!(matches!(refused, PostgresConnectError::Certificates(_)), "{refused}");
    }
}

#[tokio::test]
async fn a_url_names_the_roots_and_the_certificate_of_the_client() {
    let (authority, folder) = (authority(), tempfile::tempdir().unwrap());
    let file = |name: &str, content: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, content).unwrap();
        path.display().to_string()
    };
    let (own, key) = signed(&authority, "app");
    let [roots, own, key] = [("ca 1.pem", authority.pem()), ("own.pem", own), ("key.pem", key)]
        .map(|(name, text)| file(name, &text));
    let (chain, server_key) = signed(&authority, "127.0.0.1");
    let server =
        PostgresServerOptions::new().encrypted(chain, server_key).set("ssl_ca_file", &*roots);
    let server = PostgresServer::start_with(server).await;
    let url = |parameters: &str| {
        format!("{}?{parameters}", server.url("postgres")).parse::<PostgresOptions>()
    };
    let escaped = roots.replace(' ', "%20");
    let with_client = url(&format!("sslrootcert={escaped}&sslcert={own}&sslkey={key}"));
    let client = with_client.unwrap().client().await.unwrap();
    let own_session =
        "SELECT ssl, client_dn IS NOT NULL FROM pg_stat_ssl WHERE pid = pg_backend_pid()";
    let row = client.query_one(own_session, &[]).await.unwrap();
    assert_eq!((row.get(0), row.get(1)), (true, true));
    let only_roots = url(&format!("sslmode=verify-full&sslrootcert={escaped}&application_name=a"));
    let client = only_roots.unwrap().client().await.unwrap();
    let row = client.query_one(own_session, &[]).await.unwrap();
    assert_eq!((row.get(0), row.get(1)), (true, false));

    let system = url("sslrootcert=system").unwrap().client().await.unwrap_err();
    assert!(matches!(system, PostgresConnectError::Connect(_)), "{system}");
    for (parameters, expected) in [
        (format!("sslcert={own}"), "expected sslcert and sslkey together"),
        (format!("sslmode=disable&sslrootcert={escaped}"), "expected sslmode=require"),
    ] {
        let error = url(&parameters).unwrap_err();
        assert!(error.to_string().contains(expected), "{error}");
        assert!(matches!(error, PostgresConnectError::CertificateParameters(_)), "{error}");
    }
    // An error does not repeat what may be a password or a key.
    for (path, shown) in
        [("/none/ca.pem", true), ("/ca.pem?password=s3cret", false), ("/dev/zero", true)]
    {
        let error = url(&format!("sslrootcert={path}")).unwrap_err();
        assert!(matches!(error, PostgresConnectError::CertificateFile { .. }), "{error}");
        assert_eq!(error.to_string().contains(path), shown, "{error}");
        assert!(!error.to_string().contains("s3cret"), "{error}");
    }
    let content = authority.pem().replace('\n', "%0A").replace(' ', "%20").replace('+', "%2B");
    url(&format!("sslrootcert={content}")).unwrap().client().await.unwrap();
}
