// Makes a payment with Stripe's SDK. usage: TOKEN=… node pay_stripe.js URL FILE PARAMS
"use strict";

const Stripe = require("stripe");
const { keep, again, delay, sleep } = require("./operation.js");

async function pay(stripe, operation) {
  for (let tries = 0; ; tries++) {
    try {
      // Without this key the SDK makes one for each call: each turn of this loop would be another payment.
      const options = { idempotencyKey: operation.key };
      const payment = await stripe.paymentIntents.create(JSON.parse(operation.body), options);
      return `${payment.lastResponse.statusCode} ${JSON.stringify(payment)}`;
    } catch (error) {
      if (!(error instanceof Stripe.errors.StripeError)) throw error;
      if (tries === 9) throw error;
      if (!again(error.statusCode, error.headers, error.code)) return `${error.statusCode} ${JSON.stringify(error.raw)}`;
      await sleep(delay(tries, error.headers?.["retry-after"]));
    }
  }
}

const [url, file, params] = process.argv.slice(2);
const token = process.env.TOKEN;
const { hostname: host, port, protocol } = new URL(url);
const stripe = new Stripe(token, {
  host,
  port,
  protocol: protocol.slice(0, -1),
  timeout: 30_000,
  maxNetworkRetries: 0, // its own retries leave out 429 and ignore `Retry-After`
});
pay(stripe, keep(file, params, token)).then(console.log);
