//! Processes of a group, which are killed and frozen, with effects in PostgreSQL.

mod brokers;
mod consumer;
mod group;
mod world;
