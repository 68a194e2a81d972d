#[cfg(feature = "cluster")]
mod cluster;
mod connecting;
mod doctor;
mod emptied;
mod functions;
mod schedule;
mod secrets;
#[cfg(feature = "sentinel")]
mod sentinel;
mod suite;
mod support;
#[cfg(feature = "tls")]
mod tls;
mod waking;
mod weaknesses;
