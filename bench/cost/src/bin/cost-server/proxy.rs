//! A reverse proxy that is hyper and nothing else: a listener, a pooled client, another authority in
//! each URI.

use std::sync::Arc;

use hapax_bench_cost::Any;
use hyper::body::Incoming;
use hyper::http::uri::{Authority, Scheme, Uri};
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::TcpListener;

struct Proxy {
    client: Client<HttpConnector, Incoming>,
    upstream: Authority,
}

/// Forwards every request to `upstream`, an address.
pub(crate) async fn run(listener: TcpListener, upstream: &str) -> Result<(), Any> {
    let mut connector = HttpConnector::new();
    connector.set_nodelay(true);
    let client = Client::builder(TokioExecutor::new()).build(connector);
    let proxy = Arc::new(Proxy { client, upstream: upstream.parse()? });
    loop {
        let (stream, _) = listener.accept().await?;
        stream.set_nodelay(true)?;
        let proxy = Arc::clone(&proxy);
        tokio::spawn(async move {
            let service = service_fn(|request| proxy.forward(request));
            let connection = hyper::server::conn::http1::Builder::new();
            // An error is a client that has left.
            let _ = connection.serve_connection(TokioIo::new(stream), service).await;
        });
    }
}

impl Proxy {
    async fn forward(&self, mut request: Request<Incoming>) -> Result<Response<Incoming>, Any> {
        let mut uri = std::mem::take(request.uri_mut()).into_parts();
        uri.scheme = Some(Scheme::HTTP);
        uri.authority = Some(self.upstream.clone());
        *request.uri_mut() = Uri::from_parts(uri)?;
        Ok(self.client.request(request).await?)
    }
}
