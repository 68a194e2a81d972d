//! Journals with many operations that an earlier process left.

use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::store::CountedStore;
use super::{Double, Mode, open, send};

const LEASE: Duration = Duration::from_secs(31);

#[tokio::test(start_paused = true)]
async fn many_operations_of_a_silent_server_delay_no_other_and_write_little() {
    let store = CountedStore::new(Duration::ZERO);
    let dead = Double::new("http://dead.example", Mode::Away);
    let alive = Double::new("http://alive.example", Mode::Away);
    let first = open(&store, &[&dead, &alive]).await;
    (0..10_000).for_each(|number| send(&first, &dead, format!("dead/{number}")));
    (0..10).for_each(|number| send(&first, &alive, format!("alive/{number}")));
    sleep(Duration::from_secs(5)).await;
    assert!(first.close(Duration::from_secs(5)).await);
    sleep(LEASE).await;

    dead.set(Mode::Silent);
    alive.set(Mode::Answers);
    let tried = dead.tries();
    let second = open(&store, &[&dead, &alive]).await;
    let begin = Instant::now();
    let resumed = second.resume().await.unwrap();
    assert_eq!((resumed.pending, resumed.not_continued, resumed.expired), (10_010, 0, 0));
    while alive.answered() < 10 {
        assert!(begin.elapsed() < Duration::from_secs(5), "{} answered", alive.answered());
        sleep(Duration::from_millis(10)).await;
    }
    // Each was denied once, and has its pause.
    sleep(Duration::from_secs(10)).await;
    let before = store.writes();
    sleep(Duration::from_secs(600)).await;
    let writes = store.writes() - before;
    println!("{writes} writes in 600 s");
    assert!(writes < 600 * 100, "{writes} writes in 600 s");
    let tries = dead.tries() - tried;
    println!("{tries} tries");
    assert!((10..=2 + 610 / 30 + 1).contains(&tries), "{tries} tries of 30 s in 610 s");

    // Nothing is lost by the pauses.
    dead.set(Mode::Answers);
    let begin = Instant::now();
    while dead.answered() < 10_000 {
        assert!(begin.elapsed() < Duration::from_secs(900), "{} answered", dead.answered());
        sleep(Duration::from_secs(1)).await;
    }
    sleep(Duration::from_secs(1)).await;
    assert!(second.pending().await.unwrap().is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_resume_that_races_a_close_leaves_nothing_that_writes() {
    let store = CountedStore::new(Duration::from_millis(1));
    let server = Double::new("http://bank.example", Mode::Away);
    let first = open(&store, &[&server]).await;
    (0..500).for_each(|number| send(&first, &server, format!("{number}")));
    sleep(Duration::from_secs(5)).await;
    assert!(first.close(Duration::from_secs(5)).await);
    sleep(LEASE).await;
    for millis in 0..20 {
        let second = open(&store, &[&server]).await;
        let resuming = second.clone();
        let resuming = tokio::spawn(async move { resuming.resume().await.is_ok() });
        sleep(Duration::from_millis(millis)).await;
        // A clone is left.
        let left = second.clone();
        assert!(second.close(Duration::from_secs(60)).await);
        resuming.await.unwrap();
        let before = store.writes();
        sleep(Duration::from_secs(60)).await;
        assert_eq!(store.writes(), before, "closed after {millis} ms");
        drop(left);
    }
}

/// Its entries stay due: a process that declares the server would find nothing otherwise.
#[tokio::test(start_paused = true)]
async fn a_process_postpones_no_operation_of_a_server_that_it_does_not_declare() {
    let store = CountedStore::new(Duration::ZERO);
    let one = Double::new("http://one.example", Mode::Away);
    let two = Double::new("http://two.example", Mode::Answers);
    let of_one = open(&store, &[&one]).await;
    (0..100).for_each(|number| send(&of_one, &one, format!("{number}")));
    sleep(Duration::from_secs(20)).await;
    assert!(of_one.close(Duration::from_secs(5)).await);
    sleep(LEASE).await;
    let before = store.writes();
    let of_two = open(&store, &[&two]).await;
    assert_eq!(of_two.resume().await.unwrap().not_continued, 100);
    sleep(Duration::from_secs(600)).await;
    assert_eq!(store.writes(), before);
    // Without a resume of another process, which would make them due.
    one.set(Mode::Answers);
    let of_one = open(&store, &[&one]).await;
    of_one.begin_runner().unwrap();
    let begin = Instant::now();
    while one.answered() < 100 {
        assert!(begin.elapsed() < Duration::from_secs(200), "{} answered", one.answered());
        sleep(Duration::from_secs(1)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn an_operation_of_an_undeclared_server_is_left_to_those_that_declare_it() {
    let store = CountedStore::new(Duration::ZERO);
    let one = Double::new("http://one.example", Mode::Away);
    let two = Double::new("http://two.example", Mode::Answers);
    let of_one = open(&store, &[&one]).await;
    send(&of_one, &one, "n".to_owned());
    sleep(Duration::from_secs(20)).await;
    let of_two = open(&store, &[&two]).await;
    let resumed = of_two.resume().await.unwrap();
    assert_eq!((resumed.pending, resumed.not_continued), (0, 1));
    sleep(Duration::from_secs(20)).await;
    one.set(Mode::Answers);
    // The pause between tries may have grown beyond the wait that is the default.
    let again = of_one.post("http://one.example/").operation("n").wait(Duration::from_secs(300));
    let sent = again.send().await.unwrap();
    assert_eq!((sent.response.status.as_u16(), one.answered()), (200, 1));
    sleep(Duration::from_secs(1)).await;
    assert!(of_two.pending().await.unwrap().is_empty());
}
