//! Each test has its own cluster.

mod cluster;
mod suite;
