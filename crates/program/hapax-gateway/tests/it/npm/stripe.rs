//! Stripe's own library for Node.

use super::node;
use crate::stripe::{each_call_has_one_effect, each_problem_is_raised};

#[tokio::test(flavor = "multi_thread")]
async fn each_call_has_one_effect_though_replies_are_lost() {
    each_call_has_one_effect(node("pay.js")).await;
}

/// Without the member `error` this library takes a problem for the payment.
#[tokio::test(flavor = "multi_thread")]
async fn wire_28_each_problem_is_raised() {
    each_problem_is_raised(node("rejected.js")).await;
}
