//! TLS by OpenSSL.

use std::net::Ipv4Addr;
use std::sync::Arc;

use hapax_kafka::{KafkaSink, KafkaSource};
use hapax_messages::{MessageId, MessageSink as _, MessageSource as _, OutgoingMessage};
use rcgen::{CertifiedKey, KeyPair, generate_simple_self_signed};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::pki_types::PrivateKeyDer;

use super::Broker;
use crate::kafka::cluster::{Cluster, LIMIT};

/// Listens with TLS before a broker. Returns its port.
async fn tls(certificate: &CertifiedKey<KeyPair>, broker: u16) -> u16 {
    let key = PrivateKeyDer::Pkcs8(certificate.signing_key.serialize_der().into());
    let config = ServerConfig::builder()
        .with_no_client_auth()
        .with_single_cert(vec![certificate.cert.der().clone()], key)
        .unwrap();
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((accepted, _)) = listener.accept().await {
            let acceptor = acceptor.clone();
            tokio::spawn(async move {
                let mut client = acceptor.accept(accepted).await?;
                let mut broker = TcpStream::connect((Ipv4Addr::LOCALHOST, broker)).await?;
                tokio::io::copy_bidirectional(&mut client, &mut broker).await
            });
        }
    });
    port
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_go_through_tls_if_the_certificate_is_trusted() {
    let Some(mut broker) = Broker::new("tls") else { return };
    let certified = || generate_simple_self_signed(["127.0.0.1".to_owned()]).unwrap();
    let (certificate, other) = (certified(), certified());
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, certificate: &CertifiedKey<KeyPair>| {
        let path = folder.path().join(name);
        std::fs::write(&path, certificate.cert.pem()).unwrap();
        path.display().to_string()
    };
    let (trusted, other) = (file("trusted", &certificate), file("other", &other));
    // Clients connect to what the broker advertises.
    broker.start().await;
    let topic = Cluster::connect(&broker.address(), "tls").await.topic.clone();
    broker.kill().await;
    broker.advertised = tls(&certificate, broker.port).await;
    broker.start().await;
    let properties = |trusted: &str| {
        [
            ("bootstrap.servers", format!("127.0.0.1:{}", broker.advertised)),
            ("security.protocol", "ssl".to_owned()),
            ("ssl.ca.location", trusted.to_owned()),
        ]
    };
    let id = MessageId::new("m-1").unwrap();
    let message = OutgoingMessage::new(&topic, id, "x");
    KafkaSink::new(properties(&other)).unwrap().publish(&message).await.unwrap_err();
    KafkaSink::new(properties(&trusted)).unwrap().publish(&message).await.unwrap();
    let builder = KafkaSource::builder(properties(&trusted), [&topic], "invoices");
    let source = builder.start().await.unwrap();
    let received = timeout(LIMIT, source.receive(2.try_into().unwrap())).await;
    let received = received.expect("it is received").unwrap();
    assert_eq!((received.len(), &*received[0].message().payload), (1, &b"x"[..]));
    received[0].acknowledge().await.unwrap();
    drop(received);
    source.close().await;
}
