//! An axum extractor for sqlx.

use std::ops::{Deref, DerefMut};

use axum_core::extract::FromRequestParts;
use hapax_http::axum::{InTransaction, TransactionRejection};
use http::request::Parts;
use sqlx::{PgConnection, Postgres, Transaction};

/// An axum extractor: the connection of the handler's transaction, which begins here and commits
/// with the response. The route has [`SqlxTransactions`](crate::SqlxTransactions).
///
/// ```
/// use hapax::SqlxTx;
/// use hapax::http::axum::HandlerError;
///
/// async fn close(mut tx: SqlxTx) -> Result<&'static str, HandlerError> {
///     sqlx::query("UPDATE accounts SET open = false WHERE id = 1").execute(&mut *tx).await?;
///     Ok("closed")
/// }
/// # let _: axum::Router = axum::Router::new().route("/close", axum::routing::post(close));
/// ```
#[derive(Debug)]
pub struct SqlxTx(InTransaction<Transaction<'static, Postgres>>);

impl Deref for SqlxTx {
    type Target = PgConnection;

    fn deref(&self) -> &PgConnection {
        &self.0
    }
}

impl DerefMut for SqlxTx {
    fn deref_mut(&mut self) -> &mut PgConnection {
        &mut self.0
    }
}

impl<S: Send + Sync> FromRequestParts<S> for SqlxTx {
    type Rejection = TransactionRejection;

    async fn from_request_parts(
        parts: &mut Parts,
        state: &S,
    ) -> Result<Self, TransactionRejection> {
        InTransaction::from_request_parts(parts, state).await.map(Self)
    }
}
