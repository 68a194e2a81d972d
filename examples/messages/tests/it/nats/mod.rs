//! Without NATS these are left out, and without PostgreSQL too.

mod postgres;
