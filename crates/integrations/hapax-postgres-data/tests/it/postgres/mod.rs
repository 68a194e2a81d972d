#[cfg(feature = "sqlx")]
mod by_sqlx;
mod events;
mod examples;
mod insert;
mod isolation;
mod network;
mod operations;
mod properties;
mod settings;
mod standbys;
mod support;
mod tables;
mod versioned;
