//! `--check METHOD PATH`: the route of one request, and its policy.

use std::fmt::Write as _;

use hapax_gateway::{POLICY_SETTINGS, PolicyConfig, RouteMatch, RouteMode};
use hapax_http::server::KeyRule;
use http::Method;

use super::load::{Loaded, section, shown};
use crate::exit::CliError;

/// The request of `--check METHOD PATH`.
#[derive(Debug)]
pub(super) struct CheckedRequest {
    method: Method,
    /// The path as a client writes it, without its query.
    path: String,
}

impl CheckedRequest {
    /// Reads the values of `--check`; returns `None` if there are none. Errors do not repeat
    /// values, which may be a URL with a secret.
    pub(super) fn read(values: &[String]) -> Result<Option<Self>, CliError> {
        let usage = |what: &str| CliError::usage(format!("--check: {what}"));
        let (method, path) = match values {
            [] => return Ok(None),
            [method, path] => (method, path),
            _ => return Err(usage("expects no value, or METHOD and PATH, like POST /payments/7")),
        };
        let method = Method::from_bytes(method.as_bytes())
            .map_err(|_| usage("expects a method like POST before the path"))?;
        if !path.starts_with('/') {
            return Err(usage("expects a path that begins with a slash, like POST /payments/7"));
        }
        let path = path.split('?').next().unwrap_or_default().to_owned();
        Ok(Some(Self { method, path }))
    }
}

impl Loaded {
    /// Returns the route of a request and its policy, as text.
    pub(super) fn shown_for(&self, request: &CheckedRequest) -> Result<String, CliError> {
        let CheckedRequest { method, path } = request;
        let matched = self.config.route_of(method, path).map_err(CliError::usage)?;
        let mut text = format!("# {method} {path}\n");
        let (route, handling, policy) = match matched {
            RouteMatch::Rejected(reason) => {
                writeln!(text, "# rejected with 400 malformed-request: {reason}")
                    .map_err(CliError::unavailable)?;
                return Ok(text);
            }
            RouteMatch::NoRoute => ("no route".to_owned(), RouteMode::Protect, &self.config.policy),
            RouteMatch::Route(route) => {
                (format!("route {} ({})", route.path, route.name()), route.handling, &route.policy)
            }
        };
        let effect = effect(method, handling, policy);
        write!(text, "# {route}\n# {effect}\n\n").map_err(CliError::unavailable)?;
        text.push_str(&section("[policy]", &shown(POLICY_SETTINGS, policy))?);
        text.push_str(self.callers_by_default(policy));
        Ok(text)
    }
}

/// The result for the request.
fn effect(method: &Method, handling: RouteMode, policy: &PolicyConfig) -> String {
    match handling {
        RouteMode::Pass => "not protected: `protect = false`".to_owned(),
        RouteMode::Observe => "not protected: `observe = true` only counts".to_owned(),
        RouteMode::Protect if !policy.methods.contains(method) => {
            format!("not protected: {method} is not among the methods")
        }
        RouteMode::Protect if policy.key == KeyRule::Required => {
            "protected: without a key it is rejected".to_owned()
        }
        RouteMode::Protect => "protected with a key; without one it passes through".to_owned(),
    }
}
