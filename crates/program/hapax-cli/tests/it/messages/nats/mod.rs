//! Tests that need a NATS server; those in `postgres` need PostgreSQL too.

mod login;
mod postgres;
