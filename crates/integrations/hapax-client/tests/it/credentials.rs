//! Credentials: supplied for each try, compared, and rejected.

use std::num::NonZeroU32;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use hapax_client::{
    Client, Credentials, CredentialsError, CredentialsRequest, Journal, PendingState, SendError,
    Server,
};
use hapax_core::Idempotency;
use hapax_saga::SagaOperator;
use http::{HeaderName, HeaderValue};

use crate::bank::{Act, Bank, answer};
use crate::responses::problem;
use crate::world::{open, store};

/// Tokens of the next tries; the last one stays.
#[derive(Clone, Default)]
struct Tokens(Arc<Mutex<(Vec<&'static str>, Vec<bool>)>>);

impl Tokens {
    fn new(tokens: &[&'static str]) -> Self {
        let this = Self::default();
        this.set(tokens);
        this
    }

    fn set(&self, tokens: &[&'static str]) {
        self.0.lock().unwrap().0 = tokens.to_vec();
    }

    /// Returns for each call whether the server had rejected the credentials before.
    fn rejected(&self) -> Vec<bool> {
        self.0.lock().unwrap().1.clone()
    }

    fn supply(&self, request: &CredentialsRequest) -> Result<Credentials, CredentialsError> {
        let mut state = self.0.lock().unwrap();
        state.1.push(request.previous_rejected);
        let token = match state.0.len() {
            0 => return Err("the vault is sealed".into()),
            1 => state.0[0],
            _ => state.0.remove(0),
        };
        Ok(Credentials::bearer(token)?)
    }
}

async fn client(bank: &Bank, server: Server, tokens: &Tokens) -> Client {
    let tokens = tokens.clone();
    let supply = move |request| std::future::ready(tokens.supply(&request));
    open(bank, server).credentials(supply).build().await.unwrap()
}

async fn send(client: &Client, bank: &Bank) -> Result<u16, SendError> {
    let sent = client.post(bank.url("/")).operation("n").send().await?;
    Ok(sent.response.status.as_u16())
}

fn tokens_of(bank: &Bank) -> Vec<String> {
    let arrived = bank.arrived();
    arrived.iter().map(|it| it.header("authorization").unwrap_or("none").to_owned()).collect()
}

#[tokio::test]
async fn other_credentials_are_rejected_after_a_try_that_may_have_arrived() {
    let bank = Bank::start().await;
    bank.act([Act::CutAnswer(10)]);
    let tokens = Tokens::new(&["one", "two"]);
    let client = client(&bank, Server::hapax(), &tokens).await;
    let end = send(&client, &bank).await;
    assert!(matches!(end, Err(SendError::CredentialsChanged)), "{end:?}");
    assert_eq!(tokens_of(&bank), ["Bearer one"]);
    let end = send(&client, &bank).await;
    assert!(matches!(end, Err(SendError::CredentialsChanged)), "still others: {end:?}");
    tokens.set(&["one"]);
    assert_eq!(send(&client, &bank).await.unwrap(), 201);
    assert_eq!(tokens_of(&bank), ["Bearer one", "Bearer one"]);
    assert_eq!(bank.effects(), [1]);
}

/// Each send decides that the operation is tried again. A job that repeats it every minute, with the
/// wrong credentials or another declaration, must not fill the log.
#[tokio::test]
async fn sends_that_are_rejected_again_and_again_do_not_grow_the_log() {
    let bank = Bank::start().await;
    bank.act([Act::CutAnswer(10)]);
    let (store, tokens) = (store(), Tokens::new(&["one", "two"]));
    let client = async |server: Server| {
        let tokens = tokens.clone();
        let client = Client::open(Journal::over(Arc::clone(&store)).unwrap());
        let client = client.server(bank.origin(), server);
        client.credentials(move |request| std::future::ready(tokens.supply(&request))).build().await
    };
    let operator = SagaOperator::new(Idempotency::builder(Arc::clone(&store)).build().unwrap());
    let decisions = async || {
        let (sagas, _) = operator.list(None, NonZeroU32::MAX).await.unwrap();
        sagas[0].log.as_ref().unwrap().decisions.len()
    };
    let same = client(Server::hapax()).await.unwrap();
    for _ in 0..6 {
        let end = send(&same, &bank).await;
        assert!(matches!(end, Err(SendError::CredentialsChanged)), "{end:?}");
    }
    assert_eq!(decisions().await, 2);
    let other = Server::hapax().key_header(HeaderName::from_static("x-key"));
    let other = client(other).await.unwrap();
    for _ in 0..6 {
        let end = send(&other, &bank).await;
        assert!(matches!(end, Err(SendError::KeyChanged)), "{end:?}");
    }
    assert_eq!(decisions().await, 2);
    tokens.set(&["one"]);
    assert_eq!(send(&same, &bank).await.unwrap(), 201);
    assert_eq!(bank.effects(), [1]);
}

#[tokio::test]
async fn other_credentials_continue_at_a_server_that_scopes_by_account() {
    let bank = Bank::start().await;
    bank.act([Act::CutAnswer(10), Act::Answer(answer(401, &[], ""))]);
    let tokens = Tokens::new(&["one", "two", "three"]);
    let client = client(&bank, Server::hapax().scoped_by_account(), &tokens).await;
    // A try may have arrived, so that the 401 ends this send.
    let end = send(&client, &bank).await;
    assert!(matches!(end, Err(SendError::Unauthorized)), "{end:?}");
    assert_eq!(send(&client, &bank).await.unwrap(), 201);
    assert_eq!(tokens_of(&bank), ["Bearer one", "Bearer two", "Bearer three"]);
    assert_eq!(bank.effects(), [1]);
}

#[tokio::test]
async fn rejected_credentials_are_replaced_once_if_nothing_may_have_arrived() {
    let bank = Bank::start().await;
    let rejection = || Act::Answer(answer(401, &[], ""));
    bank.act([rejection()]);
    let tokens = Tokens::new(&["one", "two"]);
    let client = client(&bank, Server::hapax(), &tokens).await;
    assert_eq!(send(&client, &bank).await.unwrap(), 201);
    assert_eq!(tokens_of(&bank), ["Bearer one", "Bearer two"]);
    assert_eq!(tokens.rejected(), [false, true]);

    let bank = Bank::start().await;
    bank.act([rejection(), rejection()]);
    let client = self::client(&bank, Server::hapax(), &Tokens::new(&["one", "two"])).await;
    let end = send(&client, &bank).await;
    assert!(matches!(end, Err(SendError::Unauthorized)), "{end:?}");
    assert_eq!(bank.arrived().len(), 2);
    assert_eq!(send(&client, &bank).await.unwrap(), 201, "it can be sent again");
}

#[tokio::test]
async fn the_same_rejected_credentials_are_not_sent_again() {
    let bank = Bank::start().await;
    bank.act([Act::Answer(answer(401, &[], ""))]);
    let client = client(&bank, Server::hapax(), &Tokens::new(&["one"])).await;
    let end = send(&client, &bank).await;
    assert!(matches!(end, Err(SendError::Unauthorized)), "{end:?}");
    assert_eq!(bank.arrived().len(), 1);
}

/// The token names the caller by a claim, so that a new token of the same account is the same caller.
#[tokio::test]
async fn a_token_that_has_expired_ends_the_send_and_a_new_one_continues_under_the_same_name() {
    let expired = || problem(401, "invalid-token", &[]);
    for (acts, tokens, sent) in [
        // Nothing may have arrived: the callback has the same token once more.
        (vec![expired()], &["one"][..], 1),
        (vec![Act::CutAnswer(10), expired()], &["one", "two"], 2),
    ] {
        let bank = Bank::start().await;
        bank.act(acts);
        let tokens = Tokens::new(tokens);
        let client = client(&bank, Server::hapax().scoped_by_account(), &tokens).await;
        let end = send(&client, &bank).await;
        assert!(matches!(end, Err(SendError::InvalidToken)), "{end:?}");
        assert_eq!(bank.arrived().len(), sent);
        let pending = client.pending().await.unwrap();
        let is_stopped = matches!(
            &pending[0].state,
            PendingState::Stopped { reason, .. } if reason == "invalid-token"
        );
        assert!(is_stopped, "{pending:?}");
        tokens.set(&["three"]);
        assert_eq!(send(&client, &bank).await.unwrap(), 201);
        assert_eq!(tokens_of(&bank).last().unwrap(), "Bearer three");
        assert_eq!(bank.effects(), [1]);
    }
}

#[tokio::test]
async fn a_401_without_a_callback_ends_the_send() {
    let bank = Bank::start().await;
    bank.act([Act::Answer(answer(401, &[], ""))]);
    let client = open(&bank, Server::plain()).build().await.unwrap();
    let end = send(&client, &bank).await;
    assert!(matches!(end, Err(SendError::Unauthorized)), "{end:?}");
}

#[tokio::test]
async fn nothing_is_sent_without_the_credentials_of_the_callback() {
    let bank = Bank::start().await;
    let tokens = Tokens::new(&[]);
    let client = client(&bank, Server::hapax(), &tokens).await;
    let within = std::time::Duration::from_millis(300);
    let end = client.post(bank.url("/")).operation("n").within(within).send().await;
    // The text of the callback's error may have a secret.
    let is_named = |text: &str| text.contains("callback") && !text.contains("sealed");
    assert!(matches!(&end, Err(SendError::NotSent(text)) if is_named(text)), "{end:?}");
    assert_eq!(bank.connections(), 0);
    tokens.set(&["one"]);
    assert_eq!(send(&client, &bank).await.unwrap(), 201);
}

/// Returns a client whose callback adds the number of its call, from which it has the token.
async fn varying(bank: &Bank, token: fn(u32) -> Result<&'static str, CredentialsError>) -> Client {
    let tries = AtomicU32::new(0);
    let supply = move |_: CredentialsRequest| {
        let number = tries.fetch_add(1, Ordering::SeqCst);
        let credentials = token(number).map(|token| {
            let credentials = Credentials::bearer(token).unwrap();
            credentials
                .varying_header(HeaderName::from_static("x-trace"), HeaderValue::from(number))
        });
        std::future::ready(credentials)
    };
    open(bank, Server::hapax()).credentials(supply).build().await.unwrap()
}

#[tokio::test]
async fn headers_that_vary_are_sent_with_each_try_and_not_compared() {
    let bank = Bank::start().await;
    let later = || Act::Execute(answer(503, &["retry-after: 0"], ""));
    bank.act([later(), later()]);
    let client = varying(&bank, |_| Ok("one")).await;
    assert_eq!(send(&client, &bank).await.unwrap(), 201);
    let arrived = bank.arrived();
    let traces = arrived.iter().map(|it| it.header("x-trace").unwrap());
    assert_eq!(traces.collect::<Vec<_>>(), ["0", "1", "2"]);
    assert_eq!((tokens_of(&bank), bank.effects()), (vec!["Bearer one".to_owned(); 3], vec![1]));
}

#[tokio::test]
async fn another_token_beside_headers_that_vary_is_rejected() {
    let bank = Bank::start().await;
    bank.act([Act::CutAnswer(10)]);
    let client = varying(&bank, |number| Ok(if number == 0 { "one" } else { "two" })).await;
    let end = send(&client, &bank).await;
    assert!(matches!(end, Err(SendError::CredentialsChanged)), "{end:?}");
    assert_eq!(bank.arrived().len(), 1);
}

#[tokio::test]
async fn a_401_without_new_credentials_until_the_end_is_unauthorized() {
    let bank = Bank::start().await;
    bank.act([Act::Answer(answer(401, &[], ""))]);
    let token = |number| if number == 0 { Ok("one") } else { Err("the vault is sealed".into()) };
    let client = varying(&bank, token).await;
    let within = std::time::Duration::from_millis(700);
    let end = client.post(bank.url("/")).operation("n").within(within).send().await;
    assert!(matches!(end, Err(SendError::Unauthorized)), "something was sent: {end:?}");
    assert_eq!(bank.arrived().len(), 1);
}

#[tokio::test]
async fn rejected_credentials_are_not_sent_again_after_a_failure_of_the_callback() {
    let bank = Bank::start().await;
    bank.act([Act::Answer(answer(401, &[], ""))]);
    let token = |number| if number == 1 { Err("the vault is sealed".into()) } else { Ok("one") };
    let client = varying(&bank, token).await;
    let end = send(&client, &bank).await;
    assert!(matches!(end, Err(SendError::Unauthorized)), "{end:?}");
    assert_eq!(bank.arrived().len(), 1);
}
