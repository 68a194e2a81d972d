//! A tonic service and its client: two payment requests with one key, one charge.
//!
//! ```text
//! cargo run -p hapax-http --example tonic
//! ```

use std::net::SocketAddr;
use std::time::Duration;

use hapax_core::MemoryStore;
use hapax_http::server::{ExecutionHandle, IdempotencyLayer};
use shop::payments_client::PaymentsClient;
use shop::payments_server::{Payments, PaymentsServer};
use shop::{ChargeReply, ChargeRequest};
use tonic::metadata::MetadataValue;
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;
use tonic::{Code, Request, Response, Status};

/// Made of `shop.proto` by tonic-prost-build.
#[allow(unreachable_pub, reason = "it is made so")]
#[path = "shop.rs"]
pub(crate) mod shop;

type Error = Box<dyn std::error::Error + Send + Sync>;

#[tokio::main]
async fn main() -> Result<(), Error> {
    let incoming = TcpIncoming::bind(([127, 0, 0, 1], 0).into())?;
    let address = incoming.local_addr()?;
    tokio::spawn(serve(incoming, layer()?));
    for line in ask(address).await? {
        println!("{line}");
    }
    Ok(())
}

pub(crate) fn layer() -> Result<IdempotencyLayer, Error> {
    // Metadata are headers: `authorization` names the caller.
    Ok(IdempotencyLayer::builder(MemoryStore::default()).build()?)
}

pub(crate) async fn serve(incoming: TcpIncoming, layer: IdempotencyLayer) -> Result<(), Error> {
    let server = Server::builder().layer(layer.clone()).add_service(PaymentsServer::new(Shop));
    // Until it ends, new requests get `unavailable`; then the store has the outcomes.
    let ending = layer.drain_on_signal(Duration::from_secs(25));
    Ok(server.serve_with_incoming_shutdown(incoming, ending).await?)
}

struct Shop;

#[tonic::async_trait]
impl Payments for Shop {
    async fn charge(
        &self,
        request: Request<ChargeRequest>,
    ) -> Result<Response<ChargeReply>, Status> {
        let Some(execution) = request.extensions().get::<ExecutionHandle>() else {
            return Err(Status::invalid_argument("charges need an idempotency-key"));
        };
        let id = format!("{} under {}", request.get_ref().order, execution.fence());
        Ok(Response::new(ChargeReply { id }))
    }
}

/// Charges, charges again, and charges another amount under the same key.
pub(crate) async fn ask(address: SocketAddr) -> Result<Vec<String>, Error> {
    let mut client = PaymentsClient::connect(format!("http://{address}")).await?;
    let mut heard = Vec::new();
    for amount in [100, 100, 999] {
        let mut request = Request::new(ChargeRequest { order: "o-1".into(), amount });
        let metadata = request.metadata_mut();
        metadata.insert("idempotency-key", MetadataValue::from_static("\"o-1\""));
        metadata.insert("authorization", MetadataValue::from_static("Bearer me"));
        heard.push(match client.charge(request).await {
            Ok(reply) => reply.into_inner().id,
            // Nothing to ask again for: the key belongs to another request.
            Err(status) if status.code() == Code::FailedPrecondition => status.message().into(),
            Err(status) => return Err(status.into()),
        });
    }
    Ok(heard)
}
