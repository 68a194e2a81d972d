//! The HTTP contract, as scenarios.
//!
//! 1. A scenario is a function named after the numbered statement of the contract that it checks:
//!    `w07_…` checks the seventh. It is played over HTTP/1.1 and HTTP/2 against whatever a
//!    [`HttpFixture`] starts: the tower layer in a service, or a gateway on some store.
//! 2. It says what it needs as a [`ScenarioPolicy`], and what stands behind as a [`Handler`]; it sees
//!    nothing but requests and answers.
//! 3. One instance is there at a time, unless a group's name says otherwise: a store that is a
//!    file has one owner. A crash must be one, of a process that is killed, where a store is held
//!    by more than the instance's tasks.
//! 4. Some need more than an address, and are groups of their own, so that none is skipped in
//!    silence: `crashes` ends processes, `outages` cuts them off from their store, `several` has
//!    two processes on one store at a time. `any` is for everybody.
//!
//! ```text
//! // In a test crate: a function for each scenario and protocol.
//! hapax_testkit::http_suite!(fixture; any, crashes, outages, several);
//! ```
//!
//! Where starting a store is dear, [`play_all`] plays groups in one test, on one fixture: a
//! scenario uses keys and callers that no other does.
#![allow(
    clippy::expect_used,
    clippy::missing_panics_doc,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a failure here is a failed test"
)]

mod client;
mod fixture;
mod groups;
mod handler;
mod raw;
pub mod scenarios;
pub mod shapes;
mod stage;

pub use client::{Client, Connection, Protocol, TIMEOUT, TestResponse};
pub use fixture::{
    Hook, HookRequest, HookVerdict, HttpFixture, Instance, ScenarioPolicy, ScenarioScope, Starting,
    StoreLink,
};
pub use groups::{Group, Scenario, play, play_all};
pub use handler::{
    ExecutionCount, Handler, HandlerGate, HandlerRequest, TestServer, counting, handler, perform,
    reply, serve,
};
pub use raw::{Raw2, StreamEnd};
pub use stage::{ScenarioContext, TestInstance, TestRequest};
