//! The manual: reasons and trade-offs. The items' own documentation is the reference.
//!
//! | page | content |
//! | --- | --- |
//! | [`defaults`] | the reason for each default, and when to change it |
//! | [`policies`] | at-most-once, at-least-once, effectively once: how to choose, and the costs |
//! | [`failures`] | failures, the state after each, and what to do |
//! | [`limits`] | what Hapax does not guarantee |
//! | [`stores`] | the choice of a store, its secrets, its cache, and its monitoring |
//! | [`functions`] | results and errors of a function's calls, and the storage of its values |
//! | [`gateway`] | configuration of the gateway: file, routes, reload, observing |
//!
//! # Words
//!
//! | word | meaning | not |
//! | --- | --- | --- |
//! | idempotency key | the caller's name for one operation | request id, token |
//! | scope | the identity of the caller: two scopes never share a record | namespace, tenant |
//! | fingerprint | digest of a request; equal digests: the same request | checksum, signature |
//! | claim | the request to execute, and its answer | lock, acquire |
//! | lease | the right to execute for a time, which is renewed | lock timeout |
//! | lease id | the ownership of a record: random, never repeated | owner id, session |
//! | fence | number that grows with each execution, for systems downstream | version, epoch |
//! | outcome | the response or value that is stored | response cache |
//! | retention | how long an outcome is replayed | time to live |
//! | release | the operation did not happen: the next request executes | unlock, delete |
//! | unknown | the operation may have happened | failed, error |
//! | replay | answering with a stored outcome | cache hit |
//! | lapse | the end of a lease that was not renewed | expiry (that is of records) |

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
