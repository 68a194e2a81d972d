//! A journal on Redis.

use hapax_redis::{RedisOptions, RedisStore};
use hapax_testkit::servers::{RedisServer, RedisServerOptions};
use tokio::runtime::Runtime;

use crate::secrets;
use crate::shared::{SharedJournal, processes_have_one_effect_and_one_response};
use crate::world::secret;

struct Redis(RedisServer);

impl SharedJournal for Redis {
    type Store = RedisStore;

    async fn connect(&self) -> RedisStore {
        let options = RedisOptions::new(self.0.url()).secret(secret());
        RedisStore::connect(options).await.unwrap()
    }
}

#[test]
fn processes_that_share_a_journal_have_one_effect_and_one_response() {
    let runtime = Runtime::new().unwrap();
    let redis = Redis(runtime.block_on(RedisServer::start()));
    processes_have_one_effect_and_one_response(&runtime, &redis);
}

#[tokio::test]
async fn the_journal_has_no_credentials() {
    // The file of commands has all that was ever written, before it is answered.
    let options = RedisServerOptions::new().set("appendfsync", "always");
    let server = Redis(RedisServer::start_with(options).await);
    let store = std::sync::Arc::new(server.connect().await);
    secrets::send_all(std::sync::Arc::clone(&store)).await;
    secrets::opened(&store).await;
    secrets::files_have_no_secret(server.0.folder());
    server.0.command("SET planted by-a-command").await;
    assert!(secrets::files_have(server.0.folder(), "by-a-command"));
}
