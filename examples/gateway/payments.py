#!/usr/bin/env python3
"""A payments service that never looks for duplicates: every POST is a new charge.

    python3 payments.py PORT

POST /payments            charges; "seconds" in the body is how long that takes
GET  /ledger              how many charges have begun, and every one so far
GET  /charges/by-operation   what became of the operation in `Idempotency-Operation-Id` (asked by
                             `reconcile`); of another caller's same key the id is another one
"""
import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

lock = threading.Lock()
ledger = []
made = {}  # operation id -> its first charge
begun = 0
refused = {}  # operation id -> the largest fence that was told "did not happen"


class Payments(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))))
        key = self.headers.get("Idempotency-Key", "").strip('"')
        operation = self.headers.get("Idempotency-Operation-Id")  # None without a gateway
        fence = int(self.headers.get("Idempotency-Fence", 0))
        global begun
        with lock:
            begun += 1
        time.sleep(body.get("seconds", 0))
        with lock:
            if fence and fence <= refused.get(operation, 0):
                return self.answer(409, {"error": "this attempt was given up"})
            charge = {"id": f"ch_{len(ledger) + 1}", "amount": body["amount"], "key": key}
            ledger.append(charge)
            if operation:
                made.setdefault(operation, charge)
        self.answer(201, charge)

    def do_GET(self):
        if self.path == "/ledger":
            with lock:
                return self.answer(200, {"begun": begun, "charges": len(ledger), "ledger": ledger})
        if self.path != "/charges/by-operation":
            return self.answer(404, {"error": "no such path"})
        operation = self.headers.get("Idempotency-Operation-Id")
        if not operation:
            # Not by the key: two callers may use the same one.
            return self.answer(400, {"error": "expected Idempotency-Operation-Id"})
        fence = int(self.headers.get("Idempotency-Fence", 0))
        with lock:
            found = made.get(operation)
            if found is None:
                # A promise: a charge with this fence that is still on its way is refused.
                refused[operation] = max(fence, refused.get(operation, 0))
        if found is None:
            # A bare 404 would say nothing: any router answers it for a path that it does not know.
            did_not_happen = {"Idempotency-Outcome": "did-not-happen"}
            return self.answer(404, {"error": "no such charge"}, did_not_happen)
        self.answer(200, found, {"Idempotency-Status": "201"})

    def answer(self, status, value, headers=None):
        body = (json.dumps(value) + "\n").encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        for name, text in (headers or {}).items():
            self.send_header(name, text)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Payments).serve_forever()
