#[cfg(feature = "sqlx")]
mod by_sqlx;
mod events;
mod insert;
mod network;
mod properties;
mod support;
mod versioned;
