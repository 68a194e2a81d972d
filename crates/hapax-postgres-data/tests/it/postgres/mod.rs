mod insert;
mod support;
