//! The examples, as they are, run.

use std::sync::Arc;

use hapax_testkit::servers::PostgresServer;
use tokio::task::JoinSet;

use super::support::client;

#[allow(dead_code, reason = "its `main` is for people")]
#[path = "../../../examples/account.rs"]
mod account;
#[allow(dead_code, reason = "its `main` is for people")]
#[path = "../../../examples/orders.rs"]
mod order;

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn an_order_is_placed_once() {
    let server = PostgresServer::start().await;
    server.sql("postgres", order::TABLES).await;
    let orders = Arc::new(order::orders().unwrap());
    let place = async |orders: Arc<_>, client: &mut _, total| {
        let cart = "0198c0de-0000-7000-8000-000000000001";
        let order = order::Order { customer: "c", cart, total, currency: "EUR" };
        order::place(client, &orders, &order).await.unwrap()
    };
    let mut callers = JoinSet::new();
    for _ in 0..16 {
        let (orders, mut client) = (orders.clone(), client(&server).await);
        callers.spawn(async move { place(orders, &mut client, "99.90").await });
    }
    let mut told = callers.join_all().await;
    told.sort();
    let (before, placed) = told.split_at(15);
    let id = placed[0].strip_prefix("placed order ").unwrap().split(' ').next().unwrap();
    assert!(before.iter().all(|told| *told == format!("order {id} of 99.90 was placed before")));
    let other = place(orders.clone(), &mut client(&server).await, "89.90").await;
    assert_eq!(other, format!("refused: order {id} is of this cart and has another total"));
    assert_eq!(server.sql("postgres", "SELECT * FROM shipments").await, id);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn the_account_example_reads_its_balance_from_events() {
    let server = PostgresServer::start().await;
    server.sql("postgres", account::TABLES).await;
    let accounts = Arc::new(account::Accounts::new().unwrap());
    let carry_out = async |accounts: Arc<account::Accounts>, client: &_, command: &str, cents| {
        let command = account::Moved { command: command.into(), cents };
        accounts.carry_out(client, "a", &command).await.unwrap()
    };
    let one = client(&server).await;
    assert_eq!(carry_out(accounts.clone(), &one, "in", 100).await, "done, as a-1");
    assert_eq!(carry_out(accounts.clone(), &one, "in", 100).await, "done before, as a-1");
    assert_eq!(carry_out(accounts.clone(), &one, "big", -101).await, "declined: there are 100");
    let other = carry_out(accounts.clone(), &one, "in", 101).await;
    assert!(other.starts_with("refused: SameIdDifferentBody"), "{other}");
    // Twenty want ten each, every one of them twice, while the balance is brought up to date.
    let mut callers = JoinSet::new();
    for caller in 0..40 {
        let (accounts, client) = (accounts.clone(), client(&server).await);
        callers.spawn(async move {
            let told = carry_out(accounts.clone(), &client, &format!("{}", caller / 2), -10).await;
            let balance = accounts.project(&client, "a").await.unwrap();
            assert!((0..=100).contains(&balance), "{balance}");
            told
        });
    }
    let told = callers.join_all().await;
    let done = |told: &&String| told.starts_with("done");
    assert!(told.iter().filter(done).count() >= 10, "{told:?}");
    assert_eq!(accounts.project(&one, "a").await.unwrap(), 0);
    let events = "SELECT count(*), sum(cents) FROM account_events";
    assert_eq!(server.sql("postgres", events).await, "11|0");
    assert_eq!(server.sql("postgres", "SELECT sequence FROM balances").await, "11");
}
