//! The example without faults.

use hapax_bank::{Declined, TABLES, Transfer, TransferReceipt};
use hapax_testkit::servers::PostgresServer;

use super::client::{Answer, Door, Reply, ask};
use super::process::{Bank, Plan};

async fn world() -> (PostgresServer, Plan, Bank, tempfile::TempDir) {
    let server = PostgresServer::start().await;
    server.sql("postgres", TABLES).await;
    server.sql("postgres", "INSERT INTO accounts VALUES (1, 100), (2, 100)").await;
    let folder = tempfile::tempdir().unwrap();
    let plan = Plan::new(&server, folder.path().join("bank.log"));
    let mut bank = plan.start(0);
    assert!(bank.ready().await);
    (server, plan, bank, folder)
}

async fn answer(port: u16, door: Door, asked: &Transfer) -> Answer {
    match ask(port, door, asked).await {
        Reply::Final(answer) => answer,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_transfer_happens_once_by_either_door() {
    let (server, plan, mut bank, _folder) = world().await;
    for (door, line, left) in [(Door::Handler, 1, 70), (Door::Function, 2, 40)] {
        let asked = |reference: &str, amount| Transfer {
            reference: format!("{door:?}-{reference}"),
            sender: 1,
            receiver: 2,
            amount,
        };
        let first = answer(plan.port, door, &asked("a", 30)).await;
        assert_eq!(first.status, 201);
        let receipt: TransferReceipt = serde_json::from_slice(&first.body).unwrap();
        assert_eq!(receipt, TransferReceipt { line, left });
        assert_eq!(answer(plan.port, door, &asked("a", 30)).await, first);

        let declined = answer(plan.port, door, &asked("b", 1_000)).await;
        assert_eq!(declined.status, 402);
        let why: Declined = serde_json::from_slice(&declined.body).unwrap();
        assert_eq!(why, Declined::InsufficientFunds);
        // It stays declined, even with a larger balance later.
        server.sql("postgres", "UPDATE accounts SET balance = balance + 5000 WHERE id = 1").await;
        assert_eq!(answer(plan.port, door, &asked("b", 1_000)).await, declined);
        server.sql("postgres", "UPDATE accounts SET balance = balance - 5000 WHERE id = 1").await;

        for amount in [0, -30, i64::MIN] {
            let refused = answer(plan.port, door, &asked(&amount.to_string(), amount)).await;
            let why: Declined = serde_json::from_slice(&refused.body).unwrap();
            assert_eq!(why, Declined::BadAmount);
        }

        let reused = ask(plan.port, door, &asked("a", 31)).await;
        assert!(matches!(&reused, Reply::Unexpected(answer) if answer.status == 422), "{reused:?}");
    }
    assert_eq!(server.sql("postgres", "SELECT count(*) FROM ledger").await, "2");
    let balances = "SELECT string_agg(balance::text, ' ' ORDER BY id) FROM accounts";
    assert_eq!(server.sql("postgres", balances).await, "40 160");
    bank.kill_after(std::time::Duration::ZERO).await;
}
