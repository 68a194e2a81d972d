//! Stripe's own library for Python, with its automatic retries, against a gateway in front of a small
//! API that is like theirs: one effect for each call, whichever replies are lost.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use hapax::OnUnknown;
use hapax_conformance::{Call, handler, reply, serve};
use hapax_http::Body;
use hapax_http::classify::Profile;
use hapax_testkit::faults::{Proxy, ProxyRates};
use http::{Method, Response};
use http_body_util::channel::Channel;

use super::python;
use crate::world::{config, start};

const CALLS: usize = 32;

/// What the API has done.
#[derive(Default)]
struct Ledger {
    /// The call and the answer of each payment, by its key.
    made: HashMap<String, (String, String)>,
    /// How often money moved for a call.
    moved: HashMap<String, usize>,
    /// Under which fences nothing happened, and nothing will.
    barred: HashSet<(String, String)>,
    /// Payments whose reply it lost.
    lost: usize,
}

impl Ledger {
    fn answer(&mut self, call: &Call) -> Response<Body> {
        let header = |name: &str| call.headers[name].to_str().unwrap().to_owned();
        let (key, fence) = (header("idempotency-key"), header("idempotency-fence"));
        if call.method == Method::GET {
            return match self.made.get(&key) {
                Some((_, answer)) => json(answer.clone()),
                None => {
                    self.barred.insert((key, fence));
                    reply(404, "")
                }
            };
        }
        assert_eq!((&call.method, call.uri.path()), (&Method::POST, "/v1/payment_intents"));
        if self.barred.contains(&(key.clone(), fence)) {
            return reply(409, "");
        }
        let form = String::from_utf8(call.body.to_vec()).unwrap();
        let field = |name: &str| {
            let fields = form.split('&').filter_map(|pair| pair.split_once('='));
            let mut found = fields.filter(|(it, _)| *it == name).map(|(_, value)| value.to_owned());
            found.next().unwrap_or_else(|| panic!("no {name} in {form}"))
        };
        let call = field("metadata[call]");
        *self.moved.entry(call.clone()).or_default() += 1;
        let answer = format!(
            r#"{{"id":"pi_{call}","object":"payment_intent","amount":{},"currency":"usd"}}"#,
            field("amount")
        );
        self.made.insert(key, (call.clone(), answer.clone()));
        // Of every third payment nobody hears.
        if call.parse::<usize>().unwrap().is_multiple_of(3) {
            self.lost += 1;
            return broken_off();
        }
        json(answer)
    }
}

fn json(text: String) -> Response<Body> {
    let mut response = reply(200, text);
    let kind = http::HeaderValue::from_static("application/json");
    response.headers_mut().insert(http::header::CONTENT_TYPE, kind);
    response
}

fn broken_off() -> Response<Body> {
    let (mut sender, body) = Channel::<Bytes, std::io::Error>::new(1);
    tokio::spawn(async move {
        let _ = sender.send_data(Bytes::from_static(b"{")).await;
        sender.abort(std::io::Error::other("lost"));
    });
    reply(200, "").map(|_| Body::new(body))
}

#[tokio::test(flavor = "multi_thread")]
async fn each_call_has_one_effect_though_replies_are_lost() {
    let ledger = Arc::new(Mutex::new(Ledger::default()));
    let answering = Arc::clone(&ledger);
    let api = serve(handler(move |call: Call| {
        let answer = answering.lock().unwrap().answer(&call);
        async move { answer }
    }))
    .await;

    let mut config = config(format!("http://{}", api.address).parse().unwrap());
    config.policy.profile = Profile::StripeV1;
    config.policy.on_unknown = OnUnknown::Reconcile;
    config.policy.reconcile_url = Some(format!("http://{}/outcome", api.address).parse().unwrap());
    let gateway = start(config).await;
    let lossy = Proxy::before(gateway.local_addr(), 7).await.unwrap();
    lossy.set(ProxyRates { lose_reply: 200, ..ProxyRates::all(0, Duration::ZERO) });

    let url = format!("http://{}", lossy.address());
    let mut paying = python("pay.py");
    paying.args([&url, &CALLS.to_string()]);
    let ended = tokio::task::spawn_blocking(move || paying.output().unwrap()).await.unwrap();
    let (said, errors) =
        (String::from_utf8(ended.stdout).unwrap(), String::from_utf8(ended.stderr).unwrap());
    assert!(ended.status.success() && errors.is_empty(), "{errors}");

    let paid: Vec<serde_json::Value> =
        said.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let expected: Vec<_> = (0..CALLS)
        .map(|call| serde_json::json!({ "call": call, "id": format!("pi_{call}") }))
        .collect();
    assert_eq!(paid, expected);
    let ledger = ledger.lock().unwrap();
    assert_eq!((ledger.moved.len(), ledger.made.len()), (CALLS, CALLS));
    assert!(ledger.moved.values().all(|count| *count == 1), "{:?}", ledger.moved);
    // Replies were lost on both sides, or this has shown nothing.
    assert_eq!(ledger.lost, CALLS.div_ceil(3));
    assert!(lossy.counts().lost_replies > 0, "{:?}", lossy.counts());
}
