//! The log: no secret, no signature, no content.

use std::io;
use std::sync::{Arc, Mutex};

use hapax_webhooks::WebhookLayer;
use tracing_subscriber::fmt::MakeWriter;

use crate::world::{NOW, World, event, post, send, stripe_signature};

#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl io::Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Lines {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}

const SECRET: &str = concat!("whsec", "_of-the-test-of-logs");
const WRONG: &str = concat!("whsec", "_of-another-endpoint");

#[tokio::test]
async fn a_rejection_is_logged_with_source_and_code_and_without_secrets() {
    let lines = Lines::default();
    // For all threads: the interest of a thread without a subscriber would hide lines of this one.
    tracing_subscriber::fmt()
        .with_max_level(tracing::Level::TRACE)
        .with_ansi(false)
        .with_writer(lines.clone())
        .init();
    let world = World::new();
    let webhooks = world.layer(WebhookLayer::stripe("logged").secret(SECRET));
    let receiver = world.receiver(webhooks);
    let body = event("evt_private");
    let (right, wrong) =
        (stripe_signature(SECRET, NOW, &body), stripe_signature(WRONG, NOW, &body));
    let rejected = send(&receiver, post(&[("stripe-signature", &wrong)], body.clone())).await;
    rejected.is_rejected(401, "invalid-signature");
    let accepted = send(&receiver, post(&[("stripe-signature", &right)], body)).await;
    accepted.is_first(200, "execution 1");
    let log = String::from_utf8(lines.0.lock().unwrap().clone()).unwrap();
    assert!(log.contains("source=\"logged\" code=\"invalid-signature\""), "{log}");
    for text in [&log, rejected.text()] {
        for hidden in [SECRET, WRONG, &right[15..], &wrong[15..], "evt_private"] {
            assert!(!text.contains(hidden), "{hidden} in {text}");
        }
    }
}
