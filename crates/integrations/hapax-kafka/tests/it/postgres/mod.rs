//! Processes of a group, which are killed and frozen, with effects in PostgreSQL.

mod consumer;
mod group;
mod world;
