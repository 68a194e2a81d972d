mod events;
mod insert;
mod support;
mod versioned;
