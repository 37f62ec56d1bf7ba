// Package stream handles the streams of a command: [Streams] provides its stdin, stdout and stderr, [Relays]
// forward its output, [Buffer] captures part of it in memory and [Log] in a file, and [Follow] reads log files.
package stream
