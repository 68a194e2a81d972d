//! The exchange of a try: the request as it is sent, and its response.

use bytes::Bytes;
use hapax_core::OperationId;
use hapax_proxy::UpstreamError;
use hapax_saga::StepError;
use http::header::{CONTENT_LENGTH, HOST};
use http::response::Parts;
use http::{HeaderName, HeaderValue, Method, Request};
use http_body_util::Full;

use crate::body::{LargeBody, read_body};
use crate::credentials::Credentials;
use crate::flow::{ClientState, Host};
use crate::request::RecordedRequest;

/// Returns the request of a try, with the key of this operation.
pub(crate) fn outgoing(
    request: &RecordedRequest,
    host: &Host,
    key: Option<&OperationId>,
    credentials: &Credentials,
) -> Option<Request<Full<Bytes>>> {
    let url = request.uri()?;
    let target = url.path_and_query().map_or("/", |target| target.as_str());
    // A URL may have a query and no path.
    let target = if target.starts_with('?') { format!("/{target}") } else { target.to_owned() };
    let method: Method = request.method.parse().ok()?;
    let has_body = !request.body.0.is_empty() || ![Method::GET, Method::HEAD].contains(&method);
    let body = Full::new(request.body.0.clone());
    let mut outgoing = Request::builder().method(method).uri(target).body(body).ok()?;
    let headers = outgoing.headers_mut();
    for (name, value) in &request.headers {
        headers.append(HeaderName::try_from(name).ok()?, HeaderValue::from_bytes(&value.0).ok()?);
    }
    for (name, value) in credentials.headers.iter().chain(&credentials.varying) {
        headers.append(name.clone(), value.clone());
    }
    headers.insert(HOST, HeaderValue::try_from(host.upstream.authority().as_str()).ok()?);
    if has_body {
        headers.insert(CONTENT_LENGTH, HeaderValue::from(request.body.0.len()));
    }
    if let Some((name, value)) = key.and_then(|id| host.server.key(&id.downstream())) {
        headers.insert(name, value);
    }
    Some(outgoing)
}

/// Sends a request, and reads its response to the end.
pub(crate) async fn exchange(
    state: &ClientState,
    host: &Host,
    request: Request<Full<Bytes>>,
    has_caller: bool,
) -> Result<(Parts, Option<LargeBody>), StepError<()>> {
    #[cfg(test)]
    if let Some(double) = &host.double {
        let bytes = double.answer(&request).await.map_err(failed)?;
        let (head, ()) = http::Response::new(()).into_parts();
        return Ok((head, Some(LargeBody::small(bytes))));
    }
    let response = host.upstream.send(request).await.map_err(failed)?;
    let (head, body) = response.into_parts();
    let body = read_body(&state.large, body, has_caller).await.map_err(StepError::unknown)?;
    Ok((head, body))
}

/// Returns the end of a try without a response.
fn failed(error: UpstreamError) -> StepError<()> {
    match error {
        UpstreamError::Busy | UpstreamError::Unreachable(_) => StepError::not_sent(error),
        UpstreamError::Broken(_) | UpstreamError::Timeout | UpstreamError::Upload(_) => {
            StepError::unknown(error)
        }
    }
}
