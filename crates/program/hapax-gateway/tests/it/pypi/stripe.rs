//! Stripe's own library for Python.

use super::python;
use crate::stripe::{each_call_has_one_effect, each_problem_is_raised};

#[tokio::test(flavor = "multi_thread")]
async fn each_call_has_one_effect_though_replies_are_lost() {
    each_call_has_one_effect(python("pay.py")).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn wire_28_each_problem_is_raised() {
    each_problem_is_raised(python("rejected.py")).await;
}
