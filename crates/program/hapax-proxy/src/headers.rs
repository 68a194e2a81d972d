//! Header fields that the proxy adds, removes and changes.

use std::borrow::Cow;
use std::net::IpAddr;

use http::Method;
use http::header::{
    CONNECTION, CONTENT_LENGTH, CONTENT_TYPE, EXPECT, Entry, FORWARDED, HOST, HeaderMap,
    HeaderName, HeaderValue, PROXY_AUTHENTICATE, PROXY_AUTHORIZATION, TE, TRANSFER_ENCODING,
    UPGRADE, VIA,
};
use http::uri::{Authority, Uri};

use crate::handler::Peer;

const X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
/// Header with the host that the client requested.
pub const X_FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");
const X_FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");

/// Changes a client's fields to those that the upstream gets. `authority` replaces the `Host` that
/// an HTTP/1.0 client did not send.
///
/// `Host` stays the client's, because the upstream must create URLs that its clients know. The
/// forwarding fields of a trusted peer are kept, and its address is appended to `X-Forwarded-For`;
/// those of any other peer could be forged and are replaced. `Forwarded` (RFC 7239) is passed on or
/// dropped by the same rule, and never added, because services would have to choose between two
/// sources.
pub(crate) fn to_upstream(headers: &mut HeaderMap, peer: Peer, authority: &Authority) {
    let trailers = has_token(headers, &TE, "trailers");
    drop_hop_by_hop(headers);
    if trailers {
        // This proxy passes trailers, so the upstream may send those that the client accepts.
        headers.insert(TE, HeaderValue::from_static("trailers"));
    }
    // The client got `100 Continue` when its body was first read.
    headers.remove(EXPECT);
    // hyper sets it from the body that is sent, unless the body is empty.
    headers.remove(CONTENT_LENGTH);
    if let Entry::Vacant(entry) = headers.entry(HOST)
        && let Ok(host) = HeaderValue::from_str(authority.as_str())
    {
        entry.insert(host);
    }
    forwarded(headers, peer);
    headers.append(VIA, via(peer));
}

/// Returns `Via` with the protocol of the request (RFC 9110 7.6.3). Responses have none, which a
/// gateway may choose.
#[must_use]
pub const fn via(peer: Peer) -> HeaderValue {
    HeaderValue::from_static(if peer.http2 { "2 hapax" } else { "1.1 hapax" })
}

/// Declares the length of an empty body where it is not implied: servers answer a POST without a
/// length with 411 (RFC 9110 8.6). `said` is true if the client declared it.
pub(crate) fn declare_empty_length(headers: &mut HeaderMap, method: &Method, said: bool) {
    if said || [Method::POST, Method::PUT, Method::PATCH].contains(method) {
        headers.insert(CONTENT_LENGTH, HeaderValue::from_static("0"));
    }
}

/// Sets `Host` to the host in lower case. For a target in absolute form it is the target's,
/// regardless of the field (RFC 9112 3.2.2).
pub fn set_host(headers: &mut HeaderMap, target: &Uri) {
    let host = match (target.authority(), headers.get(HOST)) {
        (Some(authority), _) => match authority.port() {
            Some(port) => format!("{}:{port}", authority.host()).into_bytes(),
            None => authority.host().as_bytes().to_vec(),
        },
        (None, Some(host)) if host.as_bytes().iter().any(u8::is_ascii_uppercase) => {
            host.as_bytes().to_vec()
        }
        (None, _) => return,
    };
    if let Ok(host) = HeaderValue::from_bytes(&host.to_ascii_lowercase()) {
        headers.insert(HOST, host);
    }
}

/// Changes an upstream's fields to those that the client gets.
pub(crate) fn to_client(headers: &mut HeaderMap) {
    if headers.contains_key(TRANSFER_ENCODING) {
        // The coding decided where the body ends; the length may be wrong (RFC 9112 6.3).
        headers.remove(CONTENT_LENGTH);
    }
    drop_hop_by_hop(headers);
}

/// Removes every field whose name `is_meant` returns true for.
pub fn drop_where(headers: &mut HeaderMap, is_meant: impl Fn(&HeaderName) -> bool) {
    let meant: Vec<HeaderName> = headers.keys().filter(|name| is_meant(name)).cloned().collect();
    for name in meant {
        headers.remove(name);
    }
}

/// Returns a name as CGI and similar interfaces see it.
#[must_use]
pub fn plain(name: &HeaderName) -> Cow<'_, str> {
    let name = name.as_str();
    if name.contains('_') { name.replace('_', "-").into() } else { name.into() }
}

/// Returns whether a field contains the target from before a proxy rewrote it. Its name is as [`plain`] returns it.
#[must_use]
pub fn is_target(plain: &str) -> bool {
    matches!(plain, "x-original-url" | "x-rewrite-url")
}

/// Returns whether a field names the client behind a proxy. Its name is as [`plain`] returns it.
#[must_use]
pub fn is_forwarded(plain: &str) -> bool {
    plain.starts_with("x-forwarded-") || matches!(plain, "forwarded" | "x-real-ip")
}

/// Returns whether a field describes a message or its sender in HTTP generally. Its name is as [`plain`] returns it.
#[must_use]
pub fn is_of_the_message(plain: &str) -> bool {
    plain.starts_with("proxy-")
        || matches!(
            plain,
            "authorization"
                | "connection"
                | "content-encoding"
                | "content-length"
                | "content-type"
                | "cookie"
                | "expect"
                | "host"
                | "keep-alive"
                | "te"
                | "trailer"
                | "transfer-encoding"
                | "upgrade"
                | "via"
                | "x-forwarded-for"
                | "x-real-ip"
        )
}

/// Removes the fields that concern one connection only, and those that `Connection` names (RFC 9110
/// 7.6.1), except those without which the message would change.
pub fn drop_hop_by_hop(headers: &mut HeaderMap) {
    let mut gone = named_by_connection(headers);
    gone.retain(|name| ![HOST, CONTENT_TYPE, CONTENT_LENGTH].contains(name));
    gone.extend(headers.keys().filter(|name| hop_by_hop(name)).cloned());
    for name in gone {
        headers.remove(name);
    }
}

/// Returns whether a field concerns one connection only (RFC 9110 7.6.1).
#[must_use]
pub fn hop_by_hop(name: &HeaderName) -> bool {
    [CONNECTION, TE, TRANSFER_ENCODING, UPGRADE, PROXY_AUTHENTICATE, PROXY_AUTHORIZATION]
        .contains(name)
        || matches!(name.as_str(), "keep-alive" | "proxy-connection")
}

/// Returns the fields that `Connection` names.
#[must_use]
pub fn named_by_connection(headers: &HeaderMap) -> Vec<HeaderName> {
    headers
        .get_all(CONNECTION)
        .iter()
        .flat_map(|line| line.as_bytes().split(|byte| *byte == b','))
        .filter_map(|name| HeaderName::from_bytes(name.trim_ascii()).ok())
        .collect()
}

pub(crate) fn has_token(headers: &HeaderMap, name: &HeaderName, wanted: &str) -> bool {
    headers
        .get_all(name)
        .iter()
        .flat_map(|value| value.as_bytes().split(|byte| *byte == b','))
        .any(|token| token.trim_ascii().eq_ignore_ascii_case(wanted.as_bytes()))
}

/// Adds the peer to `X-Forwarded-For`, and sets the other `X-Forwarded-*` headers unless a trusted
/// peer has set them.
pub fn forwarded(headers: &mut HeaderMap, peer: Peer) {
    // Such a spelling is only used to forge the field.
    drop_where(headers, |name| {
        name.as_str().contains('_') && plain(name).starts_with("x-forwarded-")
    });
    if !peer.trusted {
        for name in [FORWARDED, X_FORWARDED_FOR, X_FORWARDED_HOST, X_FORWARDED_PROTO] {
            headers.remove(name);
        }
    }
    append_for(headers, peer.addr.ip().to_canonical());
    let scheme = HeaderValue::from_static(if peer.secure { "https" } else { "http" });
    headers.entry(X_FORWARDED_PROTO).or_insert(scheme);
    if let Some(host) = headers.get(HOST).cloned() {
        headers.entry(X_FORWARDED_HOST).or_insert(host);
    }
}

/// Appends an address to `X-Forwarded-For`, as one line in the order of the hops.
fn append_for(headers: &mut HeaderMap, ip: IpAddr) {
    let mut line = Vec::new();
    for value in headers.get_all(X_FORWARDED_FOR) {
        line.extend_from_slice(value.as_bytes());
        line.extend_from_slice(b", ");
    }
    line.extend_from_slice(ip.to_string().as_bytes());
    if let Ok(line) = HeaderValue::from_bytes(&line) {
        headers.insert(X_FORWARDED_FOR, line);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(fields: &[(&'static str, &'static str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in fields {
            headers.append(*name, HeaderValue::from_static(value));
        }
        headers
    }

    fn from(addr: &str) -> Peer {
        let addr: std::net::SocketAddr = addr.parse().unwrap();
        Peer { addr, secure: false, trusted: addr.ip().is_loopback(), http2: false }
    }

    fn passed(peer: &str, fields: &[(&'static str, &'static str)]) -> HeaderMap {
        let mut headers = map(fields);
        to_upstream(&mut headers, from(peer), &Authority::from_static("up:1"));
        headers
    }

    #[test]
    fn hop_by_hop_fields_are_not_forwarded() {
        let headers = passed(
            "127.0.0.1:1",
            &[
                ("connection", "keep-alive, X-One"),
                ("connection", "x-two ,close"),
                ("x-one", "1"),
                ("x-two", "2"),
                ("x-three", "3"),
                ("keep-alive", "timeout=5"),
                ("te", "gzip"),
                ("transfer-encoding", "chunked"),
                ("upgrade", "websocket"),
                ("proxy-authorization", "Basic x"),
                ("expect", "100-continue"),
                ("host", "shop.example"),
            ],
        );
        let mut names: Vec<&str> = headers.keys().map(HeaderName::as_str).collect();
        names.sort_unstable();
        assert_eq!(
            names,
            ["host", "via", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-three"]
        );
    }

    #[test]
    fn te_trailers_is_forwarded() {
        let headers = passed("127.0.0.1:1", &[("te", "gzip, Trailers"), ("connection", "te")]);
        assert_eq!(headers["te"], "trailers");
    }

    #[test]
    fn forwarding_fields_of_a_trusted_peer_are_kept() {
        let headers = passed(
            "127.0.0.1:1",
            &[
                ("host", "inner"),
                ("x-forwarded-for", "198.51.100.1"),
                ("x-forwarded-for", "198.51.100.2"),
                ("x-forwarded-proto", "https"),
                ("x-forwarded-host", "shop.example"),
            ],
        );
        assert_eq!(headers["x-forwarded-for"], "198.51.100.1, 198.51.100.2, 127.0.0.1");
        assert_eq!(headers["x-forwarded-proto"], "https");
        assert_eq!(headers["x-forwarded-host"], "shop.example");
        assert_eq!(headers["host"], "inner");
    }

    #[test]
    fn protocol_and_version_of_the_client_are_forwarded() {
        let mut headers = map(&[("x-forwarded-proto", "http"), ("forwarded", "for=10.0.0.1")]);
        let peer = Peer { secure: true, trusted: false, http2: true, ..from("127.0.0.1:1") };
        to_upstream(&mut headers, peer, &Authority::from_static("up:1"));
        assert_eq!(headers["x-forwarded-proto"], "https");
        assert_eq!(headers["via"], "2 hapax");
        assert!(!headers.contains_key("forwarded"));
    }

    #[test]
    fn forwarding_fields_of_an_untrusted_peer_are_replaced() {
        let headers = passed(
            "[::ffff:198.51.100.9]:1",
            &[
                ("host", "shop.example"),
                ("forwarded", "for=10.0.0.1"),
                ("x-forwarded-for", "10.0.0.1"),
                ("x-forwarded-proto", "https"),
                ("x-forwarded-host", "evil.example"),
            ],
        );
        assert_eq!(headers["x-forwarded-for"], "198.51.100.9");
        assert_eq!(headers["x-forwarded-proto"], "http");
        assert_eq!(headers["x-forwarded-host"], "shop.example");
        assert!(!headers.contains_key("forwarded"));
    }

    #[test]
    fn a_missing_host_is_the_upstreams() {
        assert_eq!(passed("127.0.0.1:1", &[])["host"], "up:1");
    }

    #[test]
    fn an_absolute_target_names_the_host() {
        for (target, host) in [
            ("http://u:p@B.example:81/x", "b.example:81"),
            ("http://[::1]/x", "[::1]"),
            ("/x", "a.example"),
        ] {
            let mut headers = map(&[("host", "A.example")]);
            set_host(&mut headers, &target.parse().unwrap());
            assert_eq!(headers["host"], host);
        }
    }

    #[test]
    fn connection_cannot_remove_host_or_content_fields() {
        let fields = [
            ("connection", "host, content-type, Content-Length, x-mine"),
            ("host", "a"),
            ("content-type", "text/plain"),
            ("x-mine", "1"),
        ];
        let headers = passed("127.0.0.1:1", &fields);
        assert_eq!(
            (&headers["host"], &headers["content-type"]),
            (&"a".parse().unwrap(), &"text/plain".parse().unwrap())
        );
        assert!(!headers.contains_key("x-mine"));
    }

    #[test]
    fn forwarding_fields_with_underscores_are_dropped() {
        let fields =
            [("x_forwarded_for", "10.0.0.1"), ("x_forwarded-proto", "https"), ("x_y", "1")];
        let headers = passed("127.0.0.1:1", &fields);
        assert!(
            !headers.contains_key("x_forwarded_for") && !headers.contains_key("x_forwarded-proto")
        );
        assert_eq!(headers["x-forwarded-for"], "127.0.0.1");
        assert_eq!(headers["x_y"], "1");
    }
}
