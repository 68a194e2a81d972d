"""Makes a payment with Stripe's SDK. usage: TOKEN=… python pay_stripe.py URL FILE PARAMS"""

import json
import os
import sys
import time

import stripe
from operation import again, delay, keep


def pay(client, operation):
    params = json.loads(operation["body"])
    # Without this key the SDK makes one for each call: each turn of this loop would be another payment.
    options = {"idempotency_key": operation["key"]}
    for tries in range(10):
        try:
            payment = client.v1.payment_intents.create(params=params, options=options)
            return payment.last_response.code, payment.last_response.body
        except stripe.StripeError as error:
            failure = error
            code = error.error and error.error.code  # `error.code` lacks that of a 409
            if not again(error.http_status, error.headers, code):
                return error.http_status, error.http_body
            time.sleep(delay(tries, error.headers.get("retry-after")))
    raise failure


url, path, params = sys.argv[1:]
token = os.environ["TOKEN"]
client = stripe.StripeClient(
    token,
    base_addresses={"api": url},
    # Its own retries leave out 429 and ignore `Retry-After`.
    max_network_retries=0,
    # Its default client, requests, follows redirects with key and body to another host.
    http_client=stripe.HTTPXClient(timeout=30, allow_sync_methods=True),
)
print(*pay(client, keep(path, params, token)))
