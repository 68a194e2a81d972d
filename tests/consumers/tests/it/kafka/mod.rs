//! Tests with a mock cluster of Kafka; those in `postgres` need PostgreSQL too.

mod postgres;
