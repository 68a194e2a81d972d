"""Makes payments with Stripe's own library, as an application would: its own retries, and no code for
them here. After each payment it replays it, and reuses its key for another amount.

usage: pay.py HOST PORT CALLS
"""

import json
import sys
from concurrent.futures import ThreadPoolExecutor

import stripe

host, port, calls = sys.argv[1], sys.argv[2], int(sys.argv[3])
client = stripe.StripeClient(
    "sk_test_fake", base_addresses={"api": f"http://{host}:{port}"}, max_network_retries=12
)


def pay(call):
    params = {"amount": 100 + call, "currency": "usd", "metadata": {"call": str(call)}}
    options = {"idempotency_key": f"python-{call}"}
    create = client.v1.payment_intents.create
    first = create(params=params, options=options)
    replay = create(params=params, options=options)
    assert first.amount == replay.amount == 100 + call, (first, replay)
    try:
        create(params={**params, "amount": 1}, options=options)
        raised = None
    except stripe.StripeError as error:
        raised = error.error.code
    return {"call": call, "id": first.id, "replay": replay.id, "reused": raised}


with ThreadPoolExecutor(8) as pool:
    for paid in pool.map(pay, range(calls)):
        print(json.dumps(paid))
