// Runs one scenario with the official TypeScript SDK, and prints its results as JSON.
// usage: node mcp_client.mjs MODULES stdio COMMAND [ARG...]
//        node mcp_client.mjs MODULES http URL TOKEN
import { createRequire } from "node:module";

const [modules, kind, ...rest] = process.argv.slice(2);
const require = createRequire(modules + "/");
const { Client } = require("@modelcontextprotocol/sdk/client/index.js");

function transport() {
  if (kind === "stdio") {
    const { StdioClientTransport } = require("@modelcontextprotocol/sdk/client/stdio.js");
    return new StdioClientTransport({ command: rest[0], args: rest.slice(1), stderr: "inherit" });
  }
  const { StreamableHTTPClientTransport } = require("@modelcontextprotocol/sdk/client/streamableHttp.js");
  return new StreamableHTTPClientTransport(new URL(rest[0]), { requestInit: { headers: { Authorization: "Bearer " + rest[1] } } });
}

const client = new Client({ name: "test", version: "1" });
await client.connect(transport());
const call = (name, args, options) => client.callTool({ name, arguments: args }, undefined, options);
const pixel = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==";

const out = {};
out.tools = (await client.listTools()).tools;
out.code = await call("run_code", { code: "print(6*7)", session: null });
out.image = await call("run_command", { command: "cp in.png out.png", files: [{ path: "in.png", base64: pixel }] });
out.file = await client.readResource({ uri: out.image.content.find((c) => c.type === "resource_link").uri });
out.usage = await call("run_code", { code: "1", timeout_ms: -5 });

const controller = new AbortController();
const running = { signal: controller.signal, onprogress: () => controller.abort("enough") };
const canceled = call("run_command", { command: "sleep 4329; true" }, running).then(() => "answered", (e) => e.name + ": " + e.message);
out.canceled = await canceled;
out.after = await call("run_command", { command: "echo after" });
await client.close();
console.log(JSON.stringify(out));
