//! Configuration of CORS: web pages that may use an API.

use std::time::Duration;

use hapax_http::header::{
    IDEMPOTENCY_EXPIRES, IDEMPOTENCY_OPERATION_ID, IDEMPOTENCY_PROTECTED, IDEMPOTENCY_RECORDED,
    IDEMPOTENCY_REPLAYED,
};
use http::header::{HeaderName, HeaderValue, LINK, RETRY_AFTER};
use http::{Method, Uri};
use tower_http::cors::{AllowHeaders, AllowOrigin, CorsLayer, ExposeHeaders};

use super::ConfigError;

/// Web pages that may use an API. [`Cors::new`] has the defaults.
///
/// With this configuration, the gateway answers preflights itself and replaces the CORS headers of
/// the upstream, since a stored response has those of the page that sent the first request.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Cors {
    /// Origins of the pages.
    pub origins: Origins,
    /// Methods that pages may send. Default GET, HEAD, POST, PUT, PATCH and DELETE.
    pub methods: Vec<Method>,
    /// Headers that pages may send, besides the route's key header and scope headers. Default
    /// `authorization` and `content-type`.
    pub headers: CorsHeaders,
    /// Headers of responses that pages may read, besides `Idempotency-*`, `Retry-After` and `Link`.
    /// Default: none.
    pub expose: Vec<HeaderName>,
    /// Whether pages may send cookies and other credentials. Default `false`.
    pub credentials: bool,
    /// Time for which browsers may cache a preflight's response. Default: the browser's own.
    pub max_age: Option<Duration>,
}

/// Origins whose pages may use an API.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Origins {
    /// Any origin.
    Any,
    /// These origins: `https://shop.example`, byte for byte as browsers send them.
    List(Vec<String>),
}

/// Headers that pages may send.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum CorsHeaders {
    /// Any header. Browsers require `Authorization` by name, so it is named as well.
    Any,
    /// These headers.
    List(Vec<HeaderName>),
}

impl Cors {
    /// Creates the default configuration for pages of these origins.
    #[must_use]
    pub fn new(origins: Origins) -> Self {
        let methods =
            [Method::GET, Method::HEAD, Method::POST, Method::PUT, Method::PATCH, Method::DELETE];
        let headers = [http::header::AUTHORIZATION, http::header::CONTENT_TYPE];
        Self {
            origins,
            methods: methods.into(),
            headers: CorsHeaders::List(headers.into()),
            expose: Vec::new(),
            credentials: false,
            max_age: None,
        }
    }

    /// Builds the layer of tower-http for a policy that protects these methods. Pages may send the
    /// headers in `sent`, whether they are configured or not.
    ///
    /// tower-http panics, at each request, if credentials are combined with a wildcard, so the
    /// configuration is checked first.
    pub(super) fn resolve(
        &self,
        protected: &[Method],
        sent: &[&HeaderName],
    ) -> Result<CorsLayer, ConfigError> {
        self.check(protected)?;
        Ok(self.layer(sent))
    }

    fn check(&self, protected: &[Method]) -> Result<(), ConfigError> {
        if protected.contains(&Method::OPTIONS) {
            return Err(ConfigError::CorsMethod);
        }
        match &self.origins {
            Origins::List(origins) if origins.is_empty() => return Err(ConfigError::NoOrigins),
            Origins::List(origins) if origins.iter().any(|origin| origin == "*") => {
                return Err(ConfigError::CorsMixed { field: "cors_origins" });
            }
            Origins::List(origins) => {
                if let Some(origin) = origins.iter().find(|origin| !is_origin(origin)) {
                    return Err(ConfigError::Origin { origin: origin.clone() });
                }
            }
            Origins::Any => {}
        }
        let any_method = self.methods.iter().any(|method| method.as_str() == ANY.as_str());
        let any_exposed = self.expose.contains(&ANY);
        let listed =
            |names: &CorsHeaders| matches!(names, CorsHeaders::List(names) if names.contains(&ANY));
        for (field, mixed) in [
            ("cors_methods", any_method && self.methods.len() > 1),
            ("cors_headers", listed(&self.headers)),
            ("cors_expose", any_exposed && self.expose.len() > 1),
        ] {
            if mixed {
                return Err(ConfigError::CorsMixed { field });
            }
        }
        for (field, any) in [
            ("cors_origins", self.origins == Origins::Any),
            ("cors_methods", any_method),
            ("cors_headers", self.headers == CorsHeaders::Any),
            ("cors_expose", any_exposed),
        ] {
            if self.credentials && any {
                return Err(ConfigError::CorsCredentials { field });
            }
        }
        Ok(())
    }

    fn layer(&self, sent: &[&HeaderName]) -> CorsLayer {
        let origins = match &self.origins {
            Origins::Any => AllowOrigin::any(),
            Origins::List(origins) => AllowOrigin::list(
                origins.iter().filter_map(|origin| HeaderValue::from_str(origin).ok()),
            ),
        };
        let named = match &self.headers {
            // A list, since tower-http cannot combine its wildcard with names.
            CorsHeaders::Any => &[http::header::AUTHORIZATION, ANY][..],
            CorsHeaders::List(names) => names,
        };
        let others = named.iter().filter(|name| !sent.contains(name));
        let headers = AllowHeaders::list(others.chain(sent.iter().copied()).cloned());
        let ours = [
            IDEMPOTENCY_OPERATION_ID,
            IDEMPOTENCY_REPLAYED,
            IDEMPOTENCY_RECORDED,
            IDEMPOTENCY_PROTECTED,
            IDEMPOTENCY_EXPIRES,
            RETRY_AFTER,
            LINK,
        ];
        let theirs = self.expose.iter().filter(|name| !ours.contains(name)).cloned();
        let expose: Vec<HeaderName> = ours.iter().cloned().chain(theirs).collect();
        let mut layer = CorsLayer::new()
            .allow_origin(origins)
            .allow_methods(self.methods.clone())
            .allow_headers(headers)
            .expose_headers(ExposeHeaders::list(expose))
            .allow_credentials(self.credentials);
        if let Some(age) = self.max_age {
            layer = layer.max_age(age);
        }
        layer
    }
}

/// `*` is a token, so a header can have it as its name.
const ANY: HeaderName = HeaderName::from_static("*");

/// Returns whether a browser could send this as `Origin`; a value that can never match is a typing
/// error.
fn is_origin(text: &str) -> bool {
    let Ok(uri) = text.parse::<Uri>() else { return false };
    let (Some(scheme), Some(authority)) = (uri.scheme_str(), uri.authority()) else { return false };
    // The text lacks the path that the parser adds.
    text == format!("{scheme}://{authority}")
        && !authority.as_str().contains('@')
        && text.bytes().all(|byte| !byte.is_ascii_uppercase())
}

#[cfg(test)]
mod tests {
    use tower_layer::Layer;

    use super::*;

    #[test]
    fn a_wildcard_is_the_only_element_and_excludes_credentials() {
        let shop = || Cors::new(Origins::List(vec!["https://shop.example".into()]));
        let star: Method = "*".parse().unwrap();
        let x = HeaderName::from_static("x-a");
        let (any, mixed) = (vec![star.clone()], vec![Method::GET, star]);
        for (field, alone, beside) in [
            (
                "cors_origins",
                Cors { origins: Origins::Any, ..shop() },
                Cors { origins: Origins::List(vec!["https://a".into(), "*".into()]), ..shop() },
            ),
            ("cors_methods", Cors { methods: any, ..shop() }, Cors { methods: mixed, ..shop() }),
            (
                "cors_headers",
                Cors { headers: CorsHeaders::Any, ..shop() },
                Cors { headers: CorsHeaders::List(vec![ANY, x.clone()]), ..shop() },
            ),
            (
                "cors_expose",
                Cors { expose: vec![ANY], ..shop() },
                Cors { expose: vec![x, ANY], ..shop() },
            ),
        ] {
            let settle =
                |cors: &Cors| cors.resolve(&[Method::POST], &[]).map(|layer| layer.layer(()));
            assert!(settle(&alone).is_ok(), "{field}");
            assert_eq!(settle(&beside).unwrap_err(), ConfigError::CorsMixed { field });
            let sent = Cors { credentials: true, ..alone };
            assert_eq!(settle(&sent).unwrap_err(), ConfigError::CorsCredentials { field });
        }
        let sent = Cors { credentials: true, ..shop() };
        let _made = sent.resolve(&[Method::POST], &[]).unwrap().layer(());
    }

    #[test]
    fn origins_are_as_browsers_send_them() {
        for good in ["https://shop.example", "http://localhost:5173", "http://[::1]:80", "app://x"]
        {
            assert!(is_origin(good), "{good}");
        }
        for bad in [
            "",
            "*",
            "null",
            "shop.example",
            "https://shop.example/",
            "https://Shop.example",
            "https://a@b",
        ] {
            assert!(!is_origin(bad), "{bad}");
        }
    }
}
