//! Runs of the examples.

#[allow(dead_code, reason = "its `main` is not called here")]
#[path = "../../examples/email.rs"]
mod email;
#[allow(dead_code, reason = "its `main` is not called here")]
#[path = "../../examples/order.rs"]
mod order;
#[allow(dead_code, reason = "its `main` is not called here")]
#[path = "../../examples/payment.rs"]
mod payment;
#[allow(dead_code, reason = "its `main` is not called here")]
#[path = "../../examples/resource.rs"]
mod resource;

use std::cell::RefCell;

/// Returns the lines that an example prints.
macro_rules! printed {
    ($example:ident) => {{
        let printed = RefCell::new(Vec::new());
        $example::run(|line| printed.borrow_mut().push(line)).await.unwrap();
        printed.into_inner()
    }};
}

#[tokio::test]
async fn a_payment() {
    let expected = [
        "o-1: charged ch_1 for o-1",
        "o-1: charged before: ch_1 for o-1",
        "o-2: the card was declined: Final",
        "o-2: the card was declined, as before",
        "o-3: charged ch_2 for o-3",
        "o-4: the provider did not answer",
        "o-4: ch_3 for o-4, replayed: true",
        "the provider charged 3 times",
    ];
    assert_eq!(printed!(payment), expected);
}

#[tokio::test]
async fn an_email() {
    let expected = [
        "reset: sent as 2, replayed: false",
        "reset: sent as 2, replayed: true",
        "the server sent 2 mails: at least one",
        "invoice: the outcome is unknown",
        "the server sent 3 mails: one more",
        "invoice: sent as 3, replayed: true",
    ];
    assert_eq!(printed!(email), expected);
}

#[tokio::test]
async fn a_resource() {
    let expected = [
        "at first: the database is busy",
        "phone: 1, browser: 1",
        "another plan: the key belongs to another request",
        "someone is not an address, replayed: false",
        "someone is not an address, replayed: true",
        "there is 1 account",
    ];
    assert_eq!(printed!(resource), expected);
}

#[tokio::test]
async fn an_order() {
    let expected = [
        "tap 1: the till is locked",
        "tap 2: ch_1 (7 left), false",
        "tap 3: ch_1 (7 left), true",
        "large: only 7 apples are left",
        "large: only 7 apples are left",
        "7 apples left, 1 charge",
    ];
    assert_eq!(printed!(order), expected);
}
