//! The HTTP contract, as scenarios.
//!
//! 1. A scenario is a function named after the numbered statement of the contract that it checks:
//!    `w07_…` checks the seventh. It runs over HTTP/1.1 and HTTP/2 against the instance that an
//!    [`HttpFixture`] starts: the tower layer in a service, or a gateway on some store.
//! 2. A scenario states the configuration that it needs as a [`ScenarioPolicy`], and its inner
//!    service as a [`Handler`]; it observes only requests and responses.
//! 3. One instance runs at a time, unless a group's name says otherwise: a store that is a file has
//!    one owner. If more than the instance's tasks use the store, a crash must kill a process.
//! 4. Some scenarios need more than an address. They are separate groups, so that none is skipped
//!    unnoticed: `crashes` kills processes, `outages` cuts them off from their store, `several` has
//!    two processes on one store at a time, `unretried` reconciles without a retry, `quarantines` begins one. `any` needs only an
//!    address.
//!
//! ```text
//! // In a test crate: a function for each scenario and protocol.
//! hapax_testkit::http_suite!(fixture; any, crashes, outages, several);
//! ```
//!
//! If starting a store is expensive, [`play_all`] plays groups in one test, on one fixture: each
//! scenario uses its own keys and callers.
#![allow(
    clippy::expect_used,
    clippy::missing_panics_doc,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a failure here is a failed test"
)]

mod client;
mod fixture;
mod frames;
mod groups;
mod handler;
mod issuer;
mod raw;
pub mod scenarios;
pub mod shapes;
mod stage;

pub use client::{Connection, Protocol, TIMEOUT, TestClient, TestResponse};
pub use fixture::{
    Hook, HookRequest, HookVerdict, HttpFixture, Instance, ScenarioPolicy, ScenarioScope, Starting,
    StoreLink,
};
pub use frames::{FrameBody, FrameSender, frames};
pub use groups::{Group, Scenario, play, play_all};
pub use handler::{
    ExecutionCount, Handler, HandlerGate, HandlerRequest, TestServer, counting, handler, perform,
    reply, serve,
};
pub use issuer::TestIssuer;
pub use raw::{Raw2, StreamEnd};
pub use stage::{ScenarioContext, TestInstance, TestRequest};
