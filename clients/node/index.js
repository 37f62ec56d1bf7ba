// Client of `sbxrun serve`: run untrusted commands and programs.
//
// A non-zero exit code and a timeout are reports. Errors mean that nothing has run (Refused), that
// processes may still be running (Unproven), or that the response did not arrive (Lost).

import http from "node:http";
import https from "node:https";
import { setTimeout as sleep } from "node:timers/promises";

/** Base class of all errors of this module. */
export class SbxrunError extends Error {}

/** The request was refused, and nothing has run. */
export class Refused extends SbxrunError {
  name = "Refused";

  constructor(code, message, { hint = "", status = 0, again = null } = {}) {
    super(message);
    Object.assign(this, { code, hint, status, again });
  }
}

/** The command has run, and processes may still be running. */
export class Unproven extends SbxrunError {
  name = "Unproven";

  constructor(code, message, report) {
    super(message);
    Object.assign(this, { code, report });
  }
}

/** The answer did not arrive, or was incomplete. The command may have run; the server ends a call whose client disconnects. */
export class Lost extends SbxrunError {
  name = "Lost";
}

/** The kept bytes of stdout or stderr, as written. */
export function bytes(report, stream) {
  const encoded = report[`${stream}_base64`];
  return encoded === undefined ? Buffer.from(report[stream] ?? "") : Buffer.from(encoded, "base64");
}

// A report or a cell's answer, always with stdout and stderr as text.
function withText(report) {
  for (const name of ["id", "cause"]) text(report[name]);
  for (const stream of ["stdout", "stderr"]) report[stream] = bytes(report, stream).toString();
  return report;
}

function failure({ error, started, report }, status) {
  text(error.code);
  if (started !== false) return new Unproven(error.code, error.message, report ? withText(report) : null);
  return new Refused(error.code, error.message, { hint: error.hint, status });
}

// The error in a response.
function answered(response, text) {
  try {
    const e = parsed(text, (document) => failure(document, response.statusCode));
    if (e instanceof Refused && [429, 503].includes(response.statusCode)) {
      const seconds = Number(response.headers["retry-after"] ?? 1);
      e.again = (seconds >= 0 ? seconds : 1) * 1000;
    }
    return e;
  } catch {
    return new Lost(`no valid answer: status ${response.statusCode}`);
  }
}

function fileList(files) {
  if (files === undefined || Array.isArray(files)) return files;
  return Object.entries(files).map(([path, content]) => {
    if (typeof content === "string") return { path, text: content };
    if (content instanceof Uint8Array) return { path, base64: Buffer.from(content).toString("base64") };
    return { path, id: content.id };
  });
}

// Whether a body is a stream, which can be sent only once.
const flows = (body) => body !== undefined && typeof body !== "string" && !(body instanceof Uint8Array);

// Maximum milliseconds without an event on a stream: the server sends keepalives.
const KEEPALIVE = 5_000;

// Maximum length of one event of a stream, in bytes.
const LONGEST_EVENT = 128 << 20;

// Minimum time between two requests about a command, in milliseconds.
const LEAST_PAUSE = 100;

// Maximum of every wait in milliseconds; Node's timers are limited to a few weeks.
const LONGEST_WAIT = 1e9;

// A path is text, or bytes if it is not UTF-8.
const escaped = (path) =>
  typeof path === "string"
    ? path.split("/").map(encodeURIComponent).join("/")
    : Array.from(path, (byte) => (byte === 47 ? "/" : `%${byte.toString(16).padStart(2, "0")}`)).join("");

// The body of a call, and the time for its response in addition to the margin.
function prepared(call, timeout_ms = 30_000) {
  if ((call.argv === undefined) === (call.code === undefined)) throw new TypeError("give either argv or code");
  if (call.argv !== undefined && !Array.isArray(call.argv)) throw new TypeError("argv is a list of words");
  const body = { ...call, files: fileList(call.files) };
  if (!((body.timeout_ms ?? 1) > 0 && (body.timeout_ms ?? 1) < Infinity)) throw new RangeError("timeout_ms must be a number above 0");
  body.timeout_ms ??= timeout_ms; // 0 leaves it to the server
  if (body.code !== undefined) body.language ??= "python";
  return { body: JSON.stringify(body), type: "application/json", wait: body.timeout_ms + (body.grace_ms ?? 0) };
}

/** A server, at unix:PATH, http://HOST:PORT or https://HOST:PORT. */
export class Client {
  #address;
  #token;
  #margin;
  #patience;
  #node;

  constructor(address, { token = "", margin = 60_000, patience = 10_000, node = "" } = {}) {
    const url = new URL(address);
    const web = !(url.username || url.password || url.search || url.hash) && url.pathname === "/";
    if (url.protocol === "unix:" && address.length > "unix:".length) this.#address = { socketPath: address.slice("unix:".length), host: "sbxrun" };
    else if (web && (url.protocol === "http:" || url.protocol === "https:"))
      this.#address = { protocol: url.protocol, host: url.hostname.replace(/^\[|\]$/g, ""), port: url.port };
    else throw new TypeError("want unix:PATH, http://HOST:PORT or https://HOST:PORT");
    this.#token = token.trim(); // may come from a file that ends with a newline
    this.#margin = margin;
    this.#patience = patience;
    this.#node = node;
  }

  /** Run a command or program in a new sandbox. When this returns, all its processes have exited. */
  run(call, options) {
    return this._run("/v1/run", call, options);
  }

  /** Like run, but yields output as it arrives. The last event is the report. Leaving the loop earlier ends the call. */
  stream(call, options) {
    return this._stream("/v1/run", call, options);
  }

  /** Start a command or program that runs in the background. */
  start(call, options) {
    return this._start("/v1/calls", call, options);
  }

  /** Return the handle of a started command by its ID. */
  call(id) {
    return new Process(this, "/v1/calls", id);
  }

  /** Create a sandbox that keeps its files between calls. */
  async session({ files, ...rest } = {}) {
    return new Session(this, await this._json("POST", "/v1/sessions", { ...rest, files: fileList(files) }, identity));
  }

  async sessions() {
    return this._json("GET", "/v1/sessions", undefined, ({ sessions }) => list(sessions));
  }

  async snapshots() {
    return this._json("GET", "/v1/snapshots", undefined, ({ snapshots }) => list(snapshots));
  }

  async removeSnapshot(id) {
    await this._ask("DELETE", `/v1/snapshots/${encodeURIComponent(id)}`);
  }

  async languages() {
    return this._json("GET", "/v1/languages", undefined, ({ languages }) => list(languages));
  }

  async images() {
    return this._json("GET", "/v1/images", undefined, ({ images }) => list(images));
  }

  /** Store a file in the content store and return its ID. */
  async store(data) {
    return parsed(await this._ask("POST", "/v1/files", { body: data, type: "application/octet-stream" }), identity);
  }

  /** List the content store, least recently used first. */
  async files() {
    return this._json("GET", "/v1/files", undefined, ({ files }) => list(files));
  }

  /** Remove a file from the content store. */
  async removeFile(id) {
    await this._ask("DELETE", `/v1/files/${encodeURIComponent(id)}`);
  }

  /** Read a file from the content store: a collected file or an ID. */
  fetch(file) {
    return this._ask("GET", `/v1/files/${encodeURIComponent(file.id ?? file)}`);
  }

  /** Like fetch, but yields pieces as they arrive. */
  fetchStream(file, options) {
    return this._pieces(`/v1/files/${encodeURIComponent(file.id ?? file)}`, options);
  }

  async _run(path, call, { signal, key } = {}) {
    return parsed(await this._ask("POST", path, { ...prepared(call), signal, key }), withText);
  }

  async *_stream(path, call, { signal } = {}) {
    const response = await this._send("POST", `${path}?stream=1`, { ...prepared(call), wait: KEEPALIVE, signal });
    let rest = [];
    let length = 0;
    for await (const chunk of received(response, signal)) {
      let begin = 0;
      for (let end; (end = chunk.indexOf(10, begin)) >= 0; begin = end + 1) {
        const event = parsed(Buffer.concat([...rest, chunk.subarray(begin, end)]), eventOf);
        rest = [];
        length = 0;
        if (event instanceof SbxrunError) throw event;
        if (event) yield event;
        if (event?.name === "report") return;
      }
      rest.push(chunk.subarray(begin));
      length += chunk.length - begin;
      if (length > LONGEST_EVENT) throw new Lost(`no valid answer: an event has more than ${LONGEST_EVENT} bytes`);
    }
    throw new Lost("the stream ended without a report");
  }

  async _start(path, call, { key } = {}, timeout_ms) {
    return new Process(this, path, parsed(await this._ask("POST", path, { ...prepared(call, timeout_ms), wait: 0, key }), identity));
  }

  async _json(method, path, body, make) {
    return parsed(await this._ask(method, path, body && { body: JSON.stringify(body), type: "application/json" }), make);
  }

  async _ask(method, path, request = {}) {
    const response = await this._send(method, path, request);
    const chunks = [];
    for await (const chunk of received(response, request.signal)) chunks.push(chunk);
    return Buffer.concat(chunks);
  }

  async *_pieces(path, { signal } = {}) {
    yield* received(await this._send("GET", path, { signal }), signal);
  }

  // Sends a request, retrying while it is refused temporarily, and returns a successful response.
  async _send(method, path, request) {
    const until = performance.now() + this.#patience;
    // Doubles with each attempt, even if the server says 0.
    for (let least = LEAST_PAUSE; ; least = Math.min(2 * least, 5_000)) {
      try {
        return await this.#once(method, path, request);
      } catch (e) {
        if (!(e instanceof Refused) || e.again === null || flows(request.body)) throw e;
        const pause = Math.min(Math.max(e.again, least), LONGEST_WAIT);
        if (performance.now() + pause > until) throw e;
        await rest(pause, request.signal);
      }
    }
  }

  async #once(method, path, { body, type, wait = 0, signal, key }) {
    signal?.throwIfAborted();
    const headers = { Accept: "application/json", Connection: "close" };
    if (type) headers["Content-Type"] = type;
    if (body !== undefined && !flows(body)) headers["Content-Length"] = Buffer.byteLength(body);
    if (key) headers["Idempotency-Key"] = key;
    if (this.#token) headers.Authorization = `Bearer ${this.#token}`;
    if (this.#node) headers["Sbxrun-Node"] = this.#node;
    const secure = this.#address.protocol === "https:";
    const timeout = Math.min(wait + this.#margin, LONGEST_WAIT); // an option, so that it also limits connecting
    const request = (secure ? https : http).request({ ...this.#address, method, path, headers, timeout, agent: false });
    request.on("timeout", () => request.destroy(new Lost("no answer in time")));
    const leave = () => request.destroy(signal.reason);
    signal?.addEventListener("abort", leave);
    request.on("close", () => signal?.removeEventListener("abort", leave));
    const response = await new Promise((resolve, reject) => {
      let connected = false;
      request.on("socket", (socket) => socket.once(secure ? "secureConnect" : "connect", () => (connected = true)));
      request.on("response", resolve);
      request.on("error", (e) => {
        if (signal?.aborted) reject(signal.reason);
        else if (!connected) reject(new Refused("unreachable", `the server cannot be reached: ${e.message}`));
        else reject(e instanceof Lost ? e : new Lost(`the answer did not arrive: ${e.message}`, { cause: e }));
      });
      if (flows(body))
        pour(body, request).catch((e) => {
          reject(e); // the stream's own error
          request.destroy();
        });
      else request.end(body);
    });
    if (response.statusCode < 300) return response;
    const chunks = [];
    for await (const chunk of received(response, signal)) chunks.push(chunk);
    throw answered(response, Buffer.concat(chunks));
  }
}

// Sends a stream until its end or a response, which may come early.
async function pour(body, request) {
  let over = false;
  let wake;
  request.on("drain", () => wake?.());
  for (const name of ["response", "close"])
    request.on(name, () => {
      over = true;
      wake?.();
    });
  for await (const piece of body) {
    if (over) return;
    if (!request.write(piece)) await new Promise((resolve) => (wake = resolve));
  }
  request.end();
}

// Sleeps, or throws the signal's reason instead of sleep's AbortError.
const rest = (pause, signal) => sleep(pause, undefined, { signal }).catch(() => signal.throwIfAborted());

// Returns make of a document. Throws Lost if the answer is malformed.
function parsed(text, make = object) {
  try {
    return make(JSON.parse(text));
  } catch (e) {
    throw new Lost("no valid answer", { cause: e });
  }
}

function object(value) {
  if (value === null || typeof value !== "object" || Array.isArray(value)) throw new TypeError("not an object");
  return value;
}

function list(value) {
  if (!Array.isArray(value)) throw new TypeError("not a list");
  return value;
}

function text(value) {
  if (typeof value !== "string") throw new TypeError("not a text");
  return value;
}

function statusOf(status) {
  text(status.state);
  return status;
}

const identity = (document) => text(document.id);

// An event for the caller, the error that ends the stream, or null.
function eventOf(event) {
  if (event.event === "report") return { name: "report", report: withText(event.report) };
  if (event.event === "error") return failure(event.error, 0);
  if (event.event !== "stdout" && event.event !== "stderr") return null;
  return { name: event.event, data: "base64" in event ? Buffer.from(event.base64, "base64") : Buffer.from(event.text ?? "") };
}

// The body of an answer. Closing the generator closes the connection.
async function* received(response, signal) {
  try {
    yield* response;
  } catch (e) {
    if (signal?.aborted) throw signal.reason;
    throw new Lost(`the answer broke off: ${e.message}`, { cause: e });
  } finally {
    response.destroy();
  }
}

/** A sandbox that keeps its files. It ends with end() or after its idle timeout. */
export class Session {
  #client;
  #path;

  constructor(client, id) {
    this.#client = client;
    this.id = id;
    this.#path = `/v1/sessions/${encodeURIComponent(id)}`;
  }

  /** Run a command or program. Its processes end with it; its files stay. */
  exec(call, options) {
    return this.#client._run(`${this.#path}/exec`, call, options);
  }

  stream(call, options) {
    return this.#client._stream(`${this.#path}/exec`, call, options);
  }

  /** Run a cell in the session's interpreter, which keeps definitions for the next cell. */
  cell(cell, options) {
    return this.#client._run(`${this.#path}/code`, cell, options);
  }

  /** Start a command in the background. Without a timeout it runs until it exits or the session ends. */
  start(call, options) {
    return this.#client._start(`${this.#path}/processes`, call, options, 0);
  }

  /** Return the handle of a started command by its ID. */
  process(id) {
    return new Process(this.#client, `${this.#path}/processes`, id);
  }

  async write(path, content, { mode } = {}) {
    const query = mode ? `?mode=${encodeURIComponent(mode)}` : "";
    await this.#client._ask("PUT", this.#file(path) + query, { body: content, type: "application/octet-stream" });
  }

  read(path) {
    return this.#client._ask("GET", this.#file(path));
  }

  /** Like read, but yields pieces as they arrive. */
  readStream(path, options) {
    return this.#client._pieces(this.#file(path), options);
  }

  async remove(path) {
    await this.#client._ask("DELETE", this.#file(path));
  }

  async list() {
    return this.#client._json("GET", `${this.#path}/files`, undefined, ({ files }) => list(files));
  }

  /** Read all files as a tar archive. */
  pack() {
    return this.#client._ask("GET", `${this.#path}/archive`);
  }

  /** Like pack, but yields pieces as they arrive. */
  packStream(options) {
    return this.#client._pieces(`${this.#path}/archive`, options);
  }

  async unpack(archive) {
    await this.#client._ask("PUT", `${this.#path}/archive`, { body: archive, type: "application/x-tar" });
  }

  /** The changes in the session's overlay. */
  diff() {
    return this.#client._json("GET", `${this.#path}/diff`);
  }

  /** Take a snapshot of the session's overlay. */
  snapshot(options = {}) {
    return this.#client._json("POST", `${this.#path}/snapshot`, options);
  }

  /** End the session and everything in it. A session that has already ended is not an error. */
  async end() {
    try {
      await this.#client._ask("DELETE", this.#path);
    } catch (e) {
      if (!(e instanceof Refused) || !["ended", "no-such-session"].includes(e.code)) throw e;
    }
  }

  #file(path) {
    return `${this.#path}/files/${escaped(path)}`;
  }
}

/** A background command: an asynchronous call, or a process of a session. */
export class Process {
  #client;
  #path;

  constructor(client, path, id) {
    this.#client = client;
    this.id = id;
    this.#path = `${path}/${encodeURIComponent(id)}`;
  }

  /** The current state. With wait, responds when the command ends or after that many milliseconds. */
  async status({ wait = 0, signal } = {}) {
    return parsed(await this.#client._ask("GET", `${this.#path}?wait_ms=${wait}`, { wait, signal }), statusOf);
  }

  /** Wait for the end and return the report. */
  async wait({ signal } = {}) {
    for (;;) {
      const { state, started, report, error } = await this.status({ wait: 30_000, signal });
      if (error) throw failure({ error, started: started || error.code === "unproven" || report !== undefined, report }, 0);
      if (state === "ended") {
        if (!report) throw new Lost("no valid answer: no report");
        return report;
      }
      await rest(LEAST_PAUSE, signal); // the server has usually waited 30 s
    }
  }

  /** Yield the output from a byte offset on, as it arrives. Reconnects after a broken connection. */
  async *output({ stream = "stdout", from = 0, signal } = {}) {
    for (;;) {
      const begin = from;
      try {
        const response = await this.#client._send("GET", `${this.#path}/output?follow=1&stream=${encodeURIComponent(stream)}&from=${from}`, { signal });
        for await (const chunk of received(response, signal)) {
          from += chunk.length;
          yield chunk;
        }
        return;
      } catch (e) {
        // No byte arrived: there is no output yet, or the server is gone and this call fails.
        if (!(e instanceof Lost)) throw e;
        if (from === begin) await this.status({ wait: 1_000, signal });
        await rest(LEAST_PAUSE, signal);
      }
    }
  }

  /** Write to the stdin of a process that was started with keep_stdin; end closes it. */
  async send(data, { end = false, signal } = {}) {
    await this.#client._ask("POST", `${this.#path}/stdin${end ? "?end=1" : ""}`, { body: data, type: "application/octet-stream", signal });
  }

  /** Signal all its processes. Works only for processes of a session. */
  async signal(name) {
    await this.#client._ask("POST", `${this.#path}/signal`, { body: JSON.stringify({ signal: name }), type: "application/json" });
  }

  /** End the command and discard its record. */
  end() {
    return this.#client._json("DELETE", this.#path);
  }
}
