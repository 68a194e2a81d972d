// Publishes N messages through a client with its defaults: producers.js CLIENT ADDRESS PLACE N
//
// Every fourth message is hostile, as in producers.py, which explains the last line.
'use strict';
const [name, address, place, count] = process.argv.slice(2);
const summary = { 'no-id': 0, 'too-old': 0, rejected: {} };

const nested = (depth) => (depth ? { deeper: nested(depth - 1) } : { end: null });

const texts = {
  'empty value': { empty: '' },
  'empty name': { '': 'no name' },
  'value not ASCII': { greeting: 'grüße 東京 😀' },
  'name not ASCII': { grüße: '1' },
  'tab and spaces': { tab: 'a\tb', spaces: '  a  ' },
  'line break': { lines: 'a\r\nx-injected: 1' },
  'carriage return': { return: 'a\rb' },
  'zero byte': { zero: 'a\0b' },
  'name with a space': { 'a b': '1' },
  'headers of a connection': { connection: 'close', 'content-length': '0', 'transfer-encoding': 'chunked', host: 'x' },
  'names that differ in case': { Case: '1', case: '2' },
  // amqplib encodes at most 64 KiB of headers.
  'long value': { long: 'x'.repeat(60000) },
  'long name': { ['n'.repeat(255)]: '1' },
  'many headers': Object.fromEntries(Array.from({ length: 1000 }, (_, number) => [`h${number}`, String(number)])),
  'headers of Hapax': { 'hapax-redrive': '00', 'webhook-id': 'forged', 'message-order-key': 'k' },
  'half of a character': { half: '\ud800' },
  'no-id: empty': { 'message-id': '' },
  'no-id: long': { 'message-id': 'm'.repeat(1025) },
  'no-id: zero byte': { 'message-id': 'a\0b' },
};

async function publishAll(kinds, publish) {
  const names = Object.keys(kinds);
  for (let number = 0; number < Number(count); number++) {
    const kind = number % 4 === 3 ? names[Math.floor(number / 4) % names.length] : undefined;
    try {
      if (kind) {
        await publish(number, kinds[kind]);
        for (const reason of ['no-id', 'too-old']) summary[reason] += kind.startsWith(reason);
        continue;
      }
    } catch (error) {
      summary.rejected[kind] ??= String(error).slice(0, 80);
    }
    await publish(number, {});
  }
}

const withHeaders = (kinds) => Object.fromEntries(Object.entries(kinds).map(([kind, headers]) => [kind, { headers }]));
const order = (number) => Buffer.from(JSON.stringify({ order: number, producer: name }));

async function amqplib() {
  const connection = await require('amqplib').connect(address);
  const channel = await connection.createConfirmChannel();
  const types = {
    'nested tables': { table: { a: { b: [1, 'x', null, { c: true }] } }, list: [1, 'a', [], {}], empty: {} },
    'deep tables': { deep: nested(40) },
    void: { void: null },
    integers: { zero: 0, negative: -1, byte: 127, short: -32768, int: 2 ** 31 - 1, long: 2 ** 53 - 1, true: true },
    'integers of every type': Object.fromEntries(
      ['byte', 'short', 'int', 'long'].map((type) => [type, { '!': type, value: -5 }]),
    ),
    floats: { double: 1.5, float: { '!': 'float', value: 1.5 }, tiny: 5e-324 },
    'no number': { nan: NaN },
    decimals: { price: { '!': 'decimal', value: { places: 2, digits: 110 } } },
    timestamps: { at: { '!': 'timestamp', value: 1790000000 } },
    bytes: { bytes: Buffer.from([255, 0, 254]) },
    undefined: { undefined },
    'headers of the broker': { 'x-death': [{ count: 3, reason: 'expired', queue: place }], 'x-delivery-count': 7 },
    'no-id: not UTF-8': { 'message-id': Buffer.from([255]) },
  };
  const kinds = {
    ...withHeaders({ ...texts, ...types }),
    properties: { messageId: '%d.a b/ü', correlationId: 'c'.repeat(255), replyTo: 'r', type: 't', appId: 'a' },
    'more properties': { userId: 'guest', priority: 9, timestamp: Math.floor(Date.now() / 1000), expiration: 600000, persistent: true },
    'copied to other queues': { CC: ['elsewhere'], BCC: ['nowhere'] },
    'content type': { contentType: 'text/plain; x=ü\r\n', contentEncoding: 'ü' },
    'no-id: empty property': { messageId: '' },
    'too-old: time': { timestamp: 1 },
    'payload of bytes': { body: Buffer.from([255, 0]), messageId: 'bytes-%d' },
    'no payload': { body: Buffer.alloc(0), messageId: 'empty-%d' },
  };
  await publishAll(kinds, async (number, { body, ...more }) => {
    if (more.messageId) more.messageId = more.messageId.replace('%d', number);
    await new Promise((resolve, reject) => {
      channel.sendToQueue(place, body ?? order(number), more, (error) => (error ? reject(error) : resolve()));
    });
  });
  await connection.close();
}

async function kafkajs() {
  const { Kafka, logLevel } = require('kafkajs');
  const producer = new Kafka({ brokers: address.split(','), logLevel: logLevel.ERROR }).producer();
  await producer.connect();
  const kinds = {
    ...withHeaders(texts),
    'repeated headers': { headers: { a: ['1', '2', '1'] } },
    'null header': { headers: { null: null } },
    'bytes in headers': { headers: { bytes: Buffer.from([255, 0, 254]) } },
    'number in headers': { headers: { number: 17 } },
    'no-id: not UTF-8': { headers: { 'message-id': Buffer.from([255]) } },
    'no key': { key: undefined },
    'null key': { key: null },
    'empty key': { key: '' },
    'key of bytes': { key: Buffer.from([255, 0, 10]) },
    'null value': { value: null },
    'empty value': { value: '' },
    partition: { partition: 2, key: 'elsewhere' },
    'too-old: time': { timestamp: '1' },
  };
  await publishAll(kinds, async (number, more) => {
    await producer.send({ topic: place, messages: [{ key: `customer-${number % 7}`, value: order(number), ...more }] });
  });
  await producer.disconnect();
}

({ amqplib, kafkajs })[name]()
  .then(() => console.log(JSON.stringify(summary)))
  .catch((error) => {
    console.error(error);
    process.exit(1);
  });
