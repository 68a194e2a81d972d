// Calls a server that rejects each call with the problem that the call names, and prints what the
// library made of it: the error that it raised, or what it resolved to.
//
// usage: rejected.js HOST PORT CODE...
"use strict";

const Stripe = require("stripe");

const [host, port, ...codes] = process.argv.slice(2);
const stripe = new Stripe("sk_test_fake", {
  host,
  port,
  protocol: "http",
  maxNetworkRetries: 0,
  telemetry: false,
});

async function main() {
  for (const code of codes) {
    const params = { amount: 100, currency: "usd", metadata: { code } };
    const seen = await stripe.paymentIntents.create(params).then(
      (resolved) => ({ resolved }),
      (error) => ({ raised: error.constructor.name, status: error.statusCode, code: error.code, message: error.message }),
    );
    console.log(JSON.stringify(seen));
  }
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
