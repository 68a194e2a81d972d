//! Dead letters: stored once, listed, redriven and dropped.

use hapax_core::Timestamp;
use hapax_messages::{
    DeadLetter, DeadLetterReason, DeadLetterStore, Message, MessageId, OrderKeyQuery, OrderKeyState,
};
use hapax_postgres_messages::{DeadLetterQuery, PgDeadLetterStore};

use super::{connections, server};

fn dead_letter(id: &str, key: Option<&str>) -> DeadLetter {
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
    let dead_letters = PgDeadLetterStore::new(&connections(&server));
    for _ in 0..2 {
        dead_letters.park(&dead_letter("m-1", Some("k"))).await.unwrap();
    }
    dead_letters.park(&dead_letter("m-2", None)).await.unwrap();
    let listed = dead_letters
        .list(&DeadLetterQuery { limit: 10, ..DeadLetterQuery::default() })
        .await
        .unwrap();
    assert_eq!(listed.len(), 2);
    let one = &listed[0];
    assert_eq!((one.message_id.as_deref(), &*one.reason), (Some("m-1"), "rejected"));
    assert_eq!((one.attempts, &*one.error, one.payload_bytes), (2, "no such customer", 2));
    assert_eq!((&*one.first_at, one.redrives), ("2026-09-21T14:13:20.000Z", 0));
    assert_eq!(dead_letters.get(&one.id).await.unwrap().as_ref(), Some(one));
    assert_eq!(dead_letters.get(&[0; 32]).await.unwrap(), None);
    let contents = dead_letters.contents(&one.id).await.unwrap().unwrap();
    assert_eq!(contents.payload[..], [0, 255]);
    assert_eq!(contents.headers[1], ("binary".to_owned(), vec![0, 200].into()));
    let after =
        DeadLetterQuery { after: Some(one.position()), limit: 10, ..DeadLetterQuery::default() };
    assert_eq!(dead_letters.list(&after).await.unwrap(), listed[1..]);
    let other = Some(DeadLetterReason::Mismatch);
    let none = DeadLetterQuery { reason: other, limit: 10, ..DeadLetterQuery::default() };
    assert!(dead_letters.list(&none).await.unwrap().is_empty());
}

#[tokio::test]
async fn the_native_form_of_a_message_is_read_back_and_is_no_header() {
    let server = server().await;
    let dead_letters = PgDeadLetterStore::new(&connections(&server));
    // One of its producer is a header.
    for native in [None, Some(vec![0, 255].into())] {
        let mut letter = dead_letter(&format!("{native:?}"), None).native(native.clone());
        letter.message = letter.message.with_header("hapax-native", "kafka/1 3 null bytes \n");
        dead_letters.park(&letter).await.unwrap();
        let contents = dead_letters.contents(&letter.id).await.unwrap().unwrap();
        assert_eq!((contents.native, contents.headers), (native, letter.message.headers));
    }
}

#[tokio::test]
async fn a_letter_whose_id_is_not_in_the_inbox_of_the_database_is_found() {
    let server = server().await;
    let dead_letters = PgDeadLetterStore::new(&connections(&server));
    let [batch, handled, claim, redriven] =
        ["m-1", "m-2", "m-3", "m-4"].map(|id| dead_letter(id, None));
    let mut without_id = dead_letter("m-5", None);
    without_id.message_id = None;
    for letter in [&batch, &handled, &claim, &redriven, &without_id] {
        dead_letters.park(letter).await.unwrap();
    }
    let park = "SELECT hapax_inbox('orders', ARRAY['m-1', 'm-2']); \
                SELECT hapax_inbox_park('orders', 'm-1')";
    server.sql("postgres", park).await;
    dead_letters.begin_redrive(&redriven.id, "ann", "again").await.unwrap();
    let found = async |ids: &[[u8; 32]]| dead_letters.first_not_in_inbox(ids).await.unwrap();
    let ids = [batch.id, handled.id, redriven.id, without_id.id, [7; 32]];
    assert_eq!(found(&ids).await, None);
    let all = [batch.id, claim.id];
    assert_eq!(found(&all).await, Some(claim.id));
    // Parked again after its redrive, whatever the clock of its consumer shows.
    for (letter, again) in [(&claim, Some(claim.id)), (&redriven, Some(redriven.id))] {
        dead_letters.begin_redrive(&letter.id, "ann", "again").await.unwrap();
        assert_eq!(found(&[letter.id]).await, None);
        dead_letters.park(letter).await.unwrap();
        assert_eq!(found(&[letter.id]).await, again);
    }
    let position = "SELECT hapax_position_set('orders', 'topic', 0, 4)";
    server.sql("postgres", position).await;
    assert_eq!(found(&all).await, None, "its consumer is in positions mode");
}

#[tokio::test]
async fn only_the_oldest_letter_of_a_key_is_not_behind_another_one() {
    let server = server().await;
    let dead_letters = PgDeadLetterStore::new(&connections(&server));
    let (first, second) = (dead_letter("m-1", Some("k")), dead_letter("m-2", Some("k")));
    let (other, none) = (dead_letter("m-3", Some("other")), dead_letter("m-4", None));
    for stored in [&first, &second, &other, &none] {
        dead_letters.park(stored).await.unwrap();
    }
    // Parked again: it keeps its place.
    dead_letters.park(&first).await.unwrap();
    // The clock of the server was set back after the first one.
    let clock = "UPDATE hapax_dead_letters SET parked_at = parked_at + interval '1 hour' \
                 WHERE message_id = 'm-1'";
    server.sql("postgres", clock).await;
    let query = DeadLetterQuery { limit: 10, ..DeadLetterQuery::default() };
    let listed = dead_letters.list(&query).await.unwrap();
    let ids: Vec<_> = listed.iter().map(|listed| listed.message_id.as_deref().unwrap()).collect();
    assert_eq!(ids, ["m-1", "m-2", "m-3", "m-4"]);
    assert_eq!(dead_letters.last_position().await.unwrap(), listed[3].position());
    use OrderKeyState::{Blocked, Free, Parked};
    let state = async |consumer: &str, key: &str, of: &DeadLetter, is_redriven: bool| {
        let query = OrderKeyQuery { consumer, key, dead_letter: &of.id, is_redriven };
        dead_letters.order_key(query).await.unwrap()
    };
    let new = dead_letter("m-6", Some("k"));
    assert_eq!(state("orders", "k", &new, false).await, Blocked);
    assert_eq!(state("orders", "k", &first, true).await, Free);
    assert_eq!(state("orders", "k", &second, true).await, Blocked);
    for own in [&first, &second] {
        let parked = Parked(DeadLetterReason::Rejected);
        assert_eq!(state("orders", "k", own, false).await, parked, "not redriven");
    }
    assert_eq!(state("orders", "k", &other, true).await, Blocked, "of another key");
    assert_eq!(state("orders", "k", &none, true).await, Blocked, "without a key");
    assert_eq!(state("orders", "free", &new, false).await, Free);
    assert_eq!(state("invoices", "k", &new, false).await, Free);
    dead_letters.remove(&first.id).await.unwrap();
    assert_eq!(state("orders", "k", &second, true).await, Free);
    assert_eq!(state("orders", "k", &first, true).await, Blocked, "not stored");
    // A column of type text cannot store a zero byte.
    dead_letters.park(&dead_letter("m-5", Some("a\0b"))).await.unwrap();
    assert_eq!(state("orders", "a\0b", &new, false).await, Blocked);
}

#[tokio::test]
async fn a_list_goes_on_after_a_letter_that_was_removed() {
    let server = server().await;
    let dead_letters = PgDeadLetterStore::new(&connections(&server));
    for number in 0..5 {
        dead_letters.park(&dead_letter(&format!("m-{number}"), None)).await.unwrap();
    }
    let mut query = DeadLetterQuery { limit: 2, ..DeadLetterQuery::default() };
    let mut found = Vec::new();
    loop {
        let page = dead_letters.list(&query).await.unwrap();
        let Some(last) = page.last() else { break };
        query.after = Some(last.position());
        // Its consumer handles it meanwhile.
        dead_letters.remove(&last.id).await.unwrap();
        found.extend(page.into_iter().filter_map(|dead_letter| dead_letter.message_id));
    }
    assert_eq!(found, ["m-0", "m-1", "m-2", "m-3", "m-4"]);
}

#[tokio::test]
async fn decisions_are_stored_with_their_author_and_reason() {
    let server = server().await;
    let dead_letters = PgDeadLetterStore::new(&connections(&server));
    let (one, two) = (dead_letter("m-1", Some("k")), dead_letter("m-2", None));
    dead_letters.park(&one).await.unwrap();
    dead_letters.park(&two).await.unwrap();
    let found = dead_letters.find(&one.id_hex()[..12]).await.unwrap();
    assert_eq!(found.iter().map(|dead_letter| dead_letter.id).collect::<Vec<_>>(), [one.id]);
    for number in 1..=2 {
        let redriven = dead_letters.begin_redrive(&one.id, "ann", "fixed").await.unwrap();
        assert_eq!(redriven, Some(number));
    }
    assert!(dead_letters.drop_dead_letter(&two.id, "bob", "a test").await.unwrap());
    assert!(!dead_letters.drop_dead_letter(&two.id, "bob", "a test").await.unwrap());
    dead_letters.remove(&one.id).await.unwrap();
    assert_eq!(dead_letters.begin_redrive(&one.id, "ann", "again").await.unwrap(), None);
    let decisions = "SELECT operator, reason, decision, message_id FROM hapax_dead_letter_decisions ORDER BY at";
    let expected = "ann|fixed|redrive|m-1\nann|fixed|redrive|m-1\nbob|a test|drop|m-2";
    assert_eq!(server.sql("postgres", decisions).await, expected);
}

#[tokio::test]
async fn the_letter_of_a_message_with_a_long_order_key_is_stored() {
    let server = server().await;
    let dead_letters = PgDeadLetterStore::new(&connections(&server));
    // Not compressible.
    let next = |state: &u32| Some(state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223));
    let letter = |state: u32| char::from(b'a' + state.to_be_bytes()[0] % 26);
    let long: String = std::iter::successors(Some(1), next).take(4000).map(letter).collect();
    let message = Message::new("memory://orders", "").with_key(long.as_str());
    let key = message.key.clone().unwrap();
    let (reason, at) = (DeadLetterReason::Rejected, Timestamp::from_micros(1));
    let mut dead_letter = DeadLetter::new("orders", None, message, reason, "no", at);
    dead_letters.park(&dead_letter).await.unwrap();
    let (consumer, id) = ("orders", [0; 32]);
    let query = OrderKeyQuery { consumer, key: &key, dead_letter: &id, is_redriven: false };
    assert_eq!(dead_letters.order_key(query).await.unwrap(), OrderKeyState::Blocked);
    // A source that sets the field gets an error.
    dead_letter.message.key = Some(long);
    let error = format!("{:?}", dead_letters.park(&dead_letter).await.unwrap_err());
    assert!(error.contains("expected an order key of at most 1024 bytes, found 4000"), "{error}");
}
