//! An extractor and an error for axum handlers on routes with
//! [transactions](crate::server::transaction).

use std::error::Error;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::time::Duration;

use axum_core::extract::FromRequestParts;
use axum_core::response::{IntoResponse, Response};
use http::request::Parts;

use crate::body::Body;
use crate::classify::{ClassifiedResponse, OutcomeClass};
use crate::problem::{Code, Problem};
use crate::server::transaction::{HandlerErrorExtension, TakeTxError, Tx, TxHandle};

/// An extractor of the handler's transaction, which begins here and commits with the response. `T`
/// is the type of the route's database, such as `hapax_postgres::PgTx`.
///
/// ```
/// # struct PgTx;
/// # impl PgTx {
/// #     async fn execute(&self, _: &str, _: &[u8]) -> std::io::Result<()> { Ok(()) }
/// # }
/// use hapax_http::axum::{HandlerError, InTransaction};
/// async fn close(InTransaction(tx): InTransaction<PgTx>) -> Result<&'static str, HandlerError> {
///     tx.execute("UPDATE accounts SET open = false WHERE id = 1", &[]).await?;
///     Ok("closed")
/// }
/// let app: axum::Router = axum::Router::new().route("/close", axum::routing::post(close));
/// # drop(app);
/// ```
#[derive(Debug)]
pub struct InTransaction<T: Send + 'static>(pub Tx<T>);

impl<T: Send + 'static> Deref for InTransaction<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T: Send + 'static> DerefMut for InTransaction<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.0
    }
}

/// Reasons for which a handler has no transaction. Nothing was written, and the key is released.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TransactionRejection {
    /// The request is on no route with transactions, or has no key.
    #[error(
        "expected a route with `transactions` and a request with a key: set `RouteOptions::transactions`"
    )]
    NoRoute,
    /// A transaction cannot begin.
    #[error(transparent)]
    Take(#[from] TakeTxError),
}

impl<S: Send + Sync, T: Send + 'static> FromRequestParts<S> for InTransaction<T> {
    type Rejection = TransactionRejection;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, TransactionRejection> {
        let handle = parts.extensions.get::<TxHandle>().ok_or(TransactionRejection::NoRoute)?;
        Ok(Self(handle.take().await?))
    }
}

impl IntoResponse for TransactionRejection {
    fn into_response(self) -> Response {
        tracing::warn!(error = &self as &dyn Error, "a handler has no transaction");
        let detail = "No transaction could begin. Nothing was done.";
        let problem = match self {
            Self::Take(
                TakeTxError::Begin(_)
                | TakeTxError::Lease(_)
                | TakeTxError::TimedOut
                | TakeTxError::Shutdown,
            ) => {
                let soon = Duration::from_secs(1);
                Problem::new(Code::StoreUnavailable, detail).retry_after(soon)
            }
            // The handler is at fault, and would be again on a retry.
            Self::Take(_) | Self::NoRoute => Problem::new(Code::HandlerFailed, detail),
        };
        let mut response = response(&problem);
        response.extensions_mut().insert(ClassifiedResponse(OutcomeClass::Retryable));
        response
    }
}

/// The error of a handler in a transaction; `?` converts any error to it. Everything is rolled back
/// and the key released. If the transaction lost a race, the handler is called again, and the
/// client gets the response of that call; else the client gets 500 `handler-failed`, and the log
/// has the error.
///
/// A handler that took no transaction, or is in a route without, gives its client the same
/// response, which is classified like any 500: its effect is unknown.
pub struct HandlerError(Arc<dyn Error + Send + Sync>);

impl<E: Into<Box<dyn Error + Send + Sync>>> From<E> for HandlerError {
    fn from(error: E) -> Self {
        Self(error.into().into())
    }
}

impl fmt::Debug for HandlerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("HandlerError").field(&self.0).finish()
    }
}

impl IntoResponse for HandlerError {
    fn into_response(self) -> Response {
        let problem = Problem::new(Code::HandlerFailed, "The request failed.");
        let mut response = response(&problem);
        response.extensions_mut().insert(HandlerErrorExtension(self.0));
        response
    }
}

fn response(problem: &Problem) -> Response {
    problem.response(None).map(|body| axum_core::body::Body::new(Body::from(body)))
}
