//! `hapax saga` on the store of a service.

mod shop;

use std::time::Duration;

use hapax_saga::SagaError;
use serde_json::json;

use crate::world::refused;
use shop::Shop;

const WHY: [&str; 2] = ["--reason", "the bank's statement has it"];

#[tokio::test(flavor = "multi_thread")]
async fn a_stuck_step_is_shown_and_resolved_with_its_result() {
    let shop = Shop::in_memory().await;
    shop.systems.fail("charge");
    let (started, id) = shop.stuck("k").await;
    let listed = shop.ok(&["saga", "list", "--state", "stuck"]).await;
    let lines: Vec<_> = listed.lines().collect();
    assert!(lines[1].starts_with("stuck    2") && lines[1].ends_with(&id), "{listed}");
    let situation = "         place-order version 2  unknown in charge since 2";
    assert!(lines[2].starts_with(situation), "{listed}");
    let shown = shop.ok(&["saga", "show", &id]).await;
    for line in [
        "definition   place-order version 2",
        "state        stuck",
        "stuck        unknown in charge since 2",
        "step         reserve: happened, 1 try, the last until 2",
        "  result     1999",
        "step         charge: unknown, 1 try, the last until 2",
        "; last error: charge did not answer",
        "write id     ",
    ] {
        assert!(shown.contains(line), "{line}\n{shown}");
    }
    let file = shop.folder.path().join("result");
    std::fs::write(&file, "\"paid by hand\"\n").unwrap();
    let result = format!("@{}", file.display());
    let resolve = ["saga", "resolve", &id, "--outcome", "happened", "--result", &result];
    let said = shop.ok(&[&resolve[..], &WHY].concat()).await;
    assert_eq!(said, "resolved: the step happened, and the saga continues\n");
    assert_eq!(started.outcome().await.unwrap(), "paid by hand");
    let lines = shop.audit_lines();
    let stages: Vec<_> = lines.iter().map(|line| &line["stage"]).collect();
    assert_eq!(stages, ["intended", "done"]);
    for line in &lines {
        assert_eq!((&line["saga"], &line["why"]), (&json!("resolve"), &json!(WHY[1])), "{line}");
        assert!(line["who"].as_str().unwrap().contains("uid "), "{line}");
    }
    let ended = shop.ok(&["saga", "show", &id]).await;
    assert!(
        ended.contains("state        ended") && ended.contains("step         notify: happened")
    );
    assert_eq!(shop.ok(&["saga", "list"]).await, "no unfinished sagas\n");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_saga_is_retried_and_aborted_and_its_stuck_undo_skipped() {
    let shop = Shop::in_memory().await;
    shop.systems.fail("notify");
    shop.systems.fail("free");
    let (started, id) = shop.stuck("k").await;
    let said = shop.ok(&[&["saga", "retry", &id], &WHY[..]].concat()).await;
    assert_eq!(said, "retry: the stuck step, undo or flow has new tries; see `hapax saga show`\n");
    let decisions = |count: usize| {
        move |shown: &serde_json::Value| shown["decisions"].as_array().unwrap().len() == count
    };
    shop.until(&id, "stuck", decisions(1)).await;
    let shown = shop.ok(&["saga", "show", &id]).await;
    assert!(shown.contains("decision     retry, decided by "), "{shown}");
    assert!(shown.contains(": the bank's statement has it"), "{shown}");
    let aborted = shop.json(&[&["saga", "abort", &id], &WHY[..]].concat()).await;
    assert_eq!((&aborted["id"], &aborted["action"]), (&json!(id), &json!("abort")));
    assert_eq!(aborted["was"]["step"], "notify");
    shop.until(&id, "stuck", |shown| shown["stuck"]["direction"] == "undo").await;
    let shown = shop.ok(&["saga", "show", &id]).await;
    let key = format!("  key        {}", shop.systems.key("free"));
    for line in ["exhausted in the undo of reserve", "  undo       not ended, 1 try", &key] {
        assert!(shown.contains(line), "{line}\n{shown}");
    }
    let said = shop.ok(&[&["saga", "skip", &id], &WHY[..]].concat()).await;
    assert!(said.starts_with("skipped: "), "{said}");
    let outcome = started.outcome().await;
    let Err(SagaError::Cancelled { reason }) = outcome else { panic!("{outcome:?}") };
    assert!(reason.starts_with("aborted by ") && reason.ends_with(WHY[1]), "{reason}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_step_that_did_not_happen_is_tried_again_under_its_key() {
    let shop = Shop::in_memory().await;
    shop.systems.fail("charge");
    let (started, id) = shop.stuck("k").await;
    shop.systems.succeed("charge");
    let resolve = ["saga", "resolve", &id, "--outcome", "did-not-happen"];
    // Its call may still take effect.
    let shown = shop.ok(&["saga", "show", &id]).await;
    assert!(shown.contains("; may still execute until 20"), "{shown}");
    let found = shop.rejected_code(&[&resolve[..], &WHY].concat()).await;
    assert_eq!(found, (1, "may-execute".to_owned()));
    shop.ok(&[&resolve[..], &["--force"], &WHY].concat()).await;
    assert_eq!(started.outcome().await.unwrap(), "paid 1999");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_decision_that_does_not_apply_is_exit_code_1_and_an_invalid_one_64() {
    let shop = Shop::in_memory().await;
    shop.systems.fail("notify");
    let parked = shop.begin("parked", 0).await.id().to_string();
    shop.until(&parked, "parked", |_| true).await;
    let (_, stuck) = shop.stuck("k").await;
    let seen = shop.json(&["saga", "show", &stuck]).await["write_id"].clone();
    let seen = ["--write-id", seen.as_str().unwrap()];
    shop.ok(&[&["saga", "retry", &stuck], &WHY[..], &seen].concat()).await;
    shop.until(&stuck, "stuck", |shown| shown["write_id"] != seen[1]).await;
    let unknown = "0".repeat(64);
    let happened = ["--outcome", "happened"];
    for (words, exit, code) in [
        (&["retry", &parked][..], 1, "not-stuck"),
        (&["skip", &stuck], 1, "no-undo"),
        (&["abort", &stuck, seen[0], seen[1]], 1, "changed"),
        (&["retry", &unknown], 1, "not-found"),
        (&["retry", "abc"], 64, "usage"),
        (&["abort", &stuck, "--write-id", "abc"], 64, "bad-request"),
        (&["resolve", &stuck, happened[0], happened[1]], 64, "usage"),
        (&["resolve", &stuck, happened[0], happened[1], "--result", "{"], 64, "usage"),
        (&["resolve", &stuck, happened[0], happened[1], "--result", "@/nowhere"], 64, "usage"),
        (&["resolve", &stuck, "--outcome", "did-not-happen", "--result", "1"], 64, "usage"),
    ] {
        let found = shop.rejected_code(&[&["saga"], words, &WHY].concat()).await;
        assert_eq!(found, (exit, code.to_owned()), "{words:?}");
    }
    for words in [&["retry", &stuck][..], &["retry", &stuck, "--reason", " "]] {
        let (exit, line) = shop.rejected(&[&["saga"], words].concat()).await;
        assert!(exit == 64 && line.contains("reason"), "{line}");
    }
    assert_eq!(shop.rejected_code(&["saga", "show", &unknown]).await, (1, "not-found".to_owned()));
    let now = shop.json(&["saga", "show", &stuck]).await;
    assert!(now["decisions"].as_array().unwrap().len() == 1 && now["failure"].is_null(), "{now}");
}

#[tokio::test(flavor = "multi_thread")]
async fn sagas_are_listed_by_state_definition_and_page() {
    let shop = Shop::in_memory().await;
    shop.systems.fail("charge");
    let parked = shop.begin("parked", 0).await.id().to_string();
    let shown = shop.until(&parked, "parked", |_| true).await;
    assert_eq!(shown["signal"], "go");
    let (_, stuck) = shop.stuck("k").await;
    let ids = async |words: &[&str]| {
        let listed = shop.json(&[&["saga", "list"], words].concat()).await;
        let ids = listed["sagas"].as_array().unwrap().iter().map(|saga| saga["id"].clone());
        (ids.map(|id| id.as_str().unwrap().to_owned()).collect::<Vec<_>>(), listed["next"].clone())
    };
    assert_eq!(ids(&["--state", "parked"]).await.0, [&*parked]);
    assert_eq!(ids(&["--state", "stuck", "--definition", "place-order:2"]).await.0, [&*stuck]);
    for nothing in [["--state", "overdue"], ["--definition", "other"], ["--state", "running"]] {
        assert_eq!(ids(&nothing).await.0, [""; 0], "{nothing:?}");
    }
    let (first, next) = ids(&["--limit", "1"]).await;
    let (second, end) = ids(&["--limit", "1", "--after", next.as_str().unwrap()]).await;
    assert!(end.is_null() && first < second, "{first:?} {second:?} {end}");
    assert_eq!(shop.rejected(&["saga", "list", "--definition", "a&b"]).await.0, 64);

    // Its entry was due a lease after its start; and then no process looks at it.
    shop.stop_driving().await;
    let waiting = shop.begin("waiting", 5).await.id().to_string();
    shop.clock.advance(Duration::from_secs(11 * 60));
    assert!(ids(&["--state", "overdue"]).await.0.contains(&waiting));
    let definitions = shop.ok(&["saga", "definitions"]).await;
    assert!(
        definitions.contains("         3  place-order version 2  overdue for 6"),
        "{definitions}"
    );
    let definitions = shop.json(&["saga", "definitions"]).await;
    assert_eq!(definitions["definitions"][0]["unfinished"], 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_record_of_a_saga_is_not_decided_by_hapax_keys() {
    let shop = Shop::in_memory().await;
    shop.systems.fail("charge");
    let (_, id) = shop.stuck("k").await;
    let release = ["keys", "release", "--id", &id, "--any-kind", "--force", "--forget"];
    let resolve = ["keys", "resolve", "--id", &id, "--outcome"];
    for words in [
        &["keys", "release", "--id", &id][..],
        &release,
        &[&resolve[..], &["happened"]].concat(),
        &[&resolve[..], &["did-not-happen", "--any-kind", "--force"]].concat(),
    ] {
        let found = shop.rejected_code(&[words, &WHY].concat()).await;
        assert_eq!(found, (1, "saga".to_owned()), "{words:?}");
        let (_, line) = shop.rejected(&[words, &WHY].concat()).await;
        assert!(line.contains("`hapax saga`"), "{line}");
    }
    assert_eq!(shop.json(&["saga", "show", &id]).await["state"], "stuck");
    assert!(shop.audit_lines().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_saga_in_a_file_looks_the_same_through_its_service_and_in_the_file() {
    let shop = Shop::in_file().await;
    shop.systems.fail("charge");
    let (_, id) = shop.stuck("k").await;
    let views = async || {
        let mut shown = shop.json(&["saga", "show", &id]).await;
        assert!(shown["now"].take().is_string());
        let listed = shop.json(&["saga", "list", "--state", "stuck"]).await;
        let mut definitions = shop.json(&["saga", "definitions"]).await;
        definitions["definitions"][0]["due_for_s"].take();
        (shown, listed, definitions)
    };
    let through = views().await;
    let retry = [&["saga", "retry", &id], &WHY[..]].concat();
    shop.end().await;
    // The file store lets every lease lapse when it opens.
    let (mut shown, listed, definitions) = views().await;
    shown["lease_until"] = through.0["lease_until"].clone();
    assert_eq!((shown, listed, definitions), through);
    shop.ok(&retry).await;
    let decided = shop.json(&["saga", "show", &id]).await;
    assert_eq!((&decided["state"], &decided["stuck"]), (&json!("parked"), &json!(null)));
    assert_eq!(decided["decisions"][0]["why"], WHY[1]);
    // The same decision again would only wake the saga.
    let other = ["saga", "retry", &id, "--reason", "once more"];
    assert_eq!(shop.rejected_code(&other).await, (1, "not-stuck".to_owned()));
    let lines = shop.audit_lines();
    let seen: Vec<_> = lines.iter().map(|line| (&line["stage"], &line["by"])).collect();
    let [intended, done, rejected, cli] =
        ["intended", "done", "rejected", "cli"].map(|it| json!(it));
    assert_eq!(seen, [(&intended, &cli), (&done, &cli), (&intended, &cli), (&rejected, &cli)]);
}

#[tokio::test(flavor = "multi_thread")]
async fn sagas_that_no_process_runs_end_when_they_are_aborted_and_rejected_starts_are_removed() {
    for in_file in [false, true] {
        let shop = if in_file { Shop::in_file().await } else { Shop::in_memory().await };
        let parked = shop.begin("k", 0).await.id().to_string();
        shop.until(&parked, "parked", |_| true).await;
        shop.begin_in_transaction("k", 5).await;
        let rejected = loop {
            let listed = shop.json(&["saga", "list", "--state", "stuck"]).await;
            if let Some(id) = listed["sagas"][0]["id"].as_str() {
                break id.to_owned();
            }
        };
        let listed = shop.ok(&["saga", "list", "--state", "stuck"]).await;
        assert!(listed.contains("place-order version 2  key-reused since 2"), "{listed}");
        // It begins with the id of the saga that has the key.
        let abort = [&["saga", "abort", &rejected[..8]], &WHY[..]].concat();
        assert_eq!(shop.rejected_code(&abort).await, (1, "ambiguous".to_owned()));
        shop.stop_driving().await;
        let waiting = shop.begin("waiting", 5).await.id().to_string();
        let unaccepted = shop.begin_in_transaction("unaccepted", 5).await;
        if in_file {
            shop.end().await;
        }
        for id in [&rejected, &waiting, &unaccepted] {
            let said = shop.ok(&[&["saga", "abort", id], &WHY[..]].concat()).await;
            assert!(said.starts_with("aborted: "), "{said}");
        }
        for id in [&waiting, &unaccepted] {
            let shown = shop.ok(&["saga", "show", id]).await;
            for line in [
                "end          undone",
                "undone for   aborted by ",
                "decision     abort, decided by ",
            ] {
                assert!(shown.contains(line) && shown.contains(WHY[1]), "{line}\n{shown}");
            }
            // Only a store with a secret has the key.
            assert_eq!(shown.contains("\nkey          "), in_file, "{shown}");
        }
        let gone = shop.rejected_code(&["saga", "show", &rejected]).await;
        assert_eq!(gone, (1, "not-found".to_owned()));
        let listed = shop.json(&["saga", "list"]).await;
        let ids: Vec<_> = listed["sagas"].as_array().unwrap().iter().map(|it| &it["id"]).collect();
        assert_eq!(ids, [&json!(parked)]);
        let lines = shop.audit_lines();
        let done: Vec<_> = lines.iter().filter(|line| line["stage"] == "done").collect();
        assert_eq!(done.len(), 3);
        assert!(done.iter().all(|line| line["why"] == WHY[1] && line["saga"] == "abort"));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_saga_is_found_by_its_key_and_by_the_first_digits_of_its_id() {
    for in_file in [false, true] {
        let shop = if in_file { Shop::in_file().await } else { Shop::in_memory().await };
        shop.systems.fail("charge");
        let (_, id) = shop.stuck("o-5").await;
        let key = ["--key", "o-5", "--definition", "place-order", "--scope", "customer: c"];
        let upper = id.to_uppercase();
        let look = async || {
            for name in [&[&id[..8]][..], &[&upper[..63]], &key] {
                let shown = shop.json(&[&["saga", "show"], name].concat()).await;
                assert_eq!(shown["id"], id, "{name:?}");
                assert_eq!(shown["key"], if in_file { json!("o-5") } else { json!(null) });
                let charge = &shown["steps"][1];
                assert_eq!(charge["forward"]["key"], shop.systems.key("charge"));
            }
            for other in [1, 3, 5] {
                let mut name = key;
                name[other] = if other == 5 { "customer: d" } else { "other" };
                let shown = shop.rejected_code(&[&["saga", "show"], &name[..]].concat()).await;
                assert_eq!(shown, (1, "not-found".to_owned()), "{name:?}");
            }
            let nothing = if id.starts_with('0') { "1".repeat(8) } else { "0".repeat(8) };
            let shown = shop.rejected_code(&["saga", "show", &nothing]).await;
            assert_eq!(shown, (1, "not-found".to_owned()));
            let (code, line) = shop.rejected(&["saga", "show", &id[..7]]).await;
            assert!(code == 64 && line.contains("its first 8"), "{line}");
            let listed = shop.ok(&["saga", "list"]).await;
            let situation = "place-order version 2  key o-5  unknown in charge since 2";
            assert_eq!(listed.contains(situation), in_file, "{listed}");
        };
        look().await;
        if in_file {
            shop.end().await;
            look().await;
        }
        let resolve = ["saga", "resolve", "--outcome", "happened", "--result", "\"paid\""];
        let said = shop.ok(&[&resolve[..], &key, &WHY].concat()).await;
        assert_eq!(said, "resolved: the step happened, and the saga continues\n");
    }
}

#[test]
fn a_store_of_a_service_without_an_operators_api_is_exit_code_69() {
    let folder = tempfile::tempdir().unwrap();
    let file = hapax_file::FileOptions::new(folder.path().join("hapax.db"));
    let _open = hapax_file::FileStore::open(file).unwrap();
    let (code, line) = refused(&["saga", "list", "--store", &crate::world::store(folder.path())]);
    assert_eq!(code, 69);
    for word in ["no admin address", "--admin", "hapax-operators"] {
        assert!(line.contains(word), "{word}: {line}");
    }
}

#[test]
fn a_missing_store_is_exit_code_69_and_one_in_memory_64() {
    let folder = tempfile::tempdir().unwrap();
    let missing = crate::world::store(folder.path());
    for words in [&["list"][..], &["definitions"], &["show", "abc"]] {
        let (code, line) = refused(&[&["saga"], words, &["--store", "memory:"]].concat());
        assert_eq!(code, 64, "{line}");
    }
    let (code, line) = refused(&["saga", "list", "--store", &missing]);
    assert!(code == 69 && line.contains("there is no store at"), "{line}");
}
