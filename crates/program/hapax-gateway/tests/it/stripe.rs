//! Stripe's own libraries, with their automatic retries, against a gateway in front of a small API
//! like Stripe's. [`crate::pypi`] runs the one for Python, [`crate::npm`] the one for Node.

use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;
use std::process::{Command, Output};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use hapax_core::OnUnknown;
use hapax_http::Body;
use hapax_http::classify::Profile;
use hapax_http::problem::{Code, Problem};
use hapax_testkit::faults::{FaultProxy, FaultProxyRates};
use hapax_testkit::http::{HandlerRequest, handler, reply, serve};
use http::{Method, Response};
use serde_json::{Value, json};

use crate::world::{config, start};
use hapax_testkit::http::frames;

const CALLS: usize = 32;

/// The payments that the API has made.
#[derive(Default)]
struct Ledger {
    /// The call and the answer of each payment, by its operation id.
    made: HashMap<String, (String, String)>,
    /// How often money moved for a call.
    moved: HashMap<String, usize>,
    /// Under which fences nothing happened, and nothing will.
    barred: HashSet<(String, String)>,
    /// Payments whose reply it lost.
    lost: usize,
}

impl Ledger {
    fn answer(&mut self, call: &HandlerRequest) -> Response<Body> {
        let header = |name: &str| call.headers[name].to_str().unwrap().to_owned();
        let (id, fence) = (header("idempotency-operation-id"), header("idempotency-fence"));
        if call.method == Method::GET {
            return match self.made.get(&id) {
                Some((_, answer)) => json_reply(answer.clone()),
                None => {
                    self.barred.insert((id, fence));
                    let mut response = reply(404, "");
                    let marker = "did-not-happen".parse().unwrap();
                    response.headers_mut().insert("idempotency-outcome", marker);
                    response
                }
            };
        }
        assert_eq!((&call.method, call.uri.path()), (&Method::POST, "/v1/payment_intents"));
        if self.barred.contains(&(id.clone(), fence)) {
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
        self.made.insert(id, (call.clone(), answer.clone()));
        // The reply to every third payment is lost.
        if call.parse::<usize>().unwrap().is_multiple_of(3) {
            self.lost += 1;
            return broken_off();
        }
        json_reply(answer)
    }
}

fn json_reply(text: String) -> Response<Body> {
    let mut response = reply(200, text);
    let kind = http::HeaderValue::from_static("application/json");
    response.headers_mut().insert(http::header::CONTENT_TYPE, kind);
    response
}

fn broken_off() -> Response<Body> {
    let (sender, body) = frames(1);
    tokio::spawn(async move {
        sender.data(Bytes::from_static(b"{")).await;
        sender.abort("lost").await;
    });
    reply(200, "").map(|_| Body::new(body))
}

/// Asserts that `paying`, which takes HOST, PORT and CALLS, has one effect for each call although
/// replies are lost before and behind the gateway, gets replays, and raises for each reused key.
pub(crate) async fn each_call_has_one_effect(paying: Command) {
    let ledger = Arc::new(Mutex::new(Ledger::default()));
    let answering = Arc::clone(&ledger);
    let api = serve(handler(move |call: HandlerRequest| {
        let answer = answering.lock().unwrap().answer(&call);
        async move { answer }
    }))
    .await;

    let mut config = config(format!("http://{}", api.address).parse().unwrap());
    config.policy.profile = Profile::StripeV1;
    config.policy.on_unknown = OnUnknown::Reconcile;
    config.policy.reconcile_url = Some(format!("http://{}/outcome", api.address).parse().unwrap());
    let gateway = start(config).await;
    let lossy = FaultProxy::before(gateway.local_addr(), 7).await.unwrap();
    lossy.set(FaultProxyRates { lose_reply: 200, ..FaultProxyRates::all(0, Duration::ZERO) });

    let paid = lines(paying, lossy.address(), [CALLS.to_string()]).await;
    let expected: Vec<_> = (0..CALLS)
        .map(|call| {
            let id = format!("pi_{call}");
            json!({ "call": call, "id": id, "replay": id, "reused": "key-reused" })
        })
        .collect();
    assert_eq!(paid, expected);
    let ledger = ledger.lock().unwrap();
    assert_eq!((ledger.moved.len(), ledger.made.len()), (CALLS, CALLS));
    assert!(ledger.moved.values().all(|count| *count == 1), "{:?}", ledger.moved);
    // Replies were lost on both sides, or this has shown nothing.
    assert_eq!(ledger.lost, CALLS.div_ceil(3));
    assert!(lossy.counts().lost_replies > 0, "{:?}", lossy.counts());
}

/// Asserts that `rejected`, which takes HOST, PORT and codes, raises an error for each problem.
pub(crate) async fn each_problem_is_raised(rejected: Command) {
    let server = serve(handler(|call: HandlerRequest| async move {
        let body = String::from_utf8(call.body.to_vec()).unwrap();
        let named = |code: &Code| body.contains(&format!("metadata[code]={}", code.as_str()));
        let code = Code::ALL.into_iter().find(named).unwrap_or_else(|| panic!("no code: {body}"));
        Problem::new(code, format!("Detail of {}.", code.as_str())).response(None).map(Body::from)
    }))
    .await;
    let codes = Code::ALL.map(Code::as_str);
    let seen = lines(rejected, server.address, codes.map(str::to_owned)).await;
    assert_eq!(seen.len(), codes.len());
    for (code, seen) in Code::ALL.into_iter().zip(&seen) {
        assert!(seen["raised"].is_string(), "{} is not raised: {seen}", code.as_str());
        assert_eq!(seen["status"], code.status().as_u16(), "{seen}");
        assert_eq!(seen["code"], code.as_str(), "{seen}");
        assert_eq!(seen["message"], format!("Detail of {}.", code.as_str()), "{seen}");
    }
}

/// The JSON lines that the client prints.
async fn lines<const N: usize>(
    mut client: Command,
    server: SocketAddr,
    more: [String; N],
) -> Vec<Value> {
    client.args([server.ip().to_string(), server.port().to_string()]).args(more);
    let run = move || client.output().unwrap();
    let Output { status, stdout, stderr } = tokio::task::spawn_blocking(run).await.unwrap();
    let errors = String::from_utf8(stderr).unwrap();
    assert!(status.success() && errors.is_empty(), "{errors}");
    let printed = String::from_utf8(stdout).unwrap();
    printed.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}
