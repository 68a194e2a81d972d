//! Each test has its own cluster.

pub(crate) mod cluster;
mod source;
mod suite;
