//! The log: no secret, no signature, no content.

use std::io;
use std::sync::{Arc, Mutex};

use tracing_subscriber::fmt::MakeWriter;

use crate::world::{
    NOW, OTHER_SECRET, STRIPE_SECRET, World, event, post, send, stripe_delivery, stripe_signature,
};

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

#[tokio::test]
async fn a_rejection_is_logged_with_source_and_code_and_without_secrets() {
    let lines = Lines::default();
    let writer = lines.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(tracing::Level::TRACE)
        .with_ansi(false)
        .with_writer(writer)
        .finish();
    let guard = tracing::subscriber::set_default(subscriber);
    let world = World::new();
    let receiver = world.receiver(world.stripe());
    let body = event("evt_private");
    let wrong = stripe_signature(OTHER_SECRET, NOW, &body);
    let rejected = send(&receiver, post(&[("stripe-signature", &wrong)], body.clone())).await;
    rejected.is_rejected(401, "invalid-signature");
    send(&receiver, stripe_delivery(&body)).await.is_first(200, "execution 1");
    drop(guard);
    let log = String::from_utf8(lines.0.lock().unwrap().clone()).unwrap();
    assert!(log.contains("source=\"stripe\" code=\"invalid-signature\""), "{log}");
    let right = stripe_signature(STRIPE_SECRET, NOW, &body);
    for text in [&log, rejected.text()] {
        for hidden in [STRIPE_SECRET, OTHER_SECRET, &right[15..], &wrong[15..], "evt_private"] {
            assert!(!text.contains(hidden), "{hidden} in {text}");
        }
    }
}
