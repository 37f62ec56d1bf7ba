"""What both clients for Python raise for what they have not sent."""

import asyncio
import contextlib
import os
import socket
import tempfile

import sbxrun
from sbxrun import _wire

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

# Times of which sockets and timers know no number.
for seconds in (1e10, 1e300):
    for e in raised(lambda client: client(ADDRESS, margin=seconds, patience=seconds).run(["true"], timeout=seconds, grace=seconds)):
        assert isinstance(e, sbxrun.Refused) and e.code == "unreachable", e
    for e in raised(lambda client: client(ADDRESS).call("7").status(seconds)):
        assert isinstance(e, sbxrun.Refused) and e.code == "unreachable", e
for seconds in (float("inf"), float("nan")):
    for e in raised(lambda client: client(ADDRESS).run(["true"], timeout=seconds)):
        assert type(e) is ValueError, e

# A line that comes in many pieces is looked at once, and one without an end is given up. Quadratic work would be
# 800 GB here.
events = _wire.Events()
for _ in range(40 << 10):
    assert not list(events.feed(b" " * 1024))
assert [e.data for e in events.feed(b'{"event": "stdout", "text": "a"}\n{"event": "stdout",')] == [b"a"]
assert [e.data for e in events.feed(b'"text": "b"}\n')] == [b"b"]
try:
    for _ in range(_wire.LONGEST_EVENT // len(ADDRESS) + 1):
        list(events.feed(ADDRESS.encode() * 1024))
    raise AssertionError("no end")
except sbxrun.Lost:
    pass

# What a server says of the next try is not all that counts.
retries, now, tries = _wire.Retries(10, 0), 0.0, 0
try:
    while True:
        now += retries.pause(sbxrun.Refused("busy", "m", again=0.0), _wire.Request("GET", "/"), now)
        tries += 1
except sbxrun.Refused:
    assert tries < 10, tries
