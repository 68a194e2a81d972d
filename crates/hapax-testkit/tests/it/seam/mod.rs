//! The seam holds for servers: a Redis script and PostgreSQL statements, as small as they can be,
//! pass the suite, through a network that loses replies as well.

mod postgres;
mod postgres_store;
mod redis;
mod redis_store;
mod swap_lua;

use std::time::Duration;

use hapax_testkit::faults::{Proxy, ProxyRates};

/// What a bad network does.
fn bad_network() -> ProxyRates {
    ProxyRates::all(15, Duration::from_millis(20))
}

fn assert_faults_happened(proxy: &Proxy) {
    let counts = proxy.counts();
    for times in [
        counts.lost_requests,
        counts.late_requests,
        counts.lost_replies,
        counts.torn_replies,
        counts.delays,
    ] {
        assert!(times >= 10, "a fault was rare: {counts:?}");
    }
}
