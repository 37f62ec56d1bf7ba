// Runs cells of code, one after another, in one interpreter; driver.py describes the protocol.
// Cells are evaluated as in the inspector's console: const and let may be redeclared, and await
// works at the top level.
'use strict';
(() => {
  const fs = require('fs'), net = require('net'), util = require('util'), vm = require('vm'), { Session } = require('inspector');
  // Cells may change the globals.
  const { Array, Atomics, Boolean, Buffer, Error, JSON, Object, String, Symbol, Uint8Array, process, setImmediate } = globalThis;
  const { stdout, stderr } = process;
  const SOCKET = 3, TEXT = 32 << 10;
  const rich = Symbol.for('Jupyter.display'); // returns {"media/type": data}
  const nap = new Int32Array(new SharedArrayBuffer(4));
  let cell = null; // the running cell
  let signals = 0; // SIGINTs received

  const send = (message) => {
    if (!cell) return; // a late timer
    let data = Buffer.from(`\n${cell.token} ${JSON.stringify(message)}\n`);
    while (data.length) {
      try {
        data = data.subarray(fs.writeSync(SOCKET, data));
      } catch (e) {
        if (e.code !== 'EAGAIN') throw e;
        Atomics.wait(nap, 0, 0, 1); // node makes the socket non-blocking
      }
    }
  };

  const text = (value) => (typeof value === 'string' ? value : util.inspect(value));
  const medium = (type, data) => {
    if (data instanceof Uint8Array) return { type, base64: Buffer.from(data).toString('base64') };
    if (typeof data !== 'string') return { type, text: JSON.stringify(data) };
    return type.startsWith('image/') && type !== 'image/svg+xml' ? { type, base64: data } : { type, text: data };
  };

  // show sends a value in all available media types.
  const show = (kind, value, plain = text) => {
    const media = [{ type: 'text/plain', text: plain(value) }];
    try {
      if (typeof value?.[rich] === 'function')
        for (const [type, data] of Object.entries(value[rich]())) media.push(medium(type, data));
    } catch {} // treated as absent
    if (!cell) return;
    let result = { kind, media };
    if (Buffer.byteLength(JSON.stringify(result)) > cell.max)
      result = { kind, media: [{ type: 'text/plain', text: media[0].text.slice(0, cell.max >> 3) }], truncated: true };
    send({ result });
  };

  const describe = (error) => {
    const said = { name: 'Error', message: '', traceback: '' };
    try {
      if (error instanceof Error) {
        const lines = String(error.stack).split('\n');
        const ours = lines.findIndex((line) => line.includes('at Session.post (node:inspector'));
        said.name = String(error.name);
        said.message = String(error.message);
        said.traceback = (ours < 0 ? lines : lines.slice(0, ours)).join('\n');
      } else said.message = said.traceback = text(error);
    } catch {} // its methods may fail
    said.message = said.message.slice(0, TEXT);
    said.traceback = said.traceback.slice(0, TEXT);
    return said;
  };
  const interrupted = () => ({ name: 'Interrupted', message: 'the cell was interrupted', traceback: '' });

  // end sends the end of a cell, once, after its output has been written to the pipes.
  const end = (of, error) => {
    if (cell !== of || of.over) return;
    of.over = true;
    let left = 1;
    const flushed = () => {
      if (--left) return;
      try {
        send({ end: true, error, signals });
      } finally {
        cell = null;
      }
      next();
    };
    for (const stream of [stdout, stderr])
      if (stream.writableLength && !stream.destroyed) {
        left++;
        stream.write('', flushed);
      }
    flushed();
  };

  // With breakOnSigint, SIGINT ends synchronous code, even a loop; while the cell awaits, it is an
  // event. breakable finds its function without names that a cell could change.
  let work;
  Object.defineProperty(globalThis, 'sbxrun:work', { value: () => work() });
  const breakable = new vm.Script(`this['sbxrun:work']()`, { filename: 'driver' });
  const guarded = (of, step) => {
    work = step;
    try {
      breakable.runInThisContext({ breakOnSigint: true });
    } catch (e) {
      const broken = e?.code === 'ERR_SCRIPT_EXECUTION_INTERRUPTED';
      if (broken) signals++;
      end(of, broken ? interrupted() : describe(e));
    }
  };
  process.on('SIGINT', () => {
    signals++;
    if (cell) end(cell, interrupted());
  });
  for (const event of ['uncaughtException', 'unhandledRejection'])
    process.on(event, (e) => {
      try {
        fs.writeSync(2, `Uncaught ${util.inspect(e)}\n`);
      } catch {} // stderr may be closed
    });

  // The inspector refers to the value of a cell by an ID, and calls this function with it.
  const session = new Session();
  session.connect();
  let found, keep;
  Object.defineProperty(globalThis, 'sbxrun:keep', { value: (value) => { found = value; } });
  session.post('Runtime.evaluate', { expression: `this['sbxrun:keep']` }, (_, reply) => { keep = reply.result.objectId; });

  const evaluated = (of, problem, reply) => {
    if (cell !== of || of.over) return; // interrupted
    if (problem) return end(of, describe(problem));
    const failed = reply.exceptionDetails;
    const { objectId, value, unserializableValue } = failed?.exception ?? reply.result;
    session.post('Runtime.callFunctionOn', {
      objectId: keep, functionDeclaration: 'function (value) { this(value) }',
      arguments: [objectId ? { objectId } : unserializableValue ? { unserializableValue } : { value }],
    });
    session.post('Runtime.releaseObjectGroup', { objectGroup: 'cell' });
    const it = found;
    found = undefined;
    if (failed) return end(of, describe(it));
    if (it !== undefined) guarded(of, () => show('value', it, util.inspect));
    end(of);
  };

  globalThis.display = (...values) => {
    for (const value of values) show('display', value);
  };
  Object.assign(globalThis, { require, module, exports });

  const queue = [];
  const next = () => {
    if (cell || !queue.length) return;
    const of = (cell = queue.shift());
    guarded(of, () => {
      send({ begun: true });
      session.post('Runtime.evaluate', {
        expression: `${of.code}\n//# sourceURL=cell-${of.number}`, replMode: true, awaitPromise: true, objectGroup: 'cell',
      }, (problem, reply) => evaluated(of, problem, reply));
    });
  };
  let rest = '';
  new net.Socket({ fd: SOCKET, readable: true, writable: false })
    .setEncoding('utf8')
    .on('data', (piece) => {
      const lines = (rest + piece).split('\n');
      rest = lines.pop();
      for (const line of lines) queue.push(JSON.parse(line));
      next();
    })
    .on('end', () => process.exit(0));
})();
