//! Manual of the gateway: its behaviour between clients and a service.

#[doc = include_str!("manual/proxy.md")]
pub mod proxy {}
