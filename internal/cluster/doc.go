// Package cluster puts several servers behind one interface. Between them is NATS, a message
// server: it knows who listens, and delivers at most once, in order from one sender to one
// receiver.
//
// A node is a server that also takes requests by NATS. A gateway is an HTTP server without rooms: it
// settles whose a request is, chooses a node, and passes the request on. What passes between them
// is HTTP itself, over a [Conn]: a connection whose bytes travel in messages. So every path of the
// interface, with its streams, its uploads and its cancellation, has one implementation, that of
// package server.
//
// Three things here are more than a pipe:
//
//   - A request is sent to one instance of one node. If NATS says that nobody listens there, it
//     was not delivered, and another node may have it. After that it is never sent anywhere else.
//   - A Conn has a window in each direction: a slow reader stops the writer, and neither loses
//     bytes nor fills memory. What was lost with a NATS server is sent again, at most once delivered.
//   - All that take part publish a [Heartbeat] every two seconds. One that was not heard for six is lost,
//     and with it what depends on it: requests are answered, calls canceled, sessions gone. Who is not
//     connected to NATS itself draws no such conclusions.
//
// Three things need JetStream, NATS's store: detached calls wait in a queue (see record), files are in
// object stores, and the ceilings of a tenant are divided among nodes (see held). Gateways use it; nodes
// only take calls from the queue, and change the records of those.
//
// Why a Conn of our own, when there are libraries: it is the sending again. NATS delivers at most once, so a
// server of it that dies takes messages with it, and calls are to go on. A yamux session over two
// subjects, of some seventy lines, costs about the same per call, has twice the throughput and takes three
// times the memory for a reader that does not read; but it takes what is beneath it for reliable, and
// one lost message ends the session with all calls of a node. Beneath it a Conn would be needed all the
// same. An ordered consumer of JetStream sends again, but takes eight times as long for a call, keeps all
// that a slow reader does not take, and needs a majority of servers for each byte.
//
// Why no service of micro, NATS's library for them: NATS would choose the node for a call, and it knows nothing of
// free places. Why a call of the queue is not acknowledged twice before its start: that says that NATS has
// heard it, and not that no other node has the call after an answer was lost. The record says both.
//
// A message server that is away ends nothing: nodes go on with what they have, and deliver it later.
package cluster
