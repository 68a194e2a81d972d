//! Layers around a service: Hapax, and its peers as their documentation wires them.

use std::sync::Arc;

use axum::Router;
use axum::http::header::AUTHORIZATION;
use axum::http::request::Parts;
use axum::routing::post;
use axum_idempotent::{IdempotentLayer, IdempotentOptions};
use hapax::{
    FileOptions, FileStore, IdempotencyLayer, MemoryCapacity, MemoryStore, PostgresOptions,
    PostgresStore, RedisOptions, RedisStore, Store, SystemClock,
};
use hapax_bench_cost::Any;
use idempotent::IdempotencyStore;
use idempotent::valkey::ValkeyStore;
use ruts::store::Ttl;
use ruts::store::moka::MokaStore;
use ruts::{CookieOptions, Session, SessionLayer};
use tower_cookies::CookieManagerLayer;

/// Seconds for which axum-idempotent replays, as in its documentation.
const REPLAYED_FOR: i64 = 5 * 60;

/// Capacity of the memory store: more than a run can fill. Peers have no limit.
const CAPACITY: MemoryCapacity = MemoryCapacity { records: 100_000_000, bytes: 8 << 30 };

pub(crate) fn memory(service: Router) -> Result<Router, Any> {
    protect(service, MemoryStore::new(Arc::new(SystemClock), CAPACITY))
}

pub(crate) fn file(service: Router, path: &str) -> Result<Router, Any> {
    protect(service, FileStore::open(FileOptions::new(path))?)
}

pub(crate) async fn redis(service: Router, url: &str) -> Result<Router, Any> {
    protect(service, RedisStore::connect(RedisOptions::new(url)).await?)
}

pub(crate) async fn postgres(service: Router, url: &str) -> Result<Router, Any> {
    let options: PostgresOptions = url.parse()?;
    protect(service, PostgresStore::connect(options).await?)
}

fn protect(service: Router, store: impl Store) -> Result<Router, Any> {
    Ok(service.layer(IdempotencyLayer::builder(store).namespace("").build()?))
}

pub(crate) fn idempotent_memory(service: Router) -> Result<Router, Any> {
    Ok(scoped(service, idempotent::memory::MemoryStore::builder().try_build()?))
}

pub(crate) async fn idempotent_redis(service: Router, url: &str) -> Result<Router, Any> {
    Ok(scoped(service, ValkeyStore::with_url(url).try_build().await?))
}

/// Adds the layer of the crate `idempotent`. It names the caller by the same header as Hapax.
fn scoped<S>(service: Router, store: S) -> Router
where
    S: IdempotencyStore + Clone + Send + Sync + 'static,
{
    let caller = |parts: &Parts| {
        let caller = parts.headers.get(AUTHORIZATION)?;
        caller.to_str().ok().map(String::from)
    };
    service.layer(idempotent::middleware::IdempotencyLayer::new(store).scope(caller))
}

/// Adds the layers of the crate axum-idempotent. It stores a response only in a session that exists,
/// so `/login` makes one.
pub(crate) fn axum_idempotent(service: Router) -> Router {
    let store = Arc::new(MokaStore::builder().build());
    let options = IdempotentOptions::default()
        .use_idempotency_key_header(Some("Idempotency-Key"), true)
        .expire_after(REPLAYED_FOR);
    let cookies = CookieOptions::build().name("session");
    service
        .layer(IdempotentLayer::<MokaStore>::new(options))
        .route("/login", post(login))
        .layer(SessionLayer::new(store).with_cookie_options(cookies))
        .layer(CookieManagerLayer::new())
}

async fn login(session: Session<MokaStore>) -> Result<&'static str, String> {
    let lifetime = Ttl::new(3600).map_err(|error| error.to_string())?;
    let user = String::from("me");
    session.set("user", &user, lifetime, None).await.map_err(|error| error.to_string())?;
    Ok("ok")
}
