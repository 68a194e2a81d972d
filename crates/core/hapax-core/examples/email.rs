//! A process that dies between sending a mail and recording that it did: what a retry then gets.
//!
//! A mail server takes no key, and cannot be asked. So it is one of two: the mail may be sent twice
//! (`reexecute`), or it may not be sent at all and somebody has to look (`block`). For a password
//! reset take the first, for an invoice the second.
//!
//! ```text
//! cargo run -p hapax --example email
//! ```

use std::error::Error;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hapax_core::machine::{Resolution, Resolve};
use hapax_core::{
    Function, FunctionError, Idempotency, Key, MemoryStore, NaturalKey, OnUnknown, Policy, Receipt,
    RunError, Scope,
};
use tokio::sync::oneshot;

/// What the mail server said: the number that it gave the mail.
type Sent = u64;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    run(|line| println!("{line}")).await
}

pub(crate) async fn run(say: impl Fn(String)) -> Result<(), Box<dyn Error>> {
    let store = Arc::new(MemoryStore::default());
    let idempotency = Idempotency::builder(Arc::clone(&store)).build()?;
    let server = MailServer::default();

    let reset = declare(&idempotency, "send password reset", OnUnknown::Reexecute)?;
    die_after_sending(&store, "send password reset", OnUnknown::Reexecute, &server).await?;
    let answer = send(&reset, &server, None).await?;
    say(format!("reset: sent as {}, replayed: {}", answer.value, answer.replayed));
    let answer = send(&reset, &server, None).await?;
    say(format!("reset: sent as {}, replayed: {}", answer.value, answer.replayed));
    say(format!("the server sent {} mails: at least one", server.sent()));

    let invoice = declare(&idempotency, "send invoice", OnUnknown::Block)?;
    die_after_sending(&store, "send invoice", OnUnknown::Block, &server).await?;
    match send(&invoice, &server, None).await {
        Err(RunError::OutcomeUnknown) => say("invoice: nobody knows".into()),
        other => return Err(format!("not blocked: {other:?}").into()),
    }
    say(format!("the server sent {} mails: one more", server.sent()));

    // An operator looks into the server's log, and says what was there.
    let record = idempotency.operation_id(&invoice.scope(&recipient()), &key());
    let seen = idempotency.store().load(&record).await?.stored.ok_or("there is no record")?;
    let resolution = Resolution::Happened(invoice.outcome(&server.sent()));
    let resolve =
        Resolve { expected: seen.fence, force: false, forget: false, resolution, note: None };
    idempotency.resolve(record, resolve).await?;
    let answer = send(&invoice, &server, None).await?;
    say(format!("invoice: sent as {}, replayed: {}", answer.value, answer.replayed));
    Ok(())
}

fn declare(
    idempotency: &Idempotency,
    name: &str,
    on_unknown: OnUnknown,
) -> Result<Function<Sent, String>, FunctionError> {
    let mut policy = Policy::default();
    // Not to be imitated: 30 s, the default, is a long time to watch.
    policy.terms.lease = Policy::MIN_LEASE;
    let function = idempotency.function(name).policy(policy).on_unknown(on_unknown);
    // Until the lease of the process that died has lapsed.
    function.wait(Duration::from_secs(30)).build()
}

fn recipient() -> Scope {
    Scope::of([("recipient", "me@example.com")])
}

/// The seventeenth mail to whoever it is.
fn key() -> Key {
    NaturalKey::new("mail").part("number", 17).key()
}

/// Sends it, and then hangs where that is asked for.
async fn send(
    function: &Function<Sent, String>,
    server: &MailServer,
    hang: Option<oneshot::Sender<()>>,
) -> Result<Receipt<Sent>, RunError<Sent, String>> {
    let server = server.clone();
    let work = |_| async move {
        let sent = server.send();
        if let Some(tell) = hang {
            let _ = tell.send(());
            std::future::pending::<()>().await;
        }
        Ok(sent)
    };
    function.run(&recipient(), &key(), "Dear you", work).await
}

/// Another process over the same store: a runtime of its own, which ends in the middle.
async fn die_after_sending(
    store: &Arc<MemoryStore>,
    name: &'static str,
    on_unknown: OnUnknown,
    server: &MailServer,
) -> Result<(), Box<dyn Error>> {
    let process =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let (tell, told) = oneshot::channel();
    let (store, server) = (Arc::clone(store), server.clone());
    process.spawn(async move {
        let Ok(engine) = Idempotency::builder(store).build() else { return };
        if let Ok(function) = declare(&engine, name, on_unknown) {
            drop(send(&function, &server, Some(tell)).await);
        }
    });
    told.await?;
    process.shutdown_background();
    Ok(())
}

/// A mail server, which numbers what it sends.
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
