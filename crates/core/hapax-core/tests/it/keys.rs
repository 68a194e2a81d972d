//! Keys that clients make.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use hapax_core::{
    BucketError, Clock, CompositeKey, Entropy, EntropyError, Function, Idempotency, Key, KeyError,
    KeyMaker, MakeKeyError, MemoryCapacity, MemoryStore, NaturalKey, OutcomeClass, RunError, Scope,
    Timestamp,
};
use proptest::prelude::*;
use tokio::time::Instant;

/// A clock that begins at 2026-09-21T14:13:20Z and follows tokio's time, which tests pause.
#[derive(Debug)]
struct TestClock(Instant);

impl Clock for TestClock {
    fn now(&self) -> Timestamp {
        Timestamp::from_micros(1_790_000_000_000_000).after(self.0.elapsed())
    }
}

/// Randomness that is always the same byte.
#[derive(Debug)]
struct Constant(u8);

impl Entropy for Constant {
    fn fill(&self, bytes: &mut [u8]) -> Result<(), EntropyError> {
        bytes.fill(self.0);
        Ok(())
    }
}

#[derive(Debug)]
struct Failing;

impl Entropy for Failing {
    fn fill(&self, _: &mut [u8]) -> Result<(), EntropyError> {
        Err(EntropyError)
    }
}

fn maker(entropy: impl Entropy) -> KeyMaker {
    KeyMaker::new(Arc::new(TestClock(Instant::now())), Arc::new(entropy))
}

/// Asserts that the header's grammar accepts the key.
fn is_a_key(key: &Key) {
    assert_eq!(&Key::new(key.as_str()).unwrap(), key);
}

#[tokio::test(start_paused = true)]
async fn keys_are_made_from_the_given_clock_and_randomness() {
    let maker = maker(Constant(0xab));
    let made = [
        (maker.uuid_v4().unwrap(), "abababab-abab-4bab-abab-abababababab"),
        (maker.uuid_v7().unwrap(), "01a0c450-6c00-7bab-abab-abababababab"),
        (maker.ulid().unwrap(), "01M3250V00NENTQAXBNENTQAXB"),
        (
            maker.client_timestamp_random("till-3").unwrap(),
            "till-3-1790000000000-abababababababababababababababab",
        ),
    ];
    for (key, text) in made {
        assert_eq!(key.as_str(), text);
        is_a_key(&key);
    }
}

#[test]
fn keys_made_with_the_operating_system_do_not_repeat() {
    let made = || {
        [
            Key::uuid_v4().unwrap(),
            Key::uuid_v7().unwrap(),
            Key::ulid().unwrap(),
            Key::client_timestamp_random("c").unwrap(),
        ]
    };
    let keys: HashSet<_> = (0..1000).flat_map(|_| made()).collect();
    assert_eq!(keys.len(), 4000);
    keys.iter().for_each(is_a_key);
}

#[tokio::test]
async fn without_randomness_no_key_is_made() {
    let maker = maker(Failing);
    assert!(maker.uuid_v4().is_err() && maker.uuid_v7().is_err() && maker.ulid().is_err());
    let client = maker.client_timestamp_random("c");
    assert!(matches!(client, Err(MakeKeyError::Entropy(_))));
}

#[test]
fn a_client_must_fit_into_a_key() {
    let make = |client: &str| match Key::client_timestamp_random(client) {
        Ok(_) => Ok(()),
        Err(MakeKeyError::NoKey(error)) => Err(error),
        Err(other) => panic!("{other}"),
    };
    assert_eq!(make(""), Err(KeyError::Empty));
    assert_eq!(make("é"), Err(KeyError::NotPrintable { position: 0 }));
    assert_eq!(make(&"c".repeat(208)), Ok(()));
    assert_eq!(make(&"c".repeat(209)), Err(KeyError::TooLong { length: 256 }));
}

#[test]
fn natural_keys_are_those_of_earlier_versions() {
    let keys = [
        NaturalKey::order("c-1", "cart-9"),
        // The key of a payment before the amount was left to the request.
        NaturalKey::new("payment")
            .part("order", "o-17")
            .part("amount", 1999)
            .part("currency", "EUR"),
        NaturalKey::transfer("DE1", "DE2", "rent 2026-10"),
        NaturalKey::new("x").part("n", -1).part("b", true).part("y", &[0u8, 255][..]),
        NaturalKey::payment("o-17"),
    ];
    let expected = include_str!("../golden/natural-keys.v1.txt");
    let made: String = keys.iter().map(|key| format!("{}\n", key.key().as_str())).collect();
    assert_eq!(made, expected);
    keys.iter().for_each(|key| is_a_key(&key.key()));
    assert_eq!(
        format!("{:?}", keys[0]),
        r#"NaturalKey { kind: "order", parts: ["cart", "customer"] }"#
    );
}

#[test]
fn different_parts_give_different_keys() {
    let of = |parts: NaturalKey| parts.key();
    let new = || NaturalKey::new("k");
    let keys = [
        of(new()),
        of(NaturalKey::new("k2")),
        of(new().part("a", "")),
        of(new().part("a", "ab").part("b", "c")),
        of(new().part("a", "a").part("b", "bc")),
        of(new().part("a", "ab").part("bc", "")),
        of(new().part("a", "1")),
        of(new().part("a", 1)),
        of(new().part("a", true)),
        of(new().part("a", &b"1"[..])),
        of(new().part("a", -1)),
        of(new().part("a", 1).part("a", 2)),
        of(new().part("a", 2).part("a", 1)),
        NaturalKey::payment("o").key(),
        NaturalKey::payment("p").key(),
        NaturalKey::transfer("a", "b", "r").key(),
        NaturalKey::transfer("b", "a", "r").key(),
        NaturalKey::order("a", "b").key(),
        NaturalKey::order("b", "a").key(),
    ];
    assert_eq!(keys.iter().collect::<HashSet<_>>().len(), keys.len());
    // Widths of integers and references give the same key.
    let text = String::from("x");
    assert_eq!(
        of(new().part("a", 7u8).part("t", &text)),
        of(new().part("t", "x").part("a", 7i128))
    );
}

/// The amount is no part of these keys, and part of the request.
#[tokio::test]
async fn another_amount_under_a_natural_key_is_rejected() {
    let idempotency = Idempotency::builder(MemoryStore::default()).build().unwrap();
    for key in [NaturalKey::payment("o-17"), NaturalKey::transfer("DE1", "DE2", "rent 2026-10")] {
        let pay = async |cents: u64| {
            let named = (&key, (cents, "EUR"));
            let paid =
                idempotency.at_most_once(&named, move || async move { Ok::<_, String>(cents) });
            paid.await.map(|paid| (paid.value, paid.replayed))
        };
        assert_eq!(pay(1999).await.unwrap(), (1999, false));
        let corrected = pay(2499).await;
        assert!(matches!(corrected, Err(RunError::KeyReused)), "{corrected:?}");
        assert_eq!(pay(1999).await.unwrap(), (1999, true));
    }
}

/// A record of an earlier release, whose natural key had no request.
#[tokio::test]
async fn a_key_that_identifies_alone_finds_the_record_of_a_call_without_a_request() {
    let idempotency = Idempotency::builder(MemoryStore::default()).build().unwrap();
    let key = NaturalKey::order("c-1", "cart-9");
    let call = || async { Ok::<_, String>(17) };
    idempotency.at_most_once(&(Scope::shared(), key.key(), ()), call).await.unwrap();
    let again = idempotency.at_most_once(&key.clone().identifies_alone(), call).await.unwrap();
    assert!(again.replayed);
    let compared = idempotency.at_most_once(&(key, "3 apples"), call).await;
    assert!(matches!(compared, Err(RunError::KeyReused)), "{compared:?}");
}

proptest! {
    #[test]
    fn no_two_lists_of_parts_share_a_key(
        one in prop::collection::vec(("[ab]{0,2}", "[ab]{0,3}"), 0..4),
        other in prop::collection::vec(("[ab]{0,2}", "[ab]{0,3}"), 0..4),
    ) {
        let key = |parts: &[(String, String)]| {
            let key = NaturalKey::new("k");
            parts.iter().fold(key, |key, (name, text)| key.part(name.as_str(), text)).key()
        };
        let sorted = |parts: &[(String, String)]| {
            let mut parts = parts.to_vec();
            parts.sort_by(|(one, _), (other, _)| one.cmp(other));
            parts
        };
        prop_assert_eq!(key(&one) == key(&other), sorted(&one) == sorted(&other));
    }
}

#[test]
fn the_key_of_a_payload_is_that_of_its_canonical_form() {
    let key = |payload: &serde_json::Value| Key::of_payload(payload).unwrap();
    let one = key(&serde_json::json!({"amount": 5, "to": "a"}));
    assert_eq!(one, key(&serde_json::from_str(r#"{ "to":"\u0061", "amount":5 }"#).unwrap()));
    assert_ne!(one, key(&serde_json::json!({"amount": 6, "to": "a"})));
    is_a_key(&one);
    // Differences that JSON cannot express count too.
    let of = |payload: Option<Option<u8>>| Key::of_payload(&payload).unwrap();
    assert!(of(None) != of(Some(None)) && of(None) != of(Some(Some(0))));
    // It must never change: a retry with another key would execute.
    let expected = "40995a8835b528d64450d873287a5e21b0bfb7621115e43e31eb7b94f6ad8bc0";
    assert_eq!(one.as_str(), expected);
}

const MINUTE: Duration = Duration::from_secs(60);

#[tokio::test(start_paused = true)]
async fn a_retry_in_the_next_bucket_has_the_first_key_among_its_candidates() {
    let maker = maker(Failing);
    let parts = NaturalKey::new("pay").part("user", "u-1");
    let at = |seconds| {
        let (maker, parts) = (maker.clone(), parts.clone());
        async move {
            tokio::time::sleep(Duration::from_secs(seconds)).await;
            maker.composite(&parts, MINUTE).unwrap()
        }
    };
    // Twenty seconds into a minute.
    let first = at(0).await;
    assert_eq!(at(39).await, first);
    let next = at(1).await;
    assert_eq!(next.previous(), first.current());
    assert_eq!(next.candidates(), [first.current(), next.current()]);
    let after = at(60).await;
    assert!(!after.candidates().contains(&first.current()));
    // Another bucket length gives another key, and so does another operation.
    assert_ne!(maker.composite(&parts, MINUTE * 2).unwrap().current(), after.current());
    let other = NaturalKey::new("pay").part("user", "u-2");
    assert_ne!(maker.composite(&other, MINUTE).unwrap().current(), after.current());
    is_a_key(after.current());
    assert_eq!(maker.composite(&parts, Duration::ZERO), Err(BucketError));
    assert_eq!(maker.composite(&parts, Duration::MAX), Err(BucketError));
}

#[tokio::test(start_paused = true)]
async fn a_retry_across_the_boundary_of_a_bucket_is_replayed() {
    let clock = Arc::new(TestClock(Instant::now()));
    let store = MemoryStore::new(Arc::clone(&clock) as _, MemoryCapacity::default());
    let idempotency = Idempotency::builder(Arc::new(store)).build().unwrap();
    let maker = KeyMaker::new(clock, Arc::new(Failing));
    let parts = NaturalKey::new("pay").part("user", "u-1");
    let scope = Scope::shared();
    let call = async |result: Result<u8, ()>| {
        let key: CompositeKey = maker.composite(&parts, MINUTE).unwrap();
        let key = idempotency.choose(&scope, &key).await.unwrap();
        let call = (&scope, key, "5 EUR");
        let ran = idempotency.at_least_once(&call, move || async move { result }).await;
        ran.map(|answer| (answer.value, answer.replayed)).ok()
    };
    assert_eq!(call(Ok(1)).await, Some((1, false)));
    tokio::time::sleep(MINUTE).await;
    assert_eq!(call(Ok(2)).await, Some((1, true)));
    // Two buckets later it is a new operation.
    tokio::time::sleep(MINUTE).await;
    assert_eq!(call(Ok(3)).await, Some((3, false)));
}

#[tokio::test(start_paused = true)]
async fn the_key_of_a_released_operation_is_chosen_for_one_lease() {
    let clock = Arc::new(TestClock(Instant::now()));
    let store = MemoryStore::new(Arc::clone(&clock) as _, MemoryCapacity::default());
    let idempotency = Idempotency::builder(Arc::new(store)).build().unwrap();
    let maker = KeyMaker::new(clock, Arc::new(Failing));
    let parts = NaturalKey::new("pay").part("user", "u-1");
    let scope = Scope::shared();
    let pay: Function<u8, ()> = idempotency
        .function("pay")
        .at_most_once()
        .classify(|()| OutcomeClass::Retryable)
        .build()
        .unwrap();
    let choose = async || {
        let key = maker.composite(&parts, MINUTE).unwrap();
        (pay.choose(&scope, &key).await.unwrap(), key)
    };
    let call = async |key: &Key, result: Result<u8, ()>| {
        let ran = pay.run(&scope, key, "5 EUR", move |_| async move { result });
        ran.await.map(|answer| (answer.value, answer.replayed)).ok()
    };
    // Twenty seconds into a minute, and a second before the next.
    tokio::time::sleep(Duration::from_secs(39)).await;
    let (telephone, _) = choose().await;
    assert_eq!(call(&telephone, Err(())).await, None);
    tokio::time::sleep(Duration::from_secs(2)).await;
    let (browser, _) = choose().await;
    assert_eq!(call(&browser, Ok(1)).await, Some((1, false)));
    assert_eq!(call(&telephone, Ok(2)).await, Some((1, true)));

    // The key is chosen for one lease, and no longer.
    tokio::time::sleep(MINUTE * 3 - Duration::from_secs(2)).await;
    let (first, _) = choose().await;
    assert_eq!(call(&first, Err(())).await, None);
    tokio::time::sleep(Duration::from_secs(29)).await;
    assert_eq!(choose().await.0, first);
    tokio::time::sleep(Duration::from_secs(1)).await;
    let (next, key) = choose().await;
    assert_eq!((key.previous(), key.current()), (&first, &next));
}
