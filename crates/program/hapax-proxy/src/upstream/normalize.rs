//! Conversion of requests to the form of a protocol.

use http::header::{CONNECTION, HOST, HeaderValue, TE, TRANSFER_ENCODING};
use http::uri::{Authority, PathAndQuery, Scheme, Uri};
use http::{Request, Version};

use super::Origin;
use crate::BoxedBody;

/// Converts a request to origin form, with the host in its field (RFC 9112 3.2.1).
pub(super) fn for_http1(request: &mut Request<BoxedBody>) {
    *request.version_mut() = Version::HTTP_11;
    let target = std::mem::take(request.uri_mut()).into_parts();
    if let Some(authority) = target.authority
        && let Ok(host) = HeaderValue::from_str(authority.as_str())
    {
        request.headers_mut().insert(HOST, host);
    }
    *request.uri_mut() = target.path_and_query.map_or_else(Uri::default, Uri::from);
    if request.headers().contains_key(TE) {
        // The field concerns this connection only (RFC 9110 10.1.4).
        request.headers_mut().append(CONNECTION, HeaderValue::from_static("te"));
    }
    let body = http_body::Body::size_hint(request.body());
    if body.exact().is_none() && !http_body::Body::is_end_stream(request.body()) {
        // Without this field, hyper omits such a body of GET or HEAD.
        let chunked = HeaderValue::from_static("chunked");
        request.headers_mut().insert(TRANSFER_ENCODING, chunked);
    }
}

/// Converts a request to HTTP/2: the host becomes `:authority` (RFC 9113 8.3.1), and
/// connection-specific fields are removed. Without a host, the authority is that of `origin`; with
/// an invalid one, the field stays next to it, so that the server rejects the request.
pub(super) fn for_http2(request: &mut Request<BoxedBody>, origin: &Origin) {
    *request.version_mut() = Version::HTTP_2;
    let mut target = std::mem::take(request.uri_mut()).into_parts();
    let headers = request.headers_mut();
    headers.remove(CONNECTION);
    headers.remove(TRANSFER_ENCODING);
    let host = headers.get(HOST).map_or(&b""[..], HeaderValue::as_bytes);
    let named = Authority::try_from(host);
    if host.is_empty() || named.is_ok() {
        headers.remove(HOST);
    }
    target.authority = Some(named.unwrap_or_else(|_| origin.authority.clone()));
    target.scheme = Some(if origin.secure { Scheme::HTTPS } else { Scheme::HTTP });
    target.path_and_query.get_or_insert_with(|| PathAndQuery::from_static("/"));
    // All three parts are set, so the URI is valid.
    *request.uri_mut() = Uri::from_parts(target).unwrap_or_default();
}

#[cfg(test)]
mod tests {
    use super::*;

    fn origin(secure: bool) -> Origin {
        Origin { secure, authority: Authority::from_static("up:1") }
    }

    fn request(target: &'static str, host: &'static str) -> Request<BoxedBody> {
        let mut request = Request::new(BoxedBody::default());
        *request.uri_mut() = Uri::from_static(target);
        request.headers_mut().insert(HOST, HeaderValue::from_static(host));
        request
    }

    #[test]
    fn conversions_to_http2_and_http1_are_inverse() {
        let mut there = request("/a%20b?c", "shop.example:81");
        there.headers_mut().insert(TE, HeaderValue::from_static("trailers"));
        for _ in 0..2 {
            for_http2(&mut there, &origin(true));
            assert_eq!(there.uri(), "https://shop.example:81/a%20b?c");
            assert!(!there.headers().contains_key(HOST));
            assert!(!there.headers().contains_key(CONNECTION));
            for_http1(&mut there);
            assert_eq!(
                (there.uri(), &there.headers()[HOST]),
                (&Uri::from_static("/a%20b?c"), &HeaderValue::from_static("shop.example:81"))
            );
            assert_eq!(there.headers()[CONNECTION], "te");
        }
    }

    #[test]
    fn an_invalid_host_stays_a_header_field() {
        let mut there = request("/", "%%");
        for_http2(&mut there, &origin(false));
        assert_eq!(
            (there.uri(), &there.headers()[HOST]),
            (&Uri::from_static("http://up:1/"), &HeaderValue::from_static("%%"))
        );
        let mut there = request("/", "");
        for_http2(&mut there, &origin(false));
        assert_eq!(there.uri(), "http://up:1/");
        assert!(!there.headers().contains_key(HOST));
        let mut there = request("*", "a");
        *there.method_mut() = http::Method::OPTIONS;
        for_http2(&mut there, &origin(false));
        assert_eq!(there.uri().path(), "*");
    }
}
