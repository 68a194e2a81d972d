//! Measures the cost of sagas: their rate beside bare swaps, and polling among parked ones.
//!
//!     cargo run --release -p hapax-saga --example measure -- rate [STORE] [ROUNDS] [SECONDS]
//!     cargo run --release -p hapax-saga --example measure -- parked [STORE] [SAGAS] [DUE] [SECONDS]
//!
//! STORE is file, redis, postgres or all, which is the default. `rate` runs 64 sagas of five steps that
//! do nothing and as many swaps in alternation: 5 rounds of 5 s, and prints the ratio of each. `parked`
//! inserts a million parked and a million done sagas, measures a process that only polls for 30 s, then
//! the delay with which sagas begin that become due, and lets three processes (one on a file) run
//! 10,000 that are due at one time.
//!
//! Starts its own servers, which sync as in production. Only ratios within a run are meaningful; the
//! absolute numbers depend on the machine and its other load. A value beyond its target is marked.

mod counted;
mod parked;
mod place;
mod population;
mod rate;

use std::error::Error;

use place::Place;

type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

#[tokio::main]
async fn main() -> Outcome<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |at: usize, default: u64| arguments.get(at).map_or(Ok(default), |it| it.parse());
    let stores = match arguments.get(1).map(String::as_str) {
        None | Some("all") => Place::NAMES.to_vec(),
        Some(name) => vec![name],
    };
    for name in stores {
        let place = Place::start(name).await?;
        match arguments.first().map(String::as_str) {
            Some("rate") => {
                rate::measure(&place, number(2, 5)?.max(1), number(3, 5)?.max(1)).await?
            }
            Some("parked") => {
                let sizes = parked::Sizes {
                    parked: number(2, 1_000_000)?,
                    due: number(3, 10_000)?,
                    seconds: number(4, 30)?.max(1),
                };
                parked::measure(&place, sizes).await?;
            }
            _ => return Err("expected rate or parked".into()),
        }
    }
    Ok(())
}

/// Returns a mark for a value that misses its target.
fn mark(is_met: bool) -> &'static str {
    if is_met { "" } else { "  MISSED" }
}
