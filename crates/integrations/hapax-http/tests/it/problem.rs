use std::collections::HashSet;
use std::time::Duration;

use hapax_http::problem::{Code, DocsUrl, DocsUrlError, Problem, retry_after, sentence};
use http::StatusCode;
use serde_json::{Value, json};

fn body(problem: &Problem, docs: Option<&DocsUrl>) -> Value {
    serde_json::from_slice(problem.response(docs).body()).unwrap()
}

#[test]
fn wire_21_every_code_makes_a_complete_problem() {
    let mut words = HashSet::new();
    for code in Code::ALL {
        let response = Problem::new(code, "A \"detail\"\n").response(None);
        assert_eq!(response.status(), code.status());
        assert!(response.status().is_client_error() || response.status().is_server_error());
        assert_eq!(response.headers()["content-type"], "application/problem+json");
        assert!(!response.headers().contains_key("link"));
        let expected = json!({
            "type": format!("urn:hapax:problem:{}", code.as_str()),
            "title": code.title(),
            "status": code.status().as_u16(),
            "detail": "A \"detail\"\n",
            "code": code.as_str(),
            "error": {
                "type": code.error_type(),
                "code": code.as_str(),
                "message": "A \"detail\"\n",
            },
        });
        assert_eq!(serde_json::from_slice::<Value>(response.body()).unwrap(), expected);
        assert!(code.title().starts_with(char::is_uppercase), "{}", code.title());
        assert!(words.insert(code.as_str()), "{} twice", code.as_str());
    }
}

#[test]
fn wire_28_the_type_of_the_error_follows_code_and_status() {
    for code in Code::ALL {
        let expected = match (code, code.status().as_u16()) {
            (Code::KeyReused, _) => "idempotency_error",
            (_, 400 | 413) => "invalid_request_error",
            _ => "api_error",
        };
        assert_eq!(code.error_type(), expected, "{}", code.as_str());
    }
}

#[test]
fn wire_21_an_error_becomes_a_sentence() {
    assert_eq!(sentence("a key is missing"), "A key is missing.");
    assert_eq!(sentence("Connection is odd"), "Connection is odd.");
    assert_eq!(sentence(""), ".");
}

#[test]
fn wire_21_documentation_is_linked() {
    let docs = DocsUrl::new("https://docs.example/errors?v=1").unwrap();
    let problem = Problem::new(Code::KeyReused, "");
    let response = problem.response(Some(&docs));
    assert_eq!(
        response.headers()["link"],
        "<https://docs.example/errors?v=1>; rel=\"describedby\""
    );
    assert_eq!(body(&problem, Some(&docs))["type"], "https://docs.example/errors?v=1#key-reused");
    for bad in ["", "/errors", "https://a/#b", "https://a/>", "https://a\r\nx: y", "nonsense"] {
        assert_eq!(DocsUrl::new(bad), Err(DocsUrlError), "{bad}");
    }
}

#[test]
fn wire_21_only_in_flight_has_the_member_retry_after() {
    let in_flight = Problem::new(Code::InFlight, "").retry_after(Duration::from_millis(1500));
    assert_eq!(in_flight.response(None).headers()["retry-after"], "2");
    assert_eq!(body(&in_flight, None)["retry_after"], 2);
    let away = Problem::new(Code::StoreUnavailable, "").retry_after(Duration::ZERO);
    assert_eq!(away.response(None).headers()["retry-after"], "1");
    assert_eq!(body(&away, None).get("retry_after"), None);
}

#[test]
fn wire_23_a_response_that_was_not_stored_has_original_status() {
    let problem = Problem::new(Code::ResponseNotRetained, "").original_status(StatusCode::CREATED);
    assert_eq!(body(&problem, None)["original_status"], 201);
}

#[test]
fn wire_18_retry_after_is_the_smaller_of_elapsed_and_remaining_time() {
    let seconds = Duration::from_secs;
    assert_eq!(retry_after(seconds(3), seconds(20)), seconds(3));
    assert_eq!(retry_after(seconds(40), seconds(20)), seconds(20));
    assert_eq!(retry_after(seconds(0), seconds(20)), seconds(1));
    assert_eq!(retry_after(seconds(40), seconds(0)), seconds(1));
}
