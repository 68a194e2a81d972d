//! The schedule: the rules of every schedule, and what is special on this server.

use std::num::NonZeroU32;
use std::time::Duration;

use bytes::Bytes;
use hapax_core::schedule::{EntryKey, NewEntry, QueueName, Schedule};
use hapax_core::{EntryId, Secret, StoreError};
use hapax_redis::{RedisOptions, RedisStore, RedisStoreError};
use hapax_testkit::schedule;
use hapax_testkit::servers::RedisServer;
use hapax_testkit::suite::server;

use super::suite::{OnOneServer, Redis};
use super::support::{at, claim, connect, expect_stored, key, permit};

const LONG: Duration = Duration::from_secs(86_400);

pub(crate) fn queue() -> QueueName {
    QueueName::new("payments/1").unwrap()
}

/// Returns an entry that is named by a number.
pub(crate) fn entry(of: u64, due_in: Duration) -> NewEntry {
    let id = EntryId::from_bytes(u128::from(of).to_be_bytes());
    let key = EntryKey { operation: key(of), id };
    NewEntry { key, queue: queue(), due_in, note: Bytes::from(format!("note {of}")) }
}

async fn due(store: &RedisStore) -> Vec<EntryKey> {
    let found = store.due(&[queue()], most(1_000)).await.unwrap();
    found.entries.into_iter().map(|(key, entry)| entry.map(|_| key).unwrap()).collect()
}

pub(crate) fn most(limit: u32) -> NonZeroU32 {
    NonZeroU32::new(limit).unwrap()
}

fn reason<T: std::fmt::Debug>(answer: Result<T, StoreError>) -> String {
    let Err(StoreError::Unavailable(source)) = answer else { panic!("{answer:?}") };
    source.downcast_ref::<RedisStoreError>().expect("one of ours").to_string()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_schedule_follows_the_rules_as_a_user_with_the_rights_of_the_manual() {
    let server = RedisServer::start().await;
    permit(&server, "suite-").await;
    let url = server.url().replace("//", "//hapax:word@");
    schedule::schedule_rules(&OnOneServer::new(RedisOptions::new(url))).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_schedule_with_a_secret_follows_the_rules() {
    let server = RedisServer::start().await;
    let options = RedisOptions::new(server.url()).secret(Secret::new([7; 32]));
    schedule::schedule_rules(&OnOneServer::new(options)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_schedule_follows_the_rules_over_a_network_that_loses_replies() {
    server::schedule_rules_hold_over_a_network_that_loses_replies::<Redis>().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn acknowledged_changes_survive_kills() {
    server::acknowledged_changes_of_a_schedule_survive_kills::<Redis>().await;
}

#[tokio::test]
async fn no_key_of_a_schedule_has_an_expiry_and_none_stays_behind() {
    let server = RedisServer::start().await;
    let store = connect(&server).await;
    let before = server.command("DBSIZE").await;
    for of in 0..100 {
        store.insert(entry(of, Duration::ZERO)).await.unwrap();
        assert!(store.postpone(entry(of, LONG).key, None, LONG).await.unwrap());
    }
    let names = server.command("KEYS hapax:schedule:*").await;
    let names: Vec<_> = names.lines().filter(|line| line.starts_with("hapax:")).collect();
    // Four for each of the slots.
    assert_eq!(names.len(), 64);
    for name in names {
        assert_eq!(server.command(&format!("TTL {name}")).await, ":-1", "{name}");
    }
    for of in 0..100 {
        store.remove(entry(of, LONG).key).await.unwrap();
    }
    assert_eq!(server.command("DBSIZE").await, before);
}

#[tokio::test]
async fn an_emptied_server_takes_no_entry_before_an_operator_confirms() {
    let server = RedisServer::start().await;
    let store = connect(&server).await;
    store.insert(entry(1, LONG)).await.unwrap();
    server.command("FLUSHALL").await;
    for _ in 0..2 {
        let rejected = reason(store.insert(entry(2, LONG)).await);
        assert!(rejected.contains("hapax store confirm"), "{rejected}");
    }
    assert!(store.is_replaced());
    assert!(!store.postpone(entry(1, LONG).key, None, LONG).await.unwrap());
    store.remove(entry(1, LONG).key).await.unwrap();
    connect(&server).await.confirm().await.unwrap();
    store.insert(entry(2, Duration::ZERO)).await.unwrap();
    assert_eq!(due(&store).await, [entry(2, LONG).key]);
}

#[tokio::test]
async fn a_store_that_only_reads_inserts_nothing() {
    let server = RedisServer::start().await;
    let options = at(server.port()).make(false);
    let store = RedisStore::connect(options).await.unwrap();
    let rejected = reason(store.insert(entry(1, LONG)).await);
    assert!(rejected.contains("opened for writing"), "{rejected}");
    assert_eq!(due(&store).await, []);
}

#[tokio::test]
async fn without_permissions_records_are_served_and_changes_are_unavailable() {
    let server = RedisServer::start().await;
    let commands = "+hello +info +time +get +getrange +set +evalsha +eval +ping +scan +publish \
                    +subscribe +unsubscribe";
    let user = "ACL SETUSER app on >word resetkeys resetchannels ~hapax:* &hapax:* -@all";
    assert_eq!(server.command(&format!("{user} {commands}")).await, "+OK");
    let options = RedisOptions::new(format!("redis://app:word@127.0.0.1:{}", server.port()));
    let store = RedisStore::connect(options).await.unwrap();
    expect_stored(&store, &claim(1)).await;
    // One permission after the other: whatever is rejected leaves nothing behind.
    let schedule = "+hexists +zcard +zadd +hset +hget +zscore +zrange +zrangebyscore +zrangebylex \
                    +zrem +hdel";
    for permission in schedule.split_whitespace() {
        let inserted = store.insert(entry(1, Duration::ZERO)).await;
        if ["+hexists", "+zcard", "+zadd", "+hset"].contains(&permission) {
            reason(inserted);
            assert_eq!(server.command("HLEN hapax:schedule:{0}:entries").await, ":0");
        }
        assert_eq!(server.command(&format!("ACL SETUSER app {permission}")).await, "+OK");
    }
    let _ = store.insert(entry(1, Duration::ZERO)).await;
    assert_eq!(due(&store).await, [entry(1, LONG).key]);
    assert!(store.postpone(entry(1, LONG).key, None, LONG).await.unwrap());
    assert_eq!(store.entries(None, most(10)).await.unwrap().entries.len(), 1);
    assert_eq!(store.queues().await.unwrap().len(), 1);
    store.remove(entry(1, LONG).key).await.unwrap();
    assert_eq!(server.command("KEYS hapax:schedule:*").await, "*0");
}

#[tokio::test]
async fn a_value_that_is_no_entry_is_corrupt() {
    let server = RedisServer::start().await;
    let store = connect(&server).await;
    for name in ["entries", "order", "queues", "due:payments/1"] {
        // The slot of operation ids that begin with a zero.
        let name = format!("hapax:schedule:{{0}}:{name}");
        assert_eq!(server.command(&format!("SET {name} x")).await, "+OK");
        let inserted = store.insert(entry(0, LONG)).await;
        assert!(matches!(inserted, Err(StoreError::Corrupt(_))), "{inserted:?}");
        assert_eq!(server.command(&format!("GETDEL {name}")).await, "$1\r\nx");
    }
    store.insert(entry(0, Duration::ZERO)).await.unwrap();
    let damage = "return redis.call('HSET', KEYS[1], redis.call('HKEYS', KEYS[1])[1], 'x')";
    let damage = ["EVAL", damage, "1", "hapax:schedule:{0}:entries"];
    assert_eq!(server.command_of(&damage).await, ":0");
    let found = store.due(&[queue()], most(10)).await.unwrap();
    assert!(matches!(found.entries[..], [(_, Err(StoreError::Corrupt(_)))]), "{found:?}");
    let page = store.entries(None, most(10)).await.unwrap();
    assert!(matches!(page.entries[..], [(_, Err(StoreError::Corrupt(_)))]), "{page:?}");
    let postponed = store.postpone(entry(0, LONG).key, None, LONG).await;
    assert!(matches!(postponed, Err(StoreError::Corrupt(_))), "{postponed:?}");
    // It can be removed.
    store.remove(entry(0, LONG).key).await.unwrap();
    assert_eq!(server.command("KEYS hapax:schedule:*").await, "*0");
}

#[tokio::test]
async fn long_notes_end_a_poll_and_a_page_early() {
    let server = RedisServer::start().await;
    let store = connect(&server).await;
    let note = Bytes::from(vec![b'n'; 2 << 20]);
    // Of one operation, and so in one slot.
    for of in 0..7 {
        let key = EntryKey { operation: key(0), ..entry(of, LONG).key };
        let note = note.clone();
        store.insert(NewEntry { key, note, ..entry(of, Duration::ZERO) }).await.unwrap();
    }
    let found = store.due(&[queue()], most(100)).await.unwrap();
    assert_eq!((found.entries.len(), found.next_in), (1, Some(Duration::ZERO)));
    let page = store.entries(None, most(100)).await.unwrap();
    assert!(page.more && page.entries.len() == 4, "{}", page.entries.len());
    let rest = store.entries(page.entries.last().map(|(key, _)| *key), most(100)).await.unwrap();
    assert_eq!((rest.entries.len(), rest.more), (3, false));
}

/// Adds members without an entry before all others, to the first slot: what a script leaves behind
/// that failed.
async fn leave_members(server: &RedisServer, count: u32) {
    let text = "for number = 1, tonumber(ARGV[1]) do \
                local member = string.rep('\\0', 44) .. struct.pack('>I4', number) \
                redis.call('ZADD', KEYS[1], number, member) \
                redis.call('ZADD', KEYS[2], 0, member) end return redis.call('ZCARD', KEYS[1])";
    let (due, order) = ("hapax:schedule:{0}:due:payments/1", "hapax:schedule:{0}:order");
    let command = ["EVAL", text, "2", due, order, &count.to_string()];
    let added = server.command_of(&command).await;
    assert!(added.starts_with(':'), "{added}");
}

#[tokio::test]
async fn members_without_an_entry_hide_no_entry_and_are_removed() {
    let server = RedisServer::start().await;
    let store = connect(&server).await;
    let expected = [1_000_001, 1_000_002].map(|of| {
        let key = EntryKey { operation: key(0), ..entry(of, LONG).key };
        NewEntry { key, ..entry(of, Duration::ZERO) }
    });
    for entry in expected.clone() {
        store.insert(entry).await.unwrap();
    }
    let expected = expected.map(|entry| entry.key);
    // Of a poll with a limit below their number, and of a page.
    leave_members(&server, 50).await;
    let found = store.due(&[queue()], most(1)).await.unwrap();
    let keys: Vec<_> = found.entries.iter().map(|(key, _)| *key).collect();
    assert_eq!((keys, found.next_in), (vec![expected[0]], Some(Duration::ZERO)));
    assert_eq!(server.command("ZCARD hapax:schedule:{0}:due:payments/1").await, ":2");
    let page = store.entries(None, most(1)).await.unwrap();
    assert_eq!((page.entries[0].0, page.more), (expected[0], true));
    assert_eq!(server.command("ZCARD hapax:schedule:{0}:order").await, ":2");
    // More than one call passes over: the next ones find the entries.
    leave_members(&server, 10_500).await;
    assert_eq!(due(&store).await, []);
    assert_eq!(due(&store).await, expected);
    assert_eq!(store.entries(None, most(10)).await.unwrap().entries.len(), 0);
    let page = store.entries(None, most(10)).await.unwrap();
    assert_eq!((page.entries.len(), page.more), (2, false));
    // A server that rejects their removal.
    leave_members(&server, 50).await;
    let denied = "ACL SETUSER default -zrem";
    assert_eq!(server.command(denied).await, "+OK");
    assert_eq!(due(&store).await, expected);
    let page = store.entries(None, most(10)).await.unwrap();
    assert_eq!((page.entries.len(), page.more), (2, false));
}
