// Sends a payment with fetch. usage: TOKEN=… node pay_fetch.js URL FILE BODY
"use strict";

const { keep, again, code, delay, sleep } = require("./operation.js");

async function pay(url, operation, token) {
  for (let tries = 0; ; tries++) {
    let response, text, failure;
    try {
      response = await fetch(url, {
        method: "POST",
        redirect: "manual", // a redirect would take key and body to another host
        signal: AbortSignal.timeout(30_000), // fetch alone waits for five minutes
        headers: {
          Authorization: `Bearer ${token}`,
          "Content-Type": "application/json",
          "Idempotency-Key": operation.key,
        },
        body: operation.body,
      });
      text = await response.text(); // a body that breaks off is no response
    } catch (error) {
      failure = error;
    }
    const headers = response ? Object.fromEntries(response.headers) : {};
    if (!failure && !again(response.status, headers, code(text))) return `${response.status} ${text}`;
    if (tries === 9) throw failure ?? new Error(`no outcome yet: ${response.status} ${text}`);
    await sleep(delay(tries, headers["retry-after"]));
  }
}

const [url, file, body] = process.argv.slice(2);
const token = process.env.TOKEN;
pay(url, keep(file, body, token), token).then(console.log);
