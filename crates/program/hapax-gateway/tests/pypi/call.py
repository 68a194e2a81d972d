"""Calls a method over gRPC with bytes as they are, knowing no schema, and prints what came of it.

usage: call.py ADDRESS METHOD MESSAGE [CA] [NAME=VALUE ...]

CA is a file of certificates, or `-` for no TLS.
"""

import json
import sys

import grpc

address, method, message, ca, *metadata = sys.argv[1:]
if ca == "-":
    channel = grpc.insecure_channel(address)
else:
    with open(ca, "rb") as roots:
        channel = grpc.secure_channel(address, grpc.ssl_channel_credentials(roots.read()))
said = {}
try:
    answer, call = channel.unary_unary(method).with_call(
        message.encode(), metadata=[tuple(pair.split("=", 1)) for pair in metadata], timeout=20
    )
    said["answer"] = answer.decode()
except grpc.RpcError as error:
    call = error
said["code"] = call.code().value[0]
said["details"] = call.details()
said["metadata"] = dict(call.initial_metadata()) | dict(call.trailing_metadata())
print(json.dumps(said, default=repr))
