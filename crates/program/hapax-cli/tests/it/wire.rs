//! The contract's scenarios of crashes, against a process on a file that is killed.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use hapax_core::InFlight;
use hapax_http::server::MissingScope;
use hapax_testkit::http::{
    Handler, HttpFixture, Instance, ScenarioPolicy, ScenarioScope, Starting, StoreLink, TestServer,
    serve,
};
use rustix::process::Signal;
use tempfile::TempDir;

use crate::world::Gateway;

hapax_testkit::http_suite!(fixture; crashes);

async fn fixture() -> Arc<dyn HttpFixture> {
    Arc::new(File(tempfile::tempdir().unwrap()))
}

/// Where processes keep their records, one after the other.
struct File(TempDir);

impl HttpFixture for File {
    fn has_secret(&self) -> bool {
        true
    }

    fn start(&self, policy: ScenarioPolicy, handler: Handler) -> Starting<'_> {
        Box::pin(async move {
            let upstream = serve(handler).await;
            let told = flags(&policy);
            let (address, folder) = (upstream.address, self.0.path().to_owned());
            let start = move || {
                let flags: Vec<&str> = told.iter().map(String::as_str).collect();
                Gateway::start(address, &folder, &flags)
            };
            let gateway = tokio::task::spawn_blocking(start).await.unwrap();
            let address = gateway.address;
            let process = Mutex::new(Some(gateway));
            Ok(Box::new(Process { address, process, _upstream: upstream }) as Box<dyn Instance>)
        })
    }
}

/// What these scenarios ask for. What they do not is as it is by default, here as there.
fn flags(policy: &ScenarioPolicy) -> Vec<String> {
    let ScenarioScope::Parts(names, MissingScope::Reject) = &policy.callers else {
        panic!("no scenario of crashes asks for {:?}", policy.callers)
    };
    assert!(policy.in_flight == InFlight::Reject && policy.hook.is_none());
    let names: Vec<_> = names.iter().map(ToString::to_string).collect();
    let millis = |time: std::time::Duration| format!("{}ms", time.as_millis());
    [
        ("--scope", names.join(",")),
        ("--lease", millis(policy.lease)),
        ("--retention", millis(policy.retention)),
        ("--on-unknown", policy.on_unknown.as_str().to_owned()),
    ]
    .into_iter()
    .flat_map(|(flag, value)| [flag.to_owned(), value])
    .collect()
}

struct Process {
    address: SocketAddr,
    process: Mutex<Option<Gateway>>,
    _upstream: TestServer,
}

impl Instance for Process {
    fn address(&self) -> SocketAddr {
        self.address
    }

    fn drain(&self) -> hapax_core::store::BoxFuture<'static, ()> {
        let process = self.process.lock().unwrap().take();
        Box::pin(async move {
            let Some(process) = process else { return };
            let end = move || {
                process.signal(Signal::TERM);
                process.wait()
            };
            assert_eq!(tokio::task::spawn_blocking(end).await.unwrap(), 0);
        })
    }

    fn kill(&self) -> hapax_core::store::BoxFuture<'_, ()> {
        let process = self.process.lock().unwrap().take();
        Box::pin(async move {
            let kill = move || process.map(Gateway::kill);
            tokio::task::spawn_blocking(kill).await.unwrap();
        })
    }

    fn link(&self) -> Option<&dyn StoreLink> {
        None
    }
}
