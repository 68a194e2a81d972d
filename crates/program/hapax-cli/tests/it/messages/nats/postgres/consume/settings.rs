//! Processes of one consumer whose settings differ.

use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn i41_12_a_process_of_a_consumer_with_other_ids_order_or_namespace_is_refused_at_start() {
    let (_socket, address) = Service::bind();
    let consume = Consume::start(address).await;
    let url = consume.world.database.url("postgres");
    let consume = consume.with(&["--store", &url]);
    let process = consume.process();
    let refuse = |more: [&'static str; 2]| {
        let mut words = vec!["consume", "--admin", "off", "--log-level", "off"];
        words.extend(consume.flags.iter().map(String::as_str));
        words.extend(more);
        let words: Vec<_> = words.into_iter().map(str::to_owned).collect();
        tokio::task::spawn_blocking(move || {
            refused(&words.iter().map(String::as_str).collect::<Vec<_>>())
        })
    };
    let differences = [
        (["--id", "position"], "\"header:message-id, cloudevents\"", "\"position\""),
        (["--order-by", "subject"], "\"none\"", "\"subject\""),
        (["--namespace", "shop"], "\"\"", "\"shop\""),
    ];
    // At a time: each waits for the next write of the other process.
    let refusals: Vec<_> = differences.iter().map(|(more, ..)| refuse(*more)).collect();
    for (([setting, _], theirs, ours), refusal) in differences.into_iter().zip(refusals) {
        let (code, line) = refusal.await.unwrap();
        assert_eq!(code, 64, "{line}");
        let expected = format!(
            "expected {setting} {theirs} for the consumer invoices, as the consumer invoices on "
        );
        assert!(line.contains(&expected), "{line}");
        assert!(line.contains(&format!(", found {ours}: ")), "{line}");
        assert!(line.contains(&format!("process {}", process.id().as_raw_nonzero())), "{line}");
    }
    // The same settings in other words.
    let words = ["--id", "header:Message-Id", "--id", "cloudevents"];
    let flags: Vec<_> = consume.flags.iter().map(String::as_str).chain(words).collect();
    let same = blocking(|| ConsumeProcess::start(&flags));
    // A deliberate change, once all processes have ended.
    for process in [process, same] {
        blocking(|| process.end());
    }
    let flags: Vec<_> = consume.flags.iter().map(String::as_str).collect();
    let changed = blocking(|| ConsumeProcess::start(&[&flags[..], &["--id", "position"]].concat()));
    blocking(|| changed.end());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_start_that_fails_after_the_consumer_was_registered_leaves_no_entry() {
    let (socket, address) = Service::bind();
    let consume = Consume::start(address).await;
    let url = consume.world.database.url("postgres");
    // The address of the service is in use.
    let admin = address.to_string();
    let flags = ["consume", "--admin", &admin, "--log-level", "off", "--store", &url];
    let flags = flags.into_iter().chain(consume.flags.iter().map(String::as_str));
    let (code, line) = blocking(|| refused(&flags.collect::<Vec<_>>()));
    assert!(code != 0 && line.contains("--admin"), "{line}");
    let options = url.parse::<PostgresOptions>().unwrap();
    let store = Arc::new(PostgresStore::connect(options).await.unwrap());
    let register = hapax_operators::StoreRegister::new(store, Duration::from_secs(10));
    assert_eq!(register.users().await.unwrap(), []);
    drop(socket);
}
