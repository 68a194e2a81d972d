//! Connections that leave HTTP (RFC 9110 7.8), such as those of WebSockets: passed on where nothing is
//! protected, and from then on bytes in both directions.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use hapax_http::server::ExecutionHandle;
use http::Response;
use http::header::{CONNECTION, HeaderMap, HeaderValue, UPGRADE};
use http::request::Parts;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, copy_bidirectional};
use tokio::time::{Instant, sleep_until};

use super::headers::has_token;
use crate::upstream::{Metered, Switched, Tunnel};

/// A request extension: what becomes of the client's connection, if it can leave HTTP. Of all clones
/// there is one tunnel.
#[derive(Clone, Debug, Default)]
pub(crate) struct Switch(Arc<Mutex<Option<Tunnel>>>);

impl Switch {
    /// Where the connection goes, once it has left HTTP.
    pub(crate) fn take(&self) -> Option<Tunnel> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Goes where the upstream went; into which protocol.
    pub(super) fn follow<B>(&self, response: &mut Response<B>) -> Option<HeaderValue> {
        let tunnel = response.extensions_mut().remove::<Switched>()?.take()?;
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(tunnel);
        // It has to say which (RFC 9110 15.2.2); who does not is followed all the same.
        let said = response.headers().get(UPGRADE).cloned();
        Some(said.unwrap_or_else(|| HeaderValue::from_static("unknown")))
    }
}

/// Whether a request asks for another protocol, and may have it: nothing is protected and nothing
/// of it is left to be sent. Other versions of HTTP, and TLS, are for the next hop to ask for.
pub(super) fn wanted(parts: &Parts, is_empty: bool) -> Option<(Switch, HeaderValue)> {
    let mut named = parts.headers.get_all(UPGRADE).iter();
    let (Some(protocol), None) = (named.next(), named.next()) else { return None };
    let said = protocol.to_str().ok()?.to_ascii_lowercase();
    let ours = |name: &str| name == "h2c" || name.starts_with("http/") || name.starts_with("tls/");
    let foreign = !said.split(',').any(|name| ours(name.trim()));
    let asked = has_token(&parts.headers, &CONNECTION, "upgrade");
    let free = is_empty && parts.extensions.get::<ExecutionHandle>().is_none();
    let switch = parts.extensions.get::<Switch>()?;
    (foreign && asked && free).then(|| (switch.clone(), protocol.clone()))
}

/// Says of a message that it is about another protocol.
pub(super) fn ask(headers: &mut HeaderMap, protocol: &HeaderValue) {
    headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
    headers.insert(UPGRADE, protocol.clone());
}

/// Passes bytes on in both directions until both sides have ended, one fails, or neither says anything
/// for as long as it may be silent. `read`: what the client said already.
pub(crate) async fn run<S>(client: S, read: &[u8], tunnel: Tunnel) -> io::Result<()>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let Tunnel { io, idle_timeout, _place } = tunnel;
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
