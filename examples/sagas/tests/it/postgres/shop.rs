//! The demo of the shop.

use std::collections::BTreeMap;

use hapax_testkit::servers::PostgresServer;
use tokio::process::Command;

/// A row of the table: wish, end of the saga, effects.
type Row<'a> = (&'a str, &'a str, [u32; 5]);

/// Returns the rows of the table by order, and the other lines.
fn parse(output: &str) -> (BTreeMap<&str, Row<'_>>, Vec<&str>) {
    let (mut rows, mut others) = (BTreeMap::new(), Vec::new());
    for line in output.lines() {
        match line.split_whitespace().collect::<Vec<_>>()[..] {
            [order, wish, state, reserve, charge, ship, refund, free]
                if order.starts_with("o-") =>
            {
                let counts = [reserve, charge, ship, refund, free].map(|it| it.parse().unwrap());
                assert!(rows.insert(order, (wish, state, counts)).is_none(), "{order} twice");
            }
            _ => others.push(line),
        }
    }
    (rows, others)
}

/// Returns the rows of orders that are neither done nor undone, or with an effect that is missing or
/// happened twice.
fn wrong<'a>(rows: &BTreeMap<&'a str, Row<'_>>) -> Vec<&'a str> {
    let is_wrong = |(_, (wish, state, counts)): &(&&str, &Row<'_>)| {
        !matches!(
            (*wish, *state, counts),
            ("lamp", "done", [1, 1, 1, 0, 0])
                | ("expired-card", "undone", [1, 0, 0, 0, 1])
                | ("vase", "undone", [1, 1, 0, 1, 1])
        )
    };
    rows.iter().filter(is_wrong).map(|(order, _)| *order).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn each_order_is_all_done_or_all_undone_although_each_process_is_killed() {
    let server = PostgresServer::start().await;
    for database in ["stock", "payment"] {
        server.create_database(database).await;
    }
    let folder = tempfile::tempdir().unwrap();
    let demo = Command::new(env!("CARGO_BIN_EXE_shop"))
        .args(["demo", &server.url("stock"), &server.url("payment")])
        .arg(folder.path())
        .kill_on_drop(true)
        .output();
    let demo = demo.await.unwrap();
    let output = String::from_utf8(demo.stdout).unwrap();
    println!("{output}{}", String::from_utf8_lossy(&demo.stderr));
    assert!(demo.status.success(), "{}", demo.status);

    let (rows, others) = parse(&output);
    assert_eq!(wrong(&rows), [""; 0]);
    for wish in ["lamp", "expired-card", "vase"] {
        assert!(rows.values().filter(|row| row.0 == wish).count() >= 18, "{wish}: {output}");
    }
    for process in ["order", "payment", "stock"] {
        for part in ["Forward", "Undoing"] {
            let is_hit = |line: &&&str| {
                let words: Vec<_> = line.split_whitespace().collect();
                matches!(words[..], ["killed", of, "in", "the", "middle", "of", sagas, "sagas:", at]
                    if of == process && at == part && sagas != "0")
            };
            assert_eq!(others.iter().filter(is_hit).count(), 1, "{process} {part}: {output}");
        }
    }

    // The table is that of the databases.
    for (database, columns) in [("stock", vec![0, 2, 4]), ("payment", vec![1, 3])] {
        let of_table: u32 =
            rows.values().flat_map(|row| columns.iter().map(|column| row.2[*column])).sum();
        let count = server.sql(database, "SELECT count(*) FROM effects").await;
        assert_eq!(count, of_table.to_string(), "{database}");
    }
}

#[test]
fn a_row_with_a_second_or_a_missing_effect_is_wrong() {
    let table = "\
        o-1 lamp         done   1 1 1 0 0\n\
        o-2 lamp         done   1 2 1 0 0\n\
        o-3 vase         undone 1 1 0 1 1\n\
        o-4 vase         undone 1 1 0 1 0\n\
        o-5 vase         undone 1 1 0 2 1\n\
        o-6 expired-card undone 1 0 0 0 1\n\
        o-7 expired-card stuck  1 0 0 0 1\n\
        o-8 lamp         done   1 1 0 0 0\n";
    assert_eq!(wrong(&parse(table).0), ["o-2", "o-4", "o-5", "o-7", "o-8"]);
}
