// Runs the example for Node.
import assert from "node:assert/strict";
import { once } from "node:events";
import { server } from "./service.mjs";

server.listen(0, "127.0.0.1");
await once(server, "listening");
const post = async (body) => {
  const answer = await fetch(`http://127.0.0.1:${server.address().port}/execute`, { method: "POST", body: JSON.stringify(body) });
  return [answer.status, (await answer.text()).trim().split("\n").map((line) => JSON.parse(line))];
};
if (process.argv[2] === "unreachable") assert.equal((await post({ code: "1" }))[0], 502);
else {
  assert.deepEqual(await post({ code: "import os; os.write(1, b'42\\n')" }), [200, [{ stdout: "42\n" }, { cause: "exited", exit_code: 0 }]]);
  assert.deepEqual(await post({ code: "while True: pass", timeout: 0.3 }), [200, [{ cause: "timeout", exit_code: 124 }]]);
}
assert.equal((await post({}))[0], 400);
server.closeAllConnections();
server.close();
