//! Headers of auth requests and of their responses.

use hapax_proxy::Peer;
use hapax_proxy::headers::{drop_hop_by_hop, drop_where, forwarded, plain, via};
use http::Response;
use http::header::{
    CONTENT_LENGTH, HOST, HeaderMap, HeaderName, HeaderValue, InvalidHeaderValue, TRAILER, VIA,
};
use http::request::Parts;
use http::uri::Authority;

use crate::own_headers::remove_reserved;

const X_FORWARDED_METHOD: HeaderName = HeaderName::from_static("x-forwarded-method");
const X_FORWARDED_URI: HeaderName = HeaderName::from_static("x-forwarded-uri");

/// Returns the fields of an auth request: those of the request, and a description of it.
///
/// It omits fields about the body, which is not sent; fields that would change the auth request
/// (conditions, ranges); and any description of the request by the client. `authority` is that of
/// the auth server.
pub(super) fn auth_headers(
    request: &Parts,
    peer: Peer,
    authority: &Authority,
) -> Result<HeaderMap, InvalidHeaderValue> {
    let mut headers = request.headers.clone();
    remove_reserved(&mut headers, true);
    drop_hop_by_hop(&mut headers);
    drop_where(&mut headers, |name| {
        let plain = plain(name);
        is_of_the_message(&plain)
            || plain.starts_with("x-original-")
            || plain == "x-rewrite-url"
            || matches!(&*plain, "x-forwarded-method" | "x-forwarded-uri")
            || (plain.starts_with("x-forwarded-") && !peer.trusted)
    });
    forwarded(&mut headers, peer);
    let target = request.uri.path_and_query().map_or("/", |target| target.as_str());
    headers.insert(X_FORWARDED_METHOD, HeaderValue::from_str(request.method.as_str())?);
    headers.insert(X_FORWARDED_URI, HeaderValue::from_bytes(target.as_bytes())?);
    headers.insert(HOST, HeaderValue::from_str(authority.as_str())?);
    headers.append(VIA, via(peer));
    Ok(headers)
}

/// Returns whether a field is about the body, or about the wanted part or version of the response.
fn is_of_the_message(plain: &str) -> bool {
    plain.starts_with("if-")
        || matches!(
            plain,
            "content-length" | "content-type" | "content-encoding" | "expect" | "range" | "trailer"
        )
}

/// Changes a complete response of an auth server to one for the client.
pub(super) fn from_another<B>(response: &mut Response<B>) {
    let headers = response.headers_mut();
    drop_hop_by_hop(headers);
    remove_reserved(headers, false);
    // hyper sets it from the body.
    headers.remove(CONTENT_LENGTH);
    headers.remove(TRAILER);
    *response.version_mut() = http::Version::HTTP_11;
}

#[cfg(test)]
mod tests {
    use http::Method;

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

    #[test]
    fn an_auth_request_describes_the_request_regardless_of_its_own_fields() {
        let mut request = http::Request::new(()).into_parts().0;
        request.method = Method::PATCH;
        request.uri = "/a%20b?c".parse().unwrap();
        request.headers = map(&[
            ("host", "shop.example"),
            ("connection", "x-forwarded-uri, authorization"),
            ("authorization", "Bearer a"),
            ("x-forwarded-uri", "/public"),
            ("x_forwarded_method", "GET"),
            ("x-forwarded-user", "root"),
            ("x-forwarded-for", "10.0.0.1"),
            ("x-original-uri", "/public"),
            ("content-length", "3"),
            ("if-match", "*"),
        ]);
        let asked = |peer: &str| {
            let auth = Authority::from_static("auth:1");
            let mut headers = auth_headers(&request, from(peer), &auth).unwrap();
            let user = headers.remove("x-forwarded-user");
            (headers, user)
        };
        let common = [
            ("host", "auth:1"),
            ("via", "1.1 hapax"),
            ("x-forwarded-host", "shop.example"),
            ("x-forwarded-method", "PATCH"),
            ("x-forwarded-proto", "http"),
            ("x-forwarded-uri", "/a%20b?c"),
        ];
        let anyone = [&common[..], &[("x-forwarded-for", "198.51.100.9")]].concat();
        assert_eq!(asked("198.51.100.9:1"), (map(&anyone), None));
        // A proxy on the same machine is trusted for its client, not for the request.
        let proxy = [&common[..], &[("x-forwarded-for", "10.0.0.1, 127.0.0.1")]].concat();
        assert_eq!(asked("127.0.0.1:1"), (map(&proxy), Some(HeaderValue::from_static("root"))));
    }
}
