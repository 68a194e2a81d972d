//! Hapax on Redis or Valkey, 6.2 or later: a store that many processes share.
//!
//! 1. A record is one Redis key, and a swap is one script and one round trip: the script compares
//!    the write id and writes with a single command, by the server's clock.
//! 2. All callers of a process share one connection, on which their requests are pipelined. A
//!    broken or unresponsive connection is replaced automatically. Until then requests fail within
//!    [`RedisOptions::timeout`].
//! 3. A request that was never sent is *unavailable*. One that was sent and not answered is
//!    *ambiguous*, because the server may still execute it, and the engine sends it again. An error
//!    from a single server means that nothing was done; for clusters see below.
//! 4. A server that loses records by design is rejected, at the first connection and at every later
//!    one: one that evicts, a replica, an old version. It is checked again every thirty timeouts (a
//!    minute by default). [`diagnose`] also checks settings that are accepted but risky.
//! 5. Waiters are notified by pub/sub when a record is finished ([`hapax_core::Notify`]).
//!
//! ```no_run
//! # async fn run() -> Result<(), Box<dyn std::error::Error>> {
//! use hapax_core::{Idempotency, Secret};
//! use hapax_redis::{RedisOptions, RedisStore};
//!
//! let secret = Secret::from_hex(&std::fs::read_to_string("hapax.secret")?).ok_or("no secret")?;
//! let options = RedisOptions::new("redis://127.0.0.1").secret(secret);
//! let store = RedisStore::connect(options).await?;
//! let idempotency = Idempotency::builder(store).namespace("orders").build()?;
//! # Ok(()) }
//! ```
//!
//! # When it loses records
//!
//! Redis may lose writes that it acknowledged, and a lost record executes again, also under
//! `block`. Where a rare second execution is acceptable, Redis is the fastest store for many
//! processes. Where it is not, as with money, keep records in Postgres or in a file, with a cache
//! in front if needed.
//!
//! | event | loss | prevention |
//! | --- | --- | --- |
//! | memory runs short under a policy that evicts | any record, without a trace | `maxmemory-policy noeviction`; else the store does not open |
//! | the server is killed, `appendfsync everysec` | a second of acknowledged writes | `appendfsync always` |
//! | the server is restarted without append-only file | writes after the last snapshot | `appendonly yes` |
//! | a failover | writes that the replica had not received; `WAIT` narrows this, and guarantees nothing | none |
//! | the server's clock steps forward | leases and retention that have ended by then; the latter for good | synchronize it; never set it by hand |
//! | the server's clock steps back | nothing: leases and retention last longer, and fences grow, except for a key that was removed in between | |
//! | keys are deleted | those records | a separate server, or at least a separate database |
//!
//! # Expiry
//!
//! A record with a retention has the server's own expiry (`PXAT`): the end of the retention plus
//! one lease, rounded up to the next millisecond, by the clock that also stamps deadlines. So
//! nothing is removed while an execution whose lease has lapsed may still record its outcome under
//! the old write id, and `reap` has nothing to do. The server removes lazily, so the scripts treat
//! expired records as absent. A record that is retained for ever (in flight or unknown under
//! `block`) has no expiry.
//!
//! # The schedule
//!
//! [`hapax_core::schedule`] is in sixteen slots, by the operation id. Each has a sorted set of entries
//! by time for each queue, one by key, and a hash with the notes; a tag in their names keeps them on
//! one node of a cluster. They have no expiry. What is lost of them is lost as a record is: an
//! operation whose entry is lost is not continued. If part of a cluster is unreachable, polls return
//! what is due in the rest.
//!
//! # Permissions of the server's user
//!
//! ```text
//! ACL SETUSER hapax on >PASSWORD resetkeys resetchannels ~hapax:* &hapax:* -@all
//!   +hello +info +time +get +getrange +set +evalsha +eval +ping +scan
//!   +publish +subscribe +unsubscribe +client|setinfo
//!   +hexists +hget +hset +hdel +zadd +zrem +zscore +zcard +zrange +zrangebyscore +zrangebylex
//! ```
//!
//! The last line is for the schedule; without it, calls of the schedule fail. `publish`, `subscribe`
//! and channels are for waiters; without them waiters poll four times a second. `scan` is for paging ([`hapax_core::Inspect`]). `client|setinfo` exists from 7.2 on and
//! names the connection. A cluster also needs `+cluster|slots +asking`. [`diagnose`] uses
//! `+config|get` where it is allowed.
//!
//! # At rest
//!
//! With [`RedisOptions::secret`] records are sealed, and the server's files reveal no keys,
//! credentials or outcomes. Deadlines, write id and fence are stored in plain next to the record,
//! because the script stamps them: a process that can write to the server can end a lease, as it
//! can delete a key, but it can neither read a record nor forge one.
//!
//! Processes that share records must name keys by the same secret, or all by none: else the same
//! key has two names, and nothing prevents its second execution. A process with another secret is
//! rejected ([`RedisConnectError::OtherSecret`]). The secret that seals can be replaced
//! ([`RedisOptions::key_ring`]), also where none names keys ([`KeyRing::unnamed`](hapax_core::KeyRing::unnamed)); the
//! secret that names cannot. To begin with another, delete
//! `hapax:secret`, `hapax:identity` and every record.
//!
//! A store has an identity (`hapax:identity`), which is lost with its records when the server is
//! emptied. Processes that used the store, or were given its identity ([`RedisOptions::identity`]),
//! then claim no new key under `block` or `reconcile` ([`RedisStoreError::Replaced`]) until
//! [`RedisStore::confirm`] accepts the store; under `reexecute` they log an error. A claim compares
//! the identity in its own script; in a cluster the identity is compared only when the store is
//! opened.
//!
//! The secret is checked on each new connection, and every thirty timeouts (a minute by default).
//! Within that time other processes can empty the server and begin with another secret, unnoticed.
//! A process that only reads ([`RedisOptions::make`]) does not choose the secret.
//!
//! # Clusters
//!
//! A request is executed at most once: it is sent again only where a node answered that it did not
//! process it, because its slot is elsewhere or being moved. When the client cannot learn the slot
//! owners, it returns that error to every request in progress. Therefore most errors of a write are
//! *ambiguous*, also a plain rejection such as `CLUSTERDOWN` or `OOM`. A request is *unavailable*
//! only if it was never passed to the client, or was only redirected from node to node.
//!
//! Slot owners are checked when the store opens, when the connection of a node is lost, and every
//! thirty timeouts. An unreachable master cannot be checked: that is logged, and the check is
//! repeated once it is back. If one master evicts, the store stops using the whole cluster.
//!
//! While a node drops packets or is frozen:
//!
//! - Its own keys are unavailable until the cluster has another master for them or the node is
//!   back.
//! - Other keys are answered, but slowly: in up to three quarters of the timeout, and at worst a
//!   whole one. The client learns the slot owners anew each time it is redirected to the lost node,
//!   and every request waits for that.
//! - If there are no requests for other keys, the connections to all nodes are replaced after each
//!   timeout.
//! - A process that starts then can connect if one node of its URL answers. That takes up to twice
//!   the timeout. It is rejected while the unreachable node is the one with `hapax:secret`, because
//!   the process cannot check its secret. A process that was connected before continues.
//! - Notifications may be missed while the connection of a node is replaced; waiters also poll.
//!
//! # Features
//!
//! - `cluster`: Redis Cluster. A URL that leads to a node of one is enough.
//! - `sentinel`: `redis+sentinel://` URLs.
//! - `tls`: `rediss://` URLs, by rustls.

mod admission;
mod cache;
mod certificates;
#[cfg(feature = "cluster")]
mod cluster;
mod connection;
mod diagnose;
mod driver;
mod error;
mod identity;
mod key_names;
mod link;
mod notify;
mod options;
mod reconnect;
mod record;
mod scan;
mod schedule;
mod script;
mod secret;
mod server_info;
mod store;
mod url;

pub use cache::RedisCache;
pub use diagnose::diagnose;
pub use driver::RedisDriver;
pub use error::{RedisConnectError, RedisStoreError};
pub use options::RedisOptions;
pub use server_info::UnfitServer;
pub use store::{RedisStats, RedisStore};
