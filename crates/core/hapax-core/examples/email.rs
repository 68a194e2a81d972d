//! Retries of a mail whose process crashed after it sent the mail and before it recorded that.
//!
//! A mail server takes no key and cannot be queried. So either the mail may be sent twice
//! (`reexecute`), or it may not be sent at all and an operator has to decide (`block`). Use the
//! first for a password reset, the second for an invoice.
//!
//! ```text
//! cargo run -p hapax --example email
//! ```

use std::error::Error;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hapax_core::machine::{DefiniteVerdict, Resolve};
use hapax_core::{
    Function, FunctionError, Idempotency, Key, MemoryStore, NaturalKey, OnUnknown, Policy, Receipt,
    RunError, Scope,
};
use tokio::sync::oneshot;

/// The number that the mail server gave the mail.
type Sent = u64;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    run(|line| println!("{line}")).await
}

pub(crate) async fn run(print: impl Fn(String)) -> Result<(), Box<dyn Error>> {
    let store = Arc::new(MemoryStore::default());
    let idempotency = Idempotency::builder(Arc::clone(&store)).build()?;
    let server = MailServer::default();

    let reset = declare(&idempotency, "send password reset", OnUnknown::Reexecute)?;
    crash_after_sending(&store, "send password reset", OnUnknown::Reexecute, &server).await?;
    let answer = send(&reset, &server, None).await?;
    print(format!("reset: sent as {}, replayed: {}", answer.value, answer.replayed));
    let answer = send(&reset, &server, None).await?;
    print(format!("reset: sent as {}, replayed: {}", answer.value, answer.replayed));
    print(format!("the server sent {} mails: at least one", server.sent()));

    let invoice = declare(&idempotency, "send invoice", OnUnknown::Block)?;
    crash_after_sending(&store, "send invoice", OnUnknown::Block, &server).await?;
    match send(&invoice, &server, None).await {
        Err(RunError::OutcomeUnknown) => print("invoice: the outcome is unknown".into()),
        other => return Err(format!("not blocked: {other:?}").into()),
    }
    print(format!("the server sent {} mails: one more", server.sent()));

    // An operator reads the log of the server and resolves the operation.
    let record = idempotency.operation_id(&invoice.scope(&recipient()), &key());
    let seen = idempotency.store().load(&record).await?.stored.ok_or("there is no record")?;
    let resolution = DefiniteVerdict::Happened(invoice.outcome(&server.sent()));
    let resolve = Resolve {
        expected: seen.fence,
        force: false,
        forget: false,
        resolution,
        note: None,
        restart: false,
    };
    idempotency.resolve(record, resolve).await?;
    let answer = send(&invoice, &server, None).await?;
    print(format!("invoice: sent as {}, replayed: {}", answer.value, answer.replayed));
    Ok(())
}

fn declare(
    idempotency: &Idempotency,
    name: &str,
    on_unknown: OnUnknown,
) -> Result<Function<Sent, String>, FunctionError> {
    let mut policy = Policy::default();
    // For this example only: the default of 30 s takes long to watch.
    policy.terms.lease = Policy::MIN_LEASE;
    let function = idempotency.function(name).policy(policy).on_unknown(on_unknown);
    // Waits until the lease of the crashed process has lapsed.
    function.wait(Duration::from_secs(30)).build()
}

fn recipient() -> Scope {
    Scope::of([("recipient", "me@example.com")])
}

/// Returns the key of the seventeenth mail to the recipient.
fn key() -> Key {
    NaturalKey::new("mail").part("number", 17).key()
}

/// Sends the mail, then hangs if `hang` is set.
async fn send(
    function: &Function<Sent, String>,
    server: &MailServer,
    hang: Option<oneshot::Sender<()>>,
) -> Result<Receipt<Sent>, RunError<Sent, String>> {
    let server = server.clone();
    let send = |_| async move {
        let number = server.send();
        if let Some(sent) = hang {
            let _ = sent.send(());
            std::future::pending::<()>().await;
        }
        Ok(number)
    };
    function.run(&recipient(), &key(), "Dear you", send).await
}

/// Runs another process with the same store: a separate runtime that ends after the mail is sent.
async fn crash_after_sending(
    store: &Arc<MemoryStore>,
    name: &'static str,
    on_unknown: OnUnknown,
    server: &MailServer,
) -> Result<(), Box<dyn Error>> {
    let process =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let (sending, sent) = oneshot::channel();
    let (store, server) = (Arc::clone(store), server.clone());
    process.spawn(async move {
        let Ok(engine) = Idempotency::builder(store).build() else { return };
        if let Ok(function) = declare(&engine, name, on_unknown) {
            drop(send(&function, &server, Some(sending)).await);
        }
    });
    sent.await?;
    process.shutdown_background();
    Ok(())
}

/// A mail server that numbers its mails.
#[derive(Clone, Default)]
struct MailServer(Arc<Mutex<u64>>);

impl MailServer {
    fn send(&self) -> Sent {
        let mut sent = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *sent += 1;
        *sent
    }

    fn sent(&self) -> u64 {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
