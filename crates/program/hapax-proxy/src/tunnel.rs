//! Connections that switch to another protocol (RFC 9110 7.8), such as WebSocket. They are allowed
//! on unprotected routes; from then on, bytes are forwarded in both directions.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use http::Response;
use http::header::{CONNECTION, HeaderMap, HeaderValue, UPGRADE};
use http::request::Parts;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, copy_bidirectional};
use tokio::time::{Instant, sleep_until};

use crate::headers::has_token;
use crate::upstream::{Metered, Tunnel};

/// The upstream's connection after a switch of protocols. Clones share one tunnel.
#[derive(Clone, Debug, Default)]
pub struct Switch(Arc<Mutex<Option<Tunnel>>>);

impl Switch {
    pub(crate) fn to(tunnel: Tunnel) -> Self {
        Self(Arc::new(Mutex::new(Some(tunnel))))
    }

    /// Takes the upstream's connection once both have switched protocols.
    pub(crate) fn take(&self) -> Option<Tunnel> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Takes the upstream's connection from its response; returns the new protocol.
    pub(crate) fn follow<B>(&self, response: &mut Response<B>) -> Option<HeaderValue> {
        let tunnel = response.extensions_mut().remove::<Self>()?.take()?;
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(tunnel);
        // The response must name it (RFC 9110 15.2.2); one that does not is followed nevertheless.
        let said = response.headers().get(UPGRADE).cloned();
        Some(said.unwrap_or_else(|| HeaderValue::from_static("unknown")))
    }
}

/// Returns the switch and the protocol if a request wants another protocol and may have it: its
/// connection can switch, and it has no body. Other versions of HTTP, and TLS, concern each hop
/// separately and are ignored.
pub(crate) fn wanted(
    parts: &Parts,
    is_empty: bool,
    switch: Option<&Switch>,
) -> Option<(Switch, HeaderValue)> {
    let mut named = parts.headers.get_all(UPGRADE).iter();
    let (Some(protocol), None) = (named.next(), named.next()) else { return None };
    let said = protocol.to_str().ok()?.to_ascii_lowercase();
    let ours = |name: &str| name == "h2c" || name.starts_with("http/") || name.starts_with("tls/");
    let foreign = !said.split(',').any(|name| ours(name.trim()));
    let requested = has_token(&parts.headers, &CONNECTION, "upgrade");
    let switch = switch?;
    (foreign && requested && is_empty).then(|| (switch.clone(), protocol.clone()))
}

/// Adds the fields that request or announce another protocol.
pub(crate) fn add_upgrade(headers: &mut HeaderMap, protocol: &HeaderValue) {
    headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
    headers.insert(UPGRADE, protocol.clone());
}

/// Forwards bytes in both directions until both sides have ended, one fails, or neither sends
/// anything for the idle timeout. `read` has bytes that the client sent already.
pub(crate) async fn run<S>(client: S, read: &[u8], tunnel: Tunnel) -> io::Result<()>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let Tunnel { io, idle_timeout, _permit } = tunnel;
    let mut client = Metered::new(client, false);
    let mut upstream = Metered::new(TokioIo::new(io), false);
    let meters = [client.meter(), upstream.meter()];
    let silent = async {
        loop {
            let deadline = meters[0].last().max(meters[1].last()) + idle_timeout;
            if deadline <= Instant::now() {
                break;
            }
            sleep_until(deadline).await;
        }
    };
    let pass = async {
        upstream.write_all(read).await?;
        copy_bidirectional(&mut client, &mut upstream).await
    };
    tokio::select! {
        passed = pass => passed.map(drop),
        () = silent => Err(io::ErrorKind::TimedOut.into()),
    }
}
