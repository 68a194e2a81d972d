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

use std::time::Duration;

use hapax_core::store::parts::{ExpectedIdentity, Recognition};
use hapax_core::{Clock, SystemClock, Timestamp};
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

/// Creates an identity in the form of a UUID of version 7, without hyphens: it begins with the
/// milliseconds since 1970.
fn identity(now: Timestamp, random: [u8; LENGTH / 2]) -> String {
    let time = u128::from(now.as_micros() / 1000) << 80;
    let rest = u128::from_be_bytes(random) & !(u128::MAX << 80 | FORM_MASK);
    format!("{:032x}", time | FORM | rest)
}

/// Version and variant of a UUID of version 7, and their bits.
const FORM: u128 = 0x7000_8000_0000_0000_0000;
const FORM_MASK: u128 = 0xf000_c000_0000_0000_0000;

/// A time before any store with such an identity, and a difference between clocks.
const EARLIEST: Timestamp = Timestamp::from_micros(1_764_547_200_000_000);
const SKEW: Duration = Duration::from_secs(24 * 60 * 60);

/// Returns the time at which an identity was created; `None` for one of an earlier release, which is
/// random. Of a million of those, some look like a time between December 2025 and now.
fn created(identity: &str, now: Timestamp) -> Option<Timestamp> {
    let bits = u128::from_str_radix(identity, 16).ok()?;
    let time =
        u64::try_from(bits >> 80).ok().map(|millis| Timestamp::from_micros(millis * 1000))?;
    let is_time = bits & FORM_MASK == FORM && (EARLIEST..now.after(SKEW)).contains(&time);
    (identity.len() == LENGTH && is_time).then_some(time)
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

/// Options of the first comparison of the identity.
pub(crate) struct OpenIdentity {
    pub(crate) must_exist: bool,
    /// The server and the prefix, for log messages.
    pub(crate) server: String,
}

impl RedisStore {
    /// Returns the time at which the store was created, by the clock of the process that created it;
    /// `None` for a store of an earlier release.
    #[must_use]
    pub fn created(&self) -> Option<Timestamp> {
        self.known.expected().and_then(|identity| created(&identity, SystemClock.now()))
    }

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
        let stored = self.stored_identity(leave, confirm).await?;
        Ok(is_expected(&self.known, &stored))
    }

    /// Returns the identity as it is stored, once `leave` is stored if there was none.
    async fn stored_identity(&self, leave: &str, confirm: bool) -> Result<String, RequestFailure> {
        let confirm: &[u8] = if confirm { b"1" } else { b"0" };
        let arguments = [leave.as_bytes(), confirm];
        match self.run(&self.identity, &[&self.names.identity()], &arguments).await? {
            Value::BulkString(found) => Ok(String::from_utf8_lossy(&found).into_owned()),
            _ => Err(RequestFailure::Nothing(RedisStoreError::Unreadable)),
        }
    }

    /// Compares the identity when the store is opened, and creates it if the options `make` it.
    pub(crate) async fn open_identity(
        &self,
        options: &OpenIdentity,
    ) -> Result<(), RedisConnectError> {
        let new = match self.make && !options.must_exist && self.known.expected().is_none() {
            true => self.new_identity(),
            false => String::new(),
        };
        let stored = match self.stored_identity(&new, false).await {
            Ok(stored) => stored,
            Err(RequestFailure::Foreign) => return Ok(()),
            Err(RequestFailure::Nothing(error) | RequestFailure::Unknown(error)) => {
                return Err(self.refused(error));
            }
        };
        if options.must_exist && stored.is_empty() {
            return Err(RedisConnectError::Missing);
        }
        is_expected(&self.known, &stored);
        let created = self.created().map(tracing::field::display);
        if !new.is_empty() && stored == new {
            tracing::warn!(
                server = options.server,
                created,
                "a new store was created: it has no records, so a request that another store has \
                 recorded executes again"
            );
        } else if !stored.is_empty() {
            tracing::info!(server = options.server, created, "the store is open");
        }
        Ok(())
    }

    /// Returns a new identity; empty, and so never stored, if there is no randomness.
    pub(crate) fn new_identity(&self) -> String {
        let mut random = [0; 16];
        match self.entropy.fill(&mut random) {
            Ok(()) => identity(SystemClock.now(), random),
            Err(_) => String::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_identity_has_the_time_of_its_creation_and_a_random_one_has_none() {
        let now = Timestamp::from_micros(1_795_000_000_123_000);
        let made = identity(now, [0xff; 16]);
        assert_eq!((made.len(), created(&made, now)), (LENGTH, Some(now)));
        assert_ne!(identity(now, [0xfe; 16]), made);
        // Random, not of this form, and before and after any possible time.
        let at = |micros| identity(Timestamp::from_micros(micros), [7; 16]);
        let old = at(1_600_000_000_000_000);
        let late = at(1_895_000_000_000_000);
        let other = format!("{}4{}", &made[..12], &made[13..]);
        for text in ["9f86d081884c7d659a2feaa0c55ad015", "", "7", &old, &late, &other] {
            assert_eq!(created(text, now), None, "{text}");
        }
    }
}
