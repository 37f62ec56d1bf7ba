// Package cluster combines several servers behind one interface. They communicate over NATS, a message
// server that knows the subscribers, and delivers messages at most once and in order from one sender to
// one receiver.
//
// A node is a server that also accepts requests over NATS. A gateway is an HTTP server without sandboxes:
// it authenticates a request, chooses a node, and forwards the request as HTTP over a [Conn], a connection
// whose bytes travel in messages. So every path of the API, with its streams, uploads and cancellation,
// has a single implementation, in package server.
//
// Three things go beyond forwarding:
//
//   - A request is sent to one instance of one node. If NATS reports that no one listens there, the
//     request was not delivered, and another node may get it. Otherwise it is never sent again.
//   - A Conn has a window in each direction: a slow reader stops the writer, without losing bytes or
//     filling memory. Data that is lost with a NATS server is sent again, and delivered at most once.
//   - All members publish a [Heartbeat] every two seconds. After six seconds of silence a member is lost,
//     and everything that depends on it ends: requests get a response, calls are canceled, sessions are
//     gone. A member that is itself disconnected from NATS draws no such conclusions.
//
// Three things need JetStream, the store of NATS: detached calls wait in a queue (see record), files are in object
// stores, and the ceilings of a tenant are distributed among nodes (see quotaRecord). Gateways use JetStream; nodes
// only take calls from the queue, and change the records of these calls.
//
// Why our own Conn? Because of retransmission. NATS delivers at most once, so a NATS server that dies takes messages
// with it, but calls must continue. A yamux session over two subjects, about seventy lines, costs about the same per
// call, has twice the throughput, and needs three times the memory for a reader that does not read. But yamux expects
// a reliable transport: one lost message ends the session, with all calls of a node. An ordered consumer of JetStream
// does retransmit, but takes eight times as long per call, stores everything that a slow reader does not take, and
// needs a majority of servers for each byte.
//
// Why not a service of NATS's micro library? With that, NATS would choose the node for a call, without knowing about
// free slots. Why no double acknowledgement of a queued call before its start? It confirms that NATS has received the
// acknowledgement, but not that no other node got the call after a lost response. The record does both.
//
// A NATS server that is unreachable ends nothing: nodes continue, and deliver their responses later.
package cluster
