//! Lookup of the route of one request, to check a configuration.

use http::Method;

use super::{Config, ConfigError, RouteConfig};
use crate::routes::RouteTable;

/// The route or policy that applies to a request.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum RouteMatch<'a> {
    /// The request matches this route.
    Route(&'a RouteConfig),
    /// The request matches no route: [`Config::policy`] applies.
    NoRoute,
    /// The request is rejected with 400 `malformed-request`, for this reason.
    Rejected(&'static str),
}

impl Config {
    /// Returns the route or policy for a request of `method` to `path`, written as a client sends
    /// it, without a query.
    ///
    /// ```
    /// use hapax_gateway::{Config, RouteMatch, RouteConfig};
    /// use http::Method;
    /// let mut config = Config::new("http://127.0.0.1:3000".parse()?);
    /// config.routes.push(RouteConfig::new("/payments/{*rest}", config.policy.clone()));
    /// let found = config.route_of(&Method::POST, "/%70ayments/7")?;
    /// assert_eq!(found, RouteMatch::Route(&config.routes[0]));
    /// assert_eq!(config.route_of(&Method::POST, "/orders")?, RouteMatch::NoRoute);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`ConfigError`] if the routes are invalid.
    pub fn route_of(&self, method: &Method, path: &str) -> Result<RouteMatch<'_>, ConfigError> {
        let table = RouteTable::new(&self.policy, &self.routes)?;
        Ok(match table.route(path, method) {
            Ok(found) => {
                let route = found.and_then(|index| self.routes.get(index));
                route.map_or(RouteMatch::NoRoute, RouteMatch::Route)
            }
            Err(reason) => RouteMatch::Rejected(reason),
        })
    }
}
