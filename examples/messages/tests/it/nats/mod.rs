//! Tests that need a NATS server; those in `postgres` also need PostgreSQL.

mod postgres;
