"""Calls a server that rejects each call with the problem that the call names, and prints what the
library made of it: the error that it raised, or what it resolved to.

usage: rejected.py HOST PORT CODE...
"""

import json
import sys

import stripe

host, port, *codes = sys.argv[1:]
client = stripe.StripeClient(
    "sk_test_fake", base_addresses={"api": f"http://{host}:{port}"}, max_network_retries=0
)

for code in codes:
    params = {"amount": 100, "currency": "usd", "metadata": {"code": code}}
    try:
        seen = {"resolved": dict(client.v1.payment_intents.create(params=params))}
    except stripe.StripeError as error:
        seen = {
            "raised": type(error).__name__,
            "status": error.http_status,
            "code": error.error.code,
            "message": error.user_message,
        }
    print(json.dumps(seen, default=repr))
