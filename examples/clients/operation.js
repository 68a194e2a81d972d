// Keeps an operation, and decides whether to send it again. The recipes for Node share this file.
"use strict";

const { createHash, randomUUID } = require("node:crypto");
const fs = require("node:fs");
const { dirname } = require("node:path");
const { setTimeout: sleep } = require("node:timers/promises");

const RETENTION = 24 * 3600_000; // for which the server keeps a key, in milliseconds

// Returns what `file` has: the key and the body of the first run. The file is complete and on the disk before the
// first try, and never replaced. In a service it is a row of the database, committed before the first try.
function keep(file, body, token) {
  const caller = createHash("sha256").update(token).digest("hex");
  const draft = `${file}.${randomUUID()}`;
  const operation = { key: randomUUID(), since: Date.now(), caller, body };
  fs.writeFileSync(draft, JSON.stringify(operation), { flag: "wx", mode: 0o600, flush: true });
  try {
    fs.linkSync(draft, file);
  } catch (error) {
    if (error.code !== "EEXIST") throw error; // an earlier run kept it
  }
  fs.unlinkSync(draft);
  const folder = fs.openSync(dirname(file));
  fs.fsyncSync(folder);
  fs.closeSync(folder);
  const kept = JSON.parse(fs.readFileSync(file, "utf8"));
  if (kept.caller !== caller) throw new Error(`${file}: the token has changed: look the operation up at the server`);
  if (Date.now() - kept.since > 0.9 * RETENTION) throw new Error(`${file}: too old: look the operation up at the server`);
  return kept;
}

// Returns whether another try with this key and body may get another response. No response: no status.
function again(status, headers = {}, code) {
  if (!status) return true;
  if ([headers["idempotency-replayed"], headers["idempotent-replayed"]].includes("true")) return false;
  if (status !== 409) return [408, 425, 429, 500, 502, 503, 504].includes(status);
  if (code === "outcome-unknown") return "retry-after" in headers;
  return ["in-flight", "superseded", "idempotency_key_in_use"].includes(code);
}

// Returns the code of a failure: of a problem document of Hapax, or of an error of Stripe.
function code(text) {
  try {
    const failure = JSON.parse(text);
    return failure.error?.code ?? failure.code;
  } catch {
    return undefined;
  }
}

// Returns how long to wait before the next try, in milliseconds: the time in `Retry-After`, seconds or a date, but at
// least the backoff, and a minute at most.
function delay(tries, retryAfter) {
  const backoff = 250 * 2 ** tries * (0.5 + Math.random());
  const after = Number(retryAfter) * 1000 || Date.parse(retryAfter) - Date.now() || 0;
  return Math.min(60_000, Math.max(backoff, after));
}

module.exports = { keep, again, code, delay, sleep };
