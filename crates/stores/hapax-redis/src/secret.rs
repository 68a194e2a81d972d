//! That everybody names keys by the same secret.

use hapax_core::{Key, OperationId, Scope, Secret};
use redis::Value;

use crate::connection::Connection;
use crate::error::RedisConnectError;
use crate::key_names::KeyNames;
use crate::options::RedisOptions;
use crate::script::Lua;

/// What is to be found on the server about the secret.
pub(crate) struct SecretCheck {
    script: Lua,
    /// Where.
    place: String,
    /// What; or it is left there.
    name: String,
    make: bool,
}

impl SecretCheck {
    pub(crate) fn new(options: &RedisOptions, names: &KeyNames) -> Self {
        let name = secret_name(options.naming_secret());
        Self { script: Lua::secret(), place: names.secret(), name, make: options.make }
    }

    /// Asked on every connection: another server may be behind it, or another process been first
    /// after this one was emptied. Returns whether nothing was there until now.
    pub(crate) async fn check(
        &self,
        connection: &mut Connection,
    ) -> Result<bool, RedisConnectError> {
        let make: &[u8] = if self.make { b"1" } else { b"0" };
        // By its text: it is asked once for each connection.
        let asked = self.script.by_text(&[&self.place], &[self.name.as_bytes(), make]);
        match connection.query(&asked).await {
            Ok(Value::Int(found @ (1 | 2))) => Ok(found == 2),
            // What is there is not ours to overwrite.
            Ok(_) => Err(RedisConnectError::OtherSecret),
            Err(error) if error.code() == Some("HAPAX") => Err(RedisConnectError::OtherSecret),
            Err(error) => Err(RedisConnectError::of("EVAL", error)),
        }
    }
}

/// Tells a secret from others without telling it.
fn secret_name(secret: Option<&Secret>) -> String {
    let named = |secret| {
        let scope = Scope::of([("hapax-redis", "secret check")]);
        // The shortest of keys: any would do, within a scope that nobody else has.
        Key::new("-").ok().map(|key| OperationId::derive(Some(secret), &scope, &key).to_string())
    };
    secret.and_then(named).unwrap_or_else(|| "none".into())
}
