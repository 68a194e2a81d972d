//! Connections with TLS. The client trusts the certificates of `SSL_CERT_FILE`, so that it is a process of
//! its own: this program, started again in a role.

use std::num::NonZeroUsize;
use std::path::Path;
use std::time::Duration;

use hapax_messages::{MessageId, MessageSink as _, MessageSource as _, OutgoingMessage};
use hapax_rabbitmq::{RabbitSink, RabbitSource};
use hapax_testkit::servers::{RabbitMqServer, RabbitMqServerOptions};
use rcgen::{CertifiedKey, generate_simple_self_signed};
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
