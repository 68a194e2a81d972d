//! CORS headers of responses, and responses to preflights.

use std::convert::Infallible;
use std::future::Future;

use hapax_http::Body;
use http::header::{
    ACCESS_CONTROL_ALLOW_CREDENTIALS, ACCESS_CONTROL_ALLOW_ORIGIN, ACCESS_CONTROL_EXPOSE_HEADERS,
    ACCESS_CONTROL_REQUEST_METHOD, ORIGIN,
};
use http::{Method, Request, Response};
use tower::service_fn;
use tower_http::cors::CorsLayer;
use tower_layer::Layer;
use tower_service::Service;

/// Answers a preflight with `cors`, and any other request with `answer` and the headers of `cors`.
/// CORS headers in the response of `answer` are removed, including stored ones for another page.
///
/// Dropping the future drops that of `answer`.
pub(crate) async fn answer<B, F, A>(
    cors: &CorsLayer,
    request: Request<B>,
    answer: F,
) -> Response<Body>
where
    F: FnOnce(Request<B>) -> A,
    A: Future<Output = Response<Body>>,
{
    // tower-http takes every OPTIONS request for a preflight; others go to the upstream.
    if request.method() == Method::OPTIONS && !is_preflight(&request) {
        return answer(request).await;
    }
    let mut answer = Some(answer);
    let inner = service_fn(|request| {
        let answering = answer.take().map(|answer| answer(request));
        async move {
            // It is called at most once.
            let Some(answering) = answering else { return Ok(Response::new(Body::empty())) };
            let mut response = answering.await;
            for name in [
                ACCESS_CONTROL_ALLOW_ORIGIN,
                ACCESS_CONTROL_ALLOW_CREDENTIALS,
                ACCESS_CONTROL_EXPOSE_HEADERS,
            ] {
                response.headers_mut().remove(name);
            }
            Ok::<_, Infallible>(response)
        }
    });
    match cors.layer(inner).call(request).await {
        Ok(response) => response,
        Err(never) => match never {},
    }
}

/// Returns whether a request is a preflight (Fetch standard, 4.8).
fn is_preflight<B>(request: &Request<B>) -> bool {
    let headers = request.headers();
    headers.contains_key(ORIGIN) && headers.contains_key(ACCESS_CONTROL_REQUEST_METHOD)
}
