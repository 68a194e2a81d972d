//! The layer.

use tower_layer::Layer;

use crate::adapter::tower::OperationService;
use crate::client::Client;

/// A layer that sends each request with the extension [`Operation`](crate::Operation) by a client. Other
/// requests go to the inner service, or are rejected by a [strict](crate::ClientBuilder::strict) client.
///
/// The inner service gets no operation. A layer around this one sees one request and one response of each:
/// a retry there gets the stored response, and nothing is sent twice.
#[derive(Clone, Debug)]
pub struct OperationLayer {
    client: Client,
}

impl OperationLayer {
    /// Creates a layer of a client.
    #[must_use]
    pub const fn new(client: Client) -> Self {
        Self { client }
    }
}

impl<S> Layer<S> for OperationLayer {
    type Service = OperationService<S>;

    fn layer(&self, inner: S) -> OperationService<S> {
        OperationService::new(self.client.clone(), inner)
    }
}
