//! Proxies of the environment, for `hapax call` and for endpoints of messages.

use std::ffi::OsString;
use std::net::IpAddr;

use clap::Args;
use hapax_client::ConnectProxy;
use http::Uri;
use hyper_util::client::proxy::matcher::Matcher;

use crate::exit::CliError;

/// Variables of the proxies for the schemes of servers.
const PROXIES: [&str; 2] = ["HTTPS_PROXY", "HTTP_PROXY"];

/// Whether servers are reached through the proxies of the environment. It has no variable of its own: a variable alone
/// never changes the way of a request.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct ProxyArg {
    /// Reach an https:// server through the proxy in HTTPS_PROXY, and an http:// one through that in HTTP_PROXY, by a
    /// tunnel (CONNECT), unless NO_PROXY names it. Each variable may be in small letters [default: these
    /// variables are ignored]
    #[arg(long)]
    pub(crate) proxy_from_env: bool,
}

impl ProxyArg {
    /// Returns the proxy of the server of a URL; `None` for a direct connection.
    pub(crate) fn of(self, url: &str) -> Result<Option<ConnectProxy>, CliError> {
        match self.proxy_from_env {
            true => proxy(url, |name| std::env::var_os(name).map(OsString::into_string)),
            false => Ok(None),
        }
    }
}

/// Returns the proxy of the server of a URL, by the variables that `lookup` returns. Their values, which may have
/// passwords, are not repeated.
fn proxy(
    url: &str,
    lookup: impl Fn(&str) -> Option<Result<String, OsString>>,
) -> Result<Option<ConnectProxy>, CliError> {
    let [https, http] = PROXIES.map(|name| either(&lookup, name));
    let (https, http, excepted) = (https?, http?, either(&lookup, "NO_PROXY")?);
    let excepted = excepted.unwrap_or_default();
    if https.is_none() && http.is_none() {
        return Err(CliError::usage(
            "--proxy-from-env: expected a proxy in HTTPS_PROXY or HTTP_PROXY, found none: set one, or leave the flag out",
        ));
    }
    for (name, value) in PROXIES.into_iter().zip([&https, &http]) {
        if value.as_ref().is_some_and(|value| !is_proxy(value)) {
            return Err(CliError::usage(format!(
                "{name}: expected http://[USER:PASSWORD@]HOST:PORT, found another value, which may be secret and is not \
                 shown: a proxy is reached over http:// only"
            )));
        }
    }
    if !excepted.split(',').map(str::trim).all(is_exception) {
        return Err(CliError::usage(
            "NO_PROXY: expected names (internal, .internal), addresses (10.1.2.3, 10.0.0.0/8, ::1) and *, between commas, \
             found another entry, such as one with a port or *.internal: correct it, or the server would be reached through \
             the proxy",
        ));
    }
    // A URL that is none is rejected where it is used.
    let Ok(uri) = url.parse::<Uri>() else { return Ok(None) };
    let is_secure = uri.scheme_str() == Some("https");
    let (name, of_scheme) = if is_secure { (PROXIES[0], https) } else { (PROXIES[1], http) };
    let through =
        |proxy: String| Matcher::builder().all(proxy).no(excepted).build().intercept(&uri);
    let Some(proxy) = of_scheme else {
        return match through("http://proxy".to_owned()) {
            None => Ok(None),
            Some(_) => Err(CliError::usage(format!(
                "--proxy-from-env: expected a proxy in {name} for this server, or the server in NO_PROXY, found neither: set \
                 one, or leave the flag out"
            ))),
        };
    };
    Ok(through(proxy).and_then(|found| {
        let authority = found.uri().authority()?.clone();
        Some(ConnectProxy::new(authority, found.basic_auth().cloned()))
    }))
}

/// Returns the value of a variable, in capital or in small letters; `None` if it is empty.
fn either(
    lookup: impl Fn(&str) -> Option<Result<String, OsString>>,
    name: &str,
) -> Result<Option<String>, CliError> {
    // In CGI a client sets HTTP_PROXY, by its header `Proxy`.
    let is_of_client = name == "HTTP_PROXY" && lookup("REQUEST_METHOD").is_some();
    let names = [name.to_owned(), name.to_ascii_lowercase()];
    for name in names.into_iter().skip(usize::from(is_of_client)) {
        match lookup(&name) {
            Some(Err(_)) => {
                return Err(CliError::usage(format!(
                    "{name}: expected text in UTF-8, found other bytes: correct it"
                )));
            }
            Some(Ok(value)) if !value.trim().is_empty() => return Ok(Some(value)),
            _ => {}
        }
    }
    Ok(None)
}

/// Returns whether an entry of `NO_PROXY` is one that can except a server.
fn is_exception(entry: &str) -> bool {
    let is_address = |text: &str| text.parse::<IpAddr>().is_ok();
    let is_range = |(address, bits): (&str, &str)| {
        let most = address.parse().map_or(0, |it: IpAddr| if it.is_ipv4() { 32 } else { 128 });
        is_address(address) && bits.parse::<u8>().is_ok_and(|bits| bits <= most)
    };
    let name = entry.strip_prefix('.').unwrap_or(entry);
    let is_name = name.split('.').all(|label| {
        !label.is_empty()
            && label.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte))
    });
    entry.is_empty()
        || entry == "*"
        || is_name
        || is_address(entry)
        || entry.split_once('/').is_some_and(is_range)
}

/// Returns whether a value is the URL of a proxy that is reached over plain TCP.
fn is_proxy(value: &str) -> bool {
    let matcher = Matcher::builder().all(value).build();
    let found = matcher.intercept(&Uri::from_static("http://example.com/"));
    found.is_some_and(|found| {
        let uri = found.uri();
        uri.scheme_str() == Some("http") && uri.host().is_some_and(|host| !host.is_empty())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(url: &str, variables: &[(&str, &str)]) -> Result<String, String> {
        let found = proxy(url, |name| {
            let found = variables.iter().find(|(it, _)| *it == name);
            found.map(|(_, value)| Ok((*value).to_owned()))
        });
        match found {
            Ok(proxy) => Ok(proxy.map_or_else(|| "none".to_owned(), |it| format!("{it:?}"))),
            Err(error) => Err(error.to_string()),
        }
    }

    #[test]
    fn a_server_has_the_proxy_of_its_scheme_unless_it_is_excepted() {
        let both = [
            ("HTTPS_PROXY", "http://user:hidden@secure:3128"),
            ("http_proxy", "plain:8080"),
            ("NO_PROXY", "internal, 10.0.0.0/8,::1"),
        ];
        let (secure, plain) = (r#"ConnectProxy("secure:3128")"#, r#"ConnectProxy("plain:8080")"#);
        for (url, expected) in [
            ("https://api.example.com/pay", secure),
            ("http://api.example.com", plain),
            ("https://internal", "none"),
            ("https://a.internal:8443", "none"),
            ("https://notinternal", secure),
            ("http://10.1.2.3:80/", "none"),
            ("http://[::1]:80/", "none"),
            ("https://11.1.2.3/", secure),
        ] {
            assert_eq!(of(url, &both).as_deref(), Ok(expected), "{url}");
        }
        let all = [("HTTP_PROXY", "http://plain"), ("NO_PROXY", "*")];
        assert_eq!(of("http://a", &all).as_deref(), Ok("none"));
        let cgi = [("HTTP_PROXY", "http://evil"), ("REQUEST_METHOD", "GET"), both[1]];
        assert_eq!(of("http://a", &cgi).as_deref(), Ok(plain));
    }

    #[test]
    fn what_would_change_the_way_of_a_request_unnoticed_is_rejected() {
        let of_scheme = |excepted: &str| {
            let variables = [("HTTPS_PROXY", "http://secure"), ("NO_PROXY", excepted)];
            of("http://a.internal", &variables)
        };
        for excepted in [".internal", "a.internal,", "*", "b, internal"] {
            assert_eq!(of_scheme(excepted).as_deref(), Ok("none"), "{excepted}");
        }
        let error = of_scheme("b").unwrap_err();
        assert!(error.contains("expected a proxy in HTTP_PROXY for this server"), "{error}");
        for entry in [
            "a.internal:80",
            "*.internal",
            "b a.internal",
            "[::1]",
            "10.0.0.0/33",
            "http://a",
            "a..b",
            "a.",
            "10.0.0/8",
        ] {
            let error = of_scheme(&format!("b,{entry}")).unwrap_err();
            assert!(error.starts_with("NO_PROXY: expected names"), "{entry}: {error}");
        }
        let bytes = proxy("http://a", |name| {
            Some(if name == "NO_PROXY" { Err("bytes".into()) } else { Ok("http://a".to_owned()) })
        });
        assert!(bytes.unwrap_err().to_string().starts_with("NO_PROXY: expected text in UTF-8"));
    }

    #[test]
    fn variables_without_a_proxy_are_rejected_without_their_values() {
        for value in ["https://hidden:3128", "socks5://hidden:1080", "http://", "hidden hidden"] {
            let error = of("http://a", &[("HTTPS_PROXY", value)]).unwrap_err();
            assert!(error.starts_with("HTTPS_PROXY: expected http://"), "{error}");
            assert!(!error.contains("hidden"), "{error}");
        }
        for none in [&[][..], &[("HTTPS_PROXY", " ")]] {
            let error = of("http://a", none).unwrap_err();
            assert!(error.contains("--proxy-from-env: expected a proxy"), "{error}");
        }
    }
}
