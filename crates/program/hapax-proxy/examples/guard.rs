//! Prints how the guard reads the head of a request: its framing, or the reason of a rejection.
//!
//!     cargo run -p hapax-proxy --example guard

use hapax_proxy::guard::head::framing;

fn main() {
    for fields in [
        "Content-Length: 5\r\n",
        "Transfer-Encoding: chunked\r\n",
        "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        "Content-Length: 5\r\nContent-Length: 6\r\n",
    ] {
        let head = format!("POST /orders HTTP/1.1\r\nHost: shop\r\n{fields}\r\n");
        match framing(head.as_bytes()) {
            Ok(framing) => println!("{fields:?}: {framing:?}"),
            Err(rejection) => println!("{fields:?}: {rejection}"),
        }
    }
}
