//! The example of a service in Python, which the documentation shows.

use std::process::{Child, Command, Stdio};

use hapax_testkit::servers::free_port;

use super::*;

/// A process of the example, which is killed when it is dropped.
struct PythonService(Child);

impl PythonService {
    fn start(arguments: [&str; 3]) -> Self {
        let script = Path::new(env!("CARGO_MANIFEST_DIR"));
        let script = script.join("../../../examples/messages/python/service.py");
        let mut python = Command::new("python3");
        python.arg("-I").arg(script).args(arguments).stdin(Stdio::null());
        Self(python.spawn().unwrap())
    }
}

impl Drop for PythonService {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Returns the orders that have invoices, in their order; none while the service does not listen.
fn invoiced(address: std::net::SocketAddr) -> Vec<u64> {
    let Ok(mut stream) = std::net::TcpStream::connect(address) else { return Vec::new() };
    let request = "GET / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n";
    std::io::Write::write_all(&mut stream, request.as_bytes()).unwrap();
    let Some(answer) = crate::world::receive(&stream) else { return Vec::new() };
    let rows: Vec<(u64, String)> = serde_json::from_str(&answer.body).unwrap();
    rows.into_iter().map(|(order, _)| order).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_service_in_python_and_its_consumer_are_killed_and_each_order_has_one_invoice() {
    let address = std::net::SocketAddr::from(([127, 0, 0, 1], free_port()));
    let consume = Consume::start(address).await;
    let file = format!("file:{}", consume.folder.path().join("inbox.db").display());
    let consume = consume.with(&["--store", &file, "--timeout", "5s", "--longest-pause", "500ms"]);
    let (database, port) = (consume.folder.path().join("invoices.db"), address.port().to_string());
    let secret = consume.folder.path().join("signing");
    let arguments = [database.to_str().unwrap(), &port, secret.to_str().unwrap()];
    for number in 0..40_u32 {
        let id = MessageId::new(format!("order-{}", number % 30)).unwrap();
        let payload = format!("{{\"order\": {}, \"customer\": \"c\"}}", number % 30);
        let mut message = OutgoingMessage::new("orders.created", id, payload);
        message.broker_id = Some(number.to_string());
        consume.sink.publish(&message).await.unwrap();
    }
    let invalid = MessageId::new("order-x").unwrap();
    let invalid = OutgoingMessage::new("orders.created", invalid, "{}");
    consume.sink.publish(&invalid).await.unwrap();
    let some = async |least: usize| {
        while blocking(|| invoiced(address)).len() < least {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    let (service, process) = (PythonService::start(arguments), consume.process());
    some(1).await;
    drop((process, service));
    let (service, process) = (PythonService::start(arguments), consume.process());
    some(10).await;
    drop(service);
    let _service = PythonService::start(arguments);
    consume.until_empty().await;
    blocking(|| process.end());
    let mut orders = blocking(|| invoiced(address));
    orders.sort_unstable();
    assert_eq!(orders, (0..30).collect::<Vec<_>>());
    assert_eq!(consume.dead_letters().await, "order-x rejected");
    let error = consume.world.sql("SELECT error FROM hapax_dead_letters").await;
    assert!(
        error.contains("found 422 ") && error.contains("expected an order: KeyError"),
        "{error}"
    );
}
