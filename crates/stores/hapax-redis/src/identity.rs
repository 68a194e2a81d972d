//! The identity of a store: a random text stored with its records.
//!
//! A store that was emptied would execute its operations again. So each store has an identity,
//! which is lost together with its records (FLUSHALL). Processes that used the store, or were given
//! its identity ([`RedisOptions::identity`](crate::RedisOptions::identity)), then claim no new key
//! under `block` or `reconcile` until an operator confirms:
//! [`RedisStore::confirm`](crate::RedisStore::confirm) marks the present identity, and every
//! process accepts a marked one.
//!
//! A claim's script compares the identity in the same step. In a cluster it cannot, because the
//! identity is in another slot: there it is compared when the store is opened. An insertion into the
//! schedule is treated as a claim under `block`.

use hapax_core::store::parts::{ExpectedIdentity, Recognition};
use redis::Value;

use crate::error::{RedisConnectError, RedisStoreError, RequestFailure};
use crate::record;
use crate::script::Lua;
use crate::store::RedisStore;

/// Number of characters of an identity.
const LENGTH: usize = 32;

/// Compares an identity as it is stored, empty for none and with a final `+` if it is confirmed, with
/// the expected one. Returns whether claims may continue.
fn is_expected(known: &ExpectedIdentity, stored: &str) -> bool {
    let (found, is_confirmed) = match stored.strip_suffix('+') {
        Some(found) => (found, true),
        None => (stored, false),
    };
    let found = Some(found).filter(|found| !found.is_empty());
    match known.recognise(found, is_confirmed) {
        Recognition::Expected | Recognition::Confirmed => true,
        Recognition::Replaced { is_new } => {
            if is_new {
                tracing::error!(
                    "the store was emptied or replaced: operations whose records were lost execute \
                     again under reexecute; under block and reconcile new keys are rejected until an operator \
                     runs `hapax store confirm`"
                );
            }
            false
        }
    }
}

/// Creates an identity from 16 random bytes.
fn identity(random: [u8; LENGTH / 2]) -> String {
    format!("{:032x}", u128::from_be_bytes(random))
}

/// The store that a write requires.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum RequiredStore {
    /// The one that was used before.
    Known,
    /// Any, but another one is logged.
    Logged,
    /// Any.
    Any,
}

/// A call of a script. The script takes the name of the identity as its last key, and the expected
/// identity as its last argument.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Call<'a> {
    pub(crate) script: &'a Lua,
    pub(crate) keys: &'a [&'a str],
    pub(crate) arguments: &'a [&'a [u8]],
}

impl RedisStore {
    /// Calls a script that writes to the required store. `asked` names the request in its answers.
    pub(crate) async fn run_on(
        &self,
        required: RequiredStore,
        call: Call<'_>,
        asked: &[u8],
    ) -> Result<Value, RequestFailure> {
        let Call { script, keys, arguments } = call;
        let strict = required == RequiredStore::Known;
        // A claim that may execute again also compares, until the replacement is known, so that it
        // is logged.
        let compares = strict || (required == RequiredStore::Logged && !self.known.is_replaced());
        let known = (compares && self.link.is_one()).then(|| self.known.expected()).flatten();
        match known {
            Some(known) => match self.run_known(call, asked, known).await {
                Err(RequestFailure::Nothing(RedisStoreError::Replaced)) if !strict => {
                    self.run(script, keys, arguments).await
                }
                answer => answer,
            },
            // In a cluster it was compared when the store was opened.
            None if strict && self.known.is_replaced() => match self.recognise("", false).await {
                Ok(true) => self.run(script, keys, arguments).await,
                Ok(false) => Err(RequestFailure::Nothing(RedisStoreError::Replaced)),
                Err(error) => Err(error.did_nothing()),
            },
            None => self.run(script, keys, arguments).await,
        }
    }

    /// Calls a script that writes if the store has the identity `known`, or one that an operator
    /// confirmed.
    async fn run_known(
        &self,
        call: Call<'_>,
        asked: &[u8],
        mut known: String,
    ) -> Result<Value, RequestFailure> {
        let place = self.names.identity();
        let keys = [call.keys, &[place.as_str()]].concat();
        loop {
            let arguments = [call.arguments, &[known.as_bytes()]].concat();
            let answer = self.run(call.script, &keys, &arguments).await?;
            if !record::is_replaced(asked, &answer) {
                return Ok(answer);
            }
            // Nothing was written. Repeat if the identity was confirmed meanwhile.
            let accepted = self.recognise("", false).await.map_err(RequestFailure::did_nothing)?;
            match self.known.expected() {
                Some(confirmed) if accepted && confirmed != known => known = confirmed,
                _ => return Err(RequestFailure::Nothing(RedisStoreError::Replaced)),
            }
        }
    }

    /// Compares the identity of the store with the expected one. Returns whether claims may
    /// continue. If the store has none, `leave` becomes its identity. With `confirm`, an operator
    /// confirms the present one.
    pub(crate) async fn recognise(
        &self,
        leave: &str,
        confirm: bool,
    ) -> Result<bool, RequestFailure> {
        let confirm: &[u8] = if confirm { b"1" } else { b"0" };
        let arguments = [leave.as_bytes(), confirm];
        match self.run(&self.identity, &[&self.names.identity()], &arguments).await? {
            Value::BulkString(found) => {
                Ok(is_expected(&self.known, &String::from_utf8_lossy(&found)))
            }
            _ => Err(RequestFailure::Nothing(RedisStoreError::Unreadable)),
        }
    }

    pub(crate) async fn open_identity(&self) -> Result<(), RedisConnectError> {
        let new = match self.make && self.known.expected().is_none() {
            true => self.new_identity(),
            false => String::new(),
        };
        match self.recognise(&new, false).await {
            Ok(_) | Err(RequestFailure::Foreign) => Ok(()),
            Err(RequestFailure::Nothing(error) | RequestFailure::Unknown(error)) => {
                Err(self.refused(error))
            }
        }
    }

    /// Returns a new identity; empty, and so never stored, if there is no randomness.
    pub(crate) fn new_identity(&self) -> String {
        let mut random = [0; 16];
        match self.entropy.fill(&mut random) {
            Ok(()) => identity(random),
            Err(_) => String::new(),
        }
    }
}
