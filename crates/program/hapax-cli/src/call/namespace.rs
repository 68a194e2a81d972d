//! The namespaces that a journal on a server knows: a record of each, beside its operations. Under another namespace a
//! name has another key, and would be sent again.

use std::sync::Arc;
use std::time::Duration;

use hapax_core::store::Inspect;
use hapax_core::{
    Claim, Fingerprint, FingerprintScheme, Idempotency, Key, Namespace, OnUnknown,
    OperationRequest, Outcome, Policy, Scope,
};

use crate::exit::{CliError, with_causes};
use crate::keys::TIMEOUT;

/// Scheme of the record, and format of its outcome.
const SCHEME: &str = "hapax-call/1";

/// Time for which the record is kept: jobs may run once a year.
const KEPT: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);

/// The first use of a namespace.
struct FirstUse(FingerprintScheme);

impl OperationRequest for FirstUse {
    fn scheme(&self) -> FingerprintScheme {
        self.0.clone()
    }

    fn fingerprint(&self, _: &FingerprintScheme) -> Option<Fingerprint> {
        Some(Fingerprint::builder(SCHEME).finish())
    }
}

/// Notes that calls use a namespace of the journal at `place`, and says so of one that is new there. If it must
/// exist, a new one is rejected.
pub(super) async fn note(
    store: Arc<dyn Inspect>,
    namespace: &Namespace,
    must_exist: bool,
    place: &str,
) -> Result<(), CliError> {
    let failed = |error: &dyn std::error::Error| {
        CliError::exit(69, "journal", format!("the journal at {place}: {}", with_causes(error)))
    };
    let engine = Idempotency::builder(store).namespace(namespace.as_str()).store_timeout(TIMEOUT);
    let engine = engine.build().map_err(|error| failed(&error))?;
    let scope = Scope::of([("hapax-call", "namespace")]);
    let key = Key::new("namespace").map_err(|error| failed(&error))?;
    let seen = engine.load(&engine.operation_id(&scope, &key)).await;
    if seen.map_err(|error| failed(&error))?.stored.is_some() {
        return Ok(());
    }
    if must_exist {
        return Err(CliError::exit(
            69,
            "journal",
            format!(
                "expected a namespace that calls have used in the journal at {place}, found {namespace}: correct --namespace \
                 (HAPAX_JOURNAL_NAMESPACE), or leave --journal-must-exist out once; under another namespace a name that was \
                 sent is sent again, under another key"
            ),
        ));
    }
    let first = FirstUse(FingerprintScheme::new(SCHEME).map_err(|error| failed(&error))?);
    let mut policy = Policy::default();
    policy.terms.retention = KEPT;
    policy.terms.on_unknown = OnUnknown::Reexecute;
    let claim = engine.claim(&scope, &key, &first, &policy).await;
    if let Claim::Execute(lease) = claim.map_err(|error| failed(&error))? {
        let completed = lease.complete(Outcome::new(SCHEME, ""), None).await;
        completed.map_err(|error| failed(&error))?;
        eprintln!(
            "hapax: the namespace {namespace} is new in the journal at {place}: a name that was sent under another namespace \
             is sent again, under another key; --journal-must-exist rejects this"
        );
    }
    Ok(())
}
