//! How soon a census finds undecided records, and what it costs claims.
//!
//!     cargo run --release --manifest-path bench/census/Cargo.toml -- [RECORDS] [ROUNDS] [STORE…]
//!
//! Each store is filled with finished records (1000000) and three undecided ones, and opened again.
//! Clients claim and complete new keys at a steady pace, 100 a second in all, while a census walks as
//! in a gateway. Printed are the seconds after which it knows the three and those of a whole walk,
//! and the time of one call of `hapax keys list --state unknown` on a store without a gateway, which
//! walks without pauses.
//!
//! Then, in each round (40), clients claim for two seconds without a census and as long with one
//! in progress, in turn one or the other first: the ratio holds when the machine's speed drifts. The
//! table has medians of the rounds, and their ratios. Stores: memory, file, redis, postgres, tiered;
//! default all. The program fails where the three are not found within ten minutes.

mod load;
mod store;

use std::error::Error;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hapax_core::{Idempotency, Inspect};
use hapax_operators::{Census, ListQuery};
use load::{Load, fill, quantile};
use store::{NAMES, Place, TIMEOUT, engine};
use tokio::time::sleep;

pub type Failure = Box<dyn Error + Send + Sync>;

/// How long claims are measured without a census, and with one, in each round.
const SPAN: Duration = Duration::from_secs(2);
/// After which the undecided records must be known.
const LIMIT: Duration = Duration::from_secs(600);
/// How often the census is asked.
const EVERY: Duration = Duration::from_millis(20);

#[tokio::main]
async fn main() -> Result<(), Failure> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let is_name = |word: &&String| word.parse::<u64>().is_err();
    let mut names: Vec<_> = words.iter().filter(is_name).map(String::as_str).collect();
    let mut numbers = words.iter().filter_map(|word| word.parse::<u64>().ok());
    let (records, rounds) = (numbers.next().unwrap_or(1_000_000), numbers.next().unwrap_or(40));
    if names.is_empty() {
        names.extend(NAMES);
    }
    let mut rows = Vec::new();
    for name in names {
        rows.push(measure(name, records, rounds).await?);
    }
    println!("\n{records} records; seconds, and milliseconds of a claim and its completion");
    println!(
        "store     3 found   walk   list   p50 alone  census  ratio   p99 alone  census  ratio"
    );
    rows.iter().for_each(|row| println!("{row}"));
    Ok(())
}

/// Returns a row of the table.
async fn measure(name: &str, records: u64, rounds: u64) -> Result<String, Failure> {
    let place = Place::new(name).await?;
    // Nothing is measured while it is filled: the store has time.
    let filling = place.open(TIMEOUT * 30).await?;
    let filler = engine(&filling, filling.store.clone(), TIMEOUT * 30);
    let undecided = fill(name, &filler, records).await?;
    filling.close().await;
    drop((filler, filling));

    let opened = place.open(TIMEOUT).await?;
    let store = &opened.store;
    let census = Arc::new(Census::default());
    let bare = engine(&opened, store.clone(), TIMEOUT);
    let watched = engine(&opened, census.watch(store.clone()), TIMEOUT);
    let load = Load::start(&watched);
    let (begun, mut found) = (Instant::now(), None);
    let first = place.walk(store, &watched, &census)?;
    let (found, walk) = loop {
        sleep(EVERY).await;
        let (whole, took) = (first.is_whole(), begun.elapsed());
        if census.undecided().unknown == undecided.len() {
            found.get_or_insert(took);
        }
        match found {
            Some(found) if whole => break (found, took),
            None if whole || took > LIMIT => {
                return Err(format!("{name}: expected 3 of them, found {census:?}").into());
            }
            _ => {}
        }
    };
    load.stop().await?;
    let begun = Instant::now();
    let listed = first.operators.keys().unknown(&ListQuery::default()).await?;
    let list = begun.elapsed();
    drop(first);
    let mut ids: Vec<_> = listed.keys.iter().map(|key| key.id.clone()).collect();
    ids.sort_unstable();
    if ids != undecided.iter().map(ToString::to_string).collect::<Vec<_>>() {
        return Err(format!("{name}: expected {undecided:?} on the list, found {ids:?}").into());
    }
    eprintln!("{name}: found after {found:.1?}, whole walk {walk:.1?}, list {list:.1?}");

    let (mut p50, mut p99) = (Vec::new(), Vec::new());
    for round in 0..rounds {
        let mut took = [Vec::new(), Vec::new()];
        for phase in [round % 2, 1 - round % 2] {
            let in_progress = phase == 1;
            let load = Load::start(if in_progress { &watched } else { &bare });
            match in_progress {
                false => sleep(SPAN).await,
                true => walk_for_a_span(&place, store, &watched, &census).await?,
            }
            took[usize::from(in_progress)] = load.stop().await?;
        }
        let [off, on] = took;
        let at = |part| [quantile(&off, part), quantile(&on, part)];
        p50.push(at(0.5));
        p99.push(at(0.99));
        eprintln!("{name}: round {}: p50 {:.2?}, p99 {:.2?}", round + 1, at(0.5), at(0.99));
    }
    opened.close().await;
    place.stop().await;
    let [found, walk, list] = [found, walk, list].map(|time| time.as_secs_f64());
    let ([off_50, on_50, ratio_50], [off_99, on_99, ratio_99]) = (medians(&p50), medians(&p99));
    let times = format!("{name:9} {found:7.1} {walk:6.1} {list:6.1}");
    let p50 = format!("{off_50:9.2} {on_50:7.2} {ratio_50:6.2}");
    Ok(format!("{times}   {p50}   {off_99:9.2} {on_99:7.2} {ratio_99:6.2}"))
}

/// Keeps a census walking for [`SPAN`].
async fn walk_for_a_span(
    place: &Place,
    store: &Arc<dyn Inspect>,
    watched: &Idempotency,
    census: &Arc<Census>,
) -> Result<(), Failure> {
    let begun = Instant::now();
    let mut walk = place.walk(store, watched, census)?;
    while begun.elapsed() < SPAN {
        sleep(EVERY).await;
        // After a whole walk a census rests.
        if walk.is_whole() {
            walk = place.walk(store, watched, census)?;
        }
    }
    Ok(())
}

/// Returns the medians of both columns, and their ratio.
fn medians(rounds: &[[f64; 2]]) -> [f64; 3] {
    let [off, on] = [0, 1].map(|column| {
        let mut values: Vec<_> = rounds.iter().map(|round| round[column]).collect();
        values.sort_unstable_by(f64::total_cmp);
        values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
    });
    [off, on, on / off]
}
