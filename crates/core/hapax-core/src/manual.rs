//! The manual: the reasons for the defaults, the failures and their consequences, and the choices.
//!
//! | page | content |
//! | --- | --- |
//! | [`defaults`] | the reason for each default, and when to change it |
//! | [`policies`] | at-most-once, at-least-once, effectively once: which to choose, and its cost |
//! | [`failures`] | each failure, its consequences, and what to do |
//! | [`limits`] | what is not promised |
//! | [`stores`] | the choice of a store, its secrets, its cache, and its metrics |
//! | [`functions`] | the results of a call, its errors, and how values are stored |
//! | [`gateway`] | the configuration of the gateway: file, routes, reload, observing |
//!
//! # Words
//!
//! | word | meaning | not |
//! | --- | --- | --- |
//! | idempotency key | the caller's name for one operation | request id, token |
//! | scope | the caller's identity, within which a key is unique | namespace, tenant |
//! | fingerprint | the hash that identifies the request | checksum, signature |
//! | claim | the attempt to become the owner of a key | lock, acquire |
//! | lease | the right to execute for a time | lock timeout |
//! | lease id | the owner of a record: random, never repeated | owner id, session |
//! | fence | a number that grows with takeovers, for downstream systems | version, epoch |
//! | outcome | the stored response or value | response cache |
//! | retention | the time for which an outcome is stored | time to live |
//! | release | the end of an operation that did not happen: the next claim executes | unlock, delete |
//! | unknown | the operation may or may not have happened | failed, error |
//! | replay | a response from the stored outcome | cache hit |
//! | lapse | the end of a lease without renewal | expiry (of records) |

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
