//! The frameworks that the layer works with, over real sockets where they have any.

use std::net::SocketAddr;
use std::time::Duration;

use axum::Router;
use axum::routing::post;
use hapax_http::Body;
use hapax_http::server::{ExecutionHandle, RouteOptions};
use http::{HeaderMap, HeaderValue, Request, Response};
use http_body::Frame;
use http_body_util::BodyExt;
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tower::{Layer, ServiceExt};

use super::world::{App, Frames, Runs, Signal, World, app_of, respond};

async fn listener() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    (listener, address)
}

/// What comes back for these bytes until the connection is closed.
async fn exchange(address: SocketAddr, bytes: &[u8]) -> String {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(bytes).await.unwrap();
    let mut answer = Vec::new();
    // A server that refuses a body may reset the connection after its answer.
    let _ = stream.read_to_end(&mut answer).await;
    String::from_utf8_lossy(&answer).into_owned()
}

fn raw(key: &str, body: &str) -> String {
    let length = body.len();
    format!(
        "POST /v1/pay HTTP/1.1\r\nhost: a\r\nconnection: close\r\nauthorization: Bearer alice\r\n\
         idempotency-key: {key}\r\ncontent-length: {length}\r\n\r\n{body}"
    )
}

#[tokio::test]
async fn axum_over_a_socket() {
    let world = World::new();
    let runs = Runs::default();
    let count = runs.clone();
    let app = Router::new()
        .route(
            "/pay",
            post(
                move |axum::Extension(execution): axum::Extension<ExecutionHandle>,
                      body: String| {
                    let run = count.next();
                    async move { format!("{body} run {run} attempt {}", execution.attempt()) }
                },
            ),
        )
        .layer(world.layer(RouteOptions::default()));
    let (listener, address) = listener().await;
    let server =
        tokio::spawn(async { axum::serve(listener, Router::new().nest("/v1", app)).await });

    let first = exchange(address, raw("k", "x").as_bytes()).await;
    assert!(first.starts_with("HTTP/1.1 200 OK\r\n"), "{first}");
    assert!(first.contains("idempotency-replayed: false\r\n"), "{first}");
    assert!(first.ends_with("\r\n\r\nx run 1 attempt 1"), "{first}");
    let replay = exchange(address, raw("\"k\"", "x").as_bytes()).await;
    assert!(replay.contains("idempotency-replayed: true\r\n"), "{replay}");
    assert!(replay.ends_with("\r\n\r\nx run 1 attempt 1"), "{replay}");
    let reuse = exchange(address, raw("k", "y").as_bytes()).await;
    assert!(reuse.starts_with("HTTP/1.1 422 "), "{reuse}");
    assert_eq!(runs.count(), 1);
    server.abort();
}

#[tokio::test]
async fn axum_continues_when_the_client_disconnects() {
    let world = World::new();
    let (runs, go) = (Runs::default(), Signal::new());
    let handler = (runs.clone(), go.clone());
    let app = Router::new()
        .route(
            "/v1/pay",
            post(move || {
                let (runs, go) = handler.clone();
                async move {
                    runs.next();
                    go.wait().await;
                    "done"
                }
            }),
        )
        .layer(world.layer(RouteOptions::default()));
    let (listener, address) = listener().await;
    let server = tokio::spawn(async { axum::serve(listener, app).await });

    let mut client = TcpStream::connect(address).await.unwrap();
    client.write_all(raw("k", "x").as_bytes()).await.unwrap();
    runs.reach(1).await;
    drop(client);
    let copy = exchange(address, raw("k", "x").as_bytes()).await;
    assert!(copy.contains("\"code\":\"in-flight\""), "{copy}");
    go.give();
    let replay = loop {
        let answer = exchange(address, raw("k", "x").as_bytes()).await;
        if !answer.contains("in-flight") {
            break answer;
        }
    };
    assert!(replay.contains("idempotency-replayed: true\r\n") && replay.ends_with("done"));
    assert_eq!(runs.count(), 1);
    server.abort();
}

/// Serves with bare hyper.
async fn serve_with_hyper(app: impl App) -> SocketAddr {
    let (listener, address) = listener().await;
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let service = app
                .clone()
                .map_request(|request: Request<hyper::body::Incoming>| request.map(Body::new));
            let connection = hyper::server::conn::http1::Builder::new()
                .serve_connection(TokioIo::new(stream), TowerToHyperService::new(service));
            tokio::spawn(connection);
        }
    });
    address
}

#[tokio::test]
async fn bare_hyper_with_chunks_and_trailers() {
    let world = World::new();
    let app = world.app(RouteOptions::default(), |request: Request<Body>| async {
        let body = request.into_body().collect().await.unwrap().to_bytes();
        let mut trailers = HeaderMap::new();
        trailers.insert("x-sum", HeaderValue::from_static("7"));
        let frames = [Ok(Frame::data(body)), Ok(Frame::trailers(trailers))];
        let mut response = Response::new(Body::new(Frames::new(frames)));
        response.headers_mut().insert("trailer", HeaderValue::from_static("x-sum"));
        response
    });
    let address = serve_with_hyper(app).await;
    let head = "POST / HTTP/1.1\r\nhost: a\r\nconnection: close\r\nauthorization: Bearer alice\r\n\
                te: trailers\r\nidempotency-key: k\r\n";
    let chunked = format!("{head}transfer-encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n");
    let first = exchange(address, chunked.as_bytes()).await;
    assert!(first.contains("idempotency-replayed: false\r\n"), "{first}");
    assert!(first.contains("\r\n3\r\nabc\r\n0\r\nx-sum: 7\r\n\r\n"), "{first}");
    let whole = format!("{head}content-length: 3\r\n\r\nabc");
    let replay = exchange(address, whole.as_bytes()).await;
    assert!(replay.contains("idempotency-replayed: true\r\n"), "{replay}");
    assert!(replay.ends_with("\r\n3\r\nabc\r\n0\r\nx-sum: 7\r\n\r\n"), "{replay}");
}

#[tokio::test]
async fn wire_03_expect_continue_gets_its_final_status_at_once() {
    let world = World::new();
    let app = world.app(RouteOptions::default(), |request: Request<Body>| async {
        respond(201, request.into_body().collect().await.unwrap().to_bytes())
    });
    let address = serve_with_hyper(app).await;
    let head = |key: &str| {
        format!(
            "POST / HTTP/1.1\r\nhost: a\r\nauthorization: Bearer alice\r\nidempotency-key: {key}\
             \r\nexpect: 100-continue\r\ncontent-length: 5\r\n\r\n"
        )
    };
    let mut bad = TcpStream::connect(address).await.unwrap();
    bad.write_all(head("a, b").as_bytes()).await.unwrap();
    let mut answer = vec![0; 12];
    bad.read_exact(&mut answer).await.unwrap();
    assert_eq!(answer, b"HTTP/1.1 400");

    let mut good = TcpStream::connect(address).await.unwrap();
    good.write_all(head("a").as_bytes()).await.unwrap();
    let mut answer = vec![0; 25];
    good.read_exact(&mut answer).await.unwrap();
    assert_eq!(answer, b"HTTP/1.1 100 Continue\r\n\r\n");
    good.write_all(b"hello").await.unwrap();
    good.read_exact(&mut answer[..12]).await.unwrap();
    assert_eq!(&answer[..12], b"HTTP/1.1 201");
}

#[tokio::test]
async fn wire_19_an_endless_upload_gets_413() {
    let world = World::new();
    let app = world.app(RouteOptions::default(), |_| async { respond(201, "") });
    let address = serve_with_hyper(app).await;
    let mut stream = TcpStream::connect(address).await.unwrap();
    let head = "POST / HTTP/1.1\r\nhost: a\r\nauthorization: Bearer alice\r\nidempotency-key: k\
                \r\ntransfer-encoding: chunked\r\n\r\n";
    stream.write_all(head.as_bytes()).await.unwrap();
    let (mut reader, mut writer) = stream.into_split();
    let upload = tokio::spawn(async move {
        let mut chunk = b"10000\r\n".to_vec();
        chunk.extend([b' '; 0x10000]);
        chunk.extend(b"\r\n");
        while writer.write_all(&chunk).await.is_ok() {}
    });
    let mut answer = vec![0; 12];
    reader.read_exact(&mut answer).await.unwrap();
    assert_eq!(answer, b"HTTP/1.1 413");
    // The server closes: nobody uploads for ever.
    drop(reader);
    tokio::time::timeout(Duration::from_secs(30), upload).await.unwrap().unwrap();
    assert_eq!(world.store.len(), 0);
}

/// A unary gRPC service without generated code: it answers with the status that it is asked for.
#[derive(Clone)]
struct Charge(Runs);

impl tonic::server::NamedService for Charge {
    const NAME: &'static str = "shop.Charge";
}

impl tower::Service<Request<tonic::body::Body>> for Charge {
    type Response = Response<tonic::body::Body>;
    type Error = std::convert::Infallible;
    type Future = std::pin::Pin<
        Box<dyn Future<Output = Result<Self::Response, std::convert::Infallible>> + Send>,
    >;

    fn poll_ready(
        &mut self,
        _: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Result<(), Self::Error>> {
        std::task::Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<tonic::body::Body>) -> Self::Future {
        let run = self.0.next();
        Box::pin(async move {
            let asked = request.into_body().collect().await.unwrap().to_bytes();
            let status = String::from_utf8(asked[5..].to_vec()).unwrap();
            let mut trailers = HeaderMap::new();
            trailers.insert("grpc-status", HeaderValue::from_str(&status).unwrap());
            let frames =
                [Ok(Frame::data(message(&format!("run {run}")))), Ok(Frame::trailers(trailers))];
            let mut response = Response::new(tonic::body::Body::new(Frames::new(frames)));
            response
                .headers_mut()
                .insert("content-type", HeaderValue::from_static("application/grpc"));
            Ok(response)
        })
    }
}

/// A message in its gRPC frame.
fn message(text: &str) -> bytes::Bytes {
    let mut frame = vec![0];
    frame.extend(u32::try_from(text.len()).unwrap().to_be_bytes());
    frame.extend(text.as_bytes());
    frame.into()
}

#[tokio::test(start_paused = true)]
async fn the_layer_works_around_a_tonic_router() {
    let world = World::new();
    let runs = Runs::default();
    let routes = tonic::service::Routes::new(Charge(runs.clone())).prepare();
    let app = world.layer(RouteOptions::default()).layer(routes);
    let ask = async |key: &str, status: &str| {
        let request = Request::post("http://shop/shop.Charge/Make")
            .header("authorization", "Bearer alice")
            .header("idempotency-key", key)
            .header("content-type", "application/grpc")
            .header("te", "trailers")
            .body(tonic::body::Body::new(http_body_util::Full::new(message(status))));
        let response = app.clone().oneshot(request.unwrap()).await.unwrap();
        super::world::read(response).await
    };
    let first = ask("k", "0").await;
    let replay = ask("k", "0").await;
    assert_eq!((first.replayed(), replay.replayed()), (Some("false"), Some("true")));
    assert_eq!(replay.trailers.as_ref().unwrap()["grpc-status"], "0");
    assert_eq!((&replay.body, &replay.trailers), (&first.body, &first.trailers));
    assert_eq!(runs.count(), 1);
    // By its own status, not by HTTP's 200: an exhausted resource is retryable, a precondition final.
    ask("exhausted", "8").await;
    ask("exhausted", "8").await;
    assert_eq!(runs.count(), 3);
    ask("precondition", "9").await;
    ask("precondition", "9").await;
    assert_eq!(runs.count(), 4);
}

/// Services that must be ready before they are called are called when they are.
#[tokio::test(start_paused = true)]
async fn readiness_is_the_inner_services() {
    struct Picky {
        ready: bool,
    }
    impl Clone for Picky {
        fn clone(&self) -> Self {
            Self { ready: false }
        }
    }
    impl tower::Service<Request<Body>> for Picky {
        type Response = Response<Body>;
        type Error = std::convert::Infallible;
        type Future = std::future::Ready<Result<Response<Body>, std::convert::Infallible>>;

        fn poll_ready(
            &mut self,
            _: &mut std::task::Context<'_>,
        ) -> std::task::Poll<Result<(), Self::Error>> {
            self.ready = true;
            std::task::Poll::Ready(Ok(()))
        }

        fn call(&mut self, _: Request<Body>) -> Self::Future {
            assert!(self.ready, "called before it was ready");
            std::future::ready(Ok(respond(201, "")))
        }
    }
    let world = World::new();
    let app = world.layer(RouteOptions::default()).layer(Picky { ready: false });
    let answer = app.oneshot(super::world::pay("k", "{}")).await.unwrap();
    assert_eq!(answer.status(), 201);
}

/// A connection is served while others are in hand, and by one layer for many services.
#[tokio::test(start_paused = true)]
async fn services_of_one_layer_share_its_keys() {
    let world = World::new();
    let layer = world.layer(RouteOptions::default());
    let (here, there) = (
        app_of(&layer, |_| async { respond(201, "here") }),
        app_of(&layer.clone(), |_| async { respond(201, "there") }),
    );
    let pay = || super::world::pay("k", "{}");
    assert_eq!(&*super::world::send(&here, pay()).await.body, b"here");
    assert_eq!(&*super::world::send(&there, pay()).await.body, b"here");
}
