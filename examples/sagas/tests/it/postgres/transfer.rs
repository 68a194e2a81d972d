//! Transfers whose process is killed.

use hapax_testkit::servers::PostgresServer;
use serde_json::json;
use tokio::time::sleep;

use crate::world::{EVERY, Honoring, Listening, port};

const TRANSFERS: u32 = 60;

/// Every third transfer goes to an account that is closed.
fn is_rejected(number: u32) -> bool {
    number.is_multiple_of(3)
}

async fn begin(bank: &Listening, number: u32) {
    let iban = if is_rejected(number) { "closed" } else { "DE02120300000000202051" };
    let transfer = json!({
        "reference": format!("t-{number}"),
        "account": number % 10 + 1,
        "iban": iban,
        "cents": 100,
    });
    bank.begin("/transfers", &format!("t-{number}"), &transfer).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn ledger_and_sagas_agree_although_the_process_is_killed() {
    let server = PostgresServer::start().await;
    let database = server.url("postgres");
    // After five answers the clearing house answers no more, though it accepts.
    let (clearing, url) = Honoring::serve(5).await;
    let port = port();
    let start = || {
        let program = env!("CARGO_BIN_EXE_transfer");
        let (database, url) = (database.clone(), url.clone());
        async move { Listening::start(program, port, &[&database, &url]).await }
    };
    let mut bank = start().await;
    for number in 0..TRANSFERS {
        begin(&bank, number).await;
    }
    // Each is debited, and waits for its clearing, or for a permit to run.
    clearing.has("transfers", 30).await;
    bank.kill().await;
    let count = |entry: &str| format!("SELECT count(*) FROM ledger WHERE entry = '{entry}'");
    let sent: u32 = server.sql("postgres", &count("sent")).await.parse().unwrap();
    let debited: u32 = server.sql("postgres", &count("debit")).await.parse().unwrap();
    assert!(sent <= 5 && debited >= 30, "{debited} debits, {sent} sent");
    bank = start().await;

    // Now it is killed while steps commit and are undone.
    for permits in [20, 20] {
        clearing.answers.add_permits(permits);
        let ended = "SELECT count(*) FROM ledger WHERE entry <> 'debit'";
        let before: u32 = server.sql("postgres", ended).await.parse().unwrap();
        while server.sql("postgres", ended).await.parse::<u32>().unwrap() < before + 5 {
            sleep(EVERY).await;
        }
        bank.kill().await;
        let unfinished = "SELECT count(DISTINCT reference) > (SELECT count(*) FROM ledger
            WHERE entry <> 'debit') FROM ledger";
        assert_eq!(server.sql("postgres", unfinished).await, "t", "no transfer was in progress");
        bank = start().await;
    }
    clearing.answers.add_permits(10_000);

    for number in 0..TRANSFERS {
        let reference = format!("t-{number}");
        let status = bank.until("/transfers", &reference, &["done", "undone", "stuck"]).await;
        let (state, entries) = match is_rejected(number) {
            true => ("undone", "debit,returned"),
            false => ("done", "debit,sent"),
        };
        assert_eq!(status["state"], state, "{reference}: {status}");
        let text = format!(
            "SELECT string_agg(entry, ',' ORDER BY entry) FROM ledger WHERE reference = '{reference}'"
        );
        assert_eq!(server.sql("postgres", &text).await, entries, "{reference}");
    }
    // No money appeared or was lost.
    let agrees = "SELECT sum(balance) = 100000000 - (SELECT sum(cents) FROM ledger
        WHERE entry = 'sent') FROM accounts";
    assert_eq!(server.sql("postgres", agrees).await, "t");
    // The clearing house saw one key and one body for each, some of them repeatedly.
    let calls = clearing.calls("transfers");
    assert_eq!(calls.len(), TRANSFERS as usize);
    assert!(calls.values().all(|keys| keys.iter().all(|key| *key == keys[0])), "{calls:?}");
    assert!(calls.values().any(|keys| keys.len() > 1), "no call was repeated");
}
