//! Headers that are reserved for the gateway.

use hapax_http::header::IDEMPOTENCY_KEY;
use hapax_proxy::headers::{drop_where, plain};
use http::header::HeaderMap;

/// Removes every field whose name begins with `idempotency-`. With `keep_key`, a client's key
/// stays, which the upstream may read.
///
/// An underscore counts as a hyphen: CGI and similar interfaces cannot distinguish them.
pub(crate) fn remove_reserved(headers: &mut HeaderMap, keep_key: bool) {
    drop_where(headers, |name| {
        plain(name).starts_with("idempotency-") && !(keep_key && *name == IDEMPOTENCY_KEY)
    });
}

#[cfg(test)]
mod tests {
    use http::header::{HeaderName, HeaderValue};

    use super::*;

    fn map(fields: &[(&'static str, &'static str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in fields {
            headers.append(*name, HeaderValue::from_static(value));
        }
        headers
    }

    #[test]
    fn own_fields_are_dropped() {
        let fields = [
            ("idempotency-key", "k"),
            ("idempotency-fence", "9"),
            ("idempotency_fence", "9"),
            ("idempotency_key", "l"),
            ("x", "y"),
        ];
        let mut headers = map(&fields);
        remove_reserved(&mut headers, true);
        assert_eq!(headers, map(&[("idempotency-key", "k"), ("x", "y")]));
        remove_reserved(&mut headers, false);
        assert_eq!(headers, map(&[("x", "y")]));
    }

    #[test]
    fn the_proxy_and_the_layer_have_the_same_hop_by_hop_fields() {
        use hapax_http::stored_response as layer;
        use hapax_proxy::headers as proxy;

        for name in [
            "connection",
            "keep-alive",
            "proxy-authenticate",
            "proxy-authorization",
            "proxy-connection",
            "te",
            "trailer",
            "transfer-encoding",
            "upgrade",
            "host",
        ] {
            let name = HeaderName::from_static(name);
            assert_eq!(proxy::hop_by_hop(&name), layer::hop_by_hop(&name), "{name}");
        }
        let headers = map(&[("connection", "a, B ,"), ("connection", "c d,te")]);
        assert_eq!(proxy::named_by_connection(&headers), layer::named_by_connection(&headers));
    }
}
