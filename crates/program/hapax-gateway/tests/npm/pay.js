// Makes payments with Stripe's own library for Node, as an application would: its own retries, and
// no code for them here. After each payment it replays it, and reuses its key for another amount.
//
// usage: pay.js HOST PORT CALLS
"use strict";

const Stripe = require("stripe");

const [host, port, calls] = process.argv.slice(2);
const stripe = new Stripe("sk_test_fake", {
  host,
  port,
  protocol: "http",
  maxNetworkRetries: 12,
  telemetry: false,
});

async function pay(call) {
  const params = { amount: 100 + call, currency: "usd", metadata: { call: String(call) } };
  const options = { idempotencyKey: `node-${call}` };
  const first = await stripe.paymentIntents.create(params, options);
  const replay = await stripe.paymentIntents.create(params, options);
  const reused = { ...params, amount: 1 };
  const raised = await stripe.paymentIntents.create(reused, options).then(
    () => null,
    (error) => error.code,
  );
  return { call, id: first.id, replay: replay.id, reused: raised };
}

async function main() {
  const all = Array.from({ length: Number(calls) }, (_, call) => call);
  for (const paid of await Promise.all(all.map(pay))) console.log(JSON.stringify(paid));
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
