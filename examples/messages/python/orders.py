"""An order service's outbox and an inbox for its messages, from Python.

    orders.py place postgres://app@127.0.0.1/app CUSTOMER ITEM
    orders.py consume postgres://app@127.0.0.1/app nats://127.0.0.1:4222

`hapax relay` publishes what `place` writes.
"""

import asyncio
import hashlib
import json
import re
import signal
import sys

import nats
import psycopg
from nats.js.api import ConsumerConfig
from psycopg import errors


def place(database, customer, item):
    """Writes an order and the message that reports it, in one transaction."""
    with psycopg.connect(database) as connection:
        insert = "INSERT INTO orders (customer, item) VALUES (%s, %s) RETURNING id"
        (order,) = connection.execute(insert, [customer, item]).fetchone()
        message = json.dumps({"order": order, "customer": customer})
        connection.execute(
            "SELECT hapax_outbox_put_text('orders.created', %s, %s, %s)",
            [message, customer, f"order-{order}"],
        )
    print(order)


def handle(connection, messages):
    """Writes invoices for the new ones of `messages`, and commits them with their ids."""
    with connection.transaction():
        identified = []
        for message in messages:
            message_id = header(message, "message-id")
            if message_id is None or not 1 <= len(message_id.encode()) <= 1024:
                park(connection, None, message, "no-id", "expected a header message-id")
            else:
                identified.append((message_id, message))
        ids = [message_id for message_id, _ in identified]
        payloads = [message.data for _, message in identified]
        entered = connection.execute(
            "SELECT item, state FROM hapax_inbox('python', %s::text[], %s::bytea[])", [ids, payloads]
        )
        for item, state in entered.fetchall():
            message_id, message = identified[item - 1]
            if state == "mismatch":
                park(connection, message_id, message, state, "another payload under this id")
                continue
            if state == "new":
                try:
                    created = json.loads(message.data)
                    invoice = [created["order"], created["customer"]]
                except (ValueError, KeyError, TypeError) as error:
                    connection.execute("SELECT hapax_inbox_park('python', %s)", [message_id])
                    park(connection, message_id, message, "rejected", repr(error))
                    continue
                connection.execute(
                    "INSERT INTO invoices (order_id, customer) VALUES (%s, %s)", invoice
                )
            # A message that was redriven, and is handled now or was before.
            redriven = header(message, "hapax-redrive")
            if redriven is not None and re.fullmatch("[0-9a-f]{64}", redriven):
                connection.execute(
                    "SELECT hapax_dead_letter_remove(%s)", [bytes.fromhex(redriven)]
                )


def header(message, name):
    return (message.headers or {}).get(name)


def park(connection, message_id, message, reason, error):
    """Stores a dead letter; `hapax messages list` shows it."""
    # Two messages under one id have two dead letters.
    parts = [b"python", (message_id or "").encode(), message.data]
    dead_letter_id = hashlib.sha256(
        b"".join(len(part).to_bytes(8) + part for part in parts)
    ).digest()
    headers = message.headers or {}
    names, values = list(headers), [value.encode() for value in headers.values()]
    connection.execute(
        """SELECT hapax_dead_letter_put(%s, 'python', %s, %s, %s, 1, %s, NULL, %s::text[],
                                        %s::bytea[], %s, now(), now())""",
        # `hapax messages redrive` publishes to the subject in the origin.
        [dead_letter_id, message_id, f"nats://ORDERS/{message.subject}", reason, error, names, values,
         message.data],
    )


async def consume(database, broker):
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    client = await nats.connect(broker)
    # A broker's limit of deliveries would drop messages after crashes.
    config = ConsumerConfig(ack_wait=5, max_deliver=-1, max_ack_pending=100)
    subscription = await client.jetstream().pull_subscribe(
        "orders.>", durable="python", stream="ORDERS", config=config
    )
    connection = psycopg.connect(database, autocommit=True)
    while not stop.is_set():
        try:
            messages = await subscription.fetch(50, timeout=1)
        except TimeoutError:
            continue
        try:
            handle(connection, messages)
        except (errors.LockNotAvailable, errors.SerializationFailure, errors.DeadlockDetected):
            # Another transaction has one of the ids, or caused an abort: the messages are delivered again.
            continue
        # Only after the COMMIT.
        for message in messages:
            await message.ack_sync()
    await client.close()


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["place", database, customer, item]:
            place(database, customer, item)
        case ["consume", database, broker]:
            asyncio.run(consume(database, broker))
        case _:
            sys.exit(__doc__)
