// A service that runs the code it receives, without a framework: POST /execute {"code": "print(6*7)"} responds with JSON
// lines while the program runs. A client that disconnects ends the program.
import { createServer } from "node:http";
import { pathToFileURL } from "node:url";
import { Client, Refused, SbxrunError } from "sbxrun";

const client = new Client(process.env.SBXRUN_ADDRESS ?? "unix:/run/sbxrund.sock");

function status(e) {
  if (!(e instanceof SbxrunError)) return 400; // invalid request
  if (!(e instanceof Refused)) return 502;
  if (e.again !== null) return 503;
  return e.status >= 400 && e.status < 500 ? 400 : 502;
}

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
    if (!response.headersSent) response.statusCode = status(e);
    say({ error: e.message, hint: e.hint });
  }
  response.end();
});

if (import.meta.url === pathToFileURL(process.argv[1]).href) server.listen(8000, "127.0.0.1");
