//! Arguments that the functions cannot keep are rejected with 22023, and rows past the functions by a constraint.

use tokio_postgres::error::SqlState;

use super::server;

const LONG: &str = "repeat('x', 256)";

#[tokio::test]
async fn arguments_that_cannot_be_kept_are_rejected_with_what_was_expected_and_found() {
    let server = server().await;
    let client = super::pool(&server).get().await.unwrap();
    let max = i64::MAX;
    let retention = "expected a retention of 1 second to 100 years, found";
    let consumer = "expected a consumer name of 1 to 255 bytes, found";
    let number = "expected a number of 1 to 9223372036854775806, found";
    let position = "expected a partition and an offset of at least 0, found";
    let shard = "expected a shard of 0 to 31, found";
    let put = |id: &str, consumer: &str, attempts: i32, values: &str| {
        format!(
            "hapax_dead_letter_put({id}, {consumer}, 'm', 'o', 'rejected', {attempts}, '', NULL, '{{a}}', \
             '{values}', '', now(), now())"
        )
    };
    let sequence = |number: &str, most: i32, wait: &str, aggregate: &str| {
        format!(
            "hapax_sequence('c', {aggregate}, {number}, 'm', NULL, 'x', {most}, {wait}, 'fetch')"
        )
    };
    let advance =
        |from: i64, to: i64| format!("hapax_position_advance('c', 't', 0, 1, {from}, {to}, 0)");
    for (call, text) in [
        ("hapax_inbox('c', ARRAY['m'], NULL, '0')".into(), retention),
        ("hapax_inbox('c', ARRAY['m'], NULL, '-1 day')".into(), retention),
        ("hapax_inbox('c', ARRAY['m'], NULL, '200 years')".into(), retention),
        ("hapax_inbox('c', ARRAY['m'], NULL, NULL)".into(), retention),
        ("hapax_inbox('', ARRAY['m'])".into(), consumer),
        ("hapax_inbox(NULL, ARRAY['m'])".into(), consumer),
        (format!("hapax_inbox({LONG}, ARRAY['m'])"), consumer),
        ("hapax_inbox_attempt('c', 'm', '100000 years')".into(), retention),
        (format!("hapax_inbox_attempt({LONG}, 'm')"), consumer),
        ("hapax_inbox_attempt('c', NULL)".into(), "expected an id of 1 to 1024 bytes, found null"),
        ("hapax_inbox_failed('c', 'm', 'no', '-1 s')".into(), retention),
        ("hapax_inbox_failed('c', '', 'no')".into(), "expected an id of 1 to 1024 bytes, found 0"),
        ("hapax_inbox_park('', 'm')".into(), consumer),
        ("hapax_inbox_release('c', repeat('x', 1025))".into(), "found 1025"),
        (put("'x'", "'c'", 1, "{x}"), "expected an id of 32 bytes, found 1"),
        (put("sha256('x')", LONG, 1, "{x}"), consumer),
        (put("sha256('x')", "'c'", -1, "{x}"), "expected a number of attempts from 0, found -1"),
        (
            put("sha256('x')", "'c'", 1, "{}"),
            "expected a value for each of 1 names of headers, found 0",
        ),
        (
            "hapax_outbox_put_text(repeat('x', 1025), 'x')".into(),
            "a destination of at most 1024 bytes",
        ),
        ("hapax_outbox_put_all(NULL, NULL)".into(), "expected arrays of equal length"),
        ("hapax_outbox_put_all(ARRAY['a'], NULL)".into(), "expected arrays of equal length"),
        ("hapax_outbox_park(sha256('x'), 32, 1, 'no', 1)".into(), shard),
        ("hapax_outbox_park(sha256('x'), 70000, 1, 'no', 1)".into(), shard),
        ("hapax_outbox_first_above('{-1}', '{0}')".into(), shard),
        ("hapax_outbox_poll('{77}', '{0}', '{}', '{}', '{}', 1, 1)".into(), shard),
        (sequence("0", 1, "'1 h'", "'a'"), number),
        (sequence("NULL", 1, "'1 h'", "'a'"), number),
        (sequence(&max.to_string(), 1, "'1 h'", "'a'"), number),
        (sequence("1", -1, "'1 h'", "'a'"), "expected max_waiting of at least 0, found -1"),
        (sequence("1", 1, "'-1 h'", "'a'"), "expected max_wait of 0 to 100 years, found"),
        (sequence("1", 1, "NULL", "'a'"), "expected max_wait of 0 to 100 years, found null"),
        (sequence("1", 1, "'1 h'", "''"), "expected an aggregate of 1 to 1024 bytes, found 0"),
        ("hapax_sequence_next('c', 'a', '1 h', 'other')".into(), "found other"),
        ("hapax_position_acquire('c', 't', -1, 0)".into(), position),
        ("hapax_position_acquire('c', 't', 0, -1)".into(), position),
        ("hapax_position_acquire('c', '', 0, 0)".into(), "expected a topic of 1 to 1024 bytes"),
        ("hapax_position_set('c', 't', 0, -5)".into(), position),
        ("hapax_position_set('c', 't', 0, NULL)".into(), position),
        (advance(5, 5), "to_offset above from_offset, found 1, 5 and 5"),
        (advance(5, 4), "to_offset above from_offset, found 1, 4 and 5"),
        (advance(-1, 4), position),
    ] {
        let failed = client.query(&format!("SELECT {call}"), &[]).await.expect_err(&call);
        let failed = failed.as_db_error().unwrap();
        assert_eq!(*failed.code(), SqlState::INVALID_PARAMETER_VALUE, "{call}: {failed}");
        assert!(failed.message().contains(text), "{call}: {failed}");
    }
}

#[tokio::test]
async fn arguments_at_the_bounds_are_kept() {
    let server = server().await;
    let client = super::pool(&server).get().await.unwrap();
    for call in [
        "hapax_inbox(repeat('c', 255), ARRAY[repeat('m', 1024)], NULL, '1 s')",
        "hapax_inbox('c', ARRAY['m'], NULL, '100 years')",
        "hapax_inbox('c', ARRAY['n'], NULL, make_interval(secs => 3153600000))",
        "hapax_outbox_put_text(repeat('x', 1024), 'x')",
        "hapax_outbox_put_text('', 'x')",
        "hapax_sequence(repeat('c', 255), repeat('a', 1024), 9223372036854775806, 'm', NULL, 'x', 1, '0', \
         'accept')",
        "count(*) FROM hapax_sequence_gaps",
        "hapax_position_acquire(repeat('c', 255), 't', 2147483647, 9223372036854775807)",
    ] {
        client.query(&format!("SELECT {call}"), &[]).await.unwrap();
    }
}

#[tokio::test]
async fn a_row_of_the_outbox_that_no_relay_would_find_is_not_inserted_past_the_functions() {
    let server = server().await;
    let insert = |shard: u32, id: u32, message_id: &str| {
        format!(
            "INSERT INTO hapax_outbox (shard, id, message_id, destination, headers, payload) \
             VALUES ({shard}, {id}, '{message_id}', 'd', '{{}}', 'p')"
        )
    };
    for forged in [insert(77, 1, "x"), insert(1, 0, "x"), insert(1, 1, "")] {
        let failed = server.try_sql("postgres", &forged).await.unwrap_err();
        assert!(failed.contains("hapax_outbox_bounds"), "{failed}");
    }
    server.sql("postgres", &insert(31, 1, "x")).await;
}
