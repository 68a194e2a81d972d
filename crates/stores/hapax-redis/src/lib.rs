//! Hapax on Redis or Valkey, 6.2 or later: a store that many processes share.
//!
//! 1. A record is one key, and a swap one script and one round trip: the script compares the tag
//!    and writes with a single command, by the server's own clock.
//! 2. All callers of a process share one connection, on which their requests are pipelined. It is
//!    kept by itself: broken or silent, it is replaced, and until then callers hear within
//!    [`RedisOptions::timeout`] that there is no store.
//! 3. A request that was never sent is *unavailable*; one that was sent and not answered is
//!    *ambiguous*, because it may be carried out yet, and the engine sends it again. A server's
//!    refusal says that nothing was done; not so a cluster's, see below.
//! 4. A server that would forget by design is refused, at first and whenever it is found again:
//!    one that evicts, a replica, an old version; it is looked at again every thirty time-outs (a
//!    minute by default). [`diagnose`] looks at what can be accepted.
//! 5. Those who wait for a key hear of its end by pub/sub ([`hapax_core::Notify`]).
//!
//! ```no_run
//! # async fn run() -> Result<(), Box<dyn std::error::Error>> {
//! use hapax_core::{Idempotency, Secret};
//! use hapax_redis::{RedisOptions, RedisStore};
//!
//! let secret = Secret::from_hex(&std::fs::read_to_string("hapax.secret")?).ok_or("no secret")?;
//! let options = RedisOptions::new("redis://127.0.0.1").secret(secret);
//! let store = RedisStore::connect(options).await?;
//! let idempotency = Idempotency::builder(store).build()?;
//! # Ok(()) }
//! ```
//!
//! # When it forgets
//!
//! What Redis acknowledged it may lose, and what is lost runs again, also under `block`. Where a
//! rare second execution is acceptable, Redis is the fastest store for many processes. Where it
//! is not, as with money, keep records in Postgres or in a file, with a cache in front if need be.
//!
//! | what happens | what is lost | against it |
//! | --- | --- | --- |
//! | memory runs short under a policy that evicts | any record, silently | `maxmemory-policy noeviction`; else the store does not open |
//! | the server is killed, `appendfsync everysec` | a second of what was acknowledged | `appendfsync always` |
//! | the server is restarted without append-only file | what came after the last snapshot | `appendonly yes` |
//! | a failover | what the replica was not told yet; `WAIT` narrows it, and promises nothing | none |
//! | the server's clock steps forward | what has ended by then: leases, and retention for good | keep it in step; never set it by hand |
//! | the server's clock steps back | nothing: leases and retention last longer, and fences grow, but for a key that was removed in between | |
//! | somebody deletes keys | those | a server or at least a database of its own |
//!
//! # Expiry
//!
//! A record that is kept for a time has the server's own expiry (`PXAT`), at the end of its keep
//! and one lease, rounded up to the next millisecond, by the clock that also stamps deadlines. So
//! nothing is removed while somebody whose lease is over may still come to record its outcome
//! under the old tag, and `reap` has nothing to do. The server removes lazily; therefore the
//! scripts read what is due as gone, so that nobody can see that. What is kept for ever (in flight
//! or unknown under `block`) has no expiry at all.
//!
//! # What a server's user needs
//!
//! ```text
//! ACL SETUSER hapax on >PASSWORD resetkeys resetchannels ~hapax:* &hapax:* -@all
//!   +hello +info +time +get +getrange +set +evalsha +eval +ping +scan
//!   +publish +subscribe +unsubscribe +client|setinfo
//! ```
//!
//! `publish`, `subscribe` and channels are for those who wait; without them they look four times a
//! second. `scan` is for paging ([`hapax_core::Inspect`]). `client|setinfo` exists from 7.2 on and names
//! the connection. A cluster needs `+cluster|slots +asking` as well, and [`diagnose`] asks
//! for `+config|get`, but goes without.
//!
//! # At rest
//!
//! With [`RedisOptions::secret`] records are sealed, and the server's files tell nothing of keys,
//! credentials or outcomes. Deadlines, tag and fence stand beside the record in the clear, because
//! the script stamps them: whoever can write to the server can end a lease, as they can delete a
//! key, but can neither read a record nor make one.
//!
//! Processes that share records must name keys by the same secret, or all by none: else the same
//! key has two names, and nothing stops its second execution. Whoever comes with another is
//! refused ([`RedisConnectError::OtherSecret`]). The secret that seals can be replaced
//! ([`RedisOptions::key_ring`]), the one that names cannot; to begin with another, delete
//! `hapax:secret`, `hapax:identity` and every record.
//!
//! A store has an identity (`hapax:identity`), which goes with its records when the server is emptied.
//! Processes that used the store, or remember it ([`RedisOptions::identity`]), then claim no new key under
//! `block` or `reconcile` ([`RedisStoreError::Replaced`]) until [`RedisStore::confirm`] says that it
//! was meant; under `reexecute` the log has an error. A claim compares the identity in its own script,
//! but in a cluster only when the store is opened.
//!
//! Whether the secret is still the same is looked at on each new connection, and every thirty time-outs (a
//! minute by default). Within such a time others may have emptied the server and begun with another
//! secret, unnoticed. Whoever only looks ([`RedisOptions::make`]) does not choose the secret for others.
//!
//! # Clusters
//!
//! A request is carried out once at most: it is sent again only where a node answered that it did
//! not look at it, because its slot is elsewhere or on the move. When the client cannot learn who
//! serves what, it says so to all who wait for any answer. Therefore most errors that it reports for
//! a write are *ambiguous*, also a plain refusal such as `CLUSTERDOWN` or `OOM`; *unavailable* is
//! what was never given to it, or was only sent from node to node.
//!
//! Who serves slots is looked at when the store opens, when a node's connection was lost, and every
//! thirty time-outs. A master that is away cannot be looked at: that is logged, and made up for once
//! it is back. One that evicts makes the store give up the whole cluster.
//!
//! With a node that drops packets or is frozen:
//!
//! - Its own keys are out of reach until the cluster has another master for them or it is back.
//! - Keys of others are answered, but slowly, up to three quarters of the time-out and a whole one
//!   in bad moments: the client learns anew who serves what each time it is sent to the lost node,
//!   and everybody waits for that.
//! - If nobody asks for keys of others, the connections to all nodes are made anew after each
//!   time-out.
//! - A process that starts then is served where one node of its URL answers. That takes up to twice
//!   the time-out. It is refused while the node that holds `hapax:secret` is the one that is away:
//!   it cannot know whether its secret is the right one. A process that had been let in before stays
//!   in.
//! - News of writes may be missed while a node's connection is made anew; who waits looks by itself.
//!
//! # Features
//!
//! - `cluster`: Redis Cluster. A URL that leads to a node of one is enough.
//! - `sentinel`: `redis+sentinel://` URLs.
//! - `tls`: `rediss://` URLs, by rustls.

mod admission;
mod cache;
#[cfg(feature = "cluster")]
mod cluster;
mod connection;
mod diagnose;
mod error;
mod identity;
mod key_names;
mod link;
mod notify;
mod options;
mod reconnect;
mod record;
mod scan;
mod script;
mod secret;
mod server_info;
mod store;
mod url;

pub use cache::RedisCache;
pub use diagnose::diagnose;
pub use error::{RedisConnectError, RedisStoreError};
pub use options::RedisOptions;
pub use server_info::UnfitServer;
pub use store::{RedisStats, RedisStore};
