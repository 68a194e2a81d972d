//! Scenarios, by the numbers of the statements that they check.
#![allow(missing_docs, reason = "a scenario's name says what it checks")]

pub mod details;
pub mod execution;
pub mod grpc;
pub mod headers;
pub mod identity;
pub mod in_flight;
pub mod keys;
pub mod outages;
pub mod outcomes;
pub mod protocols;
pub mod quarantines;
pub mod redirects;
pub mod rejections;
pub mod replay;
pub mod sizes;
pub mod unretried;
