//! The credentials of a try, and their comparison with those of the tries before it.
//!
//! A name stands for one request. Credentials are no part of it: they are renewed while an operation is unfinished,
//! and are never stored. For the server they may be a part of the key: under other credentials the same key is a new
//! operation, and a try a second effect. So each try saves a keyed hash of its credentials before it is sent.
//!
//! *No second effect.* Let F be the first try that may have arrived. A try of which the log does not say that it was
//! not sent may have arrived, so that F is in the log whatever a crash leaves of it.
//! 1. Tries before F had no effect, and may have had any credentials.
//! 2. After F, a try begins only with the hash that is saved, and saves it again. By induction the saved hash stays
//!    that of F, and all tries since F have the credentials of F.
//! 3. A rejected comparison saves nothing but the stop: the hash of the rejected credentials is not saved, so that
//!    a later comparison is with F again. Credentials that were changed and changed back are those of F.
//!
//! *None is stuck.* A stop by this comparison, or by a 401, ends the tries of the calls that have begun one. Each later
//! call, and each resumption, lets the operation be tried again, and compares anew: to find the stop of an earlier call
//! is no execution, in any store, also where the lease of what has stopped has lapsed, as in a file that was opened
//! since. If the credentials of F are gone for good, nothing can determine here whether F had an effect: its caller
//! looks it up, then [acknowledges](crate::Client::acknowledge) or [forgets](crate::Client::forget) the operation.
//!
//! A server that takes the account in place of the credentials is declared so
//! ([`Server::scoped_by_account`]): rule 2 is not needed then.

use std::sync::Arc;

use hapax_saga::{StepContext, StepError, StuckReason};

use super::prepared::PreparedTry;
use super::{CREDENTIALS_CHANGED, ClientState, INVALID_TOKEN, stuck};
use crate::credentials::{Credentials, CredentialsRequest};
use crate::request::RecordedRequest;
use crate::server::Server;

/// Gets the credentials of a try, and compares them with those of earlier ones. Returns their hash, and
/// whether the server has rejected others.
pub(super) async fn credentials(
    at: &StepContext<Arc<ClientState>>,
    request: &RecordedRequest,
    server: &Server,
) -> Result<(String, Credentials, bool), StepError<()>> {
    let (state, id) = (Arc::clone(at), at.id());
    // It stays until there are other credentials: the callback may fail, or be dropped.
    let rejection = state.rejection(&id);
    let rejected = rejection.is_some();
    let credentials = state.credentials(request, rejected).await?;
    if let Some(name) = credentials.unfit(request, &server.key_header) {
        let text = format!(
            "expected credentials from the callback, found `{name}`, which is a header of the connection, of the client or of the request"
        );
        return Err(StepError::not_sent(text));
    }
    let hash = credentials.hash(&state.engine);
    // After F there is one that can be read: `check_key` has compared its key.
    if let Some(before) = at.prepared::<PreparedTry>() {
        let is_same = before.credentials == hash;
        if !is_same && at.age().is_some() && !server.scoped_by_account {
            let text = "expected the credentials of a try that may have arrived, found others: restore them";
            let reason = StuckReason::Step(CREDENTIALS_CHANGED.to_owned());
            return Err(stuck(at, reason, text, false));
        }
        if let Some(reason) = rejection.filter(|_| is_same) {
            let reason = StuckReason::Step(reason.to_owned());
            let text = "expected other credentials after a 401, found the same: supply new ones";
            return Err(stuck(at, reason, text, false));
        }
    }
    Ok((hash, credentials, rejected))
}

/// Ends a try that was answered with 401: new credentials are tried once, if nothing has arrived.
pub(super) fn unauthorized(
    at: &StepContext<Arc<ClientState>>,
    rejected: bool,
    reason: &'static str,
) -> StepError<()> {
    let text = match reason {
        INVALID_TOKEN => {
            "found 401 `invalid-token`: the token does not verify or has expired, and this try executed nothing"
        }
        _ => "found 401: the server rejects the credentials",
    };
    if rejected || at.age().is_some() || at.supplier.is_none() {
        return stuck(at, StuckReason::Step(reason.to_owned()), text, false);
    }
    at.rejected().insert(at.id(), reason);
    StepError::not_sent(text)
}

impl ClientState {
    async fn credentials(
        &self,
        request: &RecordedRequest,
        rejected: bool,
    ) -> Result<Credentials, StepError<()>> {
        let Some(supplier) = &self.supplier else { return Ok(Credentials::new()) };
        let not_sent = |error: &str| StepError::not_sent(error.to_owned());
        let method = request.method.parse().map_err(|_| not_sent("the method is invalid"))?;
        let url = request.uri().ok_or_else(|| not_sent("the URL is invalid"))?;
        let (name, previous_rejected) = (request.name.clone(), rejected);
        let wanted = CredentialsRequest { name, method, url, previous_rejected };
        // The error of the callback may contain a secret, and this text is saved and logged.
        let text = "expected credentials from the callback, found an error, which may be secret and is not shown";
        supplier.supply(wanted).await.map_err(|_| not_sent(text))
    }
}
