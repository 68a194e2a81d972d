mod events;
mod insert;
mod support;
