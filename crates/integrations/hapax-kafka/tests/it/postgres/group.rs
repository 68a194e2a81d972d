//! Members that join, leave, are killed and frozen.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};

use super::consumer::{Mode, POISON};
use super::world::World;
use crate::kafka::cluster::LIMIT;

#[tokio::test(flavor = "multi_thread")]
async fn each_id_has_one_effect_while_members_come_go_die_and_freeze_in_claim_mode() {
    members_come_go_die_and_freeze(Mode::Claims).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn each_record_has_one_effect_while_members_come_go_die_and_freeze_in_positions_mode() {
    members_come_go_die_and_freeze(Mode::Positions).await;
}

async fn members_come_go_die_and_freeze(mode: Mode) {
    let world = World::start().await;
    let publishing = world.publish_all_the_time();
    let one = world.process(mode);
    world.progress(50).await;
    let two = world.process(mode);
    world.progress(200).await;
    let three = world.process(mode);
    world.progress(200).await;
    two.kill().await;
    world.every_partition_goes_on().await;
    // Frozen in its handlers, until others have its partitions.
    one.freeze();
    world.every_partition_goes_on().await;
    one.thaw();
    world.progress(100).await;
    let four = world.process(mode);
    world.progress(100).await;
    three.stop().await;
    world.every_partition_goes_on().await;
    publishing.abort();
    world.finished().await;
    one.stop().await;
    four.stop().await;
    world.check().await;
    assert_eq!(world.count("SELECT count(*) FROM hapax_dead_letters").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_lag_returns_to_zero_each_time_that_members_come_and_go_in_claim_mode() {
    the_lag_returns_to_zero(Mode::Claims).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_lag_returns_to_zero_each_time_that_members_come_and_go_in_positions_mode() {
    the_lag_returns_to_zero(Mode::Positions).await;
}

/// `HAPAX_STALL_ROUNDS` rounds, of some 15 s: members come and go under load, and then the lag returns to
/// zero. One member stays, whose memory is bounded.
async fn the_lag_returns_to_zero(mode: Mode) {
    let rounds = std::env::var("HAPAX_STALL_ROUNDS").map_or(1, |rounds| rounds.parse().unwrap());
    let world = World::start().await;
    let stays = world.process(mode);
    let mut resident = Vec::new();
    for round in 0..rounds {
        let stop = Arc::new(AtomicBool::new(false));
        let publishing = world.publish_until(&stop);
        let other = world.process(mode);
        world.more_effects(200).await;
        let further = world.process(mode);
        world.more_effects(100).await;
        other.freeze();
        world.every_partition_goes_on().await;
        other.thaw();
        match round % 2 {
            0 => other.kill().await,
            _ => other.stop().await,
        }
        world.more_effects(100).await;
        match round % 3 {
            0 => further.stop().await,
            _ => further.kill().await,
        }
        stop.store(true, Ordering::SeqCst);
        publishing.await.unwrap();
        let begun = Instant::now();
        world.drained(Duration::from_secs(30)).await;
        world.check().await;
        resident.push(stays.resident());
        eprintln!(
            "round {round}: lag zero after {:?}, {} effects, {} MiB",
            begun.elapsed(),
            world.effects().await,
            stays.resident() >> 20
        );
    }
    stays.stop().await;
    // Once its caches are full, it does not grow.
    if let [first, .., last] = resident.get(10..).unwrap_or_default() {
        assert!(*last < first + first / 2, "{resident:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_position_that_is_set_while_no_record_comes_is_acquired_again() {
    let world = World::start().await;
    let process = world.process(Mode::Positions);
    for number in 0..12 {
        world.publish(&format!("m-{number}"), number, "x").await;
    }
    world.finished().await;
    const HANDLED: &str = "SELECT count(*) FROM effects";
    const SET: &str = "
        SELECT count(hapax_position_set(consumer, topic, partition, 0)) FROM hapax_positions";
    assert_eq!(world.count(HANDLED).await, 12);
    assert_eq!(world.count(SET).await, 3);
    let handled_again = async {
        while world.count(HANDLED).await < 24 {
            sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(LIMIT, handled_again).await.expect("the records are handled again");
    process.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_offset_that_is_committed_too_early_is_found() {
    let world = World::start().await;
    let publishing = world.publish_all_the_time();
    let process = world.process(Mode::AckFirst);
    let found = async {
        while world.passed().await == 0 {
            sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(LIMIT, found).await.expect("the check finds it");
    publishing.abort();
    process.kill().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_kills_its_process_is_parked_and_no_other_one_in_claim_mode() {
    poison(Mode::Claims).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_kills_its_process_is_parked_and_no_other_one_in_batch_mode() {
    poison(Mode::Batches).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_kills_its_process_is_parked_and_no_other_one_in_positions_mode() {
    poison(Mode::Positions).await;
}

async fn poison(mode: Mode) {
    let world = World::start().await;
    for number in 0..100 {
        world.publish(&format!("m-{number}"), number, "x").await;
        if number == 50 {
            world.publish("poison", 1000, POISON).await;
        }
    }
    let mut deaths = 0;
    let mut process = world.process(mode);
    let finished = async {
        while world.cluster.lag() > 0 {
            if process.has_ended() {
                deaths += 1;
                process = world.process(mode);
            }
            sleep(Duration::from_millis(50)).await;
        }
    };
    timeout(LIMIT, finished).await.expect("the lag returns to zero");
    process.stop().await;
    assert_eq!(deaths, 3);
    assert_eq!(world.effects().await, 100);
    assert_eq!(world.count("SELECT count(*) FROM effects").await, 100);
    assert_eq!(world.count("SELECT count(*) FROM hapax_dead_letters").await, 1);
}
