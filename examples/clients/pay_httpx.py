"""Sends a payment with httpx and tenacity. usage: TOKEN=… python pay_httpx.py URL FILE BODY"""

import os
import sys

import httpx
from operation import again, delay, keep
from tenacity import retry, retry_if_exception_type, retry_if_result, stop_after_attempt


def unsettled(response):
    try:
        code = response.json()["error"]["code"]
    except (ValueError, LookupError, TypeError):
        code = None
    return again(response.status_code, response.headers, code)


def wait(state):
    failed = state.outcome.failed
    return delay(state.attempt_number - 1, None if failed else state.outcome.result().headers.get("retry-after"))


# A response is no exception to httpx: the second predicate is the one that sees a 503.
@retry(
    retry=retry_if_exception_type((httpx.TransportError, httpx.DecodingError)) | retry_if_result(unsettled),
    wait=wait,
    stop=stop_after_attempt(10),
    reraise=True,
)
def pay(client, url, operation, token):
    headers = {
        "Authorization": f"Bearer {token}",
        "Content-Type": "application/json",
        "Idempotency-Key": operation["key"],
    }
    return client.post(url, content=operation["body"], headers=headers)


url, path, body = sys.argv[1:]
token = os.environ["TOKEN"]
# Its default, written down: a redirect would take key and body to another host.
with httpx.Client(timeout=30, follow_redirects=False) as client:
    response = pay(client, url, keep(path, body, token), token)
print(response.status_code, response.text)
