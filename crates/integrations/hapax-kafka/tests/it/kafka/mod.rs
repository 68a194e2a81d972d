//! Each test has its own cluster.

pub(crate) mod cluster;
mod faults;
mod recreated;
mod source;
mod suite;
