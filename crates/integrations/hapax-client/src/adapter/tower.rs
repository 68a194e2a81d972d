//! A layer in front of a tower service that sends HTTP requests.

mod body;
mod future;
mod layer;
mod service;

pub use body::OperationBody;
pub use future::OperationFuture;
pub use layer::OperationLayer;
pub use service::{OperationService, OperationServiceError};
