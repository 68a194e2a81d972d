//! A gateway in front of a service that has the layer itself.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use hapax_core::{Idempotency, MemoryCapacity, MemoryStore, OnUnknown, SystemClock};
use hapax_http::Body;
use hapax_http::server::{IdempotencyLayer, RouteOptions, RoutePolicy, ScopeSource};
use hapax_testkit::http::{ExecutionCount, HandlerGate};
use http::Request;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use tokio::net::TcpListener;
use tower::ServiceExt;
use tower_layer::Layer;

use crate::world::{TIMEOUT, config, post, start, text};

/// A service behind the layer, whose first run waits for the gate.
async fn service(runs: &ExecutionCount, gate: &HandlerGate) -> SocketAddr {
    let store = MemoryStore::new(Arc::new(SystemClock), MemoryCapacity::default());
    let engine = Idempotency::builder(Arc::new(store)).build().unwrap();
    let route = RoutePolicy::new(ScopeSource::shared(), RouteOptions::default()).unwrap();
    let held = (runs.clone(), gate.clone());
    let handler = service_fn(move |_: Request<Body>| {
        let (runs, gate) = held.clone();
        async move {
            let run = runs.next();
            gate.pass().await;
            Ok::<_, Infallible>(text(201, run.to_string()))
        }
    });
    let handler =
        tower::service_fn(move |request| hyper::service::Service::call(&handler, request));
    let service = IdempotencyLayer::new(engine, route).layer(handler);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let service = service.clone();
            let service =
                service_fn(move |request: Request<Incoming>| service.clone().oneshot(request));
            let server = auto::Builder::new(TokioExecutor::new());
            tokio::spawn(async move {
                drop(server.serve_connection(TokioIo::new(stream), service).await);
            });
        }
    });
    address
}

/// The gateway gave up on the first request, which still runs: that it is in flight over there must
/// not become the answer of the key over here.
#[tokio::test(flavor = "multi_thread")]
async fn wire_31_in_flight_at_an_inner_gateway_is_not_stored_by_the_outer_one() {
    let (runs, gate) = (ExecutionCount::new(), HandlerGate::closed());
    let address = service(&runs, &gate).await;
    let mut config = config(format!("http://{address}").parse().unwrap());
    config.policy.upstream_timeout = Duration::from_secs(5);
    config.policy.on_unknown = OnUnknown::Reexecute;
    let gateway = start(config).await;
    let send = || post(gateway.local_addr(), "/pay", "k", "x");
    assert_eq!(send().await.code(), "upstream-timeout");
    for _ in 0..2 {
        let copy = send().await;
        assert_eq!((copy.status, copy.code().as_str()), (409, "in-flight"));
        // What was said to the gateway is not for its clients.
        assert_eq!(
            (copy.header("idempotency-outcome"), copy.header("idempotency-replayed")),
            ("", "false")
        );
    }
    gate.open();
    let first = async {
        loop {
            let answer = send().await;
            if answer.status == 201 {
                return answer;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let first = tokio::time::timeout(TIMEOUT, first).await.expect("the key never became free");
    assert_eq!((first.text().as_str(), first.header("idempotency-replayed")), ("1", "false"));
    let replay = send().await;
    assert_eq!((replay.text().as_str(), replay.header("idempotency-replayed")), ("1", "true"));
    assert_eq!(runs.count(), 1);
}
