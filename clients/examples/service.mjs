// A service that runs what it is sent, without any framework: POST /execute {"code": "print(6*7)"} answers with lines of
// JSON while the program runs. A caller who leaves ends it.
import { createServer } from "node:http";
import { pathToFileURL } from "node:url";
import { Client, Refused } from "sbxrun";

const client = new Client(process.env.SBXRUN_ADDRESS ?? "unix:/run/sbxrund.sock");

export const server = createServer(async (request, response) => {
  const leaving = new AbortController();
  response.on("close", () => leaving.abort());
  const say = (document) => response.write(JSON.stringify(document) + "\n");
  try {
    const chunks = [];
    for await (const chunk of request) chunks.push(chunk);
    const { code, timeout = 10 } = JSON.parse(Buffer.concat(chunks));
    for await (const event of client.stream({ code, timeout_ms: Math.min(timeout, 60) * 1_000 }, leaving)) {
      if (event.name !== "report") say({ [event.name]: Buffer.from(event.data).toString() });
      else say({ cause: event.report.cause, exit_code: event.report.exit_code });
    }
  } catch (e) {
    if (!response.headersSent) response.statusCode = e instanceof Refused && e.again !== null ? 503 : 400;
    say({ error: e.message });
  }
  response.end();
});

if (import.meta.url === pathToFileURL(process.argv[1]).href) server.listen(8000, "127.0.0.1");
