//! The name of a hook, by which a record shows whose operation it is.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use hapax_core::OnUnknown;
use hapax_http::server::ScopePart;
use hapax_proxy::Origin;

use crate::config::{PolicyConfig, ResolvedPolicy};

/// Returns the name of the hook of a policy that reconciles: its URL and the headers of its requests, which decide about
/// whose operation a request is. After a change of these a record is not reconciled without a retry.
///
/// On each machine a URL like `http://127.0.0.1:3000` is that of another server, which may be another service. If
/// gateways of several machines can share the store, the name has that of the machine, too.
pub(crate) fn hook_name(
    config: &PolicyConfig,
    resolved: &ResolvedPolicy,
    is_shared: bool,
) -> Option<Arc<str>> {
    let (origin, path) =
        resolved.reconcile.as_ref().filter(|_| config.on_unknown == OnUnknown::Reconcile)?;
    let scheme = if origin.secure { "https" } else { "http" };
    let authority = origin.authority.as_str().to_ascii_lowercase();
    let parts: Vec<_> = resolved.callers.parts().iter().map(ScopePart::as_str).collect();
    let (key, parts) = (&config.key_header, parts.join(","));
    let mut name = format!("{scheme}://{authority}{path} {key} {parts}");
    if is_shared && is_local(origin) {
        // Without it, such a record is reconciled by retries only.
        name = format!("{name} {}", hostname()?);
    }
    Some(name.into())
}

/// Returns the name of the machine, or of the container, if it is known.
pub(crate) fn hostname() -> Option<String> {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").ok()?;
    Some(name.trim().to_owned()).filter(|name| !name.is_empty())
}

/// Names that `/etc/hosts` of common systems have for the loopback interface, besides those that end with `localhost`.
const LOOPBACK_NAMES: [&str; 5] =
    ["localhost.localdomain", "localhost4", "localhost6", "ip6-localhost", "ip6-loopback"];

/// Returns whether a server is on the same machine, whatever the machine.
fn is_local(origin: &Origin) -> bool {
    let host = origin.host().to_ascii_lowercase();
    let host = host.strip_suffix('.').unwrap_or(&host);
    if host == "localhost" || host.ends_with(".localhost") || LOOPBACK_NAMES.contains(&host) {
        return true;
    }
    let ip = host.parse().ok().or_else(|| short_ipv4(host).map(IpAddr::V4));
    ip.is_some_and(|ip| match ip {
        IpAddr::V4(ip) => is_local_ipv4(ip),
        // An IPv4 address may be within an IPv6 one.
        IpAddr::V6(ip) => {
            ip.is_loopback() || ip.is_unspecified() || ip.to_ipv4().is_some_and(is_local_ipv4)
        }
    })
}

const fn is_local_ipv4(ip: Ipv4Addr) -> bool {
    ip.is_loopback() || ip.is_unspecified()
}

/// Returns the address of up to four decimal, octal or hexadecimal numbers, of which the last one has the remaining bytes,
/// as resolvers read `127.1`.
fn short_ipv4(host: &str) -> Option<Ipv4Addr> {
    let (mut address, mut free) = (0, 32);
    let mut parts = host.split('.').peekable();
    while let Some(part) = parts.next() {
        let number = match part.strip_prefix("0x") {
            Some(digits) => u32::from_str_radix(digits, 16),
            None if part.len() > 1 && part.starts_with('0') => u32::from_str_radix(part, 8),
            None => part.parse(),
        };
        let bits = if parts.peek().is_some() { 8 } else { free };
        free = u32::checked_sub(free, bits)?;
        let number = u64::from(number.ok()?);
        if number >> bits != 0 || bits == 0 {
            return None;
        }
        address |= number << free;
    }
    u32::try_from(address).ok().map(Ipv4Addr::from)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    fn name(url: &str, is_shared: bool) -> Option<String> {
        let mut config = Config::new("http://10.0.0.1".parse().unwrap());
        config.policy.on_unknown = OnUnknown::Reconcile;
        config.policy.reconcile_url = Some(url.parse().unwrap());
        let resolved = config.resolve().unwrap();
        hook_name(&config.policy, &resolved.policy, is_shared).map(|name| name.to_string())
    }

    #[test]
    fn a_hook_on_the_same_machine_has_its_name_if_several_can_share_the_store() {
        for (url, is_local) in [
            ("http://127.0.0.1:3000/outcome?of=this", true),
            ("http://[::1]/outcome", true),
            ("http://LocalHost/outcome", true),
            ("http://localhost./outcome", true),
            ("http://pay.localhost/outcome", true),
            ("http://ip6-localhost/outcome", true),
            ("http://[::ffff:127.0.0.1]/outcome", true),
            ("http://[::]/outcome", true),
            ("http://127.1/outcome", true),
            ("http://0/outcome", true),
            ("http://2130706433/outcome", true),
            ("http://0x7f.0.0.1/outcome", true),
            ("http://0177.1/outcome", true),
            ("http://10.1/outcome", false),
            ("http://127.0.0.0.1/outcome", false),
            ("http://[::ffff:10.0.0.1]/outcome", false),
            ("http://localhost.example/outcome", false),
            ("https://payments.shop.example/outcome", false),
            ("http://10.0.0.1/outcome", false),
        ] {
            let alone = name(url, false).unwrap();
            let lower = url.replace("LocalHost", "localhost");
            assert_eq!(alone, format!("{lower} idempotency-key authorization"));
            match name(url, true) {
                Some(shared) if is_local => {
                    assert_eq!(shared, format!("{alone} {}", hostname().unwrap()));
                }
                shared if is_local => assert_eq!((shared, hostname()), (None, None)),
                shared => assert_eq!(shared, Some(alone)),
            }
        }
    }
}
