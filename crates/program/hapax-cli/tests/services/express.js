// Payments in Express. Every POST is a new charge; idempotency keys are left to the gateway.
//
// usage: node express.js PORT LEDGER
//
// LEDGER gets a line for each charge, "CALLER AMOUNT"; LEDGER.seen a line for each request.
// A charge with "hold" is answered once the file LEDGER.release exists.

const express = require("express");
const fs = require("fs");

const [port, ledger] = process.argv.slice(2);
const app = express();
let charges = 0;

app.use((request, _response, next) => {
  fs.appendFileSync(`${ledger}.seen`, `${request.method} ${request.path}\n`);
  next();
});
app.use(express.json());

app.post(["/payments", "/charges/:kind"], async (request, response) => {
  const caller = request.get("authorization") ?? request.get("cookie") ?? request.get("x-api-key");
  const { amount, hold, fail } = request.body;
  charges += 1;
  const id = `ch_${charges}`;
  fs.appendFileSync(ledger, `${caller} ${amount}\n`);
  while (hold && !fs.existsSync(`${ledger}.release`)) {
    await new Promise((resolve) => setTimeout(resolve, 20));
  }
  if (fail) {
    response.status(503).json({ error: "the receipt service is away" });
    return;
  }
  response.status(201).json({ id, caller, amount });
});

app.listen(Number(port), "127.0.0.1");
