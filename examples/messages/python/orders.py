"""An order service's outbox and an inbox for its messages, from Python.

    orders.py place postgres://app@127.0.0.1/app CUSTOMER ITEM
    orders.py consume postgres://app@127.0.0.1/app nats://127.0.0.1:4222

`hapax relay` publishes what `place` writes.
"""

import asyncio
import hashlib
import json
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
        message = json.dumps({"order": order, "customer": customer}).encode()
        connection.execute(
            "SELECT hapax_outbox_put('orders.created', %s, %s, %s)",
            [message, customer, f"order-{order}"],
        )
    print(order)


def handle(connection, messages):
    """Writes invoices for the new ones of `messages`, and commits them with their ids."""
    ids = [message.headers["message-id"] for message in messages]
    payloads = [message.data for message in messages]
    with connection.transaction():
        entered = connection.execute(
            "SELECT item, state FROM hapax_inbox('python', %s::text[], %s::bytea[])", [ids, payloads]
        )
        for item, state in entered.fetchall():
            message_id, payload = ids[item - 1], payloads[item - 1]
            if state == "conflict":
                park(connection, message_id, payload, state, "another payload under this id")
            if state == "new":
                try:
                    created = json.loads(payload)
                    invoice = [created["order"], created["customer"]]
                except (ValueError, KeyError, TypeError) as error:
                    connection.execute("SELECT hapax_inbox_park('python', %s)", [message_id])
                    park(connection, message_id, payload, "rejected", repr(error))
                    continue
                connection.execute(
                    "INSERT INTO invoices (order_id, customer) VALUES (%s, %s)", invoice
                )


def park(connection, message_id, payload, reason, error):
    """Stores a dead letter; `hapax messages list` shows it."""
    letter = hashlib.sha256(f"python\0{message_id}".encode()).digest()
    connection.execute(
        """SELECT hapax_dead_letter_put(%s, 'python', %s, 'nats', %s, 1, %s, NULL, '{}', '{}', %s,
                                        now(), now())""",
        [letter, message_id, reason, error, payload],
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
            # Another process handles one of them, or won: they are delivered again.
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
