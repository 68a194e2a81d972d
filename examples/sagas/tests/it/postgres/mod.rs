//! Examples with PostgreSQL.

mod shop;
mod transfer;
