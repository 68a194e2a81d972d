//! Decisions of operators.

use super::*;

#[test]
fn an_operator_decides() {
    let fence = FencingToken::new(at(-10).as_micros());
    let resolve = |expected, force, resolution| {
        Event::Resolve(Resolve { expected, force, forget: false, resolution, note: None })
    };
    let nothing = "absent:not-found expired:not-found released:not-found";
    let rest = |word: &str| {
        let rows = [
            "lapsed",
            "lapsed-block",
            "lapsed-reconcile",
            "just-lapsed-reconcile",
            "unknown",
            "unknown-block",
            "unknown-reconcile",
            "reconciling",
            "reconciling-lapsed",
        ];
        rows.map(|row| format!("{row}:{word}")).join(" ")
    };
    let release = resolve(fence, false, DefiniteVerdict::DidNotHappen);
    let expected = format!("{nothing} live:rejected {} done:rejected", rest("released"));
    check("release", &release, &expected);
    let forced = resolve(fence, true, DefiniteVerdict::DidNotHappen);
    let expected = format!("{nothing} live:released {} done:rejected", rest("released"));
    check("forced release", &forced, &expected);
    let resolution = DefiniteVerdict::DidNotHappen;
    let forget = Resolve { expected: fence, force: false, forget: true, resolution, note: None };
    let expected = format!("{nothing} live:rejected {} done:released", rest("released"));
    check("forget", &Event::Resolve(forget), &expected);
    let happened = resolve(fence, false, DefiniteVerdict::Happened(outcome("found")));
    let expected = format!("{nothing} live:rejected {} done:changed", rest("done"));
    check("happened", &happened, &expected);
    let stale = resolve(FencingToken::new(1), true, DefiniteVerdict::DidNotHappen);
    let expected = format!("{nothing} live:changed {} done:changed", rest("changed"));
    check("stale", &stale, &expected);
}
