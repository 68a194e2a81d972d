"""Payments in FastAPI. Every POST is a new charge; idempotency keys are left to the gateway.

usage: payments_fastapi.py PORT LEDGER

LEDGER gets a line for each charge, "CALLER AMOUNT". A charge with "hold" is answered once the
file LEDGER.release exists.
"""

import asyncio
import itertools
import os
import sys

import uvicorn
from fastapi import FastAPI, Header
from pydantic import BaseModel

port, ledger = int(sys.argv[1]), sys.argv[2]
app = FastAPI()
ids = itertools.count(1)


class Payment(BaseModel):
    amount: int
    hold: bool = False


# A request for /orders is redirected to /orders/ with 307.
@app.post("/orders/", status_code=201)
@app.post("/payments", status_code=201)
async def pay(payment: Payment, authorization: str = Header()):
    charge = f"ch_{next(ids)}"
    with open(ledger, "a") as lines:
        lines.write(f"{authorization} {payment.amount}\n")
    while payment.hold and not os.path.exists(f"{ledger}.release"):
        await asyncio.sleep(0.02)
    return {"id": charge, "caller": authorization, "amount": payment.amount}


uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")
