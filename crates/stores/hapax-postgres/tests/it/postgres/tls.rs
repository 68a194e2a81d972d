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
