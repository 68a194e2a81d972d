//! Servers that are away or silent, under load.

use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};

use super::store::CountedStore;
use super::{Double, Mode, open, send};

const MINUTE: Duration = Duration::from_secs(60);

#[tokio::test(start_paused = true)]
async fn callers_of_a_silent_server_delay_no_other_and_write_little() {
    let store = CountedStore::new(Duration::ZERO);
    let dead = Double::new("http://dead.example", Mode::Silent);
    let alive = Double::new("http://alive.example", Mode::Answers);
    let client = open(&store, &[&dead, &alive]).await;
    (0..2_000).for_each(|number| send(&client, &dead, format!("dead/{number}")));
    sleep(Duration::from_secs(5)).await;
    let before = store.writes();
    let begin = Instant::now();
    for number in 0..20 {
        let post = client.post("http://alive.example/").operation(format!("alive/{number}"));
        let sent = post.send().await.unwrap();
        assert!(!sent.replayed && sent.tries == 1);
    }
    assert!(begin.elapsed() < Duration::from_millis(500), "{:?}", begin.elapsed());
    // Claim, entry, try, end and removal of each.
    assert_eq!(store.writes() - before, 20 * 5);
    // Those without a permit wait in memory, until their callers stop waiting.
    sleep(Duration::from_secs(20)).await;
    let (writes, tries) = (store.writes() - before, dead.tries());
    assert_eq!(tries, 1_024, "tries at once");
    // Each of those in progress renews its lease, every ten seconds.
    assert!(writes <= 20 * 5 + 3 * 1_024, "{writes} writes");
}

#[tokio::test(start_paused = true)]
async fn a_try_that_ends_by_its_time_is_counted_as_unknown() {
    let store = CountedStore::new(Duration::ZERO);
    let server = Double::new("http://slow.example", Mode::Slow);
    let client = open(&store, &[&server]).await;
    send(&client, &server, "n".to_owned());
    sleep(MINUTE / 2).await;
    server.set(Mode::Answers);
    sleep(MINUTE).await;
    let counted = &client.stats().servers[0];
    assert_eq!((counted.responded, counted.not_sent, counted.unknown), (1, 0, 1));
}

/// Operations of each second: 1,000 with `HAPAX_CLIENT_RATE=1000`, which takes long in a debug build.
fn rate() -> u64 {
    let text = std::env::var("HAPAX_CLIENT_RATE");
    text.map_or(10, |text| text.parse().expect("expected a number in HAPAX_CLIENT_RATE"))
}

/// Lets a server be out for ten minutes, in which operations are sent at it, and lets it return.
async fn outage(mode: Mode) {
    let store = CountedStore::new(Duration::ZERO);
    let server = Double::new("http://bank.example", mode);
    let other = Double::new("http://other.example", Mode::Answers);
    let client = open(&store, &[&server, &other]).await;
    let (rate, seconds) = (rate(), 600);
    for second in 0..seconds {
        for number in 0..rate {
            send(&client, &server, format!("{second}/{number}"));
        }
        sleep(Duration::from_secs(1)).await;
        if second % 60 == 30 {
            let post = client.post("http://other.example/").operation(format!("other/{second}"));
            let answer = timeout(Duration::from_millis(500), post.send()).await;
            answer.expect("another server is not delayed").unwrap();
        }
    }
    let (sent, tries, retries) = (rate * seconds, server.tries(), server.retries());
    println!("{mode:?}: {sent} operations, {tries} tries, {retries} retries");
    println!("{} writes", store.writes());
    assert!(retries <= 100 + seconds + 1, "{retries} retries in {seconds} s");
    // A silent server holds each try for its whole time-out: above this rate first tries take every
    // permit.
    let has_permits = matches!(mode, Mode::Away) || rate * 30 < 1_024;
    assert!(
        !has_permits || retries >= seconds,
        "{retries} retries: those that wait have to get on"
    );
    // Claim, entry, try, pause, its entry; some renewals. And for each retry as many.
    assert!(store.writes() <= 12 * sent, "{} writes", store.writes());

    server.set(Mode::Answers);
    let begin = Instant::now();
    // It is behind first tries, but not behind retries.
    let post = client.post("http://bank.example/").operation("new").send();
    timeout(MINUTE, post).await.expect("a new operation is not starved").unwrap();
    println!("a new operation was answered after {:?}", begin.elapsed());
    while server.answered() < sent + 1 {
        assert!(begin.elapsed() < 20 * MINUTE, "{} of {sent}: no drain", server.answered());
        sleep(Duration::from_secs(1)).await;
    }
    println!("all were answered after {:?}", begin.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_server_that_is_away_gets_a_hundred_retries_and_one_a_second_and_then_all() {
    outage(Mode::Away).await;
}

#[tokio::test(start_paused = true)]
async fn a_server_that_is_silent_gets_a_hundred_retries_and_one_a_second_and_then_all() {
    outage(Mode::Silent).await;
}

/// Each write takes a second here, so that the time of an operation is its number of writes in a row.
#[tokio::test(start_paused = true)]
async fn an_operation_takes_three_writes_in_a_row() {
    let store = CountedStore::new(Duration::from_secs(1));
    let server = Double::new("http://bank.example", Mode::Answers);
    let client = open(&store, &[&server]).await;
    let begin = Instant::now();
    client.post("http://bank.example/").operation("n").send().await.unwrap();
    // The claim; the entry and the try; the response.
    assert_eq!(begin.elapsed().as_secs(), 3);
}
