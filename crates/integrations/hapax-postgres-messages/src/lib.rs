//! Inbox, outbox, sequences and dead letters in PostgreSQL 13 and later.
//!
//! The contract is SQL: tables, and functions over them that a program in any language calls within
//! its own transactions. [`message_migrations`] returns the script that creates them, with a
//! comment on each. The rest of this crate uses them from Rust, with tokio-postgres or, with the
//! feature `sqlx`, sqlx:
//!
//! | SQL | Rust |
//! | --- | --- |
//! | `hapax_inbox` | |
//! | `hapax_inbox_insert`, `hapax_inbox_park`, `hapax_inbox_attempt`, `hapax_inbox_failed` | [`PgInbox`], for a [`BatchConsumer`](hapax_messages::BatchConsumer) |
//! | `hapax_position_acquire`, `hapax_position_advance` | [`PgInbox::advance_positions`], for a source with positions |
//! | `hapax_outbox_put`, `hapax_outbox_put_text`, `hapax_outbox_put_all` | [`put_messages`] |
//! | `hapax_outbox_poll` and others | [`PgOutbox`], for a [`Relay`](hapax_messages::Relay) |
//! | `hapax_dead_letter_put`, `hapax_dead_letter_remove`, `hapax_dead_letter_redrive`, `hapax_dead_letter_drop`, `hapax_outbox_redrive` | [`PgDeadLetterStore`] |
//! | `hapax_sequence`, `hapax_sequence_next` | |
//!
//! ```sql
//! BEGIN;
//! SELECT state FROM hapax_inbox('orders', ARRAY['message-17']);   -- new: handle it
//! INSERT INTO orders …;
//! SELECT hapax_outbox_put_text('orders.created', '{"order": 17}', 'customer-3');
//! COMMIT;   -- then acknowledge the message
//! ```
//!
//! # Inbox
//! The unique index of ids decides which of two transactions handles a message; there is no claim.
//! If another open transaction has inserted one of the ids, a transaction waits for half a second
//! and then fails with 55P03: hold its messages, and apply them again later. The functions
//! `hapax_inbox`, `hapax_inbox_attempt`, `hapax_inbox_failed` and those of sequences set this
//! `lock_timeout` themselves; the others have that of the session. An id takes about 120 bytes,
//! indexes included. `hapax_inbox_purge` removes those whose retention has ended, a bounded number in
//! each call. A [`BatchConsumer`](hapax_messages::BatchConsumer) calls it each minute; otherwise call
//! it regularly.
//!
//! # Positions
//! Where a broker has a log, such as Kafka, `hapax_positions` has a row for each consumer and partition in
//! the place of ids, or beside them. Its owner acquires it by `hapax_position_acquire`, and calls
//! `hapax_position_advance` first in each transaction. `hapax_position_set` is for operators.
//!
//! # Outbox
//! - The payload of `hapax_outbox_put` and `hapax_outbox_put_all` is `bytea`. PostgreSQL reads a
//!   literal as its text form, in which a backslash begins an escape, so JSON would be changed:
//!   write texts by `hapax_outbox_put_text`.
//! - Messages with an order key are published in the order in which their transactions commit: the
//!   writers of one key are serialized by an advisory lock on one of 1,024 stripes, which
//!   `hapax_outbox_put` takes before it allocates the id. Write the messages of a transaction by
//!   one call, shortly before COMMIT.
//! - There is no cursor, and a message that commits late is found. Rows are deleted once they are
//!   published. To skip the index entries of deleted rows, a relay keeps a floor for each shard: no
//!   message with a smaller id is left, and none can appear.
//! - No transaction stays open while a message is sent. The functions use no session state, so a
//!   pooler in transaction mode works.
//!
//! # Failover
//! An id or a message is as durable as the transaction with it. With asynchronous standbys a
//! failover loses the last transactions, ids and effects alike; a message that was acknowledged
//! before is then lost with them. Use synchronous standbys where that matters. Then neither a
//! message of the inbox is acknowledged nor one of the outbox published before a standby has its
//! transaction, even if a crash of the primary, or the end of a session that waits, has made it visible
//! before: the functions that precede an acknowledgement raise `synchronous_commit` to `on`, and write
//! even if each message is a duplicate, so that COMMIT waits; so does each poll of a relay that finds
//! messages. The exception is a wait of this process that an operator cancels (`pg_cancel_backend`) on a
//! connection of a pool, which COMMIT reports as a warning only.
//!
//! # Schema
//! The script names one schema, by default `public`, and so does each function: the search path of a caller
//! does not matter. Outside of `public`, name it in calls, or in the search path of the role;
//! [`Connections::schema`] names it in the statements of this crate, and the schema of [`put_messages`] in its
//! call.

mod connections;
mod dead_letters;
mod hashes;
mod inbox;
mod operators;
mod outbox;
mod schema;

pub use connections::{ConnectCause, Connections, SharedConnection, StatementConnections};
pub use dead_letters::PgDeadLetterStore;
pub use hapax_postgres::{SchemaName, SchemaNameError};
pub use inbox::{BatchHandler, PgInbox};
pub use operators::{
    DeadLetterContents, DeadLetterPosition, DeadLetterQuery, DeadLetterSummary, OUTBOX_CONSUMER,
};
pub use outbox::{PgOutbox, put_messages};
pub use schema::{
    message_migrations, message_migrations_beside_others, message_schemas, migrate_messages,
};
