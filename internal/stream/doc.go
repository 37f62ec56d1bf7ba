// Package stream is what a command reads and writes, on its way: [Streams] makes its
// stdin, stdout and stderr, [Relays] pass on what it writes, [Buffer] keeps some of it.
package stream
