//! Members that join, leave, are killed and frozen.

use std::time::Duration;

use tokio::time::{sleep, timeout};

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
async fn a_position_that_is_committed_too_early_is_found() {
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
