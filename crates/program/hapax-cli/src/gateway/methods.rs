//! Methods, as they are said.

use std::fmt::{self, Display};
use std::str::FromStr;

use http::Method;

/// What IANA's registry of methods has (RFC 9110, 18.2), but for `PRI` and `*`, which are there so that
/// nobody uses them. A method that is not among them is a slip of the pen, and what was meant would not
/// be protected.
const METHODS: [&str; 39] = [
    "ACL",
    "BASELINE-CONTROL",
    "BIND",
    "CHECKIN",
    "CHECKOUT",
    "CONNECT",
    "COPY",
    "DELETE",
    "GET",
    "HEAD",
    "LABEL",
    "LINK",
    "LOCK",
    "MERGE",
    "MKACTIVITY",
    "MKCALENDAR",
    "MKCOL",
    "MKREDIRECTREF",
    "MKWORKSPACE",
    "MOVE",
    "OPTIONS",
    "ORDERPATCH",
    "PATCH",
    "POST",
    "PROPFIND",
    "PROPPATCH",
    "PUT",
    "QUERY",
    "REBIND",
    "REPORT",
    "SEARCH",
    "TRACE",
    "UNBIND",
    "UNCHECKOUT",
    "UNLINK",
    "UNLOCK",
    "UPDATE",
    "UPDATEREDIRECTREF",
    "VERSION-CONTROL",
];

/// Stands for every method, where it may.
const ANY: &str = "*";

/// A method, in upper case: they are case-sensitive.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct MethodArg(pub(super) Method);

/// A method, or `*` for any.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct AnyMethodArg(pub(super) Method);

impl FromStr for MethodArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        method(text.trim()).map(Self).ok_or_else(|| expected(""))
    }
}

impl FromStr for AnyMethodArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.trim();
        let method =
            if text == ANY { Method::from_bytes(ANY.as_bytes()).ok() } else { method(text) };
        method.map(Self).ok_or_else(|| expected(", or `*` alone"))
    }
}

impl Display for MethodArg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl Display for AnyMethodArg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

fn method(text: &str) -> Option<Method> {
    METHODS.contains(&text).then(|| Method::from_bytes(text.as_bytes()).ok()).flatten()
}

fn expected(more: &str) -> String {
    format!("expected methods in upper case{more}: {}", METHODS.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn methods_are_those_of_the_registry() {
        for known in METHODS {
            assert_eq!(known.parse::<MethodArg>().unwrap().to_string(), known);
            assert_eq!(known.parse::<AnyMethodArg>().unwrap().to_string(), known);
        }
        assert_eq!(" PATCH".parse::<MethodArg>().unwrap().0, Method::PATCH);
        assert_eq!("*".parse::<AnyMethodArg>().unwrap().to_string(), "*");
        for none in ["*", "ANY", "POTS", "post", "", "PRI", "a b"] {
            let error = none.parse::<MethodArg>().unwrap_err();
            assert!(error.contains("PATCH, POST, PROPFIND"), "{none}: {error}");
            assert!(none == "*" || none.parse::<AnyMethodArg>().is_err(), "{none}");
        }
    }
}
