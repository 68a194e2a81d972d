//! Tests that need PostgreSQL.

mod queue;
