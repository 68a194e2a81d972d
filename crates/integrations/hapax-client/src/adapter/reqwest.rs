//! Requests of reqwest.

use bytes::Bytes;
use reqwest::{Request, Response, ResponseBuilderExt};

use crate::adapter::Operation;
use crate::client::Client;
use crate::error::{RequestError, SendError};

impl Client {
    /// Executes a request of reqwest as an operation, as [`OutgoingRequest::send`] does. Method, URL,
    /// headers and body are those of the request; its timeout is the time for which this call waits,
    /// unless the operation has one.
    ///
    /// No client of reqwest takes part: its default headers, cookies, proxies and redirects do not
    /// apply, and bodies are not decompressed.
    ///
    /// ```no_run
    /// # async fn pay(client: hapax_client::Client) -> Result<(), Box<dyn std::error::Error>> {
    /// let request = reqwest::Client::new()
    ///     .post("https://api.example.com/payments")
    ///     .body("1999 cents")
    ///     .build()?;
    /// let response = client.execute("invoice/17", request).await?.error_for_status()?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`SendError`]; [`RequestError::Stream`] if the body is no bytes.
    ///
    /// [`OutgoingRequest::send`]: crate::OutgoingRequest::send
    pub async fn execute(
        &self,
        operation: impl Into<Operation>,
        request: Request,
    ) -> Result<Response, SendError> {
        let body = match request.body() {
            Some(body) => {
                let bytes = body.as_bytes().ok_or(RequestError::Stream)?;
                Bytes::copy_from_slice(bytes)
            }
            None => Bytes::new(),
        };
        let target = (request.method().clone(), request.url().as_str().to_owned());
        let (headers, wait) = (request.headers(), request.timeout().copied());
        let answer = operation.into().send(self, target, headers, body, wait).await?;
        let mut response = http::Response::builder()
            .status(answer.status)
            .url(request.url().clone())
            .body(answer.body)
            // It has a status and nothing else that may be invalid.
            .map_err(SendError::journal)?;
        *response.headers_mut() = answer.headers;
        Ok(response.into())
    }
}
