//! Header fields that a client must not send, or must not send in another spelling.

use hapax_http::fingerprint::METHOD_OVERRIDES;
use hapax_proxy::Peer;
use hapax_proxy::headers::{drop_where, is_forwarded, is_of_the_message, is_target, plain};
use http::Method;
use http::header::{HeaderMap, HeaderName};

use crate::own_headers::remove_reserved;

/// Header fields that the layer reads on a route, and their names with hyphens for underscores.
#[derive(Debug)]
pub(crate) struct ProtectedHeaders(Vec<(HeaderName, String)>);

impl ProtectedHeaders {
    pub(crate) fn new<'a>(names: impl IntoIterator<Item = &'a HeaderName>) -> Self {
        let plain = |name: &HeaderName| (name.clone(), plain(name).into_owned());
        Self(names.into_iter().map(plain).collect())
    }

    /// Removes the fields of a request from which its service could conclude something else than
    /// the gateway did.
    ///
    /// It must be called before fields are added, such as those of an auth response.
    pub(crate) fn drop_spoofed(&self, headers: &mut HeaderMap, peer: Peer) {
        drop_where(headers, |name| {
            let plain = plain(name);
            is_target(&plain)
                || (!peer.trusted && is_forwarded(&plain))
                || self.is_other_spelling(name, &plain)
        });
    }

    /// Removes from trailers the fields that belong into a head: some services merge the two.
    pub(crate) fn drop_from_trailers(&self, trailers: &mut HeaderMap) {
        remove_reserved(trailers, false);
        drop_where(trailers, |name| {
            let plain = plain(name);
            is_target(&plain)
                || is_forwarded(&plain)
                || is_of_the_message(&plain)
                || is_override(&plain)
                || self.0.iter().any(|(_, it)| *it == plain)
        });
    }

    /// Returns whether a field is another spelling of a protected one. CGI and similar interfaces
    /// take an underscore for a hyphen: of two fields that differ for the layer they would see one,
    /// and not the one that counted.
    fn is_other_spelling(&self, name: &HeaderName, plain: &str) -> bool {
        let mut same = self.0.iter().filter(|(_, it)| it == plain).peekable();
        match same.peek() {
            Some(_) => same.all(|(it, _)| it != name),
            None => name.as_str().contains('_') && (is_of_the_message(plain) || is_override(plain)),
        }
    }
}

/// Returns the methods that fields of a request would replace its method with.
pub(crate) fn overriding(headers: &HeaderMap) -> impl Iterator<Item = Method> {
    let named = headers.iter().filter(|(name, _)| is_override(&plain(name)));
    named
        .flat_map(|(_, value)| value.as_bytes().split(|byte| *byte == b','))
        .filter_map(|method| Method::from_bytes(&method.trim_ascii().to_ascii_uppercase()).ok())
}

/// Returns whether some services take the method of a request from this field.
fn is_override(plain: &str) -> bool {
    METHOD_OVERRIDES.iter().any(|name| name == plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn left(names: &[&'static str], fields: &[&'static str], trusted: bool) -> Vec<String> {
        let names: Vec<_> = names.iter().map(|name| HeaderName::from_static(name)).collect();
        let mut headers = HeaderMap::new();
        for field in fields {
            headers.insert(*field, http::HeaderValue::from_static("a"));
        }
        let addr = (std::net::Ipv4Addr::LOCALHOST, 1).into();
        let peer = Peer { addr, secure: false, trusted, http2: false };
        ProtectedHeaders::new(&names).drop_spoofed(&mut headers, peer);
        let mut left: Vec<_> = headers.keys().map(ToString::to_string).collect();
        left.sort_unstable();
        left
    }

    #[test]
    fn other_spellings_of_protected_headers_are_dropped() {
        let fields = ["x-user", "x_user", "x_tenant", "x-tenant", "x_other", "content_length"];
        assert_eq!(left(&["x-user", "x_tenant"], &fields, true), ["x-user", "x_other", "x_tenant"]);
        // If both names count, neither is a spelling of the other.
        assert_eq!(left(&["x-user", "x_user"], &fields[..2], true), ["x-user", "x_user"]);
    }

    #[test]
    fn forwarding_headers_of_an_untrusted_peer_are_dropped() {
        let fields = ["x-forwarded-port", "x-forwarded_ssl", "x-real-ip", "forwarded", "x-a"];
        assert_eq!(left(&[], &fields, false), ["x-a"]);
        assert_eq!(left(&[], &["x-forwarded-port", "x-real-ip"], true).len(), 2);
        assert_eq!(left(&[], &["x-original-url", "x_rewrite_url"], true), [""; 0]);
    }

    #[test]
    fn method_overrides_are_found_in_any_spelling() {
        let mut headers = HeaderMap::new();
        headers.insert("x-http-method-override", http::HeaderValue::from_static("post, Get"));
        headers.insert("x_method_override", http::HeaderValue::from_static(" pAtch"));
        headers.insert("x-other", http::HeaderValue::from_static("PUT"));
        let mut found: Vec<_> = overriding(&headers).collect();
        found.sort_unstable_by_key(ToString::to_string);
        assert_eq!(found, [Method::GET, Method::PATCH, Method::POST]);
    }
}
