//! Connections with TLS. A client that trusts the certificates of `SSL_CERT_FILE` is a process of its own: this
//! program, started again in a role.

use std::num::NonZeroUsize;
use std::path::Path;
use std::time::Duration;

use hapax_messages::{MessageId, MessageSink as _, MessageSource as _, OutgoingMessage};
use hapax_rabbitmq::{RabbitLogin, RabbitSink, RabbitSource};
use hapax_testkit::servers::{RabbitMqServer, RabbitMqServerOptions};
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, CertifiedKey, DnType, IsCa, KeyPair,
    generate_simple_self_signed,
};
use tokio::process::Command;

/// The variable with the URL.
const ROLE: &str = "HAPAX_RABBITMQ_TLS";

const MESSAGES: usize = 3;

/// Longer than what is read at a time.
const PAYLOAD: usize = 1 << 20;

#[tokio::test]
async fn messages_go_through_tls_if_the_certificate_is_trusted() {
    let CertifiedKey { cert, signing_key } =
        generate_simple_self_signed(["127.0.0.1".to_owned()]).unwrap();
    let certificate = Some((cert.pem(), signing_key.serialize_pem()));
    let options = RabbitMqServerOptions { certificate, ..RabbitMqServerOptions::default() };
    let server = RabbitMqServer::with(options).await;
    server.declare_queue("orders").await;
    let folder = tempfile::tempdir().unwrap();
    let (trusted, other) = (folder.path().join("trusted"), folder.path().join("other"));
    std::fs::write(&trusted, cert.pem()).unwrap();
    let unrelated = generate_simple_self_signed(["127.0.0.1".to_owned()]).unwrap();
    std::fs::write(&other, unrelated.cert.pem()).unwrap();

    let url = server.tls_url();
    let (is_success, log) = client(&url, &trusted).await;
    assert!(is_success, "{log}");
    // The acknowledgements were sent before the process ended.
    while server.messages("orders").await > 0 {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let (is_success, log) = client(&url, &other).await;
    assert!(!is_success && log.contains("InvalidCertificate"), "{log}");
}

/// Runs a client that trusts one certificate. Returns whether it succeeded, and what it printed.
async fn client(url: &str, trusted: &Path) -> (bool, String) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["rabbitmq::tls::role_of_a_client", "--exact", "--nocapture"]);
    command.env(ROLE, url).env("SSL_CERT_FILE", trusted).kill_on_drop(true);
    let output = command.output().await.unwrap();
    (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
}

/// Plays the role of a client. Without a role it does nothing.
#[tokio::test]
async fn role_of_a_client() {
    let Ok(url) = std::env::var(ROLE) else { return };
    let sink = RabbitSink::builder(&url).unwrap().connect().await.unwrap();
    for number in 0..MESSAGES {
        let id = MessageId::new(format!("m-{number}")).unwrap();
        let payload = vec![u8::try_from(number).unwrap(); PAYLOAD];
        sink.publish(&OutgoingMessage::new("orders", id, payload)).await.unwrap();
    }
    let builder = RabbitSource::builder(&url, "orders").delivery_limit(None);
    let source = builder.start().await.unwrap();
    for number in 0..MESSAGES {
        let received = source.receive(NonZeroUsize::MIN).await.unwrap();
        let message = received[0].message();
        assert_eq!(message.payload, vec![u8::try_from(number).unwrap(); PAYLOAD]);
        received[0].acknowledge().await.unwrap();
    }
}

/// An authority, and the certificates that it signs, with their keys.
struct Authority(CertifiedIssuer<'static, KeyPair>);

impl Authority {
    fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.distinguished_name.push(DnType::CommonName, "an authority");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Self(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    fn sign(&self, name: &str) -> (String, String) {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap();
        params.distinguished_name.push(DnType::CommonName, name);
        (params.signed_by(&key, &self.0).unwrap().pem(), key.serialize_pem())
    }

    /// Returns the login of a client that trusts this authority.
    fn login(&self, (certificate, key): &(String, String)) -> RabbitLogin {
        let client = Some((certificate.as_bytes(), key.as_bytes()));
        RabbitLogin::default().certificates(Some(self.0.pem().as_bytes()), client).unwrap()
    }
}

#[tokio::test]
async fn a_client_logs_in_by_a_password_or_by_its_certificate() {
    let (authority, other) = (Authority::new(), Authority::new());
    let options = RabbitMqServerOptions {
        certificate: Some(authority.sign("server")),
        client_roots: Some(authority.0.pem()),
        ..RabbitMqServerOptions::default()
    };
    let server = RabbitMqServer::with(options).await;
    let add = "rabbit_auth_backend_internal:add_user(<<\"invoices\">>,<<\"p@ss\">>,<<\"test\">>),\
               rabbit_auth_backend_internal:set_permissions(<<\"invoices\">>,<<\"/\">>,<<\".*\">>,\
               <<\".*\">>,<<\".*\">>,<<\"test\">>).";
    assert_eq!(server.eval(add).await, "ok");
    let client = authority.sign("invoices");
    // Without the user of the URL, which is the administrator.
    let url = server.tls_url().replace("guest:guest@", "");
    let login = async |login: RabbitLogin, url: &str| {
        RabbitSink::builder(url).unwrap().login(login)?.connect().await?;
        Ok::<_, Box<dyn std::error::Error>>(())
    };
    login(authority.login(&client).external(), &url).await.unwrap();
    login(authority.login(&client).password("invoices", "p@ss"), &url).await.unwrap();
    let plain = RabbitLogin::default().password("invoices", "p@ss");
    login(plain, &server.url()).await.unwrap();
    for wrong in [
        authority.login(&client).password("invoices", "guess"),
        // There is no such user.
        authority.login(&authority.sign("nameless")).external(),
        // One does not trust the other.
        other.login(&client).external(),
        authority.login(&other.sign("invoices")).external(),
    ] {
        assert!(login(wrong, &url).await.is_err());
    }
    let error = login(authority.login(&client), &server.url()).await.unwrap_err().to_string();
    assert!(error.contains("certificates need amqps://"), "{error}");
    let (roots, none) = (authority.0.pem(), &b"none"[..]);
    for (roots, client) in [(none, None), (roots.as_bytes(), Some((none, none)))] {
        let login = RabbitLogin::default().certificates(Some(roots), client);
        let error = login.unwrap_err().to_string();
        assert!(error.contains("in PEM"), "{error}");
    }
}
