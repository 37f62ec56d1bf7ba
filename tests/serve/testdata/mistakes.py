"""What both clients for Python raise for what they have not sent."""

import asyncio
import contextlib
import os
import socket
import tempfile

import sbxrun

ADDRESS = "unix:/no/such/socket"


def raised(call):
    """What a call with each of the clients raises."""
    errors = []
    for client in (sbxrun.Client, sbxrun.AsyncClient):
        try:
            result = call(client)
            if asyncio.iscoroutine(result):
                asyncio.run(result)
            errors.append(None)
        except Exception as e:
            errors.append(e)
    return errors


# A header that would be two. A token is not shown.
for value in ("secret\r\nX: y", "secret\nX: y", "secret\x7f", "secret\u2028x"):
    for name, call in (
        ("Authorization", lambda client: client(ADDRESS, value).run(["true"])),
        ("Sbxrun-Node", lambda client: client(ADDRESS, node=value).run(["true"])),
        ("Idempotency-Key", lambda client: client(ADDRESS).run(["true"], key=value)),
    ):
        for e in raised(call):
            assert type(e) is ValueError and name in str(e) and "secret" not in str(e), (name, value, e)

for e in raised(lambda client: client(ADDRESS).run(["true"], collect="*.png")):
    assert type(e) is TypeError, e

# A server that accepts nobody, until its queue is full.
with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as queue:
    path = os.path.join(directory, "socket")
    listener = queue.enter_context(socket.socket(socket.AF_UNIX))
    listener.bind(path)
    listener.listen(0)
    with contextlib.suppress(BlockingIOError):
        while True:
            waiting = queue.enter_context(socket.socket(socket.AF_UNIX))
            waiting.setblocking(False)
            waiting.connect(path)
    for e in raised(lambda client: client("unix:" + path, margin=0.1).run(["true"], timeout=0.1)):
        assert isinstance(e, sbxrun.Refused) and e.code == "unreachable", e
