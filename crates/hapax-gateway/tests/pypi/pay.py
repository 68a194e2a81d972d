"""Makes payments with Stripe's own library, as an application would: nothing here knows of retries.

usage: pay.py URL CALLS
"""

import json
import sys
from concurrent.futures import ThreadPoolExecutor

import stripe

url, calls = sys.argv[1], int(sys.argv[2])
client = stripe.StripeClient(
    "sk_test_fake", base_addresses={"api": url}, max_network_retries=12
)


def pay(call):
    params = {"amount": 100 + call, "currency": "usd", "metadata": {"call": str(call)}}
    intent = client.v1.payment_intents.create(params=params)
    assert intent.amount == 100 + call, intent
    return {"call": call, "id": intent.id}


with ThreadPoolExecutor(8) as pool:
    for paid in pool.map(pay, range(calls)):
        print(json.dumps(paid))
