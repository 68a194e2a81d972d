//! Command list.
fn main() {}
