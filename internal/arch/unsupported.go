//go:build !linux || !(amd64 || arm64)

package arch

// No such name exists: the compiler's message is the text.
var _ = sbxrun_builds_only_for_Linux_on_amd64_and_arm64
