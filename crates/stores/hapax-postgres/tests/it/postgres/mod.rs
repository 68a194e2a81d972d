mod connecting;
mod emptied;
mod faults;
mod functions;
mod halves;
mod histories;
mod locks;
mod meddler;
mod plans;
mod pool;
mod purging;
mod schedule;
#[path = "../../../examples/deadlocks/scramble.rs"]
mod scramble;
mod secrets;
mod standbys;
mod suite;
mod support;
#[cfg(feature = "tls")]
mod tls;
mod transact;
mod transactions;
mod waking;
mod walks;
