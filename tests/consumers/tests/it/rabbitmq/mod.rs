//! Tests that need a RabbitMQ server; those in `postgres` need PostgreSQL too.

mod postgres;
