//! Each test has its own cluster.

pub(crate) mod cluster;
mod faults;
mod records;
mod recreated;
mod source;
mod suite;
