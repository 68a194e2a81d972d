//! Tunnels to servers through an HTTP proxy.
//!
//! 1. A server is reached by `CONNECT`, whatever its scheme. The proxy gets no request of ours, so that no response of
//!    the proxy is ever taken for one of the server.
//! 2. A proxy that opens no tunnel is a server that could not be reached: nothing of a request was sent.

use std::fmt;

use http::HeaderValue;
use http::uri::Authority;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::Origin;
use crate::BodyError;

/// The longest head of a response to `CONNECT`.
const MAX_HEAD: usize = 8 * 1024;

/// An HTTP proxy that opens tunnels (`CONNECT`). Its `Debug` form has no credentials.
#[derive(Clone, PartialEq, Eq)]
pub struct ConnectProxy {
    authority: Authority,
    authorization: Option<HeaderValue>,
}

impl ConnectProxy {
    /// Creates the proxy at a host and port, 80 without one, with the value of `Proxy-Authorization`. It is reached
    /// over plain TCP; what is sent to an `https` server is encrypted within the tunnel.
    #[must_use]
    pub fn new(authority: Authority, authorization: Option<HeaderValue>) -> Self {
        Self { authority, authorization }
    }

    /// Opens a tunnel to a server.
    pub(super) async fn open(&self, to: &Origin) -> Result<TcpStream, BodyError> {
        let failed = |error: &dyn fmt::Display| format!("the proxy {}: {error}", self.place());
        let host = self.authority.host().trim_start_matches('[').trim_end_matches(']');
        let connected = TcpStream::connect((host, self.port())).await;
        let mut stream = connected.map_err(|error| failed(&error))?;
        stream.write_all(&self.request(to)).await.map_err(|error| failed(&error))?;
        let (head, rest) = read_head(&mut stream).await.map_err(|error| failed(&error))?;
        match status(&head) {
            // A server that takes CONNECT for any other request answers what is sent next, too.
            Some(200..=299) if has_body(&head) => Err(failed(
                &"expected a tunnel, found a response with content-length or transfer-encoding: name an HTTP proxy that opens tunnels",
            )
            .into()),
            Some(200..=299) if rest == 0 => Ok(stream),
            // The server speaks after the client, also in TLS.
            Some(200..=299) => Err(failed(&"it sent more than the head of its response").into()),
            Some(407) => Err(failed(
                &"expected a tunnel, found 407: correct the user and the password of the proxy",
            )
            .into()),
            Some(status) => Err(failed(&format_args!("expected a tunnel, found {status}")).into()),
            None => Err(failed(&"expected a response of HTTP/1.1, found other bytes").into()),
        }
    }

    /// Returns host and port, for texts.
    fn place(&self) -> String {
        format!("{}:{}", self.authority.host(), self.port())
    }

    fn port(&self) -> u16 {
        self.authority.port_u16().unwrap_or(80)
    }

    fn request(&self, to: &Origin) -> Vec<u8> {
        let target = format!("{}:{}", to.authority.host(), to.port());
        let mut request = format!("CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n").into_bytes();
        if let Some(value) = &self.authorization {
            request.extend_from_slice(b"Proxy-Authorization: ");
            request.extend_from_slice(value.as_bytes());
            request.extend_from_slice(b"\r\n");
        }
        request.extend_from_slice(b"\r\n");
        request
    }
}

impl fmt::Debug for ConnectProxy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ConnectProxy").field(&self.place()).finish()
    }
}

/// Reads the head of a response. Returns it, and the number of bytes that came after it.
async fn read_head(stream: &mut TcpStream) -> Result<(Vec<u8>, usize), BodyError> {
    let mut head = Vec::with_capacity(1024);
    loop {
        if stream.read_buf(&mut head).await? == 0 {
            return Err("it closed the connection".into());
        }
        if let Some(end) = head.windows(4).position(|window| window == b"\r\n\r\n") {
            let rest = head.len() - (end + 4);
            return Ok((head, rest));
        }
        if head.len() > MAX_HEAD {
            return Err(format!("expected a head of at most {MAX_HEAD} bytes, found more").into());
        }
    }
}

/// Returns whether a head announces a body.
fn has_body(head: &[u8]) -> bool {
    head.split(|byte| *byte == b'\n').any(|line| {
        let name = line.split(|byte| *byte == b':').next().unwrap_or_default().trim_ascii();
        name.eq_ignore_ascii_case(b"content-length")
            || name.eq_ignore_ascii_case(b"transfer-encoding")
    })
}

/// Returns the status of a response.
fn status(head: &[u8]) -> Option<u16> {
    let rest = head.strip_prefix(b"HTTP/1.1 ").or_else(|| head.strip_prefix(b"HTTP/1.0 "))?;
    let (digits, after) = rest.split_at_checked(3)?;
    let has_end = after.starts_with(b" ") || after.starts_with(b"\r\n");
    let digits = std::str::from_utf8(digits).ok().filter(|_| has_end)?;
    digits.parse().ok()
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::*;

    /// Opens a tunnel to shop.example through a proxy that answers with these bytes. Returns the text of the error,
    /// and the request that the proxy got.
    async fn opened(answer: &[u8]) -> (Result<(), String>, String) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let authority = listener.local_addr().unwrap().to_string().parse().unwrap();
        let proxy = ConnectProxy::new(authority, Some(HeaderValue::from_static("Basic aDpo")));
        let to = Origin { secure: true, authority: "shop.example".parse().unwrap() };
        let serve = async {
            let (mut stream, _) = listener.accept().await.unwrap();
            let (request, _) = read_head(&mut stream).await.unwrap();
            // One that has read enough closes the connection.
            let _ = stream.write_all(answer).await;
            request
        };
        let (opened, request) = tokio::join!(proxy.open(&to), serve);
        let opened = opened.map(drop).map_err(|error| error.to_string());
        (opened, String::from_utf8(request).unwrap())
    }

    #[tokio::test]
    async fn a_tunnel_is_requested_with_the_credentials_of_the_proxy() {
        for answer in
            ["HTTP/1.1 200 Connection established\r\n\r\n", "HTTP/1.0 200\r\nA: b\r\n\r\n"]
        {
            let (opened, request) = opened(answer.as_bytes()).await;
            assert_eq!(opened, Ok(()), "{answer:?}");
            let target = "shop.example:443";
            let lines = format!("CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n");
            assert_eq!(request, format!("{lines}Proxy-Authorization: Basic aDpo\r\n\r\n"));
        }
    }

    #[tokio::test]
    async fn a_proxy_that_opens_no_tunnel_is_an_error_without_credentials() {
        let long = format!("HTTP/1.1 200 OK\r\nA: {}", "a".repeat(MAX_HEAD));
        for (answer, part) in [
            ("HTTP/1.1 407 Proxy Authentication Required\r\n\r\nlog in", "found 407"),
            ("HTTP/1.1 403 Forbidden\r\n\r\n", "found 403"),
            ("HTTP/1.1 200 OK\r\n\r\nmore", "more than the head"),
            ("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", "found a response with"),
            ("HTTP/1.1 200 OK\r\ntransfer-encoding : chunked\r\n\r\n", "found a response with"),
            ("SSH-2.0\r\n\r\n", "other bytes"),
            ("HTTP/1.1 20 OK\r\n\r\n", "other bytes"),
            ("HTTP/1.1 200", "closed the connection"),
            ("", "closed the connection"),
            (&*long, "at most 8192 bytes"),
        ] {
            let (opened, _) = opened(answer.as_bytes()).await;
            let error = opened.unwrap_err();
            assert!(error.starts_with("the proxy 127.0.0.1:"), "{error}");
            assert!(error.contains(part) && !error.contains("aDpo"), "{part}: {error}");
        }
        let proxy = ConnectProxy::new("[::1]:3128".parse().unwrap(), None);
        assert_eq!(format!("{proxy:?}"), r#"ConnectProxy("[::1]:3128")"#);
    }
}
