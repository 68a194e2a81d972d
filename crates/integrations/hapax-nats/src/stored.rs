//! Messages as a stream stores them, read by a request: its answer has their bytes, which the client library
//! does not parse.

use async_nats::jetstream::response::Response;
use async_nats::jetstream::stream::RawMessage;
use async_nats::jetstream::{Context, ErrorCode};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use tokio::time::timeout;

use crate::connection::{TIMEOUT, no_reply_text};

#[derive(Serialize)]
struct Wanted<'a> {
    seq: u64,
    /// A subject, which may have wildcards: the first message from `seq` on that has it. Servers before 2.9 ignore this.
    #[serde(skip_serializing_if = "Option::is_none")]
    next_by_subj: Option<&'a str>,
}

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
    request(context, stream, Wanted { seq: sequence, next_by_subj: None }).await
}

/// Reads the first message from a sequence on that has one of these subjects; `None` if there is none.
pub(crate) async fn read_next(
    context: &Context,
    stream: &str,
    sequence: u64,
    subjects: &[String],
) -> Result<Option<RawMessage>, async_nats::Error> {
    let mut first: Option<RawMessage> = None;
    for subject in subjects {
        let wanted = Wanted { seq: sequence, next_by_subj: Some(subject) };
        let found = request(context, stream, wanted).await?;
        first = [first, found].into_iter().flatten().min_by_key(|message| message.sequence);
        if first.as_ref().is_some_and(|first| first.sequence == sequence) {
            break;
        }
    }
    Ok(first)
}

async fn request(
    context: &Context,
    stream: &str,
    wanted: Wanted<'_>,
) -> Result<Option<RawMessage>, async_nats::Error> {
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
