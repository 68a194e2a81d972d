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
