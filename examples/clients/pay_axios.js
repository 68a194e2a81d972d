// Sends a payment with axios and axios-retry. usage: TOKEN=… node pay_axios.js URL FILE BODY
"use strict";

const axios = require("axios");
const axiosRetry = require("axios-retry").default;
const { keep, again, code, delay } = require("./operation.js");

const client = axios.create({
  timeout: 30_000, // axios alone waits forever
  maxRedirects: 0, // a redirect would take key and body to another host
  transformResponse: (text) => text, // the response as it came
});
axiosRetry(client, {
  retries: 9,
  shouldResetTimeout: true, // else the timeout is that of all tries together
  retryCondition: ({ response }) => {
    if (typeof response?.data !== "string") return true; // none, or a body that broke off
    return again(response.status, response.headers, code(response.data));
  },
  retryDelay: (tries, { response }) => delay(tries - 1, response?.headers["retry-after"]),
});

async function pay(url, operation, token) {
  const headers = {
    Authorization: `Bearer ${token}`,
    "Content-Type": "application/json",
    "Idempotency-Key": operation.key,
  };
  // A response that is no success is an error to axios.
  const response = await client.post(url, operation.body, { headers }).catch((error) => {
    if (typeof error.response?.data !== "string") throw error;
    return error.response;
  });
  return `${response.status} ${response.data}`;
}

const [url, file, body] = process.argv.slice(2);
const token = process.env.TOKEN;
pay(url, keep(file, body, token), token).then(console.log);
