//! An HTTP client for operations that must survive a crash: with a server that honors idempotency keys, one effect
//! and one response for each name.
//!
//! A program that crashes before the response of a payment arrives does not know whether it was paid. This client
//! stores the request and its idempotency key in a [`Journal`] before the first byte is sent, and the response
//! before the caller gets it. After a crash, the same call continues the operation under the same key, or returns
//! the stored response.
//!
//! # Guarantees
//! 1. The key of an operation depends on its name and on the secret of the journal alone. It is the same
//!    in every try, after a crash, and with a new journal that has the old secret.
//! 2. A name stands for one request: another method, URL, header or body under it is
//!    [`SendError::Reused`], and nothing is sent. If the journal has its response, nothing is sent, and
//!    the call returns it.
//! 3. Nothing is sent before the journal has the request. While the journal is full, damaged, unavailable or open
//!    in another process, every call is an error and sends nothing.
//! 4. *Not sent* is reported only if it is certain: there was no connection, no byte was handed to it,
//!    or the server rejected the stream (`REFUSED_STREAM`, a `GOAWAY` above its last one). Anything else
//!    may have happened, and is tried again under the same key, if the [`Server`] honors keys.
//! 5. After the first try that may have arrived, no try begins later than 0.9 of the server's
//!    retention, declared or stated by `Idempotency-Expires`, nor later than the longest duration of a try
//!    before its end ([`SendError::Expired`]).
//! 6. After a try that may have arrived, other credentials are rejected
//!    ([`SendError::CredentialsChanged`]), unless the server is
//!    [scoped by account](Server::scoped_by_account): for the server they may be another caller, and the
//!    key a new one.
//!    Nor is anything sent with another key or key header, or without a key, because the server is
//!    declared otherwise than for that try ([`SendError::KeyChanged`]).
//! 7. Credentials are supplied for each try and are never in the journal. Requests and responses are sealed
//!    (encrypted) with its secret.
//! 8. Redirects are not followed, and requests to undeclared servers are rejected. A 202 is
//!    [followed](Server::follows_accepted) if the server is declared so, at the same server only.
//! 9. An operation without a response stays in the journal: [`Client::pending`] has it until it gets one, or is
//!    [acknowledged](Client::acknowledge). A rejection of a server that executed nothing is a response only for a
//!    caller that waits for it. One that cannot be read is listed as
//!    [unreadable](PendingState::Unreadable), with what is known of it.
//!
//! # Not promised
//! - *One effect at a server that ignores keys* and is declared as one that honors them: use
//!   [`Server::without_keys`].
//! - *One effect of a name that is used again* after the journal has removed it
//!   ([`remember`](ClientBuilder::remember), 30 days) and the server its key.
//! - *That a response without a length is complete.* One that ends with its connection, without `Content-Length`
//!   and without chunks, is taken as complete.
//! - *The age of a key over a suspension after which the wall clock is not set*, as in a virtual machine without
//!   a time service. A clock that steps forward makes keys older, and ends their operations early.
//! - *That a secret in a URL or a body is not stored.* It is in the journal, sealed, as long as the operation.
//! - *An operation whose record the store loses.* Its name is new then. Its key is the same, so that a server that
//!   still has the key replays.
//!
//! # Limits
//! | limit | value |
//! | --- | --- |
//! | name | 1 to 255 printable ASCII characters |
//! | key | 64 hexadecimal digits, in quotes except for [`Server::stripe`] |
//! | URL; headers of a request together | 32 KiB each |
//! | body of a request | 1.875 MiB (1,966,080 bytes) |
//! | body of a response | up to 1 MiB is stored; up to 64 MiB reach the caller that waits, 256 MiB of all at once ([`response_memory`](ClientBuilder::response_memory)) |
//! | one try | 60 s; within it 30 s without a byte ([`idle_timeout`](ClientBuilder::idle_timeout)) |
//! | pause between tries | random, up to 0.5 s after the first, doubled up to 5 minutes, plus `Retry-After` |
//! | retries of one client to one server without a response | 100, then one a second (a retry budget) |
//! | tries at once | 1,024 of each server; 16 of operations that are resumed, 8 of one server |
//! | lists | [`Client::pending`] and [`Client::finished`] return all operations at once |
//!
//! A caller past these limits waits in memory, in the order of arrival. Once it has waited for the time of
//! its [`wait`](OutgoingRequest::wait), its operation is stored, and it gets [`SendError::Pending`].
//!
//! # Example
//! ```
//! use std::time::Duration;
//! use hapax_client::{Client, Credentials, Journal, Server};
//! # use std::sync::Arc;
//! # use hapax_core::{MemoryStore, Secret};
//! # use tokio::io::{AsyncReadExt, AsyncWriteExt};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let bank = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
//! # let origin = format!("http://{}", bank.local_addr()?);
//! # tokio::spawn(async move {
//! #     while let Ok((mut stream, _)) = bank.accept().await {
//! #         let _ = stream.read(&mut [0; 4096]).await;
//! #         let answer = b"HTTP/1.1 201 Created\r\ncontent-length: 4\r\nconnection: close\r\n\r\npaid";
//! #         let _ = stream.write_all(answer).await;
//! #     }
//! # });
//! # let store = MemoryStore::default().secret(Secret::new([7; 32]));
//! # /* In earnest:
//! let journal = Journal::file("payments.journal")?;
//! # */ let journal = Journal::over(store)?;
//! let client = Client::open(journal)
//!     .server(&origin, Server::hapax().retention(Duration::from_secs(24 * 60 * 60)))
//!     .credentials(|_| async { Ok(Credentials::bearer("token of the vault")?) })
//!     .build()
//!     .await?;
//! // Continues the operations of earlier processes.
//! let resumed = client.resume().await?;
//! assert_eq!((resumed.pending, resumed.expired), (0, 0));
//!
//! for _ in 0..2 {
//!     let payment = client.post(format!("{origin}/payments")).operation("invoice/17");
//!     let sent = payment.body("1999 cents").send().await?;
//!     assert_eq!(sent.response.status, 201); // the second one is the stored response
//! }
//! # Ok(())
//! # }
//! ```
//!
//! # Other libraries
//! Adapters take requests of `reqwest`, `reqwest-middleware` and `tower`, each as a feature. They convert
//! requests and answers; the client sends, as its own requests.
//!
//! # Operation
//! An operation is a saga of one step on [`hapax_saga`]: `hapax saga list` on the store of a journal
//! shows it by its operation id, of the definition `client`. Each run has a span `saga` and each try a span `call`,
//! without contents. A response for which no caller waits, and a stop of the operation without one, is an event
//! with its `name` and its `operation` id. End a client by
//! [`Client::close`]: one that is only dropped keeps the journal open until its calls and their pauses have
//! ended.

mod accepted;
#[cfg(any(feature = "reqwest", feature = "tower"))]
mod adapter;
mod admission;
mod body;
mod budget;
mod client;
mod credentials;
mod error;
mod exchange;
mod flow;
mod journal;
mod known;
mod request;
mod response;
mod resume;
mod send;
mod server;
mod stats;
#[cfg(test)]
mod tests;

#[cfg(any(feature = "reqwest", feature = "tower"))]
pub use adapter::Operation;
#[cfg(feature = "tower")]
pub use adapter::tower::{
    OperationBody, OperationFuture, OperationLayer, OperationService, OperationServiceError,
};
pub use client::{Client, ClientBuilder};
pub use credentials::{Credentials, CredentialsError, CredentialsRequest};
pub use error::{ClientError, RequestError, SendError};
pub use hapax_proxy::ConnectProxy;
pub use journal::{Journal, JournalError};
pub use request::OutgoingRequest;
pub use response::{ClientResponse, Sent};
pub use resume::{FinishedOperation, PendingOperation, PendingState, Resumed};
pub use send::Handle;
pub use server::Server;
pub use stats::{ClientCensus, ClientStats, ServerStats};
