//! Every way to log in at a server.

use std::path::{Path, PathBuf};

use hapax_nats::{NatsConnector, NatsCredentials};
use hapax_testkit::servers::NatsServer;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};

/// The seed of a user, and the name of its key.
const SEED: &str = "SUANQDPB2RUOE4ETUA26CNX7FUKE5ZZKFCQIIW63OX225F2CO7UEXTM7ZY";
const NKEY: &str = "UAMMBNV2EYR65NYZZ7IAK5SIR5ODNTTERJOBOF4KJLMWI45YOXOSWULM";

/// Accounts, users and their JWTs.
const OPERATOR: &str = include_str!("operator.conf");
const CREDENTIALS: &str = include_str!("invoices.creds");

fn password(user: &str, password: &str) -> NatsCredentials {
    NatsCredentials::Password { user: user.to_owned(), password: password.to_owned() }
}

/// Logs in, and waits for an answer of the server.
async fn login(connector: &NatsConnector) -> Result<(), async_nats::Error> {
    connector.connect().await?.client().flush().await?;
    Ok(())
}

async fn expect_login(server: &NatsServer, credentials: NatsCredentials, succeeds: bool) {
    let connector = NatsConnector::new(server.url()).credentials(credentials.clone()).unwrap();
    assert_eq!(login(&connector).await.is_ok(), succeeds, "{credentials:?}");
}

#[tokio::test]
async fn a_client_logs_in_by_a_password_a_token_an_nkey_or_a_credentials_file() {
    let users = format!(
        "authorization {{ users: [{{ user: \"a@b\", password: \"p:w\" }}, {{ nkey: {NKEY} }}] }}"
    );
    let server = NatsServer::with(&users).await;
    expect_login(&server, password("a@b", "p:w"), true).await;
    expect_login(&server, password("a@b", "guess"), false).await;
    expect_login(&server, NatsCredentials::Nkey(SEED.to_owned()), true).await;
    expect_login(&server, NatsCredentials::Nkey("SUguess".to_owned()), false).await;
    let with_user =
        |user: &str| NatsConnector::new(server.url().replace("//", &format!("//{user}@")));
    login(&with_user("a%40b:p%3Aw")).await.unwrap();
    assert!(login(&with_user("a%40b:guess")).await.is_err());
    // Credentials prevail over the URL.
    login(&with_user("a:b").credentials(password("a@b", "p:w")).unwrap()).await.unwrap();

    let server = NatsServer::with("authorization { token: \"t0k/n\" }").await;
    expect_login(&server, NatsCredentials::Token("t0k/n".to_owned()), true).await;
    expect_login(&server, NatsCredentials::Token("guess".to_owned()), false).await;
    let url = server.url().replace("//", "//t0k%2Fn@");
    login(&NatsConnector::new(url)).await.unwrap();

    let server = NatsServer::with(OPERATOR).await;
    expect_login(&server, NatsCredentials::File(CREDENTIALS.to_owned()), true).await;
    assert!(login(&NatsConnector::new(server.url())).await.is_err());
}

/// An authority, and a folder with certificates that it has signed.
struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
    folder: tempfile::TempDir,
}

impl Authority {
    fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.distinguished_name.push(DnType::CommonName, "an authority");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("ca.pem"), issuer.pem()).unwrap();
        Self { issuer, folder }
    }

    fn roots(&self) -> PathBuf {
        self.folder.path().join("ca.pem")
    }

    /// Returns the files of a certificate for this name and of its key.
    fn sign(&self, name: &str) -> [PathBuf; 2] {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        let file = |end: &str, text: String| {
            let path = self.folder.path().join(format!("{name}.{end}"));
            std::fs::write(&path, text).unwrap();
            path
        };
        [file("pem", certificate.pem()), file("key", key.serialize_pem())]
    }
}

#[tokio::test]
async fn a_client_logs_in_by_its_certificate_at_a_server_that_it_trusts() {
    let (authority, other) = (Authority::new(), Authority::new());
    let shown = |path: &Path| path.display().to_string();
    let [certificate, key] = authority.sign("127.0.0.1").map(|path| shown(&path));
    let roots = shown(&authority.roots());
    // The name in a client's certificate is that of its user.
    let server = NatsServer::with(&format!(
        "tls {{ cert_file: \"{certificate}\", key_file: \"{key}\", ca_file: \"{roots}\", verify_and_map: true }}\n\
         authorization {{ users: [{{ user: \"invoices.example\" }}] }}"
    ))
    .await;
    let connector = |roots: &Path, client: Option<[PathBuf; 2]>| {
        let connector = NatsConnector::new(server.url()).root_certificates(roots);
        match client {
            Some([certificate, key]) => connector.client_certificate(certificate, key),
            None => connector,
        }
    };
    let client = || Some(authority.sign("invoices.example"));
    login(&connector(&authority.roots(), client())).await.unwrap();
    for wrong in [
        connector(&authority.roots(), None),
        connector(&authority.roots(), Some(authority.sign("nameless.example"))),
        connector(&authority.roots(), Some(other.sign("invoices.example"))),
        connector(&other.roots(), client()),
        connector(Path::new("/none"), client()),
    ] {
        assert!(login(&wrong).await.is_err());
    }
    // A server without TLS gets no password.
    let plain = NatsServer::start().await;
    let connector = NatsConnector::new(plain.url()).root_certificates(authority.roots());
    assert!(login(&connector).await.is_err());
}
