/** The content of a file as text or bytes, or a file in the content store. */
export type Content = string | Uint8Array | { id: string };

/** The content of an upload. A stream is read to its end in pieces. */
export type Data = string | Uint8Array | AsyncIterable<Uint8Array>;

/** Limits of a call. */
export interface Limits {
  memory?: number;
  pids?: number;
  cpus?: number;
  cpu_time_ms?: number;
  fsize?: number;
  max_output?: number;
  output?: "truncate" | "kill";
}

/** A file for the workspace as the server expects it, with exactly one of id, text and base64. */
export interface FileIn {
  path?: string;
  /** The path in Base64 if it is not UTF-8, instead of path. */
  path_base64?: string;
  id?: string;
  text?: string;
  base64?: string;
  mode?: string;
}

/** A command (argv) or a program (code; language defaults to "python"). docs/reference/http-api.md describes each member. */
export interface Call extends Parts {
  argv?: string[];
  code?: string;
  language?: string;
  stdin?: string;
  env?: Record<string, string>;
  workdir?: string;
  /** Default: 30,000; for background processes of a session, its lifetime. */
  timeout_ms?: number;
  grace_ms?: number;
  limits?: Limits;
  files?: Record<string, Content> | FileIn[];
  collect?: string[];
}

/** An image, mounts and network access in addition to the workspace, if the server's configuration permits them. Calls in a session use the session's. */
export interface Parts {
  /** Name of an image; see images(). */
  image?: string;
  /** A directory on the server, by its name in the configuration; path defaults to /work. */
  overlay?: { name: string; path?: string };
  /** ID or name of the snapshot to start from. */
  snapshot?: string;
  volumes?: Array<{ name: string; path: string; read_only?: boolean }>;
  /** Hosts, as HOST or HOST:PORT. */
  network?: { allow: string[] };
}

export interface Change {
  path: string;
  change: "added" | "changed" | "deleted" | "mode";
  type: "file" | "directory" | "link" | "other";
  was?: string;
  size?: number;
  mode?: string;
  was_mode?: string;
  target?: string;
  same?: string;
  conflict?: boolean;
  held_back?: boolean;
  executable?: boolean;
  outside?: boolean;
}

export interface Diff {
  path: string;
  changes: Change[];
  count: number;
  bytes: number;
  warnings?: string[];
}

export interface Snapshot {
  id: string;
  name?: string;
  created_at: string;
  expires_at?: string;
  session?: string;
  path: string;
  layers: number;
  size: number;
  frozen: boolean;
  left_out?: number;
}

/** Code for an interpreter that a session keeps. */
export interface Cell {
  code: string;
  language?: string;
  timeout_ms?: number;
  limits?: { max_output?: number };
  files?: Record<string, Content> | FileIn[];
  collect?: string[];
}

/** A collected file. */
export interface FileOut {
  path: string;
  path_base64?: string;
  id?: string;
  size: number;
  media_type?: string;
  error?: string;
}

/** The common part of a report and a cell's answer. */
export interface Outcome {
  id: string;
  cause: string;
  timed_out: boolean;
  started_at: string;
  duration_ms: number;
  stdout: string;
  stdout_base64?: string;
  stdout_bytes?: number;
  stdout_truncated?: boolean;
  stderr: string;
  stderr_base64?: string;
  stderr_bytes?: number;
  stderr_truncated?: boolean;
  files?: FileOut[];
  /** Patterns of collect that matched no file. */
  unmatched?: string[];
  queue_ms: number;
  timeout_ms?: number;
  clamped?: string[];
  request_id?: string;
}

/** The outcome of a call: docs/reference/report.md. */
export interface Report extends Outcome {
  version: number;
  argv: string[];
  started: boolean;
  status: string;
  exit_code: number;
  payload?: { exit_code?: number; signal?: string };
  setup_ms?: number;
  teardown_ms?: number;
  teardown: { verdict: "proven" | "unproven" | "not_applicable"; strays: number; survivors: Array<Record<string, unknown>> };
  usage?: Record<string, unknown>;
  limits?: Array<Record<string, unknown>>;
  error?: Record<string, unknown>;
  bwrap?: Record<string, unknown>;
  network?: Record<string, unknown>;
  image?: Record<string, unknown>;
  devices?: string[];
  room?: "cold" | "warm";
}

/** A value in all available media types, plain text first. */
export interface CellResult {
  kind: "value" | "display" | "figure";
  media: Array<{ media_type: string; text?: string; id?: string; size: number; error?: string }>;
  truncated?: boolean;
}

/** The outcome of a cell: docs/concepts/cells.md. */
export interface CellAnswer extends Outcome {
  state: "kept" | "lost";
  number: number;
  results: CellResult[];
  results_truncated: boolean;
  exception?: { name: string; message: string; traceback: string };
  dropped_bytes: number;
  interpreter?: Record<string, unknown>;
  earlier?: Record<string, unknown>;
}

/** An event of a stream; the last is the report. */
export type Event = { name: "stdout" | "stderr"; data: Uint8Array } | { name: "report"; report: Report };

/** State of a background command. Process.output has its output. */
export interface CallStatus {
  id: string;
  state: "queued" | "running" | "ended";
  came_at: string;
  /** Whether it has started. If it ended without starting, a retry is safe. */
  started: boolean;
  stdout_bytes: number;
  stderr_bytes: number;
  report?: Omit<Report, "stdout" | "stderr">;
  error?: { code: string; message: string; hint?: string };
}

export interface NewProcess extends Call {
  /** Keep stdin open after the text in stdin, for Process.send. */
  keep_stdin?: boolean;
}

export interface NewSession extends Parts {
  limits?: Limits;
  idle_timeout_ms?: number;
  lifetime_ms?: number;
  files?: Record<string, Content> | FileIn[];
}

export interface SessionStatus extends Parts {
  id: string;
  created_at: string;
  expires_at: string;
  idle_timeout_ms: number;
  limits: Limits;
  room: "cold" | "warm";
  processes: number;
  clamped?: string[];
}

export interface Language {
  name: string;
  command: string[];
  file: string;
  cells: boolean;
  /** Name of the image in which it runs; absent for the server's programs. */
  image?: string;
}

/** An image that calls and sessions can use. */
export interface Image {
  name: string;
  digest: string;
  platform: string;
  devices?: string[];
}

/** An entry of a session's workspace. */
export interface Entry {
  path: string;
  /** The path, if it is not UTF-8: Buffer.from(path_base64, "base64") is a Path. */
  path_base64?: string;
  type: "file" | "directory" | "link" | "other";
  size: number;
  /** Octal permissions. */
  mode: string;
  /** Modification time in RFC 3339 format. */
  mtime: string;
}

/** A path in the workspace: text, or bytes if it is not UTF-8. */
export type Path = string | Uint8Array;

/** A file in the content store. It expires unless it is used before. */
export interface Stored {
  id: string;
  size: number;
  expires_at: string;
}

/** Aborting the signal disconnects, and the server ends the call unless it has a key. */
export interface Options {
  signal?: AbortSignal;
}

/** A second request with the same key and body gets the first one's answer instead of running again, until ten minutes after its end (for start: after it was accepted). */
export interface Once {
  key?: string;
}

/** Base class of all errors of this module. */
export class SbxrunError extends Error {}

/** The request was refused, and nothing has run. */
export class Refused extends SbxrunError {
  name: "Refused";
  code: string;
  hint: string;
  status: number;
  /** Milliseconds until a retry; null if retrying does not help. */
  again: number | null;
}

/** The command has run, and processes may still be running. */
export class Unproven extends SbxrunError {
  name: "Unproven";
  code: string;
  report: Report | null;
}

/** The answer did not arrive, or was incomplete. The command may have run; the server ends a call whose client disconnects. */
export class Lost extends SbxrunError {
  name: "Lost";
}

/** The kept bytes of stdout or stderr, as written. */
export function bytes(report: Report | CellAnswer, stream: "stdout" | "stderr"): Uint8Array;

/** A server, at unix:PATH, http://HOST:PORT or https://HOST:PORT. */
export class Client {
  /**
   * margin: milliseconds to wait for a response in addition to the call's own timeout;
   * patience: milliseconds for which a temporarily refused request is retried;
   * node: the node that a gateway forwards all requests to.
   */
  constructor(address: string, options?: { token?: string; margin?: number; patience?: number; node?: string });
  /** Run a command or program in a new sandbox. When this returns, all its processes have exited. */
  run(call: Call, options?: Options & Once): Promise<Report>;
  /** Like run, but yields output as it arrives. The last event is the report. Leaving the loop earlier ends the call. */
  stream(call: Call, options?: Options): AsyncGenerator<Event, void, void>;
  /** Start a command or program that runs in the background. */
  start(call: Call, options?: Once): Promise<Process>;
  /** Return the handle of a started command by its ID. */
  call(id: string): Process;
  /** Create a sandbox that keeps its files between calls. The caller must end it. */
  session(options?: NewSession): Promise<Session>;
  sessions(): Promise<SessionStatus[]>;
  languages(): Promise<Language[]>;
  /** The images that calls and sessions can use. */
  images(): Promise<Image[]>;
  snapshots(): Promise<Snapshot[]>;
  /** Remove a snapshot by its ID or name. */
  removeSnapshot(id: string): Promise<void>;
  /** Store a file in the content store and return its ID. */
  store(data: Data): Promise<string>;
  /** Read a file from the content store: a collected file or an ID. */
  fetch(file: FileOut | string): Promise<Uint8Array>;
  /** List the content store, least recently used first. */
  files(): Promise<Stored[]>;
  /** Remove a file from the content store. */
  removeFile(id: string): Promise<void>;
  /** Like fetch, but yields pieces as they arrive. */
  fetchStream(file: FileOut | string, options?: Options): AsyncGenerator<Uint8Array, void, void>;
}

/** A sandbox that keeps its files. It ends with end() or after its idle timeout. */
export class Session {
  /** An existing session, by its ID. */
  constructor(client: Client, id: string);
  readonly id: string;
  /** Run a command or program. Its processes end with it; its files stay. */
  exec(call: Call, options?: Options & Once): Promise<Report>;
  stream(call: Call, options?: Options): AsyncGenerator<Event, void, void>;
  /** Run a cell in the session's interpreter, which keeps definitions for the next cell. */
  cell(cell: Cell, options?: Options & Once): Promise<CellAnswer>;
  /** Start a command in the background. Without a timeout it runs until it exits or the session ends. */
  start(call: NewProcess, options?: Once): Promise<Process>;
  /** Return the handle of a started command by its ID. */
  process(id: string): Process;
  write(path: Path, content: Data, options?: { mode?: string }): Promise<void>;
  read(path: Path): Promise<Uint8Array>;
  /** Like read, but yields pieces as they arrive. */
  readStream(path: Path, options?: Options): AsyncGenerator<Uint8Array, void, void>;
  remove(path: Path): Promise<void>;
  list(): Promise<Entry[]>;
  /** Read all files as a tar archive. */
  pack(): Promise<Uint8Array>;
  /** Like pack, but yields pieces as they arrive. */
  packStream(options?: Options): AsyncGenerator<Uint8Array, void, void>;
  unpack(archive: Uint8Array | AsyncIterable<Uint8Array>): Promise<void>;
  /** The changes in the session's overlay. */
  diff(): Promise<Diff>;
  /** Take a snapshot of the session's overlay. */
  snapshot(options?: { name?: string; ttl_ms?: number }): Promise<Snapshot>;
  /** End the session and everything in it. A session that has already ended is not an error. */
  end(): Promise<void>;
}

/** A background command: an asynchronous call, or a process of a session. */
export class Process {
  private constructor();
  readonly id: string;
  /** The current state. With wait, responds when the command ends or after that many milliseconds (at most 60,000). */
  status(options?: Options & { wait?: number }): Promise<CallStatus>;
  /** Wait for the end and return the report. */
  wait(options?: Options): Promise<NonNullable<CallStatus["report"]>>;
  /** Yield the output from a byte offset on, as it arrives. Reconnects after a broken connection. */
  output(options?: Options & { stream?: "stdout" | "stderr"; from?: number }): AsyncGenerator<Uint8Array, void, void>;
  /** Write to the stdin of a process that was started with keep_stdin; end closes it. Resolves when the process has read everything except what fits into a pipe. If the process reads nothing for as long as the margin, rejects with Lost, and part of the data may have been written. */
  send(data: string | Uint8Array, options?: Options & { end?: boolean }): Promise<void>;
  /** Signal all its processes. Works only for processes of a session. */
  signal(name: string): Promise<void>;
  /** End the command and discard its record. */
  end(): Promise<CallStatus>;
}
