//! The manual: reasons, not reference.
//!
//! | page | it answers |
//! | --- | --- |
//! | [`defaults`] | why each default is what it is, and when to change it |
//! | [`policies`] | at-most-once, at-least-once, effectively once: which one, and what it costs |
//! | [`failures`] | what can fail, what is then true, and what to do |
//! | [`limits`] | what is not promised |
//! | [`stores`] | which store for what, its secrets, its cache, and what to watch |
//! | [`functions`] | what a call of a function gets, what its errors mean, how its values are kept |
//! | [`gateway`] | how the gateway is told what to do: file, routes, reload, observing |
//!
//! # Words
//!
//! | we say | for | not |
//! | --- | --- | --- |
//! | idempotency key | the caller's name for one operation | request id, token |
//! | scope | whose key it is | namespace, tenant |
//! | fingerprint | the hash that says what was asked | checksum, signature |
//! | claim | asking to execute, and the answer | lock, acquire |
//! | lease | how long a claim holds without renewal | lock time-out |
//! | grant | who owns a record: random, never repeated | owner id, session |
//! | fencing token | a number that grows with takeovers, for systems downstream | version, epoch |
//! | outcome | the answer that is kept | response cache |
//! | retention | how long it is kept | time to live |
//! | release | it did not happen: the next one executes | unlock, delete |
//! | unknown | it may or may not have happened | failed, error |
//! | replay | answering with the kept outcome | cache hit |
//! | lapse | a lease that ended without renewal | expiry (that is of records) |

#[doc = include_str!("manual/defaults.md")]
pub mod defaults {}

#[doc = include_str!("manual/policies.md")]
pub mod policies {}

#[doc = include_str!("manual/failures.md")]
pub mod failures {}

#[doc = include_str!("manual/limits.md")]
pub mod limits {}

#[doc = include_str!("manual/stores.md")]
pub mod stores {}

#[doc = include_str!("manual/functions.md")]
pub mod functions {}

#[doc = include_str!("manual/gateway.md")]
pub mod gateway {}
