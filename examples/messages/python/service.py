"""A service behind `hapax consume`: an invoice for each order, without a library for messages.

    service.py invoices.db 8000 /run/secrets/webhooks

    hapax consume --from nats://127.0.0.1 --stream ORDERS --consumer invoices --store file:inbox.db \\
        --database postgres://app@127.0.0.1/app --to http://127.0.0.1:8000/ \\
        --signing-secret-file /run/secrets/webhooks

A message may be posted again, under the same webhook-id: after a crash, or if the answer is lost. So
the invoice and the id are written in one transaction, and a message with a known id is accepted
without a second invoice. GET / lists the invoices.
"""

import base64
import hmac
import json
import sqlite3
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOLERANCE_SECONDS = 5 * 60
MAX_BODY = 1024 * 1024

TABLES = """
    CREATE TABLE IF NOT EXISTS messages (id TEXT PRIMARY KEY);
    CREATE TABLE IF NOT EXISTS invoices (order_id INTEGER NOT NULL, customer TEXT NOT NULL);
"""


class Rejected(Exception):
    """A request that is never accepted: its message becomes a dead letter."""

    def __init__(self, status, reason):
        super().__init__(reason)
        self.status = status


def verify(secrets, headers, body):
    """Returns the id of a message whose signature is valid."""
    message_id, timestamp = headers.get("webhook-id", ""), headers.get("webhook-timestamp", "")
    if not timestamp.isdecimal() or abs(time.time() - int(timestamp)) > TOLERANCE_SECONDS:
        raise Rejected(401, "expected a webhook-timestamp of the last minutes")
    content = f"{message_id}.{timestamp}.".encode() + body
    for signature in headers.get("webhook-signature", "").split():
        for secret in secrets:
            digest = base64.b64encode(hmac.digest(secret, content, "sha256")).decode()
            if hmac.compare_digest(f"v1,{digest}".encode(), signature.encode()):
                return message_id
    raise Rejected(401, "expected a valid webhook-signature")


def accept(database, message_id, body):
    """Writes the invoice of an order, unless its message was accepted before."""
    try:
        order = json.loads(body)
        invoice = (int(order["order"]), str(order["customer"]))
    except (ValueError, KeyError, TypeError) as error:
        raise Rejected(422, f"expected an order: {error!r}") from error
    connection = sqlite3.connect(database, timeout=10)
    try:
        with connection:
            insert = "INSERT INTO messages VALUES (?) ON CONFLICT DO NOTHING"
            if connection.execute(insert, [message_id]).rowcount == 1:
                connection.execute("INSERT INTO invoices VALUES (?, ?)", invoice)
    finally:
        connection.close()


class Service(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 30
    database = None
    secrets = ()

    def do_POST(self):
        length = self.headers.get("content-length", "")
        if not length.isdecimal() or int(length) > MAX_BODY:
            self.close_connection = True
            return self.answer(413, "expected a body of at most 1 MiB with its length")
        body = self.rfile.read(int(length))
        try:
            accept(self.database, verify(self.secrets, self.headers, body), body)
        except Rejected as rejected:
            return self.answer(rejected.status, str(rejected))
        except sqlite3.OperationalError as error:
            # Busy or full: the message is posted again later.
            return self.answer(503, str(error))
        self.answer(200, "accepted")

    def do_GET(self):
        connection = sqlite3.connect(self.database, timeout=10)
        rows = connection.execute("SELECT order_id, customer FROM invoices ORDER BY rowid").fetchall()
        connection.close()
        self.answer(200, json.dumps(rows))

    def answer(self, status, text):
        content = text.encode()
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        """Logs nothing."""


class Server(ThreadingHTTPServer):
    # Connections that wait: at least --in-flight of `hapax consume`.
    request_queue_size = 128


def main(database, port, secret_file):
    connection = sqlite3.connect(database)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.executescript(TABLES)
    connection.close()
    with open(secret_file, encoding="ascii") as file:
        lines = [line.strip() for line in file if line.strip()]
    Service.database = database
    Service.secrets = [base64.b64decode(line.removeprefix("whsec_")) for line in lines]
    Server(("127.0.0.1", int(port)), Service).serve_forever()


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    main(*sys.argv[1:])
