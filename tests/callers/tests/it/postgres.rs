//! Records, and a journal that the clients share, on PostgreSQL: their names race.

use hapax_callers::{CallsStore, ServerKind};

use crate::calls::{options, succeeds};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn operations_through_a_gateway_on_postgres_have_one_effect_and_one_answer() {
    succeeds(options(ServerKind::Hapax, CallsStore::Postgres)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn operations_of_a_shared_journal_at_a_server_in_stripes_manner_have_one_effect_and_one_answer()
 {
    succeeds(options(ServerKind::Stripe, CallsStore::Postgres)).await;
}
