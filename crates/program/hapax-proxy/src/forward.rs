//! Forwarding of a request to an upstream, and of its response to the client.

use std::time::Duration;

use bytes::Bytes;
use http::header::{CONTENT_LENGTH, HeaderMap, HeaderValue};
use http::uri::PathAndQuery;
use http::{Request, Response, Uri, Version};

use crate::handler::Peer;
use crate::tunnel::{self, Switch};
use crate::upstream::{BeforeSend, ReceivedBody, Upstream, UpstreamError};
use crate::{BodyError, headers};

/// A request in the form in which an upstream receives it.
#[derive(Debug)]
pub struct ForwardedRequest<B> {
    request: Request<B>,
    /// The switch of the client's connection, and the protocol, if the upstream agrees.
    switching: Option<(Switch, HeaderValue)>,
}

impl<B> ForwardedRequest<B>
where
    B: http_body::Body<Data = Bytes, Error: Into<BodyError>> + Send + 'static,
{
    /// Converts a request of `peer` to the form for `upstream`.
    ///
    /// With `switch`, the connection may leave HTTP for a protocol that the request names; without,
    /// it stays in HTTP.
    #[must_use]
    pub fn new(
        request: Request<B>,
        peer: Peer,
        switch: Option<&Switch>,
        upstream: &Upstream,
    ) -> Self {
        let (mut parts, body) = request.into_parts();
        let switching = tunnel::wanted(&parts, body.is_end_stream(), switch);
        let length_said = parts.headers.contains_key(CONTENT_LENGTH);
        headers::to_upstream(&mut parts.headers, peer, upstream.authority());
        if body.is_end_stream() {
            headers::declare_empty_length(&mut parts.headers, &parts.method, length_said);
        }
        if let Some((_, protocol)) = &switching {
            tunnel::add_upgrade(&mut parts.headers, protocol);
        }
        let mut request = Request::new(body);
        *request.method_mut() = parts.method;
        *request.uri_mut() = origin_form(parts.uri);
        *request.headers_mut() = parts.headers;
        Self { request, switching }
    }

    /// Returns the headers that the upstream receives.
    pub fn headers_mut(&mut self) -> &mut HeaderMap {
        self.request.headers_mut()
    }

    /// Calls `fill` with the headers whenever the request is sent on a connection, and with the time for which
    /// the response is awaited from then on. An upload that makes progress extends it.
    #[must_use]
    pub fn before_send(mut self, fill: fn(&mut HeaderMap, Duration)) -> Self {
        self.request.extensions_mut().insert(BeforeSend(fill));
        self
    }

    /// Sends the request by [`Upstream::send`], and returns the response for the client.
    ///
    /// # Errors
    /// [`UpstreamError`] shows whether anything of the request was sent.
    pub async fn send(self, upstream: &Upstream) -> Result<Response<ReceivedBody>, UpstreamError> {
        let Self { request, switching } = self;
        upstream.send(request).await.map(|response| to_client(response, switching))
    }

    /// Sends the request by [`Upstream::pass`], and returns the response for the client.
    ///
    /// # Errors
    /// Those of [`send`](Self::send).
    pub async fn pass(self, upstream: &Upstream) -> Result<Response<ReceivedBody>, UpstreamError> {
        let Self { request, switching } = self;
        upstream.pass(request).await.map(|response| to_client(response, switching))
    }
}

fn to_client(
    mut response: Response<ReceivedBody>,
    switching: Option<(Switch, HeaderValue)>,
) -> Response<ReceivedBody> {
    let switched = switching.and_then(|(switch, _)| switch.follow(&mut response));
    headers::to_client(response.headers_mut());
    if let Some(protocol) = switched {
        tunnel::add_upgrade(response.headers_mut(), &protocol);
    }
    // The client gets its own version of HTTP, regardless of the upstream's.
    *response.version_mut() = Version::HTTP_11;
    response
}

/// Returns the target without scheme and authority, byte for byte (RFC 9112 3.2.1).
fn origin_form(uri: Uri) -> Uri {
    uri.into_parts().path_and_query.unwrap_or_else(|| PathAndQuery::from_static("/")).into()
}
