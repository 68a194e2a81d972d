//! Operations of the client, with a journal in a file that syncs, beside requests of reqwest with
//! reqwest-middleware and reqwest-retry, without a journal: one server on loopback, in alternation.
//!
//!     cargo run --release --manifest-path bench/client/Cargo.toml --target-dir target -- [ROUNDS] [SECONDS]
//!
//! Prints for 1 and for 64 callers the answers of a second, their p50 and p99, and the median of the ratios
//! of the rounds. The promises differ: a request of reqwest is lost with its process.

use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use hapax_client::{Client, Journal, Server};
use reqwest_middleware::{ClientBuilder, ClientWithMiddleware};
use reqwest_retry::RetryTransientMiddleware;
use reqwest_retry::policies::ExponentialBackoff;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

const BODY: &[u8] = &[b'a'; 200];

const ANSWER: &[u8] = b"HTTP/1.1 201 Created\r\ncontent-length: 4\r\n\r\npaid";

/// Number of the next operation: names are never repeated.
static NEXT: AtomicU64 = AtomicU64::new(0);

/// A client that is measured.
enum Case {
    Journal(Client),
    Reqwest(ClientWithMiddleware),
}

impl Case {
    async fn send(&self, url: &str) -> Outcome<()> {
        let name = format!("invoice/{}", NEXT.fetch_add(1, Ordering::Relaxed));
        let status = match self {
            Self::Journal(client) => {
                let sent = client.post(url).operation(name).body(BODY).send().await?;
                sent.response.status.as_u16()
            }
            Self::Reqwest(client) => {
                let request = client.post(url).header("idempotency-key", name).body(BODY);
                let response = request.send().await?;
                let status = response.status().as_u16();
                response.bytes().await?;
                status
            }
        };
        if status == 201 { Ok(()) } else { Err(format!("expected 201, found {status}").into()) }
    }
}

/// The figures of a round.
struct Figures {
    rate: f64,
    p50: f64,
    p99: f64,
}

#[tokio::main]
async fn main() -> Outcome<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |at: usize, default: u64| arguments.get(at).map_or(Ok(default), |it| it.parse());
    let (rounds, seconds) = (number(0, 5)?.max(1), number(1, 5)?.max(1));

    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let origin = format!("http://{}", listener.local_addr()?);
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(serve(stream));
        }
    });

    let folder = tempfile::tempdir()?;
    let journal = Journal::file(folder.path().join("journal"))?;
    let client = Client::open(journal).server(&*origin, Server::plain()).build().await?;
    let retry = ExponentialBackoff::builder().build_with_max_retries(3);
    let reqwest = ClientBuilder::new(reqwest::Client::builder().build()?);
    let reqwest = reqwest.with(RetryTransientMiddleware::new_with_policy(retry)).build();
    let cases = [
        ("hapax-client, journal in a file", Arc::new(Case::Journal(client))),
        ("reqwest-retry, no journal", Arc::new(Case::Reqwest(reqwest))),
    ];
    let url = format!("{origin}/payments");
    println!("answers a second, p50 and p99 in ms:");
    for callers in [1, 64] {
        let mut ratios = Vec::new();
        for round in 0..rounds {
            let mut rates = Vec::new();
            for (name, case) in &cases {
                let span = Duration::from_secs(seconds);
                let Figures { rate, p50, p99 } = measure(case, &url, callers, span).await?;
                println!("{callers:>2} callers, round {round}: {name:<32} {rate:>9.0} {p50:>8.2} {p99:>8.2}");
                rates.push((rate, p50));
            }
            ratios.push((rates[0].0 / rates[1].0, rates[0].1 / rates[1].1));
        }
        let rate = median(ratios.iter().map(|(rate, _)| *rate).collect());
        let p50 = median(ratios.iter().map(|(_, p50)| *p50).collect());
        println!("{callers:>2} callers: median of the ratios: rate {rate:.3}, p50 {p50:.1}");
    }
    Ok(())
}

async fn measure(case: &Arc<Case>, url: &str, callers: u64, span: Duration) -> Outcome<Figures> {
    let begin = Instant::now();
    let mut running = JoinSet::new();
    for _ in 0..callers {
        let (case, url) = (Arc::clone(case), url.to_owned());
        running.spawn(async move {
            let mut times = Vec::new();
            while begin.elapsed() < span {
                let sent = Instant::now();
                case.send(&url).await?;
                times.push(sent.elapsed().as_secs_f64() * 1_000.0);
            }
            Outcome::Ok(times)
        });
    }
    let mut times = Vec::new();
    while let Some(ended) = running.join_next().await {
        times.extend(ended??);
    }
    let rate = times.len() as f64 / begin.elapsed().as_secs_f64();
    times.sort_by(f64::total_cmp);
    let at = |part: f64| times[((times.len() - 1) as f64 * part) as usize];
    Ok(Figures { rate, p50: at(0.5), p99: at(0.99) })
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Answers each request at once.
async fn serve(mut stream: TcpStream) -> Option<()> {
    let (mut read, mut buffer) = (Vec::new(), [0; 4096]);
    loop {
        let end = loop {
            let head = read.windows(4).position(|it| it == b"\r\n\r\n");
            if let Some(head) = head && read.len() >= head + 4 + BODY.len() {
                break head + 4 + BODY.len();
            }
            let count = stream.read(&mut buffer).await.ok().filter(|count| *count > 0)?;
            read.extend_from_slice(&buffer[..count]);
        };
        read.drain(..end);
        stream.write_all(ANSWER).await.ok()?;
    }
}
