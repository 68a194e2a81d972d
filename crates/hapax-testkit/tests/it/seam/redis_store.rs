use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::time::Duration;

use hapax::store::{BoxFuture, Cell, Reaped, Snapshot, Stamp, Stamped, Swap, Swapped};
use hapax::{FencingToken, Sealer, Store, StoreError, StoreKey, SystemEntropy, Tag, Timestamp};
use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Client, RedisError, Script};
use tokio::sync::Mutex;

use super::swap_lua::{LOAD, SWAP};

const PATIENCE: Duration = Duration::from_secs(2);

/// One hash for each cell, which expires by itself a lease after its keep.
pub(super) struct RedisStore {
    client: Client,
    prefix: String,
    connection: Mutex<Option<MultiplexedConnection>>,
    swap: Script,
    load: Script,
    sealer: Sealer,
}

impl std::fmt::Debug for RedisStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RedisStore").finish_non_exhaustive()
    }
}

impl RedisStore {
    pub(super) fn at(address: SocketAddr, prefix: String) -> Self {
        Self {
            client: Client::open(format!("redis://{address}/")).unwrap(),
            prefix,
            connection: Mutex::default(),
            swap: Script::new(SWAP),
            load: Script::new(LOAD),
            sealer: Sealer::checksum(),
        }
    }

    fn name(&self, key: &StoreKey) -> String {
        format!("{}{key}", self.prefix)
    }

    /// Nothing was sent yet: whatever fails here did not happen.
    async fn connect(&self) -> Result<MultiplexedConnection, StoreError> {
        let mut connection = self.connection.lock().await;
        if let Some(connection) = &*connection {
            return Ok(connection.clone());
        }
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(PATIENCE))
            .set_response_timeout(Some(PATIENCE));
        let new = self.client.get_multiplexed_async_connection_with_config(&config).await;
        Ok(connection.insert(new.map_err(StoreError::unavailable)?).clone())
    }

    async fn failed(&self, error: RedisError) -> StoreError {
        // What the server says it refused did not happen; of all else nobody knows.
        if error.code().is_some() {
            return StoreError::unavailable(error);
        }
        *self.connection.lock().await = None;
        StoreError::ambiguous(error)
    }

    async fn swap_cell(&self, swap: Swap) -> Result<Swapped, StoreError> {
        let record = self.sealer.seal(&swap.key, swap.tag, &swap.draft.record, &SystemEntropy);
        let record = record.map_err(StoreError::unavailable)?;
        let mut connection = self.connect().await?;
        let keep = swap.draft.keep.map_or_else(String::new, |keep| micros(keep).to_string());
        let fence = swap.draft.stamp == Stamp::NextFence;
        let reply = self
            .swap
            .key(self.name(&swap.key))
            .arg(swap.tag.as_bytes())
            .arg(swap.expected.as_ref().map_or(&[][..], |tag| tag.as_bytes()))
            .arg(u8::from(fence))
            .arg(micros(swap.draft.lease))
            .arg(keep)
            .arg(micros(swap.draft.record.terms.lease))
            .arg(record)
            .invoke_async::<Vec<Option<Vec<u8>>>>(&mut connection)
            .await;
        let reply = match reply {
            Ok(reply) => reply,
            Err(error) => return Err(self.failed(error).await),
        };
        if field(&reply, 0) != b"stored" {
            return Ok(Swapped::Conflict(self.snapshot(&swap.key, &reply)?));
        }
        Ok(Swapped::Stored(Stamped {
            now: moment(&reply, 1),
            fence: FencingToken::new(moment(&reply, 2).as_micros()),
            lease_until: moment(&reply, 3),
        }))
    }

    async fn load_cell(&self, key: &StoreKey) -> Result<Snapshot, StoreError> {
        let mut connection = self.connect().await?;
        let reply = self.load.key(self.name(key)).invoke_async(&mut connection).await;
        match reply as Result<Vec<Option<Vec<u8>>>, _> {
            Ok(reply) => self.snapshot(key, &reply),
            Err(error) => Err(self.failed(error).await),
        }
    }

    /// Kind, clock, tag, fence, lease, keep, record.
    fn snapshot(&self, key: &StoreKey, reply: &[Option<Vec<u8>>]) -> Result<Snapshot, StoreError> {
        let now = moment(reply, 1);
        let Some(tag) = &reply[2] else { return Ok(Snapshot { now, cell: None }) };
        let tag = Tag::from_bytes(tag[..].try_into().map_err(StoreError::corrupt)?);
        let record = self.sealer.open(key, tag, field(reply, 6)).map_err(StoreError::corrupt)?;
        let cell = Cell {
            tag,
            fence: FencingToken::new(moment(reply, 3).as_micros()),
            lease_until: moment(reply, 4),
            keep_until: (!field(reply, 5).is_empty()).then(|| moment(reply, 5)),
            record,
        };
        Ok(Snapshot { now, cell: Some(cell) })
    }
}

impl Store for RedisStore {
    fn swap(&self, swap: Swap) -> BoxFuture<'_, Result<Swapped, StoreError>> {
        Box::pin(self.swap_cell(swap))
    }

    fn load<'a>(&'a self, key: &'a StoreKey) -> BoxFuture<'a, Result<Snapshot, StoreError>> {
        Box::pin(self.load_cell(key))
    }

    /// Redis removes what is due.
    fn reap(&self, _: NonZeroU32) -> BoxFuture<'_, Result<Reaped, StoreError>> {
        Box::pin(async { Ok(Reaped::default()) })
    }
}

/// Exact in a script: see there.
fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX).min(1 << 52)
}

fn field(reply: &[Option<Vec<u8>>], at: usize) -> &[u8] {
    reply[at].as_deref().unwrap_or_default()
}

fn moment(reply: &[Option<Vec<u8>>], at: usize) -> Timestamp {
    let text = std::str::from_utf8(field(reply, at)).unwrap();
    Timestamp::from_micros(text.parse().unwrap())
}
