//! Paging through keys that have no order.
//!
//! The server walks its keys in an order of its own (`SCAN`), so a page in ascending order takes a
//! walk over all of them, on every master of a cluster: of what is found, the lowest keys after
//! the last page's are kept. Half a million keys a second, and each step is short, so that others
//! are not held up. A key that is there during the whole walk is found; one that comes or goes may
//! be missed.

use std::collections::BTreeSet;
use std::num::NonZeroU32;

use hapax::{StoreError, StoreKey};
use redis::Value;
use tokio::time::timeout;

use crate::connection::{Connection, Node};
use crate::error::{Failure, RedisStoreError, classify};
use crate::link::Link;
use crate::names::Names;

/// Keys the server looks at in one step: less than a millisecond.
const STEP: u32 = 1_000;

/// More cells than this are never on a page: they are held in memory.
const MOST: usize = 10_000;

/// The keys of a page.
pub(crate) struct Found {
    pub(crate) keys: Vec<StoreKey>,
    /// Whether there are keys after the last one.
    pub(crate) more: bool,
}

pub(crate) async fn keys(
    link: &Link,
    names: &Names,
    after: Option<StoreKey>,
    limit: NonZeroU32,
) -> Result<Found, StoreError> {
    let limit = (limit.get() as usize).min(MOST);
    let mut lowest = Lowest { keys: BTreeSet::new(), after, room: limit + 1 };
    let mut connection = link.wire().await.map_err(Failure::of_read)?.connection();
    for node in masters(link, &mut connection).await? {
        walk(link, &mut connection, node.as_ref(), names, &mut lowest).await?;
    }
    let more = lowest.keys.len() > limit;
    Ok(Found { keys: lowest.keys.into_iter().take(limit).collect(), more })
}

/// The lowest keys after `after`, and one that says whether there are more.
struct Lowest {
    keys: BTreeSet<StoreKey>,
    after: Option<StoreKey>,
    room: usize,
}

impl Lowest {
    fn offer(&mut self, key: StoreKey) {
        if self.after.is_some_and(|after| key <= after) {
            return;
        }
        self.keys.insert(key);
        if self.keys.len() > self.room {
            self.keys.pop_last();
        }
    }
}

async fn masters(
    link: &Link,
    connection: &mut Connection,
) -> Result<Vec<Option<Node>>, StoreError> {
    let masters = timeout(link.timeout(), connection.masters()).await;
    let masters = masters
        .map_err(|_| Failure::Nothing(RedisStoreError::TimedOut(link.timeout())))
        .and_then(|masters| masters.map_err(classify))
        .map_err(Failure::of_read)?;
    masters.ok_or_else(|| StoreError::unavailable(RedisStoreError::Incomplete))
}

async fn walk(
    link: &Link,
    connection: &mut Connection,
    node: Option<&Node>,
    names: &Names,
    lowest: &mut Lowest,
) -> Result<(), StoreError> {
    let mut cursor = b"0".to_vec();
    loop {
        let mut scan = redis::cmd("SCAN");
        scan.arg(&cursor).arg("MATCH").arg(names.pattern()).arg("COUNT").arg(STEP);
        let step = timeout(link.timeout(), connection.query_on(node, &scan)).await;
        let step = step
            .map_err(|_| Failure::Nothing(RedisStoreError::TimedOut(link.timeout())))
            .and_then(|step| step.map_err(classify))
            .map_err(Failure::of_read)?;
        let (next, keys) =
            parse(step).ok_or_else(|| StoreError::unavailable(RedisStoreError::Unreadable))?;
        for key in keys.iter().filter_map(|name| names.key(name)) {
            lowest.offer(key);
        }
        if next == b"0" {
            return Ok(());
        }
        cursor = next;
    }
}

fn parse(step: Value) -> Option<(Vec<u8>, Vec<Vec<u8>>)> {
    let Value::Array(step) = step else { return None };
    let [Value::BulkString(cursor), Value::Array(keys)] = <[Value; 2]>::try_from(step).ok()? else {
        return None;
    };
    let keys = keys.into_iter().map(|key| match key {
        Value::BulkString(key) => Some(key),
        _ => None,
    });
    Some((cursor, keys.collect::<Option<_>>()?))
}
