/** Bytes of a file as text or as they are, or a file of the content store. */
export type Content = string | Uint8Array | { id: string };

/** What a call may use. */
export interface Limits {
  memory?: number;
  pids?: number;
  cpus?: number;
  cpu_time_ms?: number;
  fsize?: number;
  max_output?: number;
  output?: "truncate" | "kill";
}

/** One file for the workspace, in the words of the server; exactly one of id, text and base64. */
export interface FileIn {
  path: string;
  id?: string;
  text?: string;
  base64?: string;
  mode?: string;
}

/** A command (argv) or a program (code, and language: "python" unless given). docs/api.md has each member. */
export interface Call {
  argv?: string[];
  code?: string;
  language?: string;
  stdin?: string;
  env?: Record<string, string>;
  workdir?: string;
  /** 30,000 unless given. */
  timeout_ms?: number;
  grace_ms?: number;
  limits?: Limits;
  files?: Record<string, Content> | FileIn[];
  collect?: string[];
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

/** A file that was collected. */
export interface FileOut {
  path: string;
  id?: string;
  size: number;
  media_type?: string;
  error?: string;
}

/** What a report and a cell's answer have in common. */
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
  queue_ms: number;
  timeout_ms?: number;
  clamped?: string[];
  request_id?: string;
}

/** How a call has ended: docs/report.md. */
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
  room?: "cold" | "warm";
}

/** A value in all the media that it can be shown as, the plain text first. */
export interface CellResult {
  kind: "value" | "display" | "figure";
  media: Array<{ media_type: string; text?: string; id?: string; size: number; error?: string }>;
  truncated?: boolean;
}

/** What has become of a cell: docs/cells.md. */
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

/** A piece of a stream; the last is the report. */
export type Event = { name: "stdout" | "stderr"; data: Uint8Array } | { name: "report"; report: Report };

/** How far a command has come that nobody waits for. The output is in Process.output. */
export interface CallStatus {
  id: string;
  state: "queued" | "running" | "ended";
  came_at: string;
  stdout_bytes: number;
  stderr_bytes: number;
  report?: Omit<Report, "stdout" | "stderr">;
  error?: { code: string; message: string; hint?: string };
}

export interface NewSession {
  limits?: Limits;
  idle_timeout_ms?: number;
  lifetime_ms?: number;
  files?: Record<string, Content> | FileIn[];
}

export interface SessionStatus {
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
}

/** An entry of a session's workspace. */
export interface Entry {
  path: string;
  type: "file" | "directory" | "link" | "other";
  size: number;
}

/** Whoever aborts the signal leaves, and the server ends the call. */
export interface Options {
  signal?: AbortSignal;
}

/** What all errors of this module are. */
export class SbxrunError extends Error {}

/** The request came to nothing: nothing of it has run. */
export class Refused extends SbxrunError {
  name: "Refused";
  code: string;
  hint: string;
  status: number;
  /** After how many milliseconds it may be tried again; null if that is no use. */
  again: number | null;
}

/** It has run, and something of it may be left. */
export class Unproven extends SbxrunError {
  name: "Unproven";
  code: string;
  report: Report | null;
}

/** The answer did not come, or not whole. It may have run; the server ends a call whose client has left. */
export class Lost extends SbxrunError {
  name: "Lost";
}

/** What was kept of stdout or stderr, as it was written. */
export function bytes(report: Report | CellAnswer, stream: "stdout" | "stderr"): Uint8Array;

/** A server, at unix:PATH, http://HOST:PORT or https://HOST:PORT. */
export class Client {
  /**
   * margin is how many milliseconds longer than a call's own timeout its answer is waited for;
   * patience, for how many milliseconds what was refused for a moment is tried again.
   */
  constructor(address: string, options?: { token?: string; margin?: number; patience?: number });
  /** Run a command, or a program, in a fresh sandbox. When this returns nothing of it is left. */
  run(call: Call, options?: Options): Promise<Report>;
  /** As run, with the output while it comes. The last event is the report; who stops before ends the call. */
  stream(call: Call, options?: Options): AsyncGenerator<Event, void, void>;
  /** Begin to run a command, or a program, which goes on whether or not anybody waits. */
  start(call: Call): Promise<Process>;
  /** What start has begun, by its id. */
  call(id: string): Process;
  /** Make a sandbox whose files stay from call to call. End it. */
  session(options?: NewSession): Promise<Session>;
  sessions(): Promise<SessionStatus[]>;
  languages(): Promise<Language[]>;
  /** Put a file into the content store, and return its id. */
  store(data: string | Uint8Array): Promise<string>;
  /** Read a file of the content store: one that was collected, or an id. */
  fetch(file: FileOut | string): Promise<Uint8Array>;
}

/** A sandbox whose files stay. It ends by end, or when nobody uses it. */
export class Session {
  /** One that was made before, by its id. */
  constructor(client: Client, id: string);
  readonly id: string;
  /** Run a command, or a program. Its end is of what it has started alone: files stay. */
  exec(call: Call, options?: Options): Promise<Report>;
  stream(call: Call, options?: Options): AsyncGenerator<Event, void, void>;
  /** Run a cell in an interpreter that the session keeps: what it defines is there for the next one. */
  cell(cell: Cell, options?: Options): Promise<CellAnswer>;
  /** Begin to run a command in the background. */
  start(call: Call): Promise<Process>;
  /** What start has begun, by its id. */
  process(id: string): Process;
  write(path: string, content: string | Uint8Array, options?: { mode?: string }): Promise<void>;
  read(path: string): Promise<Uint8Array>;
  remove(path: string): Promise<void>;
  list(): Promise<Entry[]>;
  /** All files, as a tar archive. */
  pack(): Promise<Uint8Array>;
  unpack(archive: Uint8Array): Promise<void>;
  /** End it, with all that runs in it. One that has ended already is no error. */
  end(): Promise<void>;
}

/** A command that nobody waits for: a call, or a process of a session. */
export class Process {
  private constructor();
  readonly id: string;
  /** How far it has come; with wait, not before its end or that many milliseconds (60,000 at most). */
  status(options?: Options & { wait?: number }): Promise<CallStatus>;
  /** Its report, when it has ended. */
  wait(options?: Options): Promise<NonNullable<CallStatus["report"]>>;
  /** What it has written, from a byte on, while it comes. A connection that breaks is made again. */
  output(options?: Options & { stream?: "stdout" | "stderr"; from?: number }): AsyncGenerator<Uint8Array, void, void>;
  /** Send a signal to all of it; for processes of a session. */
  signal(name: string): Promise<void>;
  /** End it, and forget it. */
  end(): Promise<CallStatus>;
}
