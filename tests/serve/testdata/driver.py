"""Carries out steps of the table in clients_test.go with a client for Python, that for threads or
that for asyncio: a JSON line in, a JSON line out."""

import asyncio
import inspect
import io
import json
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback

import sbxrun

threads = sys.argv[1] == "threads"
client = None


async def got(value):
    return await value if inspect.isawaitable(value) else value


async def each(values):
    if threads:
        for value in values:
            yield value
    else:
        async for value in values:
            yield value


def session(s):
    return (sbxrun.Session if threads else sbxrun.AsyncSession)(client, s["session"])


def place(s):
    """Where a call is run."""
    return session(s) if "session" in s else client


def process(s):
    return session(s).process(s["process"]) if "session" in s else client.call(s["process"])


def options(call, key=None):
    """A call in the words of the client."""
    call = {**call, **({"key": key} if key else {})}
    call = {{"timeout_ms": "timeout", "grace_ms": "grace", "idle_timeout_ms": "idle_timeout", "lifetime_ms": "lifetime"}.get(name, name): value
            for name, value in call.items()}
    for name in ("timeout", "grace", "idle_timeout", "lifetime"):
        if name in call:
            call[name] /= 1000
    for path, content in call.get("files", {}).items():
        if isinstance(content, dict):
            call["files"][path] = sbxrun.File(path, content["id"], 0, "", "")
    return call


def ended(r):
    return {"id": r.id, "cause": r.cause, "exit_code": r.exit_code, "timed_out": r.timed_out, "verdict": r.data["teardown"]["verdict"],
            "stdout": r.stdout, "stderr": r.stderr, "hex": r.raw("stdout").hex(),
            "files": [{"path": f.path, "id": f.id, "size": f.size} for f in r.files]}


def method(s):
    if s.get("how") == "cell":
        return session(s).cell
    return session(s).exec if "session" in s else client.run


async def new(s):
    global client
    keys = {"margin_ms": "margin", "patience_ms": "patience"}
    times = {keys[name]: s[name] / 1000 for name in keys if name in s}
    client = (sbxrun.Client if threads else sbxrun.AsyncClient)(s["address"], s.get("token", ""), node=s.get("node", ""), **times)


async def run(s):
    return ended(await got(method(s)(**options(s["call"], s.get("key")))))


async def stream(s):
    seen = {"stdout": "", "stderr": ""}
    try:
        async for event in each(place(s).stream(**options(s["call"]))):
            if event.name == "report":
                seen["exit_code"] = event.report.exit_code
            else:
                seen[event.name] += event.data.hex()
    except (sbxrun.Refused, sbxrun.Unproven) as e:
        seen.update(failed(e))
    return seen


async def cell(s):
    a = await got(session(s).cell(**options(s["call"], s.get("key"))))
    return {"cause": a.cause, "state": a.state, "stdout": a.stdout, "value": a.value, "exception": a.exception and a.exception["name"]}


async def leave(s):
    if s["how"] == "stream":
        async for event in each(session(s).stream(**options(s["call"]))):
            if event.name == "stdout":
                return {}
    if threads:
        main = threading.main_thread().ident

        def interrupt():
            while True:
                try:
                    session(s).read("up")
                    return signal.pthread_kill(main, signal.SIGINT)
                except sbxrun.Refused:
                    time.sleep(0.02)

        other = threading.Thread(target=interrupt)
        other.start()
        try:
            method(s)(**options(s["call"]))
        except Left:
            return {"error": "left"}
        finally:
            other.join()
    task = asyncio.ensure_future(method(s)(**options(s["call"])))
    while True:
        try:
            await session(s).read("up")
            break
        except sbxrun.Refused:
            await asyncio.sleep(0.02)
    task.cancel()
    try:
        return ended(await task)
    except asyncio.CancelledError:
        return {"error": "left"}


class Left(BaseException):
    """What a thread is interrupted with that waits for an answer."""


def left(*_):
    raise Left


async def make_session(s):
    return {"id": (await got(client.session(**options(s.get("options", {}))))).id}


async def start(s):
    return {"id": (await got(place(s).start(**options(s["call"], s.get("key"))))).id}


async def status(s):
    return {"state": (await got(process(s).status())).state}


async def wait(s):
    r = await got(process(s).wait())
    return {"cause": r.cause, "exit_code": r.exit_code}


async def output(s):
    where = s.get("options", {})
    return {"text": "".join([piece.decode() async for piece in each(process(s).output(where.get("stream", "stdout"), where.get("from", 0)))])}


async def send(s):
    await got(process(s).send(s["text"], end=s.get("end", False)))


async def diff(s):
    d = await got(session(s).diff())
    return {"changes": [f"{c['change']} {c['path']}" for c in d["changes"]]}


async def snapshot(s):
    return {"id": (await got(session(s).snapshot(s["name"])))["id"]}


async def snapshots(s):
    return {"ids": [x["id"] for x in await got(client.snapshots())]}


async def remove_snapshot(s):
    await got(client.remove_snapshot(s["name"]))


async def send_signal(s):
    await got(process(s).signal(s["signal"]))


async def end(s):
    if "process" in s:
        report = (await got(process(s).end())).report
        return {"cause": report and report.cause}
    await got(session(s).end())


async def write(s):
    await got(session(s).write(s["path"], s["text"], mode=s.get("mode", "644")))


async def read(s):
    return {"text": (await got(session(s).read(s["path"]))).decode()}


async def remove(s):
    await got(session(s).remove(s["path"]))


async def entries(s):
    return {"entries": sorted(f"{e.type} {e.path}" for e in await got(session(s).list()))}


async def copy(s):
    other = await got(client.session())
    await got(other.unpack(await got(session(s).pack())))
    return {"id": other.id}


async def store(s):
    return {"id": await got(client.store(bytes(s["size"]) if "size" in s else s["text"]))}


async def filled(file, pieces):
    """A file with pieces, from its beginning, and the largest of them."""
    largest = 0
    async for piece in each(pieces):
        largest = max(largest, len(piece))
        file.write(piece)
    file.seek(0)
    return largest


async def pour(s):
    """A file as a stream: into the workspace, as an archive into another one, and by way of the content store."""
    with tempfile.TemporaryFile() as file, tempfile.TemporaryFile() as archive, tempfile.TemporaryFile() as second, tempfile.TemporaryFile() as third:
        file.truncate(s["size"])
        await got(session(s).write("big", file))
        largest = await filled(archive, session(s).pack_stream())
        other = await got(client.session())
        await got(other.unpack(archive))
        largest = max(largest, await filled(second, other.read_stream("big")))
        await got(other.end())
        id = await got(client.store(second))
        largest = max(largest, await filled(third, client.fetch_stream(id)))
        return {"size": third.seek(0, 2), "whole": largest >= s["size"]}


async def pour_badly(s):
    class Broken(io.RawIOBase):
        def readable(self):
            return True

        def read(self, size=-1):
            raise ConnectionResetError  # of the file, not of the connection

    await got(session(s).write("bad", Broken()))


async def fetch(s):
    return {"text": (await got(client.fetch(s["file"]))).decode()}


async def languages(s):
    return {"cells": sorted(a.name for a in await got(client.languages()) if a.cells)}


async def images(s):
    return {"images": len(await got(client.images()))}


async def sessions(s):
    return {"ids": [x.id for x in await got(client.sessions())]}


ops = {"new": new, "run": run, "stream": stream, "cell": cell, "leave": leave, "session": make_session, "start": start, "status": status, "wait": wait,
       "output": output, "signal": send_signal, "end": end, "write": write, "read": read, "remove": remove, "list": entries, "copy": copy,
       "pour": pour, "pour-badly": pour_badly, "send": send, "diff": diff, "snapshot": snapshot, "snapshots": snapshots, "remove-snapshot": remove_snapshot, "store": store, "fetch": fetch, "languages": languages, "images": images, "sessions": sessions}


def failed(e):
    e = pickle.loads(pickle.dumps(e))  # as between processes
    if isinstance(e, sbxrun.Refused):
        return {"error": "refused", "code": e.code, "status": e.status}
    return {"error": "unproven", "code": e.code, "verdict": e.report and e.report.data["teardown"]["verdict"]}


async def answer(step):
    try:
        return await ops[step["op"]](step) or {}
    except (sbxrun.Refused, sbxrun.Unproven) as e:
        return failed(e)
    except sbxrun.Lost:
        return {"error": "lost", "trace": traceback.format_exc()}
    except (TypeError, ValueError, ConnectionResetError):
        return {"error": "wrong", "trace": traceback.format_exc()}


signal.signal(signal.SIGINT, left)
for line in sys.stdin:
    print(json.dumps(asyncio.run(answer(json.loads(line)))), flush=True)
