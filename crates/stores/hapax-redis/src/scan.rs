//! Paging through keys that have no order.
//!
//! The server walks its keys in its own order (`SCAN`). So a page in ascending order takes a walk
//! over all keys, on every master of a cluster, and retains the lowest keys after those of the
//! previous page. A walk covers half a million keys a second in short steps, which do not delay
//! other requests. A key that exists during the whole walk is found; one that is added or removed
//! meanwhile may be missed.

use std::collections::BTreeSet;
use std::num::NonZeroU32;

use hapax_core::store::Cursor;
use hapax_core::{OperationId, StoreError};
use redis::Value;
use tokio::time::timeout;

use crate::connection::{Connection, Node};
use crate::error::{RedisStoreError, RequestFailure, classify};
use crate::key_names::KeyNames;
use crate::link::ConnectionHandle;

/// Number of keys that the server visits in one step: less than a millisecond.
const STEP: u32 = 1_000;

/// The cursor that begins a walk, and that ends it.
const START: &[u8] = b"0";

/// Limit of records on a page, which are all in memory.
const MOST: usize = 10_000;

/// The keys of a page.
pub(crate) struct PageKeys {
    pub(crate) keys: Vec<OperationId>,
    /// Whether there are keys after the last one.
    pub(crate) more: bool,
}

pub(crate) async fn keys(
    link: &ConnectionHandle,
    names: &KeyNames,
    after: Option<OperationId>,
    limit: NonZeroU32,
) -> Result<PageKeys, StoreError> {
    let limit = (limit.get() as usize).min(MOST);
    let mut lowest = Lowest { keys: BTreeSet::new(), after, room: limit + 1 };
    let mut connection = link.wire().await.map_err(RequestFailure::of_read)?.connection();
    for node in masters(link, &mut connection).await? {
        walk(link, &mut connection, node.as_ref(), names, &mut lowest).await?;
    }
    let more = lowest.keys.len() > limit;
    Ok(PageKeys { keys: lowest.keys.into_iter().take(limit).collect(), more })
}

/// The lowest keys after `after`, and one more, which shows whether there are further ones.
struct Lowest {
    keys: BTreeSet<OperationId>,
    after: Option<OperationId>,
    room: usize,
}

impl Lowest {
    fn offer(&mut self, key: OperationId) {
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
    link: &ConnectionHandle,
    connection: &mut Connection,
) -> Result<Vec<Option<Node>>, StoreError> {
    let masters = timeout(link.timeout(), connection.masters()).await;
    let masters = masters
        .map_err(|_| RequestFailure::Nothing(RedisStoreError::TimedOut(link.timeout())))
        .and_then(|masters| masters.map_err(classify))
        .map_err(RequestFailure::of_read)?;
    masters.ok_or_else(|| StoreError::unavailable(RedisStoreError::Incomplete))
}

async fn walk(
    link: &ConnectionHandle,
    connection: &mut Connection,
    node: Option<&Node>,
    names: &KeyNames,
    lowest: &mut Lowest,
) -> Result<(), StoreError> {
    let mut cursor = START.to_vec();
    loop {
        let (next, keys) = scan(link, connection, node, names, (&cursor, STEP)).await?;
        for key in keys {
            lowest.offer(key);
        }
        if next == START {
            return Ok(());
        }
        cursor = next;
    }
}

async fn scan(
    link: &ConnectionHandle,
    connection: &mut Connection,
    node: Option<&Node>,
    names: &KeyNames,
    (cursor, count): (&[u8], u32),
) -> Result<(Vec<u8>, Vec<OperationId>), StoreError> {
    let mut scan = redis::cmd("SCAN");
    scan.arg(cursor).arg("MATCH").arg(names.pattern()).arg("COUNT").arg(count);
    let step = timeout(link.timeout(), connection.query_on(node, &scan)).await;
    let step = step
        .map_err(|_| RequestFailure::Nothing(RedisStoreError::TimedOut(link.timeout())))
        .and_then(|step| step.map_err(classify))
        .map_err(RequestFailure::of_read)?;
    let (next, keys) =
        parse(step).ok_or_else(|| StoreError::unavailable(RedisStoreError::Unreadable))?;
    Ok((next, keys.iter().filter_map(|name| names.key(name)).collect()))
}

/// The keys of one step of a walk in the server's order.
pub(crate) struct KeyStep {
    pub(crate) keys: Vec<OperationId>,
    pub(crate) next: Option<Cursor>,
}

/// Takes one step. A position is the number of a master and the cursor there. If masters change
/// during a walk, it may miss keys, which the next walk finds.
pub(crate) async fn step(
    link: &ConnectionHandle,
    names: &KeyNames,
    from: &Cursor,
    limit: NonZeroU32,
) -> Result<KeyStep, StoreError> {
    let (number, cursor) = match from.as_bytes() {
        [high, low, cursor @ ..] => (u16::from_be_bytes([*high, *low]), cursor),
        _ => (0, START),
    };
    let mut connection = link.wire().await.map_err(RequestFailure::of_read)?.connection();
    let masters = masters(link, &mut connection).await?;
    let Some(node) = masters.get(usize::from(number)) else {
        return Ok(KeyStep { keys: Vec::new(), next: None });
    };
    let at = (cursor, limit.get().min(STEP));
    let (next, keys) = scan(link, &mut connection, node.as_ref(), names, at).await?;
    let place =
        |number: u16, cursor: &[u8]| Cursor::new([&number.to_be_bytes()[..], cursor].concat());
    let next = match number.checked_add(1) {
        _ if next != START => Some(place(number, &next)),
        // No further master owns a slot.
        Some(number) if usize::from(number) < masters.len() => Some(place(number, START)),
        _ => None,
    };
    Ok(KeyStep { keys, next })
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
