//! Answering web pages: preflights, and what scripts may read of answers.

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

/// Answers a request: a preflight by `cors`, anything else by `answer`, with the headers of `cors`
/// and none that the answer had of the kind, kept ones of another page's request included.
///
/// Dropped, it is dropped with the answer.
pub(crate) async fn answer<B, F, A>(
    cors: &CorsLayer,
    request: Request<B>,
    answer: F,
) -> Response<Body>
where
    F: FnOnce(Request<B>) -> A,
    A: Future<Output = Response<Body>>,
{
    // tower-http takes every OPTIONS for a preflight; others are the upstream's to answer.
    if request.method() == Method::OPTIONS && !is_preflight(&request) {
        return answer(request).await;
    }
    let mut answer = Some(answer);
    let inner = service_fn(|request| {
        let answering = answer.take().map(|answer| answer(request));
        async move {
            // It is called once at most.
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

/// As the Fetch standard has it, 4.8.
fn is_preflight<B>(request: &Request<B>) -> bool {
    let headers = request.headers();
    headers.contains_key(ORIGIN) && headers.contains_key(ACCESS_CONTROL_REQUEST_METHOD)
}
