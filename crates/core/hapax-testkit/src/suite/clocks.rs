//! Rules of a clock that tests can set.

use std::time::Duration;

use hapax_core::FencingToken;

use super::{Bench, ClockFixture};

/// While the clock is behind the last fence, the next fence is one larger.
pub async fn fences_grow_while_the_clock_steps_back<F: ClockFixture>(fixture: &F) {
    let bench = Bench::open(fixture).await;
    let (key, mut stored) = bench.put(bench.draft()).await;
    bench.fixture().step_back(&bench.store, Duration::from_secs(60)).await;
    for _ in 0..3 {
        let swap = bench.swap(key, Some(stored.write_id), bench.draft());
        let next = FencingToken::new(stored.fence.get() + 1);
        assert_eq!(bench.stored(&swap).await.fence, next);
        stored = bench.record(&key).await;
        assert_eq!(stored.fence, next);
    }
}

/// Otherwise a fence is the exact time of its write, in microseconds.
pub async fn fences_are_the_clock_in_microseconds<F: ClockFixture>(fixture: &F) {
    let bench = Bench::open(fixture).await;
    for _ in 0..5 {
        bench.pass(Duration::from_micros(1_000_001)).await;
        let (key, stored) = bench.put(bench.draft()).await;
        assert_eq!(stored.fence.issued_at(), bench.load(&key).await.now);
    }
}
