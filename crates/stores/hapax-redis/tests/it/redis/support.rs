//! Stores of the tests, and the steps that they share.

use std::sync::Arc;

use hapax_redis::{RedisOptions, RedisStore};
use hapax_testkit::servers::RedisServer;

pub(crate) use hapax_testkit::steps::{
    SameRequest, claim, claim_key, complete, expect_stored, key, named, own, policy, write_id,
};

pub(crate) fn at(port: u16) -> RedisOptions {
    RedisOptions::new(format!("redis://127.0.0.1:{port}"))
}

pub(crate) async fn connect(server: &RedisServer) -> Arc<RedisStore> {
    Arc::new(RedisStore::connect(at(server.port())).await.unwrap())
}

/// Connects with a time-out that may be too short for that on a busy machine: a test needs it later.
pub(crate) async fn connect_within(options: RedisOptions) -> RedisStore {
    loop {
        match RedisStore::connect(options.clone()).await {
            Ok(store) => return store,
            Err(error) => assert!(error.is_unreachable(), "{error}"),
        }
    }
}

/// Creates the user `hapax` with the password `word`, and the rights on keys of this prefix that the manual has.
pub(crate) async fn permit(server: &RedisServer, prefix: &str) {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../core/hapax-core/src/manual/stores.md");
    let page = std::fs::read_to_string(page).unwrap();
    let (_, rights) = page.split_once("ACL SETUSER hapax ").unwrap();
    let (rights, _) = rights.split_once("```").unwrap();
    let rights = rights.replace("hapax:*", &format!("{prefix}*")).replace("PASSWORD", "word");
    let words = ["ACL", "SETUSER", "hapax"].into_iter().chain(rights.split_whitespace());
    assert_eq!(server.command_of(&words.collect::<Vec<_>>()).await, "+OK");
}
