//! Each test has its own cluster.

pub(crate) mod cluster;
mod faults;
mod source;
mod suite;
