//! Tests that need a RabbitMQ server; those in `postgres` also need PostgreSQL.

mod postgres;
