//! Idempotency in front of any HTTP service, in any language.
//!
//! The proxy of [`hapax_proxy`] around the layer of [`hapax_http`]. The guarantees of the layer hold
//! for the service behind it, which needs no change. The gateway adds:
//!
//! 1. It rejects requests that can be read in two ways, before anything is claimed.
//! 2. For a request without a response it determines whether any byte of it was sent. If none was,
//!    the key is released; otherwise the outcome is unknown.
//! 3. Operators inspect and resolve keys on a separate listener.
//! 4. It can authorise a request before it answers. Without forward authorisation
//!    ([`ForwardAuth`]), a replay checks no credentials.
//! 5. Its store is a file, or a server that any number of gateways share, optionally with a cache
//!    in front ([`StoreUrl`], [`CacheUrl`]). [`StoreOpener::diagnose`] reports settings that would
//!    silently break a guarantee of the store.
//! 6. It speaks HTTP/1.1 and HTTP/2 on both sides, with or without TLS ([`Transport`]).
//!    [`manual::proxy`] describes the details.
//! 7. At shutdown it drains: it records the outcomes of requests in progress, and records as unknown
//!    those that do not end in time.
//!
//! It is not a load balancer (it has one upstream) and not an HTTP cache (it stores only responses
//! to requests with keys), and it never changes a body.
//!
//! ```
//! use hapax_gateway::{Config, Gateway, StoreUrl};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let mut config = Config::new("http://127.0.0.1:3000".parse()?);
//! config.listen = "127.0.0.1:0".parse()?;
//! config.admin = None;
//! config.store = StoreUrl::Memory;
//! let gateway = Gateway::start(config).await?;
//! println!("listening on {}", gateway.local_addr());
//! gateway.shutdown().await;
//! # Ok(())
//! # }
//! ```

mod access;
mod admin;
mod auth;
mod budget;
mod config;
mod context;
mod cors;
mod gateway;
mod handler;
mod housekeeping;
pub mod manual;
mod metrics;
mod observe;
mod own_headers;
mod proxy;
mod reconcile;
mod routes;
mod snapshot;
mod store;
mod tokens;

pub use config::{
    Config, ConfigError, Cors, CorsHeaders, ForwardAuth, GATEWAY_SETTINGS, GivenSettings,
    JwtConfig, JwtKeys, LogConfig, LogFormat, NamesSettings, Origins, POLICY_SETTINGS,
    PolicyConfig, ROUTE_SETTINGS, ReconcileAuthorization, RouteConfig, RouteMatch, RouteMode,
    ScopeConfig, ServerLimits, Setting, SettingInfo, SettingWords, Transport, ValueKind,
    is_setting,
};
pub use gateway::{Gateway, ReloadError, RunningGateway, ShutdownReport, StartError};
pub use hapax_proxy::tls::{ListenTls, ReadCertificates, TlsError, UpstreamTls};
pub use hapax_proxy::{
    ByteSize, IpNetwork, NetworkError, UnitError, UpstreamProtocol, parse_duration,
};
pub use store::{
    CacheUrl, OpenStore, ServerUrl, StoreDrivers, StoreFinding, StoreOpenError, StoreOpener,
    StoreUrl, StoreUrlError, UrlText,
};
pub use tokens::JwtKeysError;
