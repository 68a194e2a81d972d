//! Ids of messages.

use hapax_core::{JsonPointers, Timestamp};
use hapax_messages::{IdRule, IdRules, LogPosition, Message, MessageId, MessageIdError};

fn id(rule: IdRule, message: &Message) -> Result<String, MessageIdError> {
    IdRules::new([rule]).id(message).map(|id| id.to_string())
}

#[test]
fn the_case_of_a_header_name_is_ignored() {
    let message = Message::new("queue", "x").with_header("Message-ID", "m-1");
    assert_eq!(id(IdRule::Header("message-id".into()), &message).unwrap(), "m-1");
}

#[test]
fn an_id_that_is_missing_empty_too_long_or_not_utf8_is_an_error() {
    let rule = || IdRule::Header("message-id".into());
    let with = |value: Vec<u8>| Message::new("queue", "x").with_header("message-id", value);
    assert!(matches!(id(rule(), &Message::new("queue", "x")), Err(MessageIdError::Missing { .. })));
    assert_eq!(id(rule(), &with(vec![])), Err(MessageIdError::Empty));
    assert_eq!(id(rule(), &with(vec![b'a'; 1025])), Err(MessageIdError::TooLong { length: 1025 }));
    assert_eq!(id(rule(), &with(vec![b'a'; 1024])).unwrap().len(), 1024);
    assert_eq!(id(rule(), &with(vec![0xff])), Err(MessageIdError::NotUtf8));
    assert_eq!(id(rule(), &with(vec![b'a', 0])), Err(MessageIdError::ZeroByte));
}

#[test]
fn a_rule_that_applies_and_finds_no_valid_id_ends_the_search() {
    let rules = IdRules::new([IdRule::Header("message-id".into()), IdRule::PayloadHash]);
    let empty = Message::new("queue", "x").with_header("message-id", "");
    assert_eq!(rules.id(&empty), Err(MessageIdError::Empty));
    assert_eq!(rules.id(&Message::new("queue", "x")).unwrap().as_str().len(), 64);
}

#[test]
fn a_cloud_event_is_named_by_source_and_id() {
    let expected = r#"["/orders","17"]"#;
    for prefix in ["ce-", "ce_", "cloudEvents:"] {
        let message = Message::new("queue", "x")
            .with_header(format!("{prefix}id"), "17")
            .with_header(format!("{prefix}source"), "/orders");
        assert_eq!(id(IdRule::CloudEvents, &message).unwrap(), expected);
    }
    let structured = Message::new("queue", r#"{"id":"17","source":"/orders","data":1}"#)
        .with_header("Content-Type", "application/cloudevents+json; charset=utf-8");
    assert_eq!(id(IdRule::CloudEvents, &structured).unwrap(), expected);
    let other = Message::new("queue", r#"{"id":"17","source":"/orders"}"#);
    assert!(id(IdRule::CloudEvents, &other).is_err());
}

#[test]
fn a_cloud_event_without_a_source_has_no_id() {
    for source in [None, Some("")] {
        let mut headers = Message::new("queue", "x").with_header("ce-id", "17");
        let mut structured = r#"{"id":"17"}"#.to_owned();
        if let Some(source) = source {
            headers = headers.with_header("ce-source", source);
            structured = format!(r#"{{"id":"17","source":"{source}"}}"#);
        }
        let structured = Message::new("queue", structured)
            .with_header("content-type", "application/cloudevents+json");
        for message in [headers, structured] {
            let error = id(IdRule::CloudEvents, &message).unwrap_err();
            assert!(error.to_string().contains("source"), "{error}");
        }
    }
}

#[test]
fn several_json_members_form_one_id_and_a_missing_one_is_an_error() {
    let pointers = |names: &[&str]| IdRule::JsonPointers(JsonPointers::new(names).unwrap());
    let message = Message::new("queue", r#"{"a":"x","b":12,"c":1.5,"d":null}"#);
    assert_eq!(id(pointers(&["/a"]), &message).unwrap(), "x");
    assert_eq!(id(pointers(&["/a", "/b"]), &message).unwrap(), r#"["x","12"]"#);
    for missing in ["/c", "/d", "/e"] {
        assert!(id(pointers(&["/a", missing]), &message).is_err(), "{missing}");
    }
    assert!(id(pointers(&["/a"]), &Message::new("queue", "not json")).is_err());
}

#[test]
fn equal_offsets_of_a_topic_that_was_created_again_have_different_ids() {
    let at = |micros| LogPosition {
        topic: "orders".into(),
        partition: 3,
        offset: 7,
        stored_at: Timestamp::from_micros(micros),
    };
    let message = Message::new("queue", "x").with_position(at(5));
    assert_eq!(id(IdRule::Position, &message).unwrap(), "orders:3:7:5");
    let again = Message::new("queue", "x").with_position(at(6));
    assert_ne!(id(IdRule::Position, &message), id(IdRule::Position, &again));
}

#[test]
fn different_ids_have_different_keys() {
    let long = MessageId::new("a".repeat(300)).unwrap();
    let copy = MessageId::new(long.to_key().as_str()).unwrap();
    assert_ne!(long.to_key(), copy.to_key());
    assert_eq!(MessageId::new("order-17").unwrap().to_key().as_str(), "order-17");
    assert_ne!(MessageId::new("ä").unwrap().to_key(), MessageId::new("ö").unwrap().to_key());
}
