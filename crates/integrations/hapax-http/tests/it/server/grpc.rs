//! A generated service and client of tonic's, over HTTP/2.

use std::sync::Arc;
use std::time::Duration;

use crate::examples::in_tonic::shop::payments_client::PaymentsClient;
use crate::examples::in_tonic::shop::payments_server::{Payments, PaymentsServer};
use crate::examples::in_tonic::shop::{ChargeReply, ChargeRequest};
use bytes::Bytes;
use hapax_core::OnUnknown;
use hapax_core::machine::HookTiming;
use hapax_core::machine::Verdict;
use hapax_http::server::{ExecutionHandle, ReconcileRequest, ReconciledResponse, RouteOptions};
use tonic::metadata::MetadataValue;
use tonic::transport::server::TcpIncoming;
use tonic::transport::{Channel, Server};
use tonic::{Code, Request, Response, Status};

use super::world::{Mood, Runs, Signal, World, with_policy};

/// Answers as the order says: with an id, or with a status of this number.
struct Shop {
    runs: Runs,
    go: Signal,
}

#[tonic::async_trait]
impl Payments for Shop {
    async fn charge(
        &self,
        request: Request<ChargeRequest>,
    ) -> Result<Response<ChargeReply>, Status> {
        let run = self.runs.next();
        let attempt =
            request.extensions().get::<ExecutionHandle>().map_or(0, ExecutionHandle::attempt);
        let order = request.into_inner().order;
        match order.as_str() {
            "slow" => self.go.wait().await,
            order => {
                if let Ok(code) = order.parse::<i32>() {
                    let mut status =
                        Status::with_details(code.into(), "Zażółć: 100 %", vec![0, 255, 7].into());
                    status.metadata_mut().insert("x-run", MetadataValue::from(run as u64));
                    return Err(status);
                }
            }
        }
        let mut reply = Response::new(ChargeReply { id: format!("run {run} attempt {attempt}") });
        reply.metadata_mut().insert_bin("x-seal-bin", MetadataValue::from_bytes(&[0, 1, 255]));
        Ok(reply)
    }
}

struct Stage {
    world: World,
    client: PaymentsClient<Channel>,
    runs: Runs,
    go: Signal,
}

impl Stage {
    async fn new(options: RouteOptions) -> Self {
        let world = World::new();
        let (runs, go) = (Runs::default(), Signal::new());
        let incoming = TcpIncoming::bind(([127, 0, 0, 1], 0).into()).unwrap();
        let address = incoming.local_addr().unwrap();
        let shop = PaymentsServer::new(Shop { runs: runs.clone(), go: go.clone() });
        let server = Server::builder().layer(world.layer(options)).add_service(shop);
        tokio::spawn(server.serve_with_incoming(incoming));
        let client = PaymentsClient::connect(format!("http://{address}")).await.unwrap();
        Self { world, client, runs, go }
    }

    async fn charge(
        &self,
        key: &'static str,
        order: &str,
        amount: u64,
    ) -> Result<Response<ChargeReply>, Status> {
        let mut request = Request::new(ChargeRequest { order: order.into(), amount });
        let metadata = request.metadata_mut();
        metadata.insert("idempotency-key", MetadataValue::from_static(key));
        metadata.insert("authorization", MetadataValue::from_static("Bearer alice"));
        self.client.clone().charge(request).await
    }

    /// The code of a refusal, and the word that its message begins with.
    async fn refused(&self, key: &'static str, order: &str, amount: u64) -> (Code, String) {
        let status = self.charge(key, order, amount).await.unwrap_err();
        let word = status.message().split(':').next().unwrap().to_owned();
        (status.code(), word)
    }
}

#[tokio::test]
async fn wire_16_a_generated_client_gets_the_replay() {
    let stage = Stage::new(RouteOptions::default()).await;
    let first = stage.charge("k", "o-1", 100).await.unwrap();
    let replay = stage.charge("\"k\"", "o-1", 100).await.unwrap();
    assert_eq!(first.metadata().get("idempotency-replayed").unwrap(), "false");
    assert_eq!(replay.metadata().get("idempotency-replayed").unwrap(), "true");
    assert_eq!(replay.metadata().get_bin("x-seal-bin"), first.metadata().get_bin("x-seal-bin"));
    assert_eq!(first.get_ref().id, "run 1 attempt 1");
    assert_eq!(replay.get_ref(), first.get_ref());
    assert_eq!(stage.runs.count(), 1);
}

#[tokio::test]
async fn wire_16_a_generated_client_gets_a_final_error_again() {
    let stage = Stage::new(RouteOptions::default()).await;
    let first = stage.charge("k", "5", 1).await.unwrap_err();
    let replay = stage.charge("k", "5", 1).await.unwrap_err();
    assert_eq!((replay.code(), replay.message()), (Code::NotFound, "Zażółć: 100 %"));
    assert_eq!(replay.details(), [0, 255, 7]);
    assert_eq!(replay.metadata().get("x-run"), first.metadata().get("x-run"));
    assert_eq!(stage.runs.count(), 1);
}

#[tokio::test]
async fn wire_16_a_generated_client_gets_rejections_of_reused_and_invalid_keys() {
    let stage = Stage::new(RouteOptions::default()).await;
    stage.charge("k", "o-1", 100).await.unwrap();
    assert_eq!(
        stage.refused("k", "o-1", 999).await,
        (Code::FailedPrecondition, "key-reused".into())
    );
    assert_eq!(
        stage.refused("a, b", "o-1", 100).await,
        (Code::InvalidArgument, "invalid-key".into())
    );
    assert_eq!(stage.runs.count(), 1);
}

#[tokio::test]
async fn wire_16_a_generated_client_gets_in_flight() {
    let stage = Arc::new(Stage::new(RouteOptions::default()).await);
    let owner = Arc::clone(&stage);
    let first = tokio::spawn(async move { owner.charge("k", "slow", 1).await });
    stage.runs.reach(1).await;
    let copy = stage.charge("k", "slow", 1).await.unwrap_err();
    assert_eq!(copy.code(), Code::Aborted);
    assert_eq!(copy.metadata().get("grpc-retry-pushback-ms").unwrap(), "1000");
    stage.go.give();
    let first = first.await.unwrap().unwrap();
    let replay = stage.charge("k", "slow", 1).await.unwrap();
    assert_eq!(replay.get_ref(), first.get_ref());
    assert_eq!(stage.runs.count(), 1);
}

#[tokio::test]
async fn wire_16_a_generated_client_gets_store_unavailable() {
    let stage = Stage::new(RouteOptions::default()).await;
    stage.world.store.is(Mood::Down);
    assert_eq!(stage.refused("k", "o-1", 1).await, (Code::Unavailable, "store-unavailable".into()));
    stage.world.store.is(Mood::Well);
    stage.charge("k", "o-1", 1).await.unwrap();
    assert_eq!(stage.runs.count(), 1);
}

#[tokio::test]
async fn wire_16_the_classes_of_grpc_statuses_apply_to_a_generated_client() {
    let stage = Stage::new(with_policy(|policy| policy.terms.on_unknown = OnUnknown::Block)).await;
    // Resource exhausted: nothing happened, so that the next one runs.
    for _ in 0..2 {
        let status = stage.charge("free", "8", 1).await.unwrap_err();
        assert_eq!(status.code(), Code::ResourceExhausted);
    }
    assert_eq!(stage.runs.count(), 2);
    // Internal and unavailable leave it open.
    for (key, order, code) in [("open", "13", Code::Internal), ("away", "14", Code::Unavailable)] {
        assert_eq!(stage.charge(key, order, 1).await.unwrap_err().code(), code);
        let refused = stage.refused(key, order, 1).await;
        assert_eq!(refused, (Code::FailedPrecondition, "outcome-unknown".into()));
    }
    assert_eq!(stage.runs.count(), 4);
}

/// What a hook says of an execution whose client heard *internal*.
async fn after_a_doubt(response: http::Response<Bytes>) -> Result<String, Status> {
    let times = Duration::from_secs(5);
    let options = with_policy(|policy| {
        policy.terms.on_unknown = OnUnknown::Reconcile;
        policy.hook = Some(HookTiming { after: times, timeout: times });
    });
    let hook = move |_: ReconcileRequest| {
        let response = response.clone();
        async move { Verdict::Happened(ReconciledResponse::from(response)) }
    };
    let stage = Stage::new(RouteOptions { reconcile: Some(Arc::new(hook)), ..options }).await;
    assert_eq!(stage.charge("k", "13", 1).await.unwrap_err().code(), Code::Internal);
    let answer = stage.charge("k", "13", 1).await;
    assert_eq!(stage.runs.count(), 1);
    Ok(answer?.into_inner().id)
}

/// A hook speaks HTTP, where a gRPC answer's status has only the head to be in.
#[tokio::test]
async fn wire_15_a_generated_client_gets_the_reconciled_response() {
    let reply = Bytes::from_static(b"\0\0\0\0\x05\x0a\x03o-1");
    let said = http::Response::builder().header("content-type", "application/grpc");
    let happened = said.header("content-length", "10").body(reply.clone()).unwrap();
    assert_eq!(after_a_doubt(happened).await.unwrap(), "o-1");
    let happened = http::Response::builder().header("grpc-status", "0").body(reply).unwrap();
    assert_eq!(after_a_doubt(happened).await.unwrap(), "o-1");
    let said = http::Response::builder().header("grpc-status", "5");
    let happened = said.header("grpc-message", "no such order").body(Bytes::new()).unwrap();
    let status = after_a_doubt(happened).await.unwrap_err();
    assert_eq!((status.code(), status.message()), (Code::NotFound, "no such order"));
}
