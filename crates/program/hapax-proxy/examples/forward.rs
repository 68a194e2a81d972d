//! A reverse proxy in front of one service: it rejects ambiguous requests and drains on Ctrl-C.
//!
//!     cargo run -p hapax-proxy --example forward -- http://127.0.0.1:3000
//!     curl -i 127.0.0.1:8080/

use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use hapax_proxy::{
    BoxedBody, ClientRequest, ConnectOptions, ForwardedRequest, ListenerConfig, Origin, Peer,
    ProxyHandler, Shutdown, ShutdownPhase, Upstream, listener,
};
use http::{Request, Response, StatusCode};
use hyper::body::Incoming;
use tokio::net::TcpListener;

struct Forward(Upstream);

impl ProxyHandler for Forward {
    type Body = BoxedBody;

    async fn answer(self: Arc<Self>, request: ClientRequest) -> Response<BoxedBody> {
        let ClientRequest { request, rejection, peer, switch } = request;
        if let Some(rejection) = rejection {
            eprintln!("rejected a request of {}: {rejection}", peer.addr);
            return status(StatusCode::BAD_REQUEST);
        }
        match ForwardedRequest::new(request, peer, switch.as_ref(), &self.0).pass(&self.0).await {
            Ok(response) => response.map(BoxedBody::new),
            Err(error) => {
                eprintln!("{error}");
                status(StatusCode::BAD_GATEWAY)
            }
        }
    }

    async fn overloaded(self: Arc<Self>, _: Peer, _: Request<Incoming>) -> Response<BoxedBody> {
        status(StatusCode::SERVICE_UNAVAILABLE)
    }
}

fn status(status: StatusCode) -> Response<BoxedBody> {
    let mut response = Response::new(BoxedBody::default());
    *response.status_mut() = status;
    response
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let service = std::env::args().nth(1).ok_or("expected the URL of a service")?.parse()?;
    let origin = Origin::of(&service).ok_or("expected http://HOST:PORT")?;
    let upstream = Upstream::new(origin, Duration::from_secs(30), 100, ConnectOptions::default());
    let clients = TcpListener::bind("127.0.0.1:8080").await?;
    let shutdown = Shutdown::default();
    let serving = listener::serve(
        clients,
        Arc::new(Forward(upstream)),
        ListenerConfig::default(),
        shutdown.clone(),
    );
    let serving = tokio::spawn(serving);
    tokio::signal::ctrl_c().await?;
    shutdown.enter(ShutdownPhase::Draining);
    serving.await?;
    Ok(())
}
