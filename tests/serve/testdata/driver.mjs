// Carries out steps of the table in clients_test.go with the client for Node: a JSON line in, a JSON line out.
import { createInterface } from "node:readline";
import { Readable } from "node:stream";
import { setTimeout as sleep } from "node:timers/promises";
import { bytes, Client, Lost, Refused, Session, Unproven } from "sbxrun";

let client;
const text = (data) => Buffer.from(data).toString();
const session = (s) => s.session && new Session(client, s.session);
const process = (s) => (s.session ? session(s).process(s.process) : client.call(s.process));

const ended = (r) => ({
  id: r.id, cause: r.cause, exit_code: r.exit_code, timed_out: r.timed_out, verdict: r.teardown.verdict,
  stdout: r.stdout, stderr: r.stderr, hex: Buffer.from(bytes(r, "stdout")).toString("hex"),
  files: (r.files ?? []).map(({ path, id, size }) => ({ path, id, size })),
});

const ops = {
  new: ({ address, token, margin_ms, patience_ms, node }) => {
    client = new Client(address, { token, margin: margin_ms, patience: patience_ms, node });
  },
  run: async (s) => ended(await (s.session ? session(s).exec(s.call, s) : client.run(s.call, s))),
  async stream(s) {
    const seen = { stdout: "", stderr: "" };
    try {
      for await (const event of s.session ? session(s).stream(s.call) : client.stream(s.call)) {
        if (event.name === "report") seen.exit_code = event.report.exit_code;
        else seen[event.name] += Buffer.from(event.data).toString("hex");
      }
    } catch (e) {
      Object.assign(seen, failed(e));
    }
    return seen;
  },
  async cell(s) {
    const a = await session(s).cell(s.call, s);
    return { cause: a.cause, state: a.state, stdout: a.stdout, value: a.results.at(-1)?.media[0].text, exception: a.exception?.name };
  },
  async leave(s) {
    if (s.how === "stream") {
      for await (const event of session(s).stream(s.call)) if (event.name === "stdout") return {};
    }
    const leaving = new AbortController();
    const call = s.how === "cell" ? session(s).cell(s.call, leaving) : session(s).exec(s.call, leaving);
    call.catch(() => {});
    for (;;) {
      try {
        await session(s).read("up");
        break;
      } catch (e) {
        if (e.code !== "no-such-file") throw e;
        await sleep(20);
      }
    }
    leaving.abort(new Error("left"));
    return { error: (await call.catch((e) => e)).message };
  },
  session: async (s) => ({ id: (await client.session(s.options)).id }),
  start: async (s) => ({ id: (await (s.session ? session(s) : client).start(s.call, s)).id }),
  status: async (s) => ({ state: (await process(s).status(s)).state }),
  wait: async (s) => {
    const { cause, exit_code } = await process(s).wait();
    return { cause, exit_code };
  },
  async output(s) {
    let all = "";
    for await (const piece of process(s).output(s.options)) all += text(piece);
    return { text: all };
  },
  send: (s) => process(s).send(s.text, s),
  diff: async (s) => ({ changes: (await session(s).diff()).changes.map((c) => `${c.change} ${c.path}`) }),
  snapshot: async (s) => ({ id: (await session(s).snapshot({ name: s.name })).id }),
  snapshots: async () => ({ ids: (await client.snapshots()).map((x) => x.id) }),
  "remove-snapshot": (s) => client.removeSnapshot(s.name),
  signal: (s) => process(s).signal(s.signal),
  end: async (s) => (s.process ? { cause: (await process(s).end()).report?.cause } : session(s).end()),
  write: (s) => session(s).write(s.path, s.text, s),
  read: async (s) => ({ text: text(await session(s).read(s.path)) }),
  remove: (s) => session(s).remove(s.path),
  list: async (s) => ({ entries: (await session(s).list()).map((e) => `${e.type} ${e.path}`).sort() }),
  async copy(s) {
    const other = await client.session();
    await other.unpack(await session(s).pack());
    return { id: other.id };
  },
  store: async (s) => ({ id: await client.store(s.size ? Buffer.alloc(s.size) : s.text) }),
  // A file as a stream: into the workspace, as an archive into another one, and by way of the content store.
  async pour(s) {
    let [size, largest] = [0, 0];
    async function* noted(pieces) {
      size = 0;
      for await (const piece of pieces) {
        size += piece.length;
        largest = Math.max(largest, piece.length);
        yield piece;
      }
    }
    const zeros = async function* () {
      for (let left = s.size; left > 0; left -= 65536) yield Buffer.alloc(Math.min(left, 65536));
    };
    await session(s).write("big", Readable.from(zeros()), { mode: "644" });
    const other = await client.session();
    await other.unpack(noted(session(s).packStream()));
    const id = await client.store(noted(other.readStream("big")));
    await other.end();
    for await (const _ of noted(client.fetchStream(id)));
    return { size, whole: largest >= s.size };
  },
  "pour-badly": (s) =>
    session(s).write("bad", Readable.from((function* () {
      yield Buffer.alloc(100);
      throw new TypeError("bad");
    })())),
  fetch: async (s) => ({ text: text(await client.fetch(s.file)) }),
  languages: async () => ({ cells: (await client.languages()).filter((l) => l.cells).map((l) => l.name).sort() }),
  images: async () => ({ images: (await client.images()).length }),
  sessions: async () => ({ ids: (await client.sessions()).map((s) => s.id) }),
};

function failed(e) {
  if (e instanceof Refused) return { error: "refused", code: e.code, status: e.status };
  if (e instanceof Unproven) return { error: "unproven", code: e.code, verdict: e.report?.teardown.verdict };
  if (e instanceof Lost) return { error: "lost", trace: e.stack, cause: String(e.cause?.stack) };
  if (e instanceof TypeError || e instanceof RangeError) return { error: "wrong" };
  return { error: String(e.stack) };
}

for await (const line of createInterface({ input: globalThis.process.stdin })) {
  const step = JSON.parse(line);
  let answer;
  try {
    answer = await ops[step.op](step);
  } catch (e) {
    answer = failed(e);
  }
  globalThis.process.stdout.write(JSON.stringify(answer ?? {}) + "\n");
}
