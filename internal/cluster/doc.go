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
//   - All that take part publish a [Beat] every two seconds. One that was not heard for six is lost,
//     and with it what depends on it: requests are answered, calls canceled, sessions gone. Who is not
//     connected to NATS itself draws no such conclusions.
//
// A message server that is away ends nothing: nodes go on with what they have, and deliver it later.
package cluster
