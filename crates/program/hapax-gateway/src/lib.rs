//! Idempotency in front of any HTTP service, in any language.
//!
//! A reverse proxy around the layer of [`hapax_http`]: what the layer promises holds for the service
//! behind it, which need not know. What it adds:
//!
//! 1. Requests that could be read in two ways are refused before anything is claimed.
//! 2. Of a request without an answer it knows whether anything of it was sent. If nothing was, the
//!    key is free again; if anything was, the outcome is unknown.
//! 3. Operators see and resolve keys on a listener of their own.
//! 4. It may ask before it answers: without forward authorisation ([`ForwardAuth`]) a replay checks
//!    no credentials.
//! 5. Its store is a file of its own, or a server that any number of gateways share, with a cache in
//!    front if need be ([`StoreUrl`], [`CacheUrl`]). [`StoreOpener::diagnose`] says what would silently
//!    break a store's promise.
//! 6. It speaks HTTP/1.1 and HTTP/2 on both sides, with TLS or without ([`Transport`]); in which manner,
//!    [`manual::proxy`] says.
//! 7. At the end it drains: what is in hand is recorded, what does not end in time is recorded as
//!    unknown.
//!
//! It is not a load balancer (one upstream), it does not cache (only requests with keys are
//! remembered), and it never changes a body.
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
mod connection_limit;
mod cors;
mod gateway;
mod guard;
mod handler;
mod housekeeping;
mod listener;
pub mod manual;
mod metrics;
mod observe;
mod proxy;
mod reconcile;
mod routes;
mod shutdown;
mod snapshot;
mod store;
mod tls;
mod units;
mod upstream;

pub use config::{
    Config, ConfigError, Cors, CorsHeaders, ForwardAuth, GATEWAY_SETTINGS, GivenSettings,
    IpNetwork, ListenTls, LogConfig, LogFormat, NamesSettings, NetworkError, Origins,
    POLICY_SETTINGS, PolicyConfig, ROUTE_SETTINGS, RouteConfig, RouteMatch, RouteMode, ScopeConfig,
    ServerLimits, Setting, SettingInfo, SettingWords, Transport, UpstreamProtocol, UpstreamTls,
    ValueKind, is_setting,
};
pub use gateway::{Gateway, ReloadError, RunningGateway, ShutdownReport, StartError};
pub use store::{
    CacheUrl, OpenStore, ServerUrl, StoreFinding, StoreOpenError, StoreOpener, StoreUrl,
    StoreUrlError, UrlText,
};
pub use tls::{ReadCertificates, TlsError};
pub use units::{ByteSize, UnitError, parse_duration};
