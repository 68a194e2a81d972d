//! Real connections, and the example.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::Bytes;
use hapax_http::Body;
use hapax_testkit::http::{Protocol, TestClient};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::world::{
    NOW, OTHER_SECRET, STRIPE_SECRET, World, event, post, send, stripe_delivery, stripe_signature,
};

#[allow(dead_code, reason = "its `main` is for people")]
#[path = "../../examples/receiver.rs"]
mod receiver;

async fn serve(router: Router) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, router).await });
    address
}

#[tokio::test]
async fn deliveries_over_tcp_are_verified_and_execute_once() {
    let world = World::new();
    let address = serve(world.receiver(world.stripe())).await;
    let client = TestClient { address, protocol: Protocol::Http1 };
    let body = event("evt_1");
    let sign = |secret| {
        let signature = stripe_signature(secret, NOW, &body);
        post(&[("stripe-signature", &signature)], body.clone())
            .map(|_| Body::from(Bytes::from(body.clone())))
    };
    client.send(sign(OTHER_SECRET)).await.is_rejected(401, "invalid-signature");
    world.assert_untouched();
    client.send(sign(STRIPE_SECRET)).await.is_first(200, "execution 1");
    client.send(sign(STRIPE_SECRET)).await.is_replay(200, "execution 1");
    assert_eq!(world.handled()[0].body, body);
}

#[tokio::test]
async fn a_connection_that_breaks_off_in_the_body_leaves_nothing() {
    let world = World::new();
    let address = serve(world.receiver(world.stripe())).await;
    let body = event("evt_1");
    let signature = stripe_signature(STRIPE_SECRET, NOW, &body);
    let mut stream = TcpStream::connect(address).await.unwrap();
    let head = format!(
        "POST /hooks HTTP/1.1\r\nhost: x\r\nstripe-signature: {signature}\r\ncontent-length: \
         {}\r\n\r\n",
        body.len() + 1
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    stream.write_all(body.as_bytes()).await.unwrap();
    stream.shutdown().await.unwrap();
    // The server closes the connection once it has dealt with the request.
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer).await;
    let answer = String::from_utf8_lossy(&answer);
    assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 400"), "{answer}");
    world.assert_untouched();
}

#[tokio::test]
async fn the_example_calls_back_once_for_each_event_and_again_after_an_error() {
    let world = World::new();
    let events = Arc::new(Mutex::new(Vec::new()));
    let callback = {
        let events = Arc::clone(&events);
        move |event: receiver::Event| {
            let mut events = events.lock().unwrap();
            events.push((event.id, event.body));
            let is_second = events.len() == 2;
            async move { if is_second { Err("the database is away".to_owned()) } else { Ok(()) } }
        }
    };
    let (router, _) = receiver::router(world.stripe(), world.engine.clone(), callback).unwrap();
    let deliver = |id: &str| {
        let mut request = stripe_delivery(&event(id));
        *request.uri_mut() = "/stripe".parse().unwrap();
        request
    };
    send(&router, deliver("evt_1")).await.is_first(200, "received\n");
    send(&router, deliver("evt_1")).await.is_replay(200, "received\n");
    send(&router, deliver("evt_2")).await.is_first(500, "the database is away");
    send(&router, deliver("evt_2")).await.is_first(200, "received\n");
    let ids: Vec<_> = events.lock().unwrap().iter().map(|(id, _)| id.clone()).collect();
    assert_eq!(ids, ["evt_1", "evt_2", "evt_2"]);
    assert_eq!(events.lock().unwrap()[0].1, event("evt_1"));
}
