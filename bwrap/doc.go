// Package bwrap turns a policy into bubblewrap's arguments and hands back a
// sandbox that is held just before its payload.
//
// The way from a [Policy] to a [Sandbox]:
//
//	Prepare   decides everything and opens every descriptor; nothing runs yet
//	Start     forks the keeper, which execs bwrap; returns when init is known
//	          and verified, and a pidfd of it is open
//	Release   lets init start the payload
//
// Descriptors of bwrap: 0, 1, 2 are the payload's; then the arguments, the
// block pipe and the status pipe; then one for each file that is copied into
// the sandbox. bwrap closes all of them before the payload.
//
// The block pipe holds init back. End-of-file on it would let the payload
// start, so bwrap gets a descriptor that is open for writing too: it never sees
// end-of-file, whoever dies. The status pipe carries bwrap's JSON: the pid of
// init as seen from here, and later the payload's exit code, if it was executed.
package bwrap
