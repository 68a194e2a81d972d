//! A server that is emptied.

use std::sync::Arc;

use hapax_redis::{RedisConnectError, RedisOptions, RedisStore};
use hapax_testkit::servers::RedisServer;
use hapax_testkit::suite::{EmptiedFixture, emptied_rules};

use super::support::at;

struct Emptied(RedisServer);

impl EmptiedFixture for Emptied {
    type Store = RedisStore;

    async fn open(&self, known: Option<String>) -> Arc<RedisStore> {
        let options = known.into_iter().fold(at(self.0.port()), RedisOptions::identity);
        Arc::new(RedisStore::connect(options).await.unwrap())
    }

    fn known(&self, store: &RedisStore) -> Option<String> {
        store.known_identity()
    }

    fn is_replaced(&self, store: &RedisStore) -> bool {
        store.is_replaced()
    }

    async fn empty(&self, _: u32) {
        self.0.command("FLUSHALL").await;
    }

    async fn confirm(&self, store: &RedisStore) {
        store.confirm().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn an_emptied_server_executes_nothing_again_before_an_operator_confirms() {
    emptied_rules(&Emptied(RedisServer::start().await)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_must_have_a_store_is_rejected_until_one_is_made() {
    let server = RedisServer::start().await;
    let required = || RedisStore::connect(at(server.port()).must_exist(true));
    assert!(matches!(required().await, Err(RedisConnectError::Missing)));
    assert_eq!(server.command("DBSIZE").await, ":0");
    let made = RedisStore::connect(at(server.port())).await.unwrap();
    let created = made.created().unwrap();
    let found = required().await.unwrap();
    assert_eq!((found.created(), found.is_replaced()), (Some(created), false));

    // Emptied while it is used: that is detected as before, and at the next start.
    server.command("FLUSHALL").await;
    assert!(matches!(required().await, Err(RedisConnectError::Missing)));
    // A store of an earlier release has a random identity.
    server.command("SET hapax:secret none").await;
    server.command("SET hapax:identity 9f86d081884c7d659a2feaa0c55ad015").await;
    assert_eq!(required().await.unwrap().created(), None);
}
