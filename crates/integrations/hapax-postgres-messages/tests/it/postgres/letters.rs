//! Dead letters: stored once, listed, redriven and dropped.

use hapax_core::Timestamp;
use hapax_messages::{DeadLetter, DeadLetterReason, DeadLetters, Message, MessageId};
use hapax_postgres_messages::{LetterQuery, PgDeadLetters};

use super::{connections, server};

fn letter(id: &str, key: Option<&str>) -> DeadLetter {
    let mut message = Message::new("memory://orders", vec![0, 255])
        .with_header("a", "b")
        .with_header("binary", vec![0, 200]);
    message.key = key.map(str::to_owned);
    let id = MessageId::new(id).unwrap();
    let now = Timestamp::from_micros(1_790_000_000_000_000);
    let reason = DeadLetterReason::Rejected;
    DeadLetter::new("orders", Some(&id), message, reason, "no such customer", now).attempts(2)
}

#[tokio::test]
async fn a_letter_is_stored_once_and_read_back() {
    let server = server().await;
    let letters = PgDeadLetters::new(&connections(&server));
    for _ in 0..2 {
        letters.park(&letter("m-1", Some("k"))).await.unwrap();
    }
    letters.park(&letter("m-2", None)).await.unwrap();
    let listed = letters.list(&LetterQuery { limit: 10, ..LetterQuery::default() }).await.unwrap();
    assert_eq!(listed.len(), 2);
    let one = &listed[0];
    assert_eq!((one.message_id.as_deref(), &*one.reason), (Some("m-1"), "rejected"));
    assert_eq!((one.attempts, &*one.error, one.payload_bytes), (2, "no such customer", 2));
    assert_eq!((&*one.first_at, one.redrives), ("2026-09-21T14:13:20.000Z", 0));
    let blocked = letters.blocked_keys("orders").await.unwrap();
    assert_eq!(blocked.into_iter().collect::<Vec<_>>(), ["k"]);
    let contents = letters.contents(&one.id).await.unwrap().unwrap();
    assert_eq!(contents.payload[..], [0, 255]);
    assert_eq!(contents.headers[1], ("binary".to_owned(), vec![0, 200].into()));
    let after = LetterQuery { after: Some(one.place()), limit: 10, ..LetterQuery::default() };
    assert_eq!(letters.list(&after).await.unwrap(), listed[1..]);
    let other = Some(DeadLetterReason::Conflict);
    let none = LetterQuery { reason: other, limit: 10, ..LetterQuery::default() };
    assert!(letters.list(&none).await.unwrap().is_empty());
}

#[tokio::test]
async fn a_list_goes_on_after_a_letter_that_was_removed() {
    let server = server().await;
    let letters = PgDeadLetters::new(&connections(&server));
    for number in 0..5 {
        letters.park(&letter(&format!("m-{number}"), None)).await.unwrap();
    }
    let mut query = LetterQuery { limit: 2, ..LetterQuery::default() };
    let mut found = Vec::new();
    loop {
        let page = letters.list(&query).await.unwrap();
        let Some(last) = page.last() else { break };
        query.after = Some(last.place());
        // Its consumer handles it meanwhile.
        letters.remove(&last.id).await.unwrap();
        found.extend(page.into_iter().filter_map(|letter| letter.message_id));
    }
    assert_eq!(found, ["m-0", "m-1", "m-2", "m-3", "m-4"]);
}

#[tokio::test]
async fn decisions_are_stored_with_their_author_and_reason() {
    let server = server().await;
    let letters = PgDeadLetters::new(&connections(&server));
    let (one, two) = (letter("m-1", Some("k")), letter("m-2", None));
    letters.park(&one).await.unwrap();
    letters.park(&two).await.unwrap();
    let found = letters.find(&one.id_hex()[..12]).await.unwrap();
    assert_eq!(found.iter().map(|letter| letter.id).collect::<Vec<_>>(), [one.id]);
    for number in 1..=2 {
        let redriven = letters.begin_redrive(&one.id, "ann", "fixed").await.unwrap();
        assert_eq!(redriven, Some(number));
    }
    assert!(letters.drop_letter(&two.id, "bob", "a test").await.unwrap());
    assert!(!letters.drop_letter(&two.id, "bob", "a test").await.unwrap());
    letters.remove(&one.id).await.unwrap();
    assert_eq!(letters.begin_redrive(&one.id, "ann", "again").await.unwrap(), None);
    let decisions =
        "SELECT who, why, action, message_id FROM hapax_dead_letter_decisions ORDER BY at";
    let expected = "ann|fixed|redrive|m-1\nann|fixed|redrive|m-1\nbob|a test|drop|m-2";
    assert_eq!(server.sql("postgres", decisions).await, expected);
}
