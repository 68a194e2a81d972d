//! The effects, which are rows of a table without a unique index.

use std::time::Duration;

use deadpool_postgres::{Manager, ManagerConfig, Object, Pool, RecyclingMethod, Runtime};
use hapax_core::FencingToken;
use hapax_core::store::BoxFuture;
use hapax_postgres_data::Pooled;
use hapax_postgres_messages::Connections;
use tokio_postgres::{Client, Config, NoTls};

use crate::{ConsumersError, failed};

/// Tables of the effects, and of the highest fencing token for each id.
pub(crate) const TABLES: &str = "
    CREATE TABLE effects (id text NOT NULL, process int NOT NULL);
    CREATE INDEX ON effects (id);
    CREATE TABLE fences (id text PRIMARY KEY, fence bigint NOT NULL)";

const EFFECT: &str = "INSERT INTO effects (id, process) VALUES ($1, $2)";

/// Writes an effect if no higher token was seen. The row's lock orders it with [`RAISE`].
const FENCED_EFFECT: &str = "
    WITH fenced AS (
        INSERT INTO fences (id, fence) VALUES ($1, $3)
        ON CONFLICT (id) DO UPDATE SET fence = EXCLUDED.fence WHERE fences.fence <= EXCLUDED.fence
        RETURNING 1)
    INSERT INTO effects (id, process) SELECT $1, $2 FROM fenced";

const RAISE: &str = "
    INSERT INTO fences (id, fence) VALUES ($1, $2)
    ON CONFLICT (id) DO UPDATE SET fence = GREATEST(fences.fence, EXCLUDED.fence)";

const EXISTS: &str = "SELECT EXISTS (SELECT FROM effects WHERE id = $1)";

pub(crate) type Connection = Pooled<Object>;

/// Connections of a consumer.
#[derive(Clone, Debug)]
pub(crate) struct Database {
    pub(crate) pool: Pool,
}

impl Database {
    pub(crate) fn new(config: Config) -> Result<Self, ConsumersError> {
        let recycling = ManagerConfig { recycling_method: RecyclingMethod::Fast };
        let wait = Some(Duration::from_secs(5));
        let pool = Pool::builder(Manager::from_config(config, NoTls, recycling))
            .max_size(32)
            .runtime(Runtime::Tokio1)
            .wait_timeout(wait)
            .create_timeout(wait)
            .build()
            .map_err(failed("creating a pool"))?;
        Ok(Self { pool })
    }

    pub(crate) fn connections(&self) -> Connections<Connection> {
        let pool = self.pool.clone();
        Connections::new(move || {
            let pool = pool.clone();
            let got = async move { pool.get().await.map(|object| Pooled::new(object, |o| o)) };
            Box::pin(got) as BoxFuture<'static, _>
        })
    }
}

/// Error of an effect that was not written, or may have been.
#[derive(Debug, thiserror::Error)]
pub(crate) enum EffectError {
    #[error("no connection: nothing was written")]
    Connect(#[from] deadpool_postgres::PoolError),
    #[error("the statement failed, or its reply was lost")]
    Statement(#[from] tokio_postgres::Error),
    #[error("a higher fencing token was seen: nothing was written")]
    Fenced,
}

impl Database {
    pub(crate) async fn effect(&self, id: &str) -> Result<(), EffectError> {
        Ok(effect(&*self.pool.get().await?, id).await?)
    }

    pub(crate) async fn fenced_effect(
        &self,
        id: &str,
        fence: FencingToken,
    ) -> Result<(), EffectError> {
        let client = self.pool.get().await?;
        let fence = number(fence);
        match client.execute(FENCED_EFFECT, &[&id, &process(), &fence]).await? {
            0 => Err(EffectError::Fenced),
            _ => Ok(()),
        }
    }

    /// Rejects further effects with `fence` or a lower token, and returns whether the effect
    /// exists.
    pub(crate) async fn reconcile(
        &self,
        id: &str,
        fence: FencingToken,
    ) -> Result<bool, EffectError> {
        let client = self.pool.get().await?;
        client.execute(RAISE, &[&id, &(number(fence) + 1)]).await?;
        Ok(client.query_one(EXISTS, &[&id]).await?.get(0))
    }
}

/// Writes an effect on a connection, which may be in a transaction.
pub(crate) async fn effect(client: &Client, id: &str) -> Result<(), tokio_postgres::Error> {
    client.execute(EFFECT, &[&id, &process()]).await.map(drop)
}

fn process() -> i32 {
    i32::try_from(std::process::id()).unwrap_or(i32::MAX)
}

fn number(fence: FencingToken) -> i64 {
    i64::try_from(fence.get()).unwrap_or(i64::MAX)
}
