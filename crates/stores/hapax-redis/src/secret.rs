//! The check that all processes name keys by the same secret.

use hapax_core::{Key, Namespace, OperationId, Scope, Secret};
use redis::Value;

use crate::connection::Connection;
use crate::error::RedisConnectError;
use crate::key_names::KeyNames;
use crate::options::RedisOptions;
use crate::script::Lua;

/// The mark of the secret on the server, and the script that compares it.
pub(crate) struct SecretCheck {
    script: Lua,
    /// The name of the mark.
    place: String,
    /// The expected content, which is written if there is no mark.
    name: String,
    make: bool,
    must_exist: bool,
}

impl SecretCheck {
    pub(crate) fn new(options: &RedisOptions, names: &KeyNames) -> Self {
        let name = secret_name(options.naming_secret());
        Self {
            script: Lua::secret(),
            place: names.secret(),
            name,
            make: options.make,
            must_exist: options.must_exist,
        }
    }

    /// Checks the mark, on every connection: it may lead to another server, or another process may
    /// have been the first after the server was emptied. Returns whether there was no mark until
    /// now. Only the first connection of a store requires one: a server that is emptied later is detected
    /// by its identity.
    pub(crate) async fn check(
        &self,
        connection: &mut Connection,
        is_first: bool,
    ) -> Result<bool, RedisConnectError> {
        let make: &[u8] = match self.make {
            _ if is_first && self.must_exist => b"2",
            true => b"1",
            false => b"0",
        };
        // By text, because it is sent once per connection.
        let asked = self.script.by_text(&[&self.place], &[self.name.as_bytes(), make]);
        match connection.query(&asked).await {
            Ok(Value::Int(found @ (1 | 2))) => Ok(found == 2),
            Ok(Value::Int(3)) => Err(RedisConnectError::Missing),
            // The present mark is not ours to overwrite.
            Ok(_) => Err(RedisConnectError::OtherSecret),
            Err(error) if error.code() == Some("HAPAX") => Err(RedisConnectError::OtherSecret),
            Err(error) => Err(RedisConnectError::of("EVAL", error)),
        }
    }
}

/// Returns a name that differs for each secret and does not reveal it.
fn secret_name(secret: Option<&Secret>) -> String {
    let named = |secret| {
        let scope = Scope::of([("hapax-redis", "secret check")]);
        // The shortest key: any would do, within a scope that no caller has.
        Key::new("-").ok().map(|key| {
            OperationId::derive(Some(secret), &Namespace::default(), &scope, &key).to_string()
        })
    };
    secret.and_then(named).unwrap_or_else(|| "none".into())
}
