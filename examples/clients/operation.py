"""Keeps an operation, and decides whether to send it again. The recipes for Python share this file."""

import hashlib
import json
import os
import random
import time
import uuid
from email.utils import parsedate_to_datetime

RETENTION = 24 * 3600  # for which the server keeps a key, in seconds


def keep(path, body, token):
    """Returns what the file has: the key and the body of the first run.

    The file is complete and on the disk before the first try, and never replaced. In a service it is a row of the
    database, committed before the first try.
    """
    caller = hashlib.sha256(token.encode()).hexdigest()
    operation = {"key": str(uuid.uuid4()), "since": int(time.time() * 1000), "caller": caller, "body": body}
    draft = f"{path}.{uuid.uuid4()}"
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
        json.dump(operation, out)
        out.flush()
        os.fsync(out.fileno())
    try:
        os.link(draft, path)
    except FileExistsError:
        pass  # an earlier run kept it
    os.unlink(draft)
    folder = os.open(os.path.dirname(os.path.abspath(path)), os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)
    with open(path) as file:
        kept = json.load(file)
    if kept["caller"] != caller:
        raise ValueError(f"{path}: the token has changed: look the operation up at the server")
    if time.time() - kept["since"] / 1000 > 0.9 * RETENTION:
        raise ValueError(f"{path}: too old: look the operation up at the server")
    return kept


def again(status, headers, code):
    """Returns whether another try with this key and body may get another response. No response: no status."""
    if status is None:
        return True
    if "true" in (headers.get("idempotency-replayed"), headers.get("idempotent-replayed")):
        return False
    if status != 409:
        return status in (408, 425, 429, 500, 502, 503, 504)
    if code == "outcome-unknown":
        return "retry-after" in headers
    return code in ("in-flight", "superseded", "idempotency_key_in_use")


def delay(tries, retry_after):
    """Returns how long to wait before the next try, in seconds.

    The time in `Retry-After`, seconds or a date, but at least the backoff, and a minute at most.
    """
    after = 0.0
    try:
        after = float(retry_after or 0)
    except ValueError:
        try:
            after = parsedate_to_datetime(retry_after).timestamp() - time.time()
        except (TypeError, ValueError):
            pass  # no date either
    return min(60, max(0.25 * 2**tries * random.uniform(0.5, 1.5), after))
