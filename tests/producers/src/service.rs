//! A service that rejects every message, or accepts every one.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use axum::Router;
use axum::body::Bytes;
use axum::http::{HeaderMap, StatusCode};

use crate::broker::Outcome;

/// The id and the payload of a message.
pub(crate) type Post = (String, Vec<u8>);

/// The service, and the ids and payloads that were posted to it.
#[derive(Clone, Default)]
pub(crate) struct Service {
    posted: Arc<Mutex<Vec<Post>>>,
    accepts: Arc<AtomicBool>,
}

impl Service {
    /// Serves on a free port.
    pub(crate) async fn serve(&self) -> Outcome<SocketAddr> {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let this = self.clone();
        let handle =
            move |headers: HeaderMap, body: Bytes| async move { this.post(&headers, &body) };
        let router = Router::new().fallback(handle);
        tokio::spawn(async move { axum::serve(listener, router).await });
        Ok(address)
    }

    pub(crate) fn accept(&self) {
        self.accepts.store(true, Ordering::SeqCst);
    }

    /// Returns what was posted since the last call.
    pub(crate) fn take(&self) -> Vec<Post> {
        std::mem::take(&mut *self.posted.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(crate) fn count(&self) -> usize {
        self.posted.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    fn post(&self, headers: &HeaderMap, body: &Bytes) -> StatusCode {
        let id = headers.get("webhook-id").map(|id| String::from_utf8_lossy(id.as_bytes()).into());
        let posted = (id.unwrap_or_default(), body.to_vec());
        self.posted.lock().unwrap_or_else(PoisonError::into_inner).push(posted);
        match self.accepts.load(Ordering::SeqCst) {
            true => StatusCode::NO_CONTENT,
            false => StatusCode::UNPROCESSABLE_ENTITY,
        }
    }
}
