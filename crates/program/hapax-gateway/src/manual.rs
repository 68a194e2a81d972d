//! The gateway's manual: how it behaves between clients and a service.

#[doc = include_str!("manual/proxy.md")]
pub mod proxy {}
