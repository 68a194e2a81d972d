"""Publishes N messages through a framework with its defaults: producers.py FRAMEWORK ADDRESS PLACE N

Every fourth message is hostile: in a header, a property, its id or its payload, as far as the framework lets it
through. Instead of one that the framework rejects, a plain message is published. The last line is JSON: how many
messages have no valid id or are too old, which become dead letters for that, and what was rejected.
"""

import asyncio
import datetime
import decimal
import json
import os
import sys

NAME, ADDRESS, PLACE, COUNT = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])

# Expected reasons of dead letters, beside a rejection by the service.
REASONS = ("no-id", "too-old")
summary = {"no-id": 0, "too-old": 0, "rejected": {}}


def nested(depth):
    return {"deeper": nested(depth - 1)} if depth else {"end": None}


# Values that are texts, for every broker.
TEXTS = {
    "empty value": {"empty": ""},
    "empty name": {"": "no name"},
    "value not ASCII": {"greeting": "grüße 東京 😀"},
    "name not ASCII": {"grüße": "1"},
    "tab and spaces": {"tab": "a\tb", "spaces": "  a  "},
    "line break": {"lines": "a\r\nx-injected: 1"},
    "carriage return": {"return": "a\rb"},
    "line feed": {"feed": "a\nb"},
    "zero byte": {"zero": "a\0b"},
    "control characters": {"control": "".join(map(chr, range(1, 32))) + "\x7f"},
    "name with a space": {"a b": "1"},
    "name with a colon": {"a:b": "1"},
    "headers of a connection": {
        "connection": "close, x-kept", "x-kept": "1", "content-length": "0", "transfer-encoding": "chunked",
        "host": "other.example", "expect": "100-continue", "te": "trailers", "upgrade": "h2c",
    },
    "names that differ in case": {"Case": "1", "case": "2", "CASE": "3"},
    "long value": {"long": "x" * 102_400},
    "long name": {"n" * 255: "1"},
    "many headers": {f"h{number}": str(number) for number in range(1000)},
    "headers of Hapax": {
        "hapax-redrive": "00" * 32, "hapax-routing-key": "elsewhere", "webhook-id": "forged", "webhook-signature": "v1,x",
        "idempotency-key": '"forged"', "message-destination": "elsewhere", "message-order-key": "k",
    },
    "no-id: empty": {"message-id": ""},
    "no-id: long": {"message-id": "m" * 1025},
    "no-id: zero byte": {"message-id": "a\0b"},
}

# Values of AMQP's types.
TYPES = {
    "nested tables": {"table": {"a": {"b": [1, "x", None, {"c": True}]}}, "list": [1, "a", [], {}], "empty": {}},
    "deep tables": {"deep": nested(40)},
    "void": {"void": None},
    "integers": {"zero": 0, "negative": -1, "short": -32768, "int": 2**31 - 1, "long": 2**63 - 1, "true": True},
    "floats": {"float": 1.5, "tiny": 5e-324},
    "infinite float": {"infinite": float("inf")},
    "no number": {"nan": float("nan")},
    "decimals": {"price": decimal.Decimal("1.10"), "negative": decimal.Decimal("-0.5")},
    "timestamps": {"at": datetime.datetime(2026, 11, 28, 12, tzinfo=datetime.timezone.utc)},
    "bytes": {"bytes": b"\xff\x00\xfe"},
    "array of bytes": {"array": bytearray(b"\x00\xff")},
    "headers of the broker": {"x-death": [{"count": 3, "reason": "expired", "queue": PLACE}], "x-delivery-count": 7},
    "no-id: not UTF-8": {"message-id": b"\xff\xfe"},
}


def hostile(kinds):
    """Yields for each message its number, and kind and contents if it is hostile."""
    kinds = list(kinds.items())
    for number in range(COUNT):
        yield number, (*kinds[number // 4 % len(kinds)],) if number % 4 == 3 else None


def note(kind):
    for reason in REASONS:
        summary[reason] += kind.startswith(reason)


def rejected(kind, error):
    summary["rejected"].setdefault(kind, f"{type(error).__name__}: {str(error)[:80]}")


def publish_all(kinds, connect):
    """`connect` returns a function that takes the number of a message and the contents of its kind."""
    publish = connect()
    for number, kind in hostile(kinds):
        if kind:
            try:
                publish(number, kind[1])
                note(kind[0])
                continue
            except Exception as error:
                rejected(kind[0], error)
                publish = connect()
        publish(number, {})


async def publish_each(kinds, connect):
    publish = await connect()
    for number, kind in hostile(kinds):
        if kind:
            try:
                await publish(number, kind[1])
                note(kind[0])
                continue
            except Exception as error:
                rejected(kind[0], error)
                publish = await connect()
        await publish(number, {})


def with_own_ids(kinds):
    """Returns kinds for a framework that sets the property message-id, before which no header counts."""
    return {kind.replace("no-id: ", "id in a header: "): headers for kind, headers in kinds.items()}


def with_headers(kinds):
    return {kind: {"headers": headers} for kind, headers in kinds.items()}


def order(number):
    return {"order": number, "producer": NAME}


def kombu():
    from kombu import Connection

    now = datetime.datetime.now(datetime.timezone.utc)
    kinds = with_headers(TEXTS | TYPES) | {
        "properties": {"message_id": "%d.a b/ü", "correlation_id": "c" * 255, "reply_to": "r", "type": "t", "app_id": "a"},
        "priority and time": {"priority": 9, "timestamp": int(now.timestamp()), "expiration": 600},
        "too-old: time": {"timestamp": 0},
        "transient": {"delivery_mode": 1},
        "content type": {"content_type": "text/plain; x=ü\r\n", "content_encoding": "ü"},
        "long property": {"correlation_id": "c" * 256},
        "no payload": {"body": b"", "message_id": "empty-%d"},
        "payload of bytes": {"body": b"\xff\x00%d"},
        "compressed": {"compression": "zlib"},
    }

    def connect():
        # Confirmed, as Celery's documentation advises: a message that closes the connection takes no other with it.
        producer = Connection(ADDRESS, transport_options={"confirm_publish": True}).Producer()

        def publish(number, more):
            more = numbered(more, number)
            producer.publish(more.pop("body", order(number)), exchange="", routing_key=PLACE, **more)

        return publish

    publish_all(kinds, connect)


def numbered(more, number):
    """Puts the number of the message where its contents have a place for it."""
    for part in ("message_id", "body", "task_id", "value"):
        if isinstance(more.get(part), str):
            more = more | {part: more[part].replace("%d", str(number))}
        if isinstance(more.get(part), bytes):
            more = more | {part: more[part].replace(b"%d", b"%d" % number)}
    return dict(more)


def celery():
    from celery import Celery

    app = Celery("shop", broker=ADDRESS)
    app.conf.task_default_queue = PLACE
    app.conf.broker_transport_options = {"confirm_publish": True}
    app.conf.task_publish_retry = False
    # The id of a task is its message's: --id header:id.
    kinds = {kind: more for kind, more in with_headers(TEXTS | TYPES).items() if not kind.startswith("no-id")} | {
        "id": {"task_id": "%d.a b/ü"},
        "long id": {"task_id": "t" * 200 + "%d"},
        "no-id: too long": {"task_id": "t" * 1025},
        "priority": {"priority": 9},
        "expires": {"expires": 3600, "countdown": 60},
        "reply": {"reply_to": "r", "correlation_id": "c"},
        "pickled": {"serializer": "pickle"},
        "compressed": {"compression": "zlib"},
    }

    def publish(number, more):
        app.send_task("shop.pay", args=[number], kwargs={"producer": NAME}, **numbered(more, number))

    publish_all(kinds, lambda: publish)


def pika():
    import pika

    now = int(datetime.datetime.now().timestamp())
    kinds = with_headers(TEXTS | TYPES) | {
        "properties": {"message_id": "%d.a b/ü", "correlation_id": "c" * 255, "reply_to": "r", "type": "t", "app_id": "a"},
        "more properties": {"user_id": "guest", "cluster_id": "c", "priority": 255, "timestamp": now, "expiration": "600000"},
        "too-old: time": {"timestamp": 0},
        "time of the far future": {"timestamp": 2**63},
        "transient": {"delivery_mode": 1},
        "delivery mode": {"delivery_mode": 7},
        "content type": {"content_type": "text/plain; x=ü\r\n", "content_encoding": "ü"},
        "property not UTF-8": {"correlation_id": b"\xff\xfe", "type": b"\xfe"},
        "property with a zero byte": {"type": "a\0b"},
        "id that is not UTF-8, which is none": {"message_id": b"\xff%d"},
        "no-id: empty property": {"message_id": ""},
        "long property": {"correlation_id": "c" * 256},
        "no payload": {"body": b"", "message_id": "empty-%d"},
        "payload of bytes": {"body": b"\xff\x00%d"},
    }

    def connect():
        channel = pika.BlockingConnection(pika.URLParameters(ADDRESS)).channel()
        channel.confirm_delivery()

        def publish(number, more):
            more = numbered(more, number)
            body = more.pop("body", json.dumps(order(number)))
            properties = pika.BasicProperties(**more) if more else None
            channel.basic_publish(exchange="", routing_key=PLACE, body=body, properties=properties)

        return publish

    publish_all(kinds, connect)


async def aio_pika():
    import aio_pika

    now = datetime.datetime.now(datetime.timezone.utc)
    kinds = with_headers(with_own_ids(TEXTS | TYPES)) | {
        "properties": {"message_id": "%d.a b/ü", "correlation_id": "c" * 255, "reply_to": "r", "type": "t", "app_id": "a"},
        "more properties": {"user_id": "guest", "priority": 9, "timestamp": now, "expiration": 600},
        "too-old: time": {"timestamp": 0},
        "persistent": {"delivery_mode": 2},
        "content type": {"content_type": "text/plain; x=ü\r\n", "content_encoding": "ü"},
        "empty id, which the framework replaces": {"message_id": ""},
        "long property": {"correlation_id": "c" * 256},
        "no payload": {"body": b"", "message_id": "empty-%d"},
        "payload of bytes": {"body": b"\xff\x00%d"},
    }

    async def connect():
        channel = await (await aio_pika.connect_robust(ADDRESS)).channel()

        async def publish(number, more):
            more = numbered(more, number)
            body = more.pop("body", json.dumps(order(number)).encode())
            await channel.default_exchange.publish(aio_pika.Message(body, **more), routing_key=PLACE)

        return publish

    await publish_each(kinds, connect)


async def faststream_rabbit():
    from faststream.rabbit import RabbitBroker

    kinds = with_headers(with_own_ids(TEXTS | TYPES)) | {
        "properties": {"message_id": "%d.a b/ü", "correlation_id": "c" * 255, "reply_to": "r", "message_type": "t"},
        "more properties": {"user_id": "guest", "priority": 9, "expiration": 600, "persist": True},
        "content type": {"content_type": "text/plain; x=ü\r\n", "content_encoding": "ü"},
        "payload of bytes": {"body": b"\xff\x00%d"},
        "text": {"body": "order %d"},
    }

    async def connect():
        broker = RabbitBroker(ADDRESS, logger=None)
        await broker.start()

        async def publish(number, more):
            more = numbered(more, number)
            await broker.publish(more.pop("body", order(number)), queue=PLACE, **more)

        return publish

    await publish_each(kinds, connect)


# A server accepts 64 KiB of headers.
NATS = with_headers(TEXTS | {"long value": {"long": "x" * 60_000}}) | {
    "headers of the broker": {"headers": {"Nats-Msg-Id": "%d", "Nats-Expected-Stream": PLACE}},
    "id": {"headers": {"message-id": "%d.a b/ü"}},
    "text": {"body": "order %d"},
    "payload of bytes": {"body": b"\xff\x00%d"},
}


def of_nats(more, number):
    more = numbered(more, number)
    if "headers" in more:
        more["headers"] = {name: value.replace("%d", f"{NAME}-{number}") for name, value in more["headers"].items()}
    return more


async def nats_py():
    import nats

    async def connect():
        stream = (await nats.connect(ADDRESS)).jetstream()

        async def publish(number, more):
            more = of_nats(more, number)
            body = more.pop("body", json.dumps(order(number)))
            await stream.publish(f"{PLACE}.created", body if isinstance(body, bytes) else body.encode(), **more)

        return publish

    await publish_each(NATS | {"no payload": {"body": b""}}, connect)


async def faststream_nats():
    from faststream.nats import NatsBroker

    async def connect():
        broker = NatsBroker(ADDRESS, logger=None)
        await broker.start()

        async def publish(number, more):
            more = of_nats(more, number)
            await broker.publish(more.pop("body", order(number)), f"{PLACE}.created", stream=PLACE, **more)

        return publish

    await publish_each(NATS | {"own correlation": {"correlation_id": "a b/ü\r"}}, connect)


def confluent_kafka():
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": ADDRESS})
    # The client ends a text at a zero byte, but not bytes.
    pairs = lambda headers: [(name, value.encode() if "\0" in value else value) for name, value in headers.items()]
    kinds = {kind: {"headers": pairs(headers)} for kind, headers in TEXTS.items()} | {
        "repeated headers": {"headers": [("a", b"1"), ("b", b"x"), ("a", b"2"), ("a", b"1")]},
        "null header": {"headers": [("null", None), ("empty", b""), ("null", b"1")]},
        "bytes in headers": {"headers": [("bytes", b"\xff\x00\xfe")]},
        "no-id: not UTF-8": {"headers": [("message-id", b"\xff")]},
        "id": {"headers": [("message-id", "%d.a b/ü")]},
        "no key": {"key": None},
        "empty key": {"key": b""},
        "key of bytes": {"key": b"\xff\x00\n"},
        "key like an encoded one": {"key": b"base16:ff"},
        "long key": {"key": b"k" * 3000},
        "null value": {"value": None},
        "empty value": {"value": b""},
        "bytes": {"value": b"\xff\x00%d"},
        "partition": {"partition": 2, "key": b"elsewhere"},
    }

    def publish(number, more):
        more = numbered(more, number)
        if "headers" in more:
            place = lambda value: value.replace("%d", str(number)) if isinstance(value, str) else value
            more["headers"] = [(name, place(value)) for name, value in more["headers"]]
        more = {"value": json.dumps(order(number)), "key": f"customer-{number % 7}"} | more
        producer.produce(PLACE, on_delivery=delivered, **more)
        producer.poll(0)

    def delivered(error, _):
        if error:
            raise SystemExit(f"not delivered: {error}")

    publish_all(kinds, lambda: publish)
    producer.flush()


async def faststream_kafka():
    from faststream.kafka import KafkaBroker

    kinds = with_headers(TEXTS) | {
        "key of bytes": {"key": b"\xff\x00\n"},
        "no key": {"key": None},
        "text": {"value": "order %d"},
        "bytes": {"value": b"\xff\x00%d"},
        "own correlation": {"correlation_id": "a b/ü\r"},
        "partition": {"partition": 2, "key": b"elsewhere"},
    }
    async def connect():
        broker = KafkaBroker(ADDRESS, logger=None)
        await broker.start()

        async def publish(number, more):
            more = {"key": f"customer-{number % 7}".encode()} | numbered(more, number)
            await broker.publish(more.pop("value", order(number)), PLACE, **more)

        return publish

    await publish_each(kinds, connect)


FRAMEWORKS = [
    kombu, celery, pika, aio_pika, faststream_rabbit, nats_py, faststream_nats, confluent_kafka, faststream_kafka,
]
framework = {it.__name__.replace("_", "-"): it for it in FRAMEWORKS}[NAME]
result = framework()
if result is not None:
    asyncio.new_event_loop().run_until_complete(result)
print(json.dumps(summary), flush=True)
# Connections that are repaired for ever do not end with their event loop.
os._exit(0)
