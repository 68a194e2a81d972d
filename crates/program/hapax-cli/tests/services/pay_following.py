"""Posts with httpx, which follows a redirect with the same headers and body.

usage: pay_following.py URL KEY BODY

Prints the statuses of the redirects, the status, whether it is a replay, and the body, as JSON.
"""

import json
import sys

import httpx

url, key, body = sys.argv[1:]
headers = {
    "authorization": "Bearer a",
    "content-type": "application/json",
    "idempotency-key": key,
}
with httpx.Client(follow_redirects=True, timeout=60) as client:
    answer = client.post(url, content=body, headers=headers)
redirects = [it.status_code for it in answer.history]
replayed = answer.headers.get("idempotency-replayed")
print(json.dumps([redirects, answer.status_code, replayed, answer.text]))
