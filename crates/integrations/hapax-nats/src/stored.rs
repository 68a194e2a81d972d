//! Messages as a stream stores them, read by a request: its answer has their bytes, which the client library
//! does not parse.

use std::collections::BTreeMap;

use async_nats::jetstream::response::Response;
use async_nats::jetstream::stream::RawMessage;
use async_nats::jetstream::{Context, ErrorCode};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use serde::Deserialize;
use tokio::time::timeout;

use crate::connection::{TIMEOUT, no_reply_text};

#[derive(Deserialize)]
struct Stored {
    message: RawMessage,
}

/// Reads a message of a stream; `None` if there is none of this sequence.
pub(crate) async fn read(
    context: &Context,
    stream: &str,
    sequence: u64,
) -> Result<Option<RawMessage>, async_nats::Error> {
    let wanted = BTreeMap::from([("seq", sequence)]);
    let request = context.request(format!("STREAM.MSG.GET.{stream}"), &wanted);
    let answer: Response<Stored> =
        timeout(TIMEOUT, request).await.map_err(|_| no_reply_text(TIMEOUT))??;
    match answer {
        Response::Ok(Stored { message }) => Ok(Some(message)),
        Response::Err { error } if error.error_code() == ErrorCode::NO_MESSAGE_FOUND => Ok(None),
        Response::Err { error } => Err(error.into()),
    }
}

/// Decodes the payload or the headers of a message.
pub(crate) fn decode(text: &str) -> Result<Bytes, async_nats::Error> {
    Ok(STANDARD.decode(text)?.into())
}
