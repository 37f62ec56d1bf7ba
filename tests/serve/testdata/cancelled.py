"""A task that is cancelled ends, also in the moment in which a piece of its answer comes: before Python 3.12 asyncio.wait_for would drop that."""

import asyncio
import contextlib
import os
import tempfile

import sbxrun

TRIES = 150


async def endless(reader, writer):
    with contextlib.suppress(OSError, asyncio.IncompleteReadError):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        line = b'{"event":"stdout","text":"x"}\n'
        while not writer.is_closing():
            writer.write(b"%x\r\n%b\r\n" % (len(line), line))
            await writer.drain()
            await asyncio.sleep(0.001)
    writer.close()


async def use(client):
    async with contextlib.aclosing(client.stream(["x"])) as events:
        async for _ in events:
            pass


async def main():
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "socket")
        server = await asyncio.start_unix_server(endless, path)
        for n in range(TRIES):
            task = asyncio.ensure_future(use(sbxrun.AsyncClient("unix:" + path)))
            await asyncio.sleep(0.003 + n % 50 * 0.0001)  # the moment is what is varied
            task.cancel()
            _, pending = await asyncio.wait({task}, timeout=20)
            assert not pending and task.cancelled(), f"the task that was cancelled as number {n}: {task}"
        server.close()


asyncio.run(main())
